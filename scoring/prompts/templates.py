"""Writes an operator's template around a request's query and item, and checks it against the tokenizer at start-up.

A row is `prefix + item + suffix`, tokenised as one text. Control tokens stand where the template writes them and
nowhere else: a user's `<|im_end|>` is ten ordinary characters. In the text that a template makes, control tokens stand
under secret names, so that text is for plain encoding only.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from scoring.errors import ScoringError, refusal
from scoring.labels import label_ids
from scoring.prompts.cross_encoder_files import ScoreActivation
from scoring.prompts.sandbox import SourceError, TemplatePiece, TemplateSource, compile_source
from scoring.tokenizer_protocol import TokenizerProtocol


class Frame(NamedTuple):
    """Holds the text around an item."""

    head: str
    tail: str
    empty: str  # the whole row of an empty item

    def row(self, item: str) -> str:
        """Returns the text of one item's row."""
        return self.head + item + self.tail if item else self.empty


class SplitFrame(NamedTuple):
    """Holds a frame cut at the control tokens on both sides of the item, so that the rest is encoded once a request.

    A tokenizer encodes the text on the two sides of a control token independently, so a row is `before`, then the ids
    of `head + item + tail`, then `after`. `head` begins and `tail` ends with the control token itself, because a
    tokenizer may treat the beginning of a text in its own way and may let a control token swallow the spaces beside it.
    """

    before: list[int]
    head: str
    tail: str
    after: list[int]

    @classmethod
    def of(cls, frame: Frame, tokenizer: TokenizerProtocol) -> "SplitFrame":
        """Cuts a frame and encodes its outer parts."""
        opened, closed = tokenizer.mark_spans(frame.head), tokenizer.mark_spans(frame.tail)
        start, head_end = opened[-1] if opened else (0, 0)
        tail_start, end = closed[0] if closed else (len(frame.tail), len(frame.tail))
        texts = [frame.head[:head_end], frame.tail[tail_start:]]
        before, after = tokenizer.encode_batch(texts, add_special_tokens=False, plain=True)
        return cls(before[:-1], frame.head[start:], frame.tail[:end], after[1:])

    def rows(self, items: Sequence[str], tokenizer: TokenizerProtocol) -> list[list[int]]:
        """Returns the ids of each item's row."""
        texts = [self.head + item + self.tail for item in items]
        found = tokenizer.encode_batch(texts, add_special_tokens=False, plain=True)
        return [self.before + ids + self.after for ids in found]


VARIABLES = frozenset(("query", "item", "instruction", "system"))
SEAM = "seam"  # `{{ seam }}`: the texts on its two sides are tokenised separately, as some models were trained
KNOWN = VARIABLES | {SEAM}
REASONING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis", "<|end|>"),
)
_CONTROL = re.compile(r"<\|[^<>|\s]+\|>")
_SAMPLES = ("one", "another", " two\n", "\n ", "a  b ")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """Holds a template as the operator writes it."""

    prefix: str = ""
    item: str = "{{ item }}"
    suffix: str = ""
    labels: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)  # of `instruction` and `system`
    controls: tuple[str, ...] = ()  # strings that must be control tokens of the tokenizer
    token_ids: tuple[int, ...] = ()  # that labels must be; with `labels_alone` false they are taken as they are
    labels_alone: bool = False  # a label is the token of its text alone, whatever the prompt ends with
    activation: ScoreActivation | None = None  # what a rerank score is published with

    @property
    def version(self) -> str:
        """Identifies the wording: it changes with every change of the text."""
        parts: list[Any] = [self.prefix, self.item, self.suffix, self.labels, sorted(self.defaults.items())]
        parts += [self.token_ids] if self.token_ids else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


PRESETS: Mapping[str, TemplateSpec] = {
    "plain": TemplateSpec(prefix="{{ query }}"),
    "builtin": TemplateSpec(prefix="Query: {{ query }}\nDocument: ", suffix="\nRelevant:", labels=(" yes", " no")),
    "qwen3_reranker": TemplateSpec(
        prefix=(
            "<|im_start|>system\n"
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: "
        ),
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        labels=("yes", "no"),
        defaults={"instruction": "Given a web search query, retrieve relevant passages that answer the query"},
        controls=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    ),
    "mxbai_rerank_v2": TemplateSpec(
        prefix=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n{{ seam }}{% if instruction %}instruction: {{ instruction }}\n{% endif %}"
            "query: {{ query }}{{ seam }}\n{{ seam }}document: "
        ),
        suffix=(
            "{{ seam }}\n{{ seam }}You are a search relevance expert who evaluates how well documents match search "
            "queries. For each query-document pair, carefully analyze the semantic relationship between them, then "
            "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:{{ seam }}"
            "<|im_end|>\n<|im_start|>assistant\n"
        ),
        labels=("1", "0"),
        defaults={"instruction": ""},
        controls=("<|im_start|>", "<|im_end|>"),
        labels_alone=True,
        activation="none",
    ),
    "bge_reranker_v2_gemma": TemplateSpec(
        prefix="<bos>A: {{ query }}{{ seam }}\n{{ seam }}B: ",
        suffix=(
            "{{ seam }}\n{{ seam }}Given a query A and a passage B, determine whether the passage contains an answer "
            "to the query by providing a prediction of either 'Yes' or 'No'."
        ),
        labels=("Yes",),
        controls=("<bos>",),
        labels_alone=True,
        activation="none",
    ),
    "ctxl": TemplateSpec(
        prefix="Check whether a given document contains information helpful to answer the query.\n<Document> ",
        suffix="\n<Query> {{ query }}{% if instruction %} {{ instruction }}{% endif %} ??",
        labels=("!",),
        defaults={"instruction": ""},
        token_ids=(0,),
        labels_alone=True,
        activation="none",
    ),
    "zerank": TemplateSpec(
        prefix="<|im_start|>system\n{{ query }}<|im_end|>\n<|im_start|>user\n",
        suffix="<|im_end|>\n<|im_start|>assistant\n",
        labels=("Yes",),
        controls=("<|im_start|>", "<|im_end|>"),
        labels_alone=True,
        activation="none",
    ),
}


class TemplateRefused(ValueError):
    """Refuses a template that failed its checks. The message names the template and the field."""


class Template:
    """Writes prompts by one template that passed its checks. Stateless and thread-safe."""

    def __init__(self, name: str, spec: TemplateSpec, tokenizer: TokenizerProtocol) -> None:
        """Compiles and checks the template.

        Args:
            name: The name that requests give.
            spec: The operator's text.
            tokenizer: Must know the control tokens, and encode each label as one token.

        Raises:
            TemplateRefused: A check failed.
        """
        self.name = name
        self.version = f"{name}@{spec.version}"
        self.labels = tuple(map(tokenizer.mark, spec.labels))  # an operator's label may be a control token
        self.activation = spec.activation
        self.defaults = dict(spec.defaults)
        self._seam = {SEAM: tokenizer.seam}
        self._sources = tuple(_compiled(name, part, getattr(spec, part)) for part in ("prefix", "item", "suffix"))
        self.uses = frozenset().union(*(source.names for source in self._sources)) - {SEAM}
        self._check_item()
        self._check_defaults()
        self._texts = {
            piece.text: tokenizer.mark(piece.text)
            for source in self._sources
            for case in source.cases.values()
            for piece in case
        }
        self.chars = sum(map(len, self._texts.values()))  # a bound on the template's own text in a row
        self._check_controls(spec, tokenizer)
        self._check_reasoning()
        self.label_ids = self._check_labels(tokenizer, spec)
        self._fixed = bool(spec.token_ids) or spec.labels_alone
        self.can_split = self._check_rows(tokenizer)

    def frame(self, query: str, extra: Mapping[str, str]) -> Frame:
        """Returns the text around every item of one request.

        Args:
            query: The query's text.
            extra: `instruction` and `system`, where they are not the defaults.
        """
        values = self.defaults | dict(extra) | {"query": query}
        filled = self._pieces(values | {"item": "\x00"})
        at = next(index for index, piece in enumerate(filled) if piece.name == "item")
        return Frame(
            self._join(filled[:at], values),
            self._join(filled[at + 1 :], values),
            self._join(self._pieces(values), values),
        )

    @property
    def fixed_labels(self) -> bool:
        """Whether the labels' ids are those found at start-up: the text after the item is the same in every row."""
        _, item, suffix = self._sources
        return self._fixed or (item.names == {"item"} and suffix.names <= {SEAM})

    def _pieces(self, values: Mapping[str, str]) -> list[TemplatePiece]:
        return [piece for source in self._sources for piece in source.pieces({**values, **self._seam})]

    def _join(self, pieces: list[TemplatePiece], values: Mapping[str, str]) -> str:
        filled = {**values, **self._seam}
        return "".join(filled.get(piece.name, "") if piece.name else self._texts[piece.text] for piece in pieces)

    def _check_item(self) -> None:
        prefix, item, suffix = self._sources
        for part, source in (("prefix", prefix), ("suffix", suffix)):
            if "item" in source.names:
                raise self._refused(part, "must not use `item`: only `item` is cut to length")
        for case, pieces in item.cases.items():
            if "item" in case and [piece.name for piece in pieces].count("item") != 1:
                raise self._refused("item", "must write `{{ item }}` exactly once")
        if "item" not in item.names:
            raise self._refused("item", "must write `{{ item }}` exactly once")

    def _check_defaults(self) -> None:
        for name in self.defaults:
            if name not in ("instruction", "system") or name not in self.uses:
                raise self._refused("defaults", f"must be of `instruction` or `system`, where used. Given: {name}")

    def _check_controls(self, spec: TemplateSpec, tokenizer: TokenizerProtocol) -> None:
        written = _CONTROL.findall("\n".join(self._texts))  # a misspelt one would be read as characters
        for text in (*spec.controls, *written):
            if not tokenizer.has_token(text):
                raise self._refused(
                    "prefix", f"or another part writes {text}, which is not a control token of this tokenizer"
                )

    def _check_reasoning(self) -> None:
        for source_values in ({}, dict.fromkeys(VARIABLES, "x")):
            text = "".join(piece.text for piece in self._pieces({**source_values, "item": "x"}))
            for opened, closed in REASONING:
                if text.rfind(opened) > text.rfind(closed):
                    raise self._refused("suffix", f"leaves a reasoning block open: {opened} without {closed}")

    def _check_labels(self, tokenizer: TokenizerProtocol, spec: TemplateSpec) -> tuple[int, ...]:
        if spec.token_ids and not spec.labels_alone:
            return spec.token_ids
        suffix = "" if spec.labels_alone else self._sample().tail
        try:
            found = tuple(label_ids(tokenizer, self.labels, suffix, plain=True))
        except ScoringError as error:
            raise self._refused("labels", error.message) from None
        if spec.token_ids and found != spec.token_ids:
            raise self._refused("labels", f"must be the tokens {spec.token_ids}. Given: {found}")
        return found

    def _check_rows(self, tokenizer: TokenizerProtocol) -> bool:
        """Returns whether a SplitFrame gives the rows' ids: not where a tokenizer looks across its control tokens."""
        frame = self._sample()
        rows = tokenizer.encode_batch([frame.row(item) for item in _SAMPLES], add_special_tokens=False, plain=True)
        if rows[0] == rows[1]:
            raise self._refused("item", "gives the same row for two different items")
        return SplitFrame.of(frame, tokenizer).rows(_SAMPLES, tokenizer) == rows

    def _sample(self) -> Frame:
        return self.frame(_SAMPLES[0], dict.fromkeys({"instruction", "system"} - self.defaults.keys(), _SAMPLES[0]))

    def _refused(self, part: str, why: str) -> TemplateRefused:
        return TemplateRefused(f"`templates.{self.name}.{part}` {why}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledTemplate:
    """Holds a template with one request's values, all but the query."""

    template: Template
    values: Mapping[str, str]

    def frame(self, query: str) -> Frame:
        """Returns the text around every item of the request."""
        return self.template.frame(query, self.values)


def fill(template: Template, given: Mapping[str, str | None]) -> FilledTemplate:
    """Checks a request's values for a template.

    Args:
        template: The template to fill.
        given: The request's `query`, `instruction` and `system`.

    Raises:
        ScoringError: A value is missing, or the template does not use it.
    """
    for name, value in given.items():
        if value is not None and name not in template.uses:
            raise refusal(name, f"be absent: template {template.name} does not use it.")
        if value is None and name in template.uses and name not in template.defaults:
            raise refusal(name, f"be given: template {template.name} uses it. Given: nothing.")
    values = {name: value for name, value in given.items() if value is not None and name != "query"}
    return FilledTemplate(template=template, values=values)


def _compiled(name: str, part: str, text: str) -> TemplateSource:
    try:
        return compile_source(text, KNOWN)
    except SourceError as error:
        raise TemplateRefused(f"`templates.{name}.{part}` {error}.") from None


def compile_templates(specs: Mapping[str, TemplateSpec], tokenizer: TokenizerProtocol) -> dict[str, Template]:
    """Compiles all configured templates, and each preset that suits the tokenizer under its own name.

    A preset that fails its checks is left out.

    Raises:
        TemplateRefused: A configured template fails its checks.
    """
    found = {name: Template(name, spec, tokenizer) for name, spec in specs.items()}
    for name, spec in PRESETS.items():
        if name not in found:
            with contextlib.suppress(TemplateRefused):
                found[name] = Template(name, spec, tokenizer)
    return found
