"""Routes: what `assay score` can ask, and how each answer becomes lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.cli.score_files.prompts import Questions, as_continuations, list_of, must_be
from deployments.cli.score_files.reader import Record

# What the command itself puts into requests, or needs to be as it is to read the answers.
OWN_FIELDS = frozenset(
    (
        "query",
        "items",
        "documents",
        "texts",
        "labels",
        "label_token_ids",
        "template",
        "layout",
        "on_item_error",
        "top_n",
        "return_documents",
        "return_text",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerativeScoring(Questions):
    """POST /generative_scoring, with labels or continuations."""

    path = "/generative_scoring"
    takes = frozenset(("labels", "label_token_ids", "template", "continuations_field"))

    def check(self) -> None:
        ways = [name for name, value in self.options().items() if value and name != "template"]
        ways += [name for name in ("continuations",) if name in self.fields]
        if len(ways) > 1 or not (ways or self.template):
            what = " and ".join(ways) or "none"
            raise ValueError(f"Labels, label token ids or continuations must be given, one of them. Given: {what}.")

    def problem(self, record: Record) -> str | None:
        problem, name = Questions.problem(self, record), self.mapped.continuations
        if problem is None and name is not None and as_continuations(record.fields.get(name)) is None:
            return f"`{name}` must be a list of texts, or of lists of token ids, none of them empty."
        return problem

    def key(self, record: Record) -> tuple[object, ...]:
        key = Questions.key(self, record)
        return key if self.mapped.continuations is None else (*key, as_continuations(self._own_continuations(record)))

    def size(self, record: Record) -> int:
        return len(self.item_of(record)) + sum(map(len, self._own_continuations(record)))

    def body(self, batch: Sequence[Record]) -> dict[str, Any]:
        own = [self._own_continuations(record) for record in batch]
        return Questions.body(self, batch) | ({"continuations": own} if self.mapped.continuations is not None else {})

    def lines(self, batch: Sequence[Record], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        own = ("index", "object", "id", "error")
        return [
            self.line(record, {name: value for name, value in row.items() if name not in own}, row["error"])
            for record, row in zip(batch, list_of(answer, "data", len(batch)), strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        told = self.mapped.continuations is not None or "continuations" in self.fields
        return {
            "score": None,
            **({"continuations": None} if told else {"probabilities": None, "logprobs": None, "label_mass": None}),
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "truncated": False,
            "truncated_tokens": 0,
        }

    def _own_continuations(self, record: Record) -> list[Any]:
        name = self.mapped.continuations
        found: list[Any] = [] if name is None else record.fields[name]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Questions):
    """POST /v1/score."""

    path = "/v1/score"
    takes = frozenset(("label_token_ids",))

    def check(self) -> None:
        if not self.label_token_ids:
            raise ValueError("`--label-token-ids` must be given. Given: none.")

    def lines(self, batch: Sequence[Record], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows, cuts = (list_of(answer, name, len(batch)) for name in ("scores", "truncated"))
        return [
            self.line(record, {"score": row[0], "scores": row, "truncated": cut}, None)
            for record, row, cut in zip(batch, rows, cuts, strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        return {"score": None, "scores": None, "truncated": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerank(Questions):
    """POST /rerank: every document with its relevance, in the input's order."""

    path = "/rerank"
    takes = frozenset[str]()
    items = "documents"
    kinds = "text or an object"

    def query_problem(self, item: object, query: object) -> str | None:
        return None if isinstance(query, str) else must_be(self.mapped.query, "text", query)

    def kind(self, item: object) -> object:
        return Rerank if isinstance(item, str | dict) else None

    def size(self, record: Record) -> int:
        item = self.item_of(record)
        return len(item if isinstance(item, str) else json.dumps(item))

    def lines(self, batch: Sequence[Record], answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        results = {result["index"]: result for result in list_of(answer, "results", len(batch))}
        if sorted(results) != list(range(len(batch))):
            raise ValueError("Every document is wanted once.")
        return [
            self.line(record, {"score": found["relevance_score"], "truncated": "truncated" in found}, None)
            for record, found in zip(batch, (results[index] for index in range(len(batch))), strict=True)
        ]

    def empty(self) -> dict[str, Any]:
        return {"score": None, "truncated": False}

    def tokens(self, answer: Mapping[str, Any]) -> tuple[int, int]:
        meta = answer.get("meta", {})
        return meta.get("tokens", {}).get("input_tokens", 0), meta.get("cached_tokens", 0)


ROUTES: dict[str, type[Questions]] = {"generative_scoring": GenerativeScoring, "score": Score, "rerank": Rerank}


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
