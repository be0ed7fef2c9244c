"""Seams: how query and item become one row. Ids after ids, one text, or one text that a template writes."""

from dataclasses import replace

from scoring.builder import Builder
from scoring.errors import ItemError, ScoreCode, check_joined, id_range
from scoring.frames import Runs
from scoring.rows import Bounds, Prompts, Rows
from scoring.templates import Filled
from scoring.tokens import Tokens
from scoring.truncation import cut_ids


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
