"""Converts records to requests of a scoring route, and each answer to one output line a record."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from deployments.cli.score_files.client import Refusal
from deployments.cli.score_files.reader import InputRecord

MAX_REQUEST_CHARS = 1_000_000
# Error codes that one item may cause; every other refusal concerns all items.

OF_ITEMS = frozenset((
    "context_length_exceeded", "request_too_large", "body_too_large", "invalid_json", "invalid_token_id",
    "deadline_exceeded", "quarantined_request", "nonfinite_logits", "internal_error",
))  # fmt: skip
# Fields of requests that the command sets itself, or whose values it needs to read the answers.
OWN_FIELDS = frozenset((
    "query", "items", "documents", "texts", "labels", "label_token_ids", "template", "layout", "on_item_error",
    "top_n", "return_documents", "return_text",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFields:
    """Names the fields of a record. `fixed_query` replaces the query of every record."""

    item: str = "item"
    query: str = "query"
    continuations: str | None = None
    id: str | None = None
    fixed_query: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRoute:
    """Builds the requests of one route and reads its answers; a subclass defines what the route takes and returns.

    Consecutive records with the same query share a request, so that the query is computed once.
    """

    path: ClassVar[str]
    takes: ClassVar[frozenset[str]]  # options that the route accepts
    items: ClassVar[str] = "items"  # name of the request's field with the items
    kinds: ClassVar[str] = "text or token ids"  # types of an item, for messages
    names: RecordFields
    labels: tuple[str, ...] = ()
    label_token_ids: tuple[int, ...] = ()
    template: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of the request
    max_items: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError for options that the route does not accept, or that contradict each other."""
        for name, value in self.options().items():
            if value and name not in self.takes:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"`{option}` must be absent: {self.path} does not take it. Given: {value}.")
        self.check()

    def options(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "label_token_ids": list(self.label_token_ids),
            "template": self.template,
            "continuations_field": self.names.continuations,
        }

    def check(self) -> None:
        """Raises ValueError for options that contradict each other."""

    def lines(self, batch: Sequence[InputRecord], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the output line of each record. Raises ValueError if the answer is not one for these records."""
        raise NotImplementedError

    def empty(self) -> dict[str, Any]:
        """Returns what a line contains in place of an answer."""
        raise NotImplementedError

    def tokens(self, answer: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the prompt tokens of an answer, and how many of them were cached."""
        usage = answer.get("usage", {})
        return usage.get("prompt_tokens", 0), usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def terms(self) -> dict[str, Any]:
        """Returns the options that the output depends on."""
        return {
            "route": self.path,
            **self.options(),
            "item_field": self.names.item,
            "query_field": self.names.query,
            "id_field": self.names.id,
            "query": self.names.fixed_query,
            "fields": dict(self.fields),
        }

    def of_items(self, refusal: Refusal) -> bool:
        """Says whether the refusal may concern only some of the items."""
        theirs = [self.items] + (["query"] if self.names.fixed_query is None else [])
        theirs += ["continuations"] if self.names.continuations else []
        return refusal.code in OF_ITEMS or (refusal.param or "").startswith(tuple(theirs))

    def query_of(self, record: InputRecord) -> Any:
        if self.names.fixed_query is not None:
            return self.names.fixed_query
        return record.fields.get(self.names.query)

    def item_of(self, record: InputRecord) -> Any:
        return record.fields.get(self.names.item)

    def problem(self, record: InputRecord) -> str | None:
        """Says why the record cannot be scored; None if it can."""
        if record.problem is not None:
            return record.problem
        item, query = self.item_of(record), self.query_of(record)
        if self.kind(item) is None:
            return _must_be(self.names.item, self.kinds, item)
        if query is None and self.template is not None:
            return None
        return self.query_problem(item, query)

    def query_problem(self, item: object, query: object) -> str | None:
        kind = _text_or_ids(query)
        if kind is None:
            return _must_be(self.names.query, "text or token ids", query)
        if self.template is None and kind != self.kind(item):
            return f"`{self.names.item}` must be of the same kind as `{self.names.query}`: text or token ids."
        return None

    def kind(self, item: object) -> object:
        """Returns the kind of an item, None if it is not one. Only items of the same kind share a request."""
        return _text_or_ids(item)

    def batches(self, records: Iterable[InputRecord]) -> Iterator[list[InputRecord]]:
        """Groups records that share a request, in order. A record that cannot be scored is a group of its own."""
        batch: list[InputRecord] = []
        key: object = None
        chars = 0
        for record in records:
            problem = self.problem(record)
            size = 0 if problem else self.size(record)
            mine = None if problem else self.key(record)
            full = len(batch) >= self.max_items or chars + size > MAX_REQUEST_CHARS
            if batch and (problem or mine != key or full):
                yield batch
                batch, chars = [], 0
            key = mine
            chars += size
            batch.append(replace(record, problem=problem))
        if batch:
            yield batch

    def key(self, record: InputRecord) -> tuple[object, ...]:
        """Returns a value that is equal for records that may share a request."""
        return self.query_of(record), self.kind(self.item_of(record))

    def size(self, record: InputRecord) -> int:
        """Returns roughly how many characters the record adds to a request; a token counts as one."""
        return len(self.item_of(record))

    def body(self, batch: Sequence[InputRecord]) -> dict[str, Any]:
        given = {
            "query": self.query_of(batch[0]),
            "labels": list(self.labels) or None,
            "label_token_ids": list(self.label_token_ids) or None,
            "template": self.template,
        }
        items = [self.item_of(record) for record in batch]
        return {self.items: items, **self.fields, **{name: value for name, value in given.items() if value is not None}}

    def line(self, record: InputRecord, values: Mapping[str, Any], error: Mapping[str, Any] | None) -> dict[str, Any]:
        head: dict[str, Any] = {"index": record.index}
        if self.names.id is not None:
            head["id"] = record.fields.get(self.names.id)
        return {**head, **values, "error": error}

    def failed(self, record: InputRecord, code: str, message: str) -> dict[str, Any]:
        return self.line(record, self.empty(), {"code": code, "message": message})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeScoring(ScoringRoute):
    """Uses POST /generative_scoring, with labels or continuations."""

    path = "/generative_scoring"
    takes = frozenset(("labels", "label_token_ids", "template", "continuations_field"))

    def check(self) -> None:
        ways = [name for name, value in self.options().items() if value and name != "template"]
        ways += [name for name in ("continuations",) if name in self.fields]
        if len(ways) > 1 or not (ways or self.template):
            what = " and ".join(ways) or "none"
            raise ValueError(f"Labels, label token ids or continuations must be given, one of them. Given: {what}.")

    def problem(self, record: InputRecord) -> str | None:
        problem, name = ScoringRoute.problem(self, record), self.names.continuations
        if problem is None and name is not None and _as_continuations(record.fields.get(name)) is None:
            return f"`{name}` must be a list of texts, or of lists of token ids, none of them empty."
        return problem

    def key(self, record: InputRecord) -> tuple[object, ...]:
        key = ScoringRoute.key(self, record)
        return key if self.names.continuations is None else (*key, _as_continuations(self._own_continuations(record)))

    def size(self, record: InputRecord) -> int:
        return len(self.item_of(record)) + sum(map(len, self._own_continuations(record)))

    def body(self, batch: Sequence[InputRecord]) -> dict[str, Any]:
        own = [self._own_continuations(record) for record in batch]
        return ScoringRoute.body(self, batch) | ({"continuations": own} if self.names.continuations is not None else {})

    def lines(self, batch: Sequence[InputRecord], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = ("index", "object", "id", "error")
        return [
            self.line(record, {name: value for name, value in row.items() if name not in own}, row["error"])
            for record, row in zip(batch, _list_of(answer, "data", len(batch)), strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        listed = self.names.continuations is not None or "continuations" in self.fields
        return {
            "score": None,
            **({"continuations": None} if listed else {"probabilities": None, "logprobs": None, "label_mass": None}),
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "truncated": False,
            "truncated_tokens": 0,
        }

    def _own_continuations(self, record: InputRecord) -> list[Any]:
        name = self.names.continuations
        found: list[Any] = [] if name is None else record.fields[name]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(ScoringRoute):
    """Uses POST /v1/score."""

    path = "/v1/score"
    takes = frozenset(("label_token_ids",))

    def check(self) -> None:
        if not self.label_token_ids:
            raise ValueError("`--label-token-ids` must be given. Given: none.")

    def lines(self, batch: Sequence[InputRecord], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows, cuts = (_list_of(answer, name, len(batch)) for name in ("scores", "truncated"))
        return [
            self.line(record, {"score": row[0], "scores": row, "truncated": cut}, None)
            for record, row, cut in zip(batch, rows, cuts, strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        return {"score": None, "scores": None, "truncated": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerank(ScoringRoute):
    """Uses POST /rerank, and gives the documents in the input's order."""

    path = "/rerank"
    takes = frozenset[str]()
    items = "documents"
    kinds = "text or an object"

    def item_of(self, record: InputRecord) -> Any:
        """Returns the document. A value in it of a type that JSON does not have, such as a date, becomes text."""
        item = ScoringRoute.item_of(self, record)
        return json.loads(json.dumps(item, default=str)) if isinstance(item, dict) else item

    def query_problem(self, item: object, query: object) -> str | None:
        return None if isinstance(query, str) else _must_be(self.names.query, "text", query)

    def kind(self, item: object) -> object:
        return Rerank if isinstance(item, str | dict) else None

    def size(self, record: InputRecord) -> int:
        item = self.item_of(record)
        return len(item if isinstance(item, str) else json.dumps(item))

    def body(self, batch: Sequence[InputRecord]) -> dict[str, Any]:
        return ScoringRoute.body(self, batch) | {"return_documents": False}  # which the output does not hold

    def lines(self, batch: Sequence[InputRecord], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        found = sorted([*answer["results"], *answer.get("errors", ())], key=lambda one: one["index"])
        if [one["index"] for one in found] != list(range(len(batch))):
            raise ValueError("Every document is wanted once.")
        return [
            self.failed(record, one["code"], one["message"])
            if "relevance_score" not in one
            else self.line(record, {"score": one["relevance_score"], "truncated": "truncated" in one}, None)
            for record, one in zip(batch, found, strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        return {"score": None, "truncated": False}

    def tokens(self, answer: Mapping[str, Any]) -> tuple[int, int]:
        meta = answer.get("meta", {})
        return meta.get("tokens", {}).get("input_tokens", 0), meta.get("cached_tokens", 0)


ROUTES: dict[str, type[ScoringRoute]] = {"generative_scoring": GenerativeScoring, "score": Score, "rerank": Rerank}


def request_field(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, whose value is JSON or else text. Raises ValueError for a field that the command sets."""
    name, mark, value = text.partition("=")
    if not mark or not name or name in OWN_FIELDS:
        own = f", and not be one of {', '.join(sorted(OWN_FIELDS))}" if name in OWN_FIELDS else ""
        raise ValueError(f"`--set` must be NAME=VALUE{own}. Given: {text}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _list_of(answer: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Returns a list of an answer. Raises ValueError unless it has `count` entries."""
    rows = answer.get(name)
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"{count} rows are wanted.")
    return rows


def _as_continuations(value: object) -> type | None:
    """Returns str for a list of texts, int for a list of token ids, and None for anything else or an empty list."""
    if not isinstance(value, list) or not all(value):
        return None
    kinds = {_text_or_ids(entry) for entry in value}
    return kinds.pop() if len(kinds) == 1 else None


def _must_be(field: str, allowed: str, value: object) -> str:
    return f"`{field}` must be {allowed}. Given: {'nothing' if value is None else 'another value'}."


def _text_or_ids(value: object) -> type | None:
    """Returns str for a text, int for a list of token ids, and None for anything else."""
    if isinstance(value, str):
        return str
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    return int if ids else None
