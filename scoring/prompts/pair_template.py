"""Learns from a repository's chat template how it writes a query and a document, as the texts of a prompt template.

The chat template is rendered with the roles `system` (the instruction), `query` and `document`. The text around the
values becomes a TemplateSpec, so that a request's values are inserted as plain text like those of any other template.
A chat template that treats values in a way of its own gives no TemplateSpec.
"""

import time
from collections.abc import Mapping
from itertools import product
from typing import Any

from jinja2 import TemplateError

from scoring.prompts.sandbox import FAILURES, SourceError, compile_source, environment
from scoring.prompts.templates import PRESETS, SEAM, TemplateSpec

NAMES = frozenset(("instruction", "query", "item"))
PLACES = {"instruction": " zq1iz ", "query": " zq2qz ", "item": " zq3dz "}  # spaces show where a value is stripped
SAMPLES = ("", "a", " b\n\nc ", "<|im_end|>{{ x }}", "\u4e2d\u6587 \U0001f600")
MAX_SECONDS, MAX_PIECES = 2.0, 10_000  # of one rendering


class Unwritable(ValueError):
    """The chat template writes pairs, but not as text around unchanged values. The message says what is wrong."""


class PairRenderer:
    """Renders a chat template with one pair."""

    def __init__(self, source: str, names: Mapping[str, str | None], values: Mapping[str, Any]) -> None:
        """Compiles the chat template.

        Args:
            source: The Jinja template.
            names: Variables for special tokens (`bos_token`, ...).
            values: Further variables, such as `add_generation_prompt`.

        Raises:
            Unwritable: The source is not a template.
        """
        try:
            self._template = environment().from_string(source)
        except TemplateError:
            raise Unwritable("its chat template is no Jinja template") from None
        self._names = {"add_generation_prompt": False, "tools": None, "documents": None, **values, **names}

    def text(self, instruction: str | None, query: str, item: str, structured: bool) -> str | None:
        """Returns the text of a pair; None where the template fails. `structured`: contents are lists of parts."""
        roles = {"system": instruction, "query": query, "document": item}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
            for role, text in roles.items()
            if text is not None
        ]
        pieces, deadline = [], time.monotonic() + MAX_SECONDS
        try:
            for piece in self._template.generate(self._names | {"messages": messages}):
                pieces.append(piece)
                if time.monotonic() > deadline or len(pieces) > MAX_PIECES:
                    raise Unwritable("its chat template takes too long for one pair")
        except Unwritable:
            raise
        except FAILURES:
            return None
        return "".join(pieces)


def pair_spec(renderer: PairRenderer, structured: bool | None = None) -> TemplateSpec | None:
    """Returns the texts that a chat template writes around a pair.

    Without an instruction, the row is what the template writes without a system message.

    Args:
        renderer: The chat template.
        structured: Whether contents are lists of parts; None: strings if the template writes these, else lists.

    Returns:
        The texts, without labels; None for a template that does not write the two roles.

    Raises:
        Unwritable: The template changes values, or writes them more than once.
    """
    for one in (False, True) if structured is None else (structured,):
        bare, full = _render(renderer, None, one), _render(renderer, PLACES["instruction"], one)
        if bare is not None and _count(bare, "query") and _count(bare, "item"):
            found = _spec(bare, full)
            _verify(renderer, found, one)
            return found
    return None


def matching_preset(spec: TemplateSpec) -> str | None:
    """Returns the name of the preset that makes the same rows, with its default instruction or a given one."""
    for name, preset in PRESETS.items():
        default = preset.defaults.get("instruction", "")
        pairs = [("", default), ("a b", "a b")] if "instruction" in preset.defaults or spec.defaults else [("", "")]
        if preset.labels and all(_row(spec, one, "q", "d") == _row(preset, other, "q", "d") for one, other in pairs):
            return name
    return None


def _render(renderer: PairRenderer, instruction: str | None, structured: bool) -> str | None:
    return renderer.text(instruction, PLACES["query"], PLACES["item"], structured)


def _count(text: str, name: str) -> int:
    """Returns how often a value was written, with or without the spaces around it."""
    return text.count(PLACES[name].strip())


def _spec(bare: str, full: str | None) -> TemplateSpec:
    prefix, suffix = _sources(bare)
    if full is None or not _count(full, "instruction"):
        return TemplateSpec(prefix=prefix, suffix=suffix)
    full_prefix, full_suffix = _sources(full)
    if "{{ instruction }}" in full_suffix or full_suffix != suffix:
        raise Unwritable("its chat template writes the instruction after the document")
    both = f"{{% if instruction %}}{full_prefix}{{% else %}}{prefix}{{% endif %}}"
    return TemplateSpec(prefix=both, suffix=suffix, defaults={"instruction": ""})


def _sources(text: str) -> tuple[str, str]:
    """Returns the text before and after the item, with names in place of the other values."""
    if any(mark in text for mark in ("{{", "{%", "{#")):
        raise Unwritable("its chat template writes braces of the template language")
    for name, value in PLACES.items():
        if _count(text, name) > 1 or _count(text, name) != text.count(value):
            raise Unwritable(f"its chat template changes or repeats the text of the {name}")
    for name in ("instruction", "query"):
        text = text.replace(PLACES[name], f"{{{{ {name} }}}}")
    prefix, _, suffix = text.partition(PLACES["item"])
    return prefix, suffix


def _verify(renderer: PairRenderer, spec: TemplateSpec, structured: bool) -> None:
    for instruction, query, item in product((None, *SAMPLES[1:]), SAMPLES, SAMPLES):
        if renderer.text(instruction, query, item, structured) != _row(spec, instruction or "", query, item):
            raise Unwritable("its chat template treats some values in a way of its own")


def _row(spec: TemplateSpec, instruction: str, query: str, item: str) -> str:
    values = {"instruction": instruction, "query": query, "item": item}
    try:
        sources = [compile_source(text, NAMES | {SEAM}) for text in (spec.prefix, spec.item, spec.suffix)]
    except SourceError as error:
        raise Unwritable(f"the text of its chat template {error}") from None
    return "".join(
        values[piece.name] if piece.name else piece.text for source in sources for piece in source.pieces(values)
    )
