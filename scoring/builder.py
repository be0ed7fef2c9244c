"""Builder: what every seam needs to make rows: the query cut and as ids, costs, failures by item, and packing."""

from collections.abc import Callable

import numpy as np

from scoring.errors import ItemError, ScoreCode, ScoringError, check_tokens, id_range
from scoring.rows import Bounds, Prompts, Rows, offsets
from scoring.tokens import Encoding, Tokens
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
