"""Compiles the two kinds of templates so that no request's data is ever read as template language.

Chat templates run in a Jinja sandbox with the helpers that model authors expect and without a loader.

An operator's prompt template may hold text, `{{ name }}`, and `{% if name %}` on whether a value is empty; nothing
else. So its result depends on a request only through which values are empty, and every such case is rendered at
start-up into pieces of text and names. A request's values are then put between the pieces as they are.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, NoReturn

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A template can raise these as it runs.
FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox of chat templates.

    It has no loader, so nothing can be included. Undefined names are empty: the templates of models rely on that.
    """
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


class TemplateRaised(TemplateError):
    """Reports that a chat template called `raise_exception`."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


class _Generation(Extension):
    """Renders `{% generation %}`, with which some templates mark answers for training, as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(words: object) -> NoReturn:
    raise TemplateRaised(str(words))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


MAX_SOURCE_CHARS = 16_384
_SLOT = re.compile("\x00([a-z]+)\x00")  # NUL is refused in a source
_OPEN = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.If, nodes.CondExpr)
_LOGIC = (nodes.And, nodes.Or, nodes.Not)


class SourceError(ValueError):
    """Refuses a prompt template. The message says what is wrong with it, for the operator."""


class TemplatePiece(NamedTuple):
    """Holds literal text, or the name of the value that stands here."""

    text: str
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """Holds a compiled prompt template."""

    names: frozenset[str]
    cases: Mapping[frozenset[str], tuple[TemplatePiece, ...]]  # by which of `names` are not empty

    def pieces(self, values: Mapping[str, str]) -> tuple[TemplatePiece, ...]:
        """Returns the pieces of the case in which exactly these values are not empty."""
        return self.cases[frozenset(name for name in self.names if values.get(name))]


def compile_source(text: str, known: frozenset[str]) -> TemplateSource:
    """Compiles an operator's prompt template.

    Args:
        text: The template.
        known: Names that it may use as data.

    Raises:
        SourceError: The text uses other names, or more of the template language than is allowed.
    """
    if len(text) > MAX_SOURCE_CHARS:
        raise SourceError(f"must be at most {MAX_SOURCE_CHARS} characters. Given: {len(text)}")
    if "\x00" in text:
        raise SourceError("must not hold a NUL character")
    try:
        tree = _environment().parse(text)
        names = frozenset(_checked(tree, known))
        template = _environment().from_string(text)
        cases = {case: _split(template.render(_slots(names, case))) for case in _subsets(names)}
    except TemplateError as error:
        raise SourceError(f"must be a valid template: {error}") from None
    return TemplateSource(names=names, cases=cases)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(undefined=StrictUndefined, loader=None, keep_trailing_newline=True)
    for table in (made.globals, made.filters, made.tests):
        table.clear()
    return made


def _checked(node: nodes.Node, known: frozenset[str], place: str = "output") -> Iterator[str]:
    """Yields the names in `node`. `place` says where it stands: in an output or in a condition on emptiness."""
    if isinstance(node, nodes.Name):
        if node.ctx != "load" or node.name not in known:
            raise SourceError(f"may only use {', '.join(sorted(known))}, and not set them. Given: {node.name}")
        yield node.name
    elif isinstance(node, nodes.If | nodes.CondExpr):
        for field, child in node.iter_fields():
            inner = "condition" if field == "test" else "output"
            for one in child if isinstance(child, list) else [child]:
                if one is not None:
                    yield from _checked(one, known, inner)
    elif isinstance(node, _OPEN) or (place == "condition" and isinstance(node, _LOGIC)):
        for one in node.iter_child_nodes():
            yield from _checked(one, known, place)
    else:
        kind = type(node).__name__.lower()
        raise SourceError(
            f"may only hold text, values and conditions on whether a value is empty. Given: {kind}, line {node.lineno}"
        )


def _subsets(names: frozenset[str]) -> Iterator[frozenset[str]]:
    for size in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(sorted(names), size))


def _slots(names: frozenset[str], filled: frozenset[str]) -> dict[str, str]:
    return {name: f"\x00{name}\x00" if name in filled else "" for name in names}


def _split(rendered: str) -> tuple[TemplatePiece, ...]:
    parts = _SLOT.split(rendered)  # text and names in turn
    if any("\x00" in part for part in parts):
        raise SourceError("must not hold a NUL character")
    pieces = [TemplatePiece("", part) if index % 2 else TemplatePiece(part, None) for index, part in enumerate(parts)]
    return tuple(piece for piece in pieces if piece.text or piece.name)
