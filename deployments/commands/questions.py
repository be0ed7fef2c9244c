"""Questions: consecutive records as requests of a route, and the answer as one line a record."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.commands.records import Record
from deployments.commands.service import Refusal

MAX_REQUEST_CHARS = 1_000_000
OWN_FIELDS = frozenset(("query", "items", "labels", "label_token_ids", "template", "layout", "on_item_error"))
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
EMPTY_LINE = {
    "score": None,
    "probabilities": None,
    "logprobs": None,
    "label_mass": None,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "truncated": False,
    "truncated_tokens": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Which fields of a record are what. A fixed `query` stands for the field of every record."""

    item: str = "item"
    query: str = "query"
    id: str | None = None
    fixed_query: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeScoring:
    """POST /generative_scoring. Records with equal queries that follow one another share a request, so that the query
    is computed once."""

    path = "/generative_scoring"
    mapped: Mapped
    labels: tuple[str, ...] = ()
    label_token_ids: tuple[int, ...] = ()
    template: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # further ones of the request, as given
    most_items: int = 64

    def terms(self) -> dict[str, Any]:
        """What the output depends on, beside the input and the model."""
        return {
            "route": self.path,
            "labels": list(self.labels),
            "label_token_ids": list(self.label_token_ids),
            "template": self.template,
            "item_field": self.mapped.item,
            "query_field": self.mapped.query,
            "id_field": self.mapped.id,
            "query": self.mapped.fixed_query,
            "fields": dict(self.fields),
        }

    def query_of(self, record: Record) -> Any:
        if self.mapped.fixed_query is not None:
            return self.mapped.fixed_query
        return record.fields.get(self.mapped.query)

    def problem(self, record: Record) -> str | None:
        """Why the record cannot be asked about."""
        if record.problem is not None:
            return record.problem
        item, query = record.fields.get(self.mapped.item), self.query_of(record)
        for name, value in ((self.mapped.item, item), (self.mapped.query, query)):
            if value is None and name == self.mapped.query and self.template is not None:
                continue
            if _kind(value) is None:
                return f"`{name}` must be text or token ids. Given: {'nothing' if value is None else 'another value'}."
        if self.template is None and _kind(item) != _kind(query):
            return f"`{self.mapped.item}` must be of the same kind as `{self.mapped.query}`: text or token ids."
        return None

    def batches(self, records: Iterable[Record]) -> Iterator[list[Record]]:
        """Records that share a request, in order; one that cannot be asked about stands alone."""
        batch: list[Record] = []
        key: Any = None
        chars = 0
        for record in records:
            problem = self.problem(record)
            size = 0 if problem else len(record.fields[self.mapped.item])
            mine = None if problem else (self.query_of(record), _kind(record.fields[self.mapped.item]))
            full = len(batch) >= self.most_items or chars + size > MAX_REQUEST_CHARS
            if batch and (problem or mine != key or full):
                yield batch
                batch, chars = [], 0
            key = mine
            chars += size
            batch.append(replace(record, problem=problem))
        if batch:
            yield batch

    def body(self, batch: Sequence[Record]) -> dict[str, Any]:
        given = {
            "query": self.query_of(batch[0]),
            "labels": list(self.labels) or None,
            "label_token_ids": list(self.label_token_ids) or None,
            "template": self.template,
        }
        items = [record.fields[self.mapped.item] for record in batch]
        return {"items": items, **self.fields, **{name: value for name, value in given.items() if value is not None}}

    def lines(self, batch: Sequence[Record], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """ValueError if the answer is not one of this route for so many items."""
        rows = answer.get("data")
        if not isinstance(rows, list) or len(rows) != len(batch):
            raise ValueError(f"{len(batch)} rows are wanted.")
        own = {"index", "object", "id"}
        return [
            self._head(record) | {name: value for name, value in row.items() if name not in own}
            for record, row in zip(batch, rows, strict=True)
        ]

    def failed(self, record: Record, code: str, message: str) -> dict[str, Any]:
        return self._head(record) | EMPTY_LINE | {"error": {"code": code, "message": message}}

    def _head(self, record: Record) -> dict[str, Any]:
        head: dict[str, Any] = {"index": record.index}
        return head if self.mapped.id is None else head | {"id": record.fields.get(self.mapped.id)}


ROUTES = {"generative_scoring": GenerativeScoring}


def of_items(refusal: Refusal) -> bool:
    """Whether fewer items, or other ones, might have been answered."""
    return refusal.code in OF_ITEMS or (refusal.param or "").startswith(("items", "query"))


def request_field(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a field of the request: JSON, or else the text itself. ValueError for a field that is ours."""
    name, mark, value = text.partition("=")
    if not mark or not name or name in OWN_FIELDS:
        own = f", and not be one of {', '.join(sorted(OWN_FIELDS))}" if name in OWN_FIELDS else ""
        raise ValueError(f"`--set` must be NAME=VALUE{own}. Given: {text}.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _kind(value: object) -> type | None:
    """str, or int for a list of token ids."""
    if isinstance(value, str):
        return str
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    return int if ids else None
