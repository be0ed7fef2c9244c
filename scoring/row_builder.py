"""Seams: how query and item become one row. Ids after ids, one text, or one text that a template writes.

Builder: what every seam needs to make rows: the query cut and as ids, costs, failures by item, and packing.

Rows of a scoring request: query and item joined, cut to length, as flat ids with one shared prefix.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scoring.errors import ItemError, ScoreCode, ScoringError, check_joined, check_tokens, id_range
from scoring.rows import Bounds, Int32s, Names, Prompts, Rows, offsets
from scoring.templates import Filled, Runs
from scoring.tokenizer_protocol import Encoding, Tokens
from scoring.truncation import Cut, Side, cut_ids, cut_text


class Builder:
    """Common to all seams. `build` is theirs."""

    plain = False  # control tokens' strings in text are ordinary characters

    def __init__(self, tokens: Tokens, spec: Prompts, bounds: Bounds) -> None:
        self.tokens = tokens
        self.spec = spec
        self.bounds = bounds
        self.errors: dict[int, ItemError] = {}
        self.texts: dict[int, str] = {}
        self.most = min(bounds.max_model_len, spec.max_row_tokens or bounds.max_model_len)
        self.query_text, self.query = self._query()
        if len(self.query) > self.most:
            raise self._query_too_long(len(self.query))

    def encode(self, text: str, special: bool) -> list[int]:
        special = special and self.spec.add_special_tokens
        return self.tokens.encode_batch([text], add_special_tokens=special, plain=self.plain)[0]

    def encode_spans(self, text: str) -> Encoding:
        return self.tokens.encode_spans(text, plain=self.plain)

    def cut(self, text: str, excess: int, encode: Callable[[str], list[int]], most: int, side: Side) -> Cut:
        return cut_text(self.encode_spans(text).spans, text, excess, side, encode, most)

    def _query(self) -> tuple[str, list[int]]:
        """The query's text (if it is text) and ids, cut to `max_query_tokens`; special tokens only if it leads."""
        spec, query, most = self.spec, self.spec.query, self.spec.max_query_tokens
        if isinstance(query, list):
            wrong = id_range("query", query, self.bounds.vocab_size)
            if wrong:
                raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, "query")
            return "", cut_ids(query, most, "right") if most else query
        if most:
            own = len(self.encode_spans(query).ids)
            if own > most:
                query = self.cut(query, own - most, lambda rest: self.encode(rest, False), most, "right").text
        return query, self.encode(query, not spec.item_first)

    def _query_too_long(self, given: int) -> ScoringError:
        return ScoringError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`query` must leave room in {self.most} tokens. Given: {given}. "
            f"Shorten it or set `{self.spec.names.query_tokens}`.",
            "query",
        )

    def check_total(self, given: int) -> None:
        check_tokens(given, self.bounds.max_request_tokens, self.spec.names.items)

    def too_long(self, index: int, given: int, most: int, field: str) -> None:
        self.errors[index] = ItemError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`{self.spec.names.items}[{index}]` must be at most {most} tokens ({field}). Given: {given}. "
            "Shorten it or cut it.",
        )

    def empty(self, index: int) -> None:
        self.errors[index] = ItemError(
            ScoreCode.INVALID_VALUE,
            f"`{self.spec.names.items}[{index}]` and the query must not both be empty. Given: no tokens.",
        )

    def suffix(self) -> str:
        """Text that ends every prompt, "" if there is none."""
        return self.query_text if self.spec.item_first else ""

    def build(self) -> Rows:
        raise NotImplementedError

    def pack(self, head: list[int], parts: dict[int, list[int]], truncated: list[int]) -> Rows:
        """Rows `head + part`. The prefix is the longest that all share and that leaves every row a token of its own."""
        suffix = self.suffix()
        rows = list(parts.values())
        if not rows:
            empty = np.zeros(0, np.int32)
            return Rows(empty, empty, offsets([]), [], truncated, self.errors, suffix, {})
        common = _common(rows)
        shared = min(len(head) + common, min(map(len, rows)) + len(head) - 1)
        keep = min(shared, len(head))
        tail, skip = head[keep:], shared - keep
        self.check_total(shared + sum(map(len, rows)) + len(rows) * (len(tail) - skip))
        prefix = np.array(head[:keep] + rows[0][:skip], np.int32)
        starts = offsets([len(tail) + len(row) - skip for row in rows])
        ids = np.empty(int(starts[-1]), np.int32)
        for row, start, end in zip(rows, starts[:-1], starts[1:], strict=True):
            ids[start:end] = tail + row[skip:]
        return Rows(prefix, ids, starts, list(parts), truncated, self.errors, suffix, self.texts)


def _common(rows: list[list[int]]) -> int:
    """Length of the longest common beginning: that of the least and the greatest row in lexicographic order."""
    low, high = min(rows), max(rows)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


class Concat(Builder):
    """Ids of query and item, each tokenised alone, one after the other."""

    def build(self) -> Rows:
        spec, most = self.spec, self.most
        room = most - len(self.query)
        budget = room if spec.max_item_tokens is None else min(room, spec.max_item_tokens)
        items = self._items()
        copies = len(items) * len(self.query) if spec.item_first else len(self.query)
        self.check_total(copies + sum(min(len(item), budget) for item in items))
        parts: dict[int, list[int]] = {}
        truncated = [0] * len(items)
        for index, item in enumerate(items):
            if index in self.errors:
                continue
            if len(item) > budget and spec.truncate == "error":
                self.too_long(
                    index, len(item), budget, spec.names.item_tokens if budget < room else "the model's context"
                )
                continue
            kept = self._cut(index, item, budget)
            if not kept and not self.query:
                self.empty(index)
                continue
            truncated[index] = len(item) - len(kept)
            parts[index] = kept + self.query if spec.item_first else kept
        return self.pack([] if spec.item_first else self.query, parts, truncated)

    def _items(self) -> list[list[int]]:
        special = self.spec.add_special_tokens and self.spec.item_first
        if isinstance(self.spec.items[0], str):
            texts = [item for item in self.spec.items if isinstance(item, str)]
            items = self.tokens.encode_batch(texts, add_special_tokens=special)
            bos = self.tokens.bos_token_id
            lone = self.spec.add_special_tokens and not self.query and bos is not None
            return [[bos] if lone and not item and bos is not None else item for item in items]
        items = [item for item in self.spec.items if isinstance(item, list)]
        for index, item in enumerate(items):
            wrong = id_range(f"{self.spec.names.items}[{index}]", item, self.bounds.vocab_size)
            if wrong:
                self.errors[index] = ItemError(ScoreCode.INVALID_TOKEN_ID, wrong)
        return items

    def _cut(self, index: int, item: list[int], budget: int) -> list[int]:
        if len(item) <= budget:
            return item
        text = self.spec.items[index]
        if not isinstance(text, str):
            return cut_ids(item, budget, self.spec.truncation_side)

        def encode(rest: str) -> list[int]:
            return self.encode(rest, self.spec.item_first)

        return self.cut(text, len(item) - budget, encode, budget, self.spec.truncation_side).ids


class Joint(Builder):
    """Ids of the joined text."""

    def build(self) -> Rows:
        spec = self.spec
        texts = [item for item in spec.items if isinstance(item, str)]
        chars = len(texts) * self.around() + sum(map(len, texts))
        check_joined(chars, self.bounds.limits.max_joined_chars, self.spec.names.items)
        truncated = [0] * len(texts)
        if spec.max_item_tokens is not None:
            texts = [self._limit(index, text, truncated) for index, text in enumerate(texts)]
        rows = self._encode(texts)
        parts: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if index not in self.errors:
                found = self._fit(index, texts[index], row, truncated)
                if found is not None:
                    parts[index] = found
        return self.pack([], parts, truncated)

    def around(self) -> int:
        """Characters of a row besides its item's."""
        return len(self.query_text)

    def _encode(self, items: list[str]) -> list[list[int]]:
        special = self.spec.add_special_tokens
        return self.tokens.encode_batch([self._join(item) for item in items], add_special_tokens=special)

    def _join(self, item: str) -> str:
        return item + self.query_text if self.spec.item_first else self.query_text + item

    def _limit(self, index: int, text: str, truncated: list[int]) -> str:
        most = self.spec.max_item_tokens or 0
        own = len(self.encode_spans(text).ids)
        if own <= most:
            return text
        if self.spec.truncate == "error":
            self.too_long(index, own, most, self.spec.names.item_tokens)
            return text
        cut = self.cut(text, own - most, lambda rest: self.encode(rest, False), most, self.spec.truncation_side)
        truncated[index] = own - len(cut.ids)
        return cut.text

    def _fit(self, index: int, text: str, row: list[int], truncated: list[int]) -> list[int] | None:
        most = self.most
        self.texts[index] = self._join(text)
        if not row and self.spec.add_special_tokens and self.tokens.bos_token_id is not None:
            return [self.tokens.bos_token_id]
        if not row:
            self.empty(index)
            return None
        if len(row) <= most:
            return row
        if self.spec.truncate == "error":
            self.too_long(index, len(row), most, "the model's context, query included")
            return None
        cut = self.cut(
            text, len(row) - most, lambda rest: self.encode(self._join(rest), True), most, self.spec.truncation_side
        )
        if len(cut.ids) > most:
            raise self._query_too_long(len(cut.ids))
        truncated[index] += len(row) - len(cut.ids)
        self.texts[index] = self._join(cut.text)
        return cut.ids


class Templated(Joint):
    """Ids of the text that a template makes of query and item, with control tokens only where it writes them."""

    plain = True

    def __init__(self, tokens: Tokens, spec: Prompts, bounds: Bounds, template: Filled) -> None:
        super().__init__(tokens, replace(spec, item_first=False, add_special_tokens=False), bounds)
        self.frame = template.frame(self.query_text)
        self.in_runs = template.template.in_runs

    def around(self) -> int:
        return len(self.frame.head) + len(self.frame.tail)

    def suffix(self) -> str:
        return self.frame.tail

    def _encode(self, items: list[str]) -> list[list[int]]:
        frame = self.frame
        if self.in_runs and (all(items) or frame.empty == frame.head + frame.tail):
            return Runs.of(frame, self.tokens).rows(items, self.tokens)
        rows = [frame.row(item) for item in items]
        return self.tokens.encode_batch(rows, add_special_tokens=False, plain=True)

    def _join(self, item: str) -> str:
        return self.frame.row(item)


__all__ = ["Bounds", "Int32s", "Names", "Prompts", "Rows", "build_rows"]


def build_rows(tokens: Tokens, spec: Prompts, bounds: Bounds) -> Rows:
    """Raises ScoringError for what is wrong with the request as a whole. CPU work: call it off the event loop."""
    if isinstance(spec.query, str) != isinstance(spec.items[0], str):
        raise ScoringError(
            ScoreCode.INVALID_VALUE,
            f"`{spec.names.items}` must be of the same kind as `query`: both text or both token ids. "
            "Given: one of each.",
            spec.names.items,
        )
    if spec.seam == "joint" and not isinstance(spec.query, str):
        raise ScoringError(ScoreCode.INVALID_VALUE, "`seam` must be concat for token ids. Given: joint.", "seam")
    if spec.template is not None:
        return Templated(tokens, spec, bounds, spec.template).build()
    builder = Joint(tokens, spec, bounds) if spec.seam == "joint" else Concat(tokens, spec, bounds)
    return builder.build()
