"""Questions: consecutive records as requests of a route, and the answer as one line a record."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from deployments.cli.score_files.client import Refusal
from deployments.cli.score_files.reader import Record

MAX_REQUEST_CHARS = 1_000_000
# What one item can be at fault for; any other refusal would meet every item.
OF_ITEMS = frozenset(
    (
        "context_length_exceeded",
        "request_too_large",
        "body_too_large",
        "invalid_json",
        "invalid_token_id",
        "deadline_exceeded",
        "quarantined_request",
        "nonfinite_logits",
        "internal_error",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Which fields of a record are what. A fixed `query` stands for the field of every record."""

    item: str = "item"
    query: str = "query"
    continuations: str | None = None
    id: str | None = None
    fixed_query: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Records with equal queries that follow one another share a request, so that the query is computed once. A route
    says what it takes, how it is asked and what its answer says of each record."""

    path: ClassVar[str]
    takes: ClassVar[frozenset[str]]  # which of the options below, and "continuations_field"
    items: ClassVar[str] = "items"  # the request's field for them
    kinds: ClassVar[str] = "text or token ids"  # that an item may be of
    mapped: Mapped
    labels: tuple[str, ...] = ()
    label_token_ids: tuple[int, ...] = ()
    template: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of the request, as given
    most_items: int = 64

    def __post_init__(self) -> None:
        """ValueError for options that the route does not take, or that contradict each other."""
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
            "continuations_field": self.mapped.continuations,
        }

    def check(self) -> None:
        """ValueError for options that contradict each other."""

    def lines(self, batch: Sequence[Record], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """ValueError if the answer is not one of this route for so many items."""
        raise NotImplementedError

    def empty(self) -> dict[str, Any]:
        """What a line has in place of an answer."""
        raise NotImplementedError

    def tokens(self, answer: Mapping[str, Any]) -> tuple[int, int]:
        """Of all rows, and how many of them were cached."""
        usage = answer.get("usage", {})
        return usage.get("prompt_tokens", 0), usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)

    def terms(self) -> dict[str, Any]:
        """What the output depends on, beside the input and the model."""
        return {
            "route": self.path,
            **self.options(),
            "item_field": self.mapped.item,
            "query_field": self.mapped.query,
            "id_field": self.mapped.id,
            "query": self.mapped.fixed_query,
            "fields": dict(self.fields),
        }

    def of_items(self, refusal: Refusal) -> bool:
        """Whether fewer items, or other ones, might have been answered."""
        theirs = [self.items, "query"] + (["continuations"] if self.mapped.continuations else [])
        return refusal.code in OF_ITEMS or (refusal.param or "").startswith(tuple(theirs))

    def query_of(self, record: Record) -> Any:
        if self.mapped.fixed_query is not None:
            return self.mapped.fixed_query
        return record.fields.get(self.mapped.query)

    def item_of(self, record: Record) -> Any:
        return record.fields.get(self.mapped.item)

    def problem(self, record: Record) -> str | None:
        """Why the record cannot be asked about."""
        if record.problem is not None:
            return record.problem
        item, query = self.item_of(record), self.query_of(record)
        if self.kind(item) is None:
            return must_be(self.mapped.item, self.kinds, item)
        if query is None and self.template is not None:
            return None
        return self.query_problem(item, query)

    def query_problem(self, item: object, query: object) -> str | None:
        kind = _text_or_ids(query)
        if kind is None:
            return must_be(self.mapped.query, "text or token ids", query)
        if self.template is None and kind != self.kind(item):
            return f"`{self.mapped.item}` must be of the same kind as `{self.mapped.query}`: text or token ids."
        return None

    def kind(self, item: object) -> object:
        """Items of one kind may share a request; None for what is no item."""
        return _text_or_ids(item)

    def batches(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """Records that share a request, in order; one that cannot be asked about stands alone."""
        batch: list[Record] = []
        key: object = None
        chars = 0
        for record in records:
            problem = self.problem(record)
            size = 0 if problem else self.size(record)
            mine = None if problem else self.key(record)
            full = len(batch) >= self.most_items or chars + size > MAX_REQUEST_CHARS
            if batch and (problem or mine != key or full):
                yield batch
                batch, chars = [], 0
            key = mine
            chars += size
            batch.append(replace(record, problem=problem))
        if batch:
            yield batch

    def key(self, record: Record) -> tuple[object, ...]:
        """Equal for records that may share a request."""
        return self.query_of(record), self.kind(self.item_of(record))

    def size(self, record: Record) -> int:
        """Characters of a request, roughly; a token counts as one."""
        return len(self.item_of(record))

    def body(self, batch: Sequence[Record]) -> dict[str, Any]:
        given = {
            "query": self.query_of(batch[0]),
            "labels": list(self.labels) or None,
            "label_token_ids": list(self.label_token_ids) or None,
            "template": self.template,
        }
        items = [self.item_of(record) for record in batch]
        return {self.items: items, **self.fields, **{name: value for name, value in given.items() if value is not None}}

    def line(self, record: Record, values: Mapping[str, Any], error: Mapping[str, Any] | None) -> dict[str, Any]:
        head: dict[str, Any] = {"index": record.index}
        if self.mapped.id is not None:
            head["id"] = record.fields.get(self.mapped.id)
        return {**head, **values, "error": error}

    def failed(self, record: Record, code: str, message: str) -> dict[str, Any]:
        return self.line(record, self.empty(), {"code": code, "message": message})


def list_of(answer: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """ValueError unless the answer has `count` of them."""
    rows = answer.get(name)
    if not isinstance(rows, list) or len(rows) != count:
        raise ValueError(f"{count} rows are wanted.")
    return rows


def as_continuations(value: object) -> type | None:
    """str or int, for what is a list of texts or of token ids; None for anything else, and for nothing."""
    if not isinstance(value, list) or not all(value):
        return None
    kinds = {_text_or_ids(entry) for entry in value}
    return kinds.pop() if len(kinds) == 1 else None


def must_be(field: str, allowed: str, value: object) -> str:
    return f"`{field}` must be {allowed}. Given: {'nothing' if value is None else 'another value'}."


def _text_or_ids(value: object) -> type | None:
    """str, or int for a list of token ids."""
    if isinstance(value, str):
        return str
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    return int if ids else None
