"""Builds the rows of a scoring request: query and item joined, cut to length, as flat ids with one shared prefix.

Three ways to join ("seams"): token ids after token ids, one text, or one text that a template writes. Text is cut at
token boundaries, and cut text is tokenised again, so that its score is that of the shortened text.

Shape legend: N items, R rows (one for each item that did not fail), P prefix tokens, M tokens of all rows after the
prefix.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ItemError, ScoreCode, ScoringError, ScoringLimits, refusal
from scoring.labels import token_id_problem
from scoring.prompts.templates import FilledTemplate, SplitFrame
from scoring.tokenizer_protocol import Encoding, TokenizerProtocol

Int32s = npt.NDArray[np.int32]
Side = Literal["right", "left"]
Query = str | list[int]
Items = list[str] | list[list[int]]
LONG_HEAD = 32  # tokens before an item, as in the router: with fewer, requests may share the beginnings of their items
OTHER_ITEM = "."  # any text does: a row with it in the item's place tells what stands before the item


class FieldNames(NamedTuple):
    """Names the request fields that errors mention, as the route calls them."""

    items: str = "items"
    item_tokens: str = "max_item_tokens"
    query_tokens: str = "max_query_tokens"
    query: str = "query"  # "": rows are one text each


DEFAULT_FIELD_NAMES = FieldNames()


class PromptSpec(NamedTuple):
    """Says how a query and its items are joined.

    With a template both are text and the template joins them; `item_first` and `add_special_tokens` then have no
    effect.
    """

    item_first: bool = False
    add_special_tokens: bool = True
    seam: Literal["concat", "joint"] = "concat"
    truncate: Literal["item", "error"] = "item"
    truncation_side: Side = "right"
    max_item_tokens: int | None = None
    max_query_tokens: int | None = None
    max_row_tokens: int | None = None  # of the whole row, taken from the item; only with the joint seam
    template: FilledTemplate | None = None
    pairs: bool = False  # the tokenizer joins query and item, as encoders read two texts
    names: FieldNames = DEFAULT_FIELD_NAMES


class PromptLimits(NamedTuple):
    """Holds what the model and the server allow one scoring request."""

    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    max_rows: int
    max_cells: int  # rows times labels
    scoring: ScoringLimits


class ScoringRows(NamedTuple):
    """Holds the rows: row i is `prefix + ids[starts[i]:starts[i + 1]]` and belongs to item `items[i]`."""

    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [R + 1]
    items: list[int]  # [R]
    truncated: list[int]  # [N] tokens cut off each item
    errors: dict[int, ItemError]  # by item; a failed item has no row
    suffix: str  # text that ends every prompt, "" if there is none; marked text with a template
    texts: dict[int, str]  # by item, as tokenised: under the `joint` seam only
    segments: Int32s = np.zeros(0, np.int32)  # [R] tokens before the second segment; empty: no row has one

    def lengths(self) -> list[int]:
        """Returns the tokens of each row, its prefix included, [R]."""
        found: list[int] = (self.starts[1:] - self.starts[:-1] + len(self.prefix)).tolist()
        return found


def unshared(rows: ScoringRows, keep: int = 0) -> ScoringRows:
    """Returns rows that share no more than the first `keep` tokens of their prefix."""
    own = rows.prefix[keep:]
    if not len(own):
        return rows
    ends = zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)
    ids = np.concatenate([part for start, end in ends for part in (own, rows.ids[start:end])])
    starts = rows.starts + np.arange(len(rows.starts), dtype=np.int32) * len(own)
    return rows._replace(prefix=rows.prefix[:keep], ids=ids.astype(np.int32), starts=starts.astype(np.int32))


def joined(parts: Sequence[ScoringRows], field: str) -> ScoringRows:
    """Returns the rows of several requests as those of one request, which share nothing.

    Args:
        parts: The requests' rows.
        field: Name of the items, which errors repeat with the item's place.
    """
    whole = [unshared(one) for one in parts]
    first = offsets([len(one.truncated) for one in parts]).tolist()  # item of each part, in the whole

    return ScoringRows(
        prefix=np.zeros(0, np.int32),
        ids=np.concatenate([one.ids for one in whole]),
        starts=offsets([int(size) for one in whole for size in np.diff(one.starts)]),
        items=[index + by for one, by in zip(whole, first, strict=False) for index in one.items],
        truncated=[cut for one in parts for cut in one.truncated],
        errors={
            index + by: error.under(f"{field}[{index}]", f"{field}[{index + by}]")
            for one, by in zip(parts, first, strict=False)
            for index, error in one.errors.items()
        },
        suffix=parts[0].suffix,
        texts={},
        segments=np.concatenate([one.segments for one in whole]),
    )


class CutText(NamedTuple):
    """Holds shortened text and its ids, as the row encodes them."""

    text: str
    ids: list[int]


def build_score_rows(
    tokenizer: TokenizerProtocol, query: Query, items: Items, spec: PromptSpec, limits: PromptLimits
) -> ScoringRows:
    """Builds rows as `build_rows` does, but a row without others shares what stands before its item, as it would beside
    others.

    With more of it in the prefix, items would displace queries from the prefix cache, and requests of one query would
    go to different replicas. Where less than `LONG_HEAD` tokens stand before the item, requests may share the beginning
    of their items, and the row shares all it can.
    """
    builder = _builder(tokenizer, query, items, spec, limits)
    rows = builder.build()
    head = builder.head_size(rows.prefix) if len(rows.items) == 1 else 0
    return unshared(rows, head) if head >= LONG_HEAD else rows


def build_rows(
    tokenizer: TokenizerProtocol, query: Query, items: Items, spec: PromptSpec, limits: PromptLimits
) -> ScoringRows:
    """Builds the rows of a request. This is CPU work: call it off the event loop.

    Args:
        tokenizer: Encodes the text.
        query: Text, or token ids.
        items: At least one, of the same kind as the query.
        spec: Says how they are joined.
        limits: The limits of the model and the server.

    Returns:
        One row for each item that did not fail; `errors` holds the others.

    Raises:
        ScoringError: The request as a whole is wrong.
    """
    return _builder(tokenizer, query, items, spec, limits).build()


def _builder(
    tokenizer: TokenizerProtocol, query: Query, items: Items, spec: PromptSpec, limits: PromptLimits
) -> "RowBuilder":
    if isinstance(query, str) != isinstance(items[0], str):
        rule = "be of the same kind as `query`: both text or both token ids. Given: one of each."
        raise refusal(spec.names.items, rule)
    if spec.seam == "joint" and not isinstance(query, str):
        raise refusal("seam", "be concat for token ids. Given: joint.")
    if spec.pairs:
        return PairRowBuilder(tokenizer, query, items, spec, limits)
    if spec.template is not None:
        return TemplateRowBuilder(tokenizer, query, items, spec, limits, spec.template)
    builder = JointRowBuilder if spec.seam == "joint" else ConcatRowBuilder
    return builder(tokenizer, query, items, spec, limits)


def offsets(lengths: Sequence[int]) -> Int32s:
    """Returns where each of N rows of these lengths begins in one flat array, and where the last ends, [N + 1]."""
    return np.fromiter(accumulate(lengths, initial=0), np.int32, len(lengths) + 1)


class RowBuilder:
    """Holds what every seam needs: the query, cut and as ids, the failures by item, and the packing of rows."""

    plain = False  # True: strings of control tokens in the text are ordinary characters

    def __init__(
        self, tokenizer: TokenizerProtocol, query: Query, items: Items, spec: PromptSpec, limits: PromptLimits
    ) -> None:
        """Encodes the query. Raises ScoringError for a query that is wrong or leaves no room."""
        self.tokenizer = tokenizer
        self.spec = spec
        self.limits = limits
        self.errors: dict[int, ItemError] = {}
        self.items = self._readable(items)
        self.texts: dict[int, str] = {}
        self.max_row_tokens = min(limits.max_model_len, spec.max_row_tokens or limits.max_model_len)
        self.query_text, self.query = self._encode_query(query)
        if len(self.query) > self.max_row_tokens and not spec.pairs:
            raise self._query_too_long(len(self.query))

    def build(self) -> ScoringRows:
        """Builds the rows by the rule of this seam. Raises ScoringError for the request as a whole."""
        raise NotImplementedError

    def head_size(self, prefix: Int32s) -> int:
        """Returns how many tokens of a row's prefix stand before its item, whatever the item is."""
        raise NotImplementedError

    def suffix(self) -> str:
        """Returns the text that ends every prompt, "" if there is none."""
        return self.query_text if self.spec.item_first else ""

    def encode(self, text: str, special: bool) -> list[int]:
        """Returns the ids of a text, with the special tokens if both `special` and the request say so."""
        special = special and self.spec.add_special_tokens
        return self.tokenizer.encode_batch([text], add_special_tokens=special, plain=self.plain)[0]

    def encode_spans(self, text: str) -> Encoding:
        """Returns the ids of a text and the characters that each stands for."""
        return self.tokenizer.encode_spans(text, plain=self.plain)

    def cut(self, text: str, excess: int, encode: Callable[[str], list[int]], maximum: int, side: Side) -> CutText:
        """Shortens a text that has `excess` tokens too many: see `cut_text`."""
        return cut_text(self.encode_spans(text).spans, text, excess, side, encode, maximum)

    def fail_too_long(self, index: int, given: int, maximum: int, field: str) -> None:
        """Records that an item has `given` tokens where `field` allows `maximum`."""
        self.errors[index] = ItemError(
            ScoreCode.CONTEXT_LENGTH_EXCEEDED,
            f"`{self.spec.names.items}[{index}]` must be at most {maximum} tokens ({field}). Given: {given}. "
            "Shorten it or cut it.",
        )

    def fail_empty(self, index: int) -> None:
        """Records that an item's row would have no token."""
        names = self.spec.names
        rule = f"and `{names.query}` must not both be empty" if names.query else "must not be empty"
        message = f"`{names.items}[{index}]` {rule}. Given: no tokens."
        self.errors[index] = ItemError(ScoreCode.INVALID_VALUE, message)

    def _readable(self, items: Items) -> Items:
        """Returns the items with "" in place of texts that are no Unicode, which fail."""
        found: list[str] = []
        for index, item in enumerate(items):
            if not isinstance(item, str):
                return items
            if not is_unicode(item):
                message = f"`{self.spec.names.items}[{index}]` must be Unicode text. Given: half of a surrogate pair."
                self.errors[index] = ItemError(ScoreCode.INVALID_VALUE, message)
                item = ""
            found.append(item)
        return found

    def check_total(self, given: int) -> None:
        """Raises ScoringError if the rows have too many tokens together."""
        check_tokens(given, self.limits.max_request_tokens, self.spec.names.items)

    def _take_out(self, parts: dict[int, list[int]]) -> None:
        """Takes out the rows with ids of a text that the model lacks. Raises ScoringError if the query has them."""
        vocab_size = self.limits.vocab_size
        name = self.spec.names.query
        problem = token_id_problem(name, self.query, vocab_size, text=True)
        if problem:
            raise ScoringError(ScoreCode.INVALID_TOKEN_ID, problem, name)
        for index, part in tuple(parts.items()):
            problem = token_id_problem(f"{self.spec.names.items}[{index}]", part, vocab_size, text=True)
            if problem:
                self.errors[index] = ItemError(ScoreCode.INVALID_TOKEN_ID, problem)
                del parts[index]

    def pack(self, head: list[int], parts: dict[int, list[int]], truncated: list[int]) -> ScoringRows:
        """Packs the rows `head + part`. The shared prefix is the longest that leaves every row a token of its own.

        Args:
            head: Ids that begin every row.
            parts: The remaining ids of each row, by item.
            truncated: Tokens cut off each item, [N].
        """
        suffix = self.suffix()
        rows = list(parts.values())
        if not rows:
            empty = np.zeros(0, np.int32)
            return ScoringRows(empty, empty, offsets([]), [], truncated, self.errors, suffix, {})
        common = _common_prefix(rows)
        shared = min(len(head) + common, min(map(len, rows)) + len(head) - 1)
        keep = min(shared, len(head))
        tail, skip = head[keep:], shared - keep
        self.check_total(shared + sum(map(len, rows)) + len(rows) * (len(tail) - skip))
        prefix = np.array(head[:keep] + rows[0][:skip], np.int32)
        starts = offsets([len(tail) + len(row) - skip for row in rows])
        ids = np.fromiter(chain.from_iterable(tail + row[skip:] for row in rows), np.int32, int(starts[-1]))
        if self._lacks(ids) or self._lacks(prefix):
            self._take_out(parts)
            return self.pack(head, parts, truncated)
        return ScoringRows(prefix, ids, starts, list(parts), truncated, self.errors, suffix, self.texts)

    def _lacks(self, ids: Int32s) -> bool:
        """Tells whether the model lacks one of the ids."""
        return len(ids) > 0 and bool(np.maximum.reduce(ids) >= self.limits.vocab_size)

    def _encode_query(self, query: Query) -> tuple[str, list[int]]:
        """Returns the query's text (if it is text) and ids, cut to `max_query_tokens`.

        It has the special tokens only if it begins the row.
        """
        spec, maximum = self.spec, self.spec.max_query_tokens
        if isinstance(query, list):
            problem = token_id_problem("query", query, self.limits.vocab_size)
            if problem:
                raise ScoringError(ScoreCode.INVALID_TOKEN_ID, problem, "query")
            return "", cut_ids(query, maximum, "right") if maximum else query
        if maximum:
            own = len(self.encode_spans(query).ids)
            if own > maximum:
                query = self.cut(query, own - maximum, lambda rest: self.encode(rest, False), maximum, "right").text
        return query, self.encode(query, not spec.item_first)

    def _query_too_long(self, given: int) -> ScoringError:
        advice = f"Shorten it or set `{self.spec.names.query_tokens}`."
        rule = f"leave room in {self.max_row_tokens} tokens. Given: {given}. {advice}"
        return refusal(self.spec.names.query, rule, ScoreCode.CONTEXT_LENGTH_EXCEEDED)


class ConcatRowBuilder(RowBuilder):
    """Joins the ids of query and item, each tokenised separately."""

    def build(self) -> ScoringRows:
        """Builds one row for each item. See `RowBuilder.build`."""
        spec = self.spec
        room = self.max_row_tokens - len(self.query)
        budget = room if spec.max_item_tokens is None else min(room, spec.max_item_tokens)
        items = self._encode_items()
        copies = len(items) * len(self.query) if spec.item_first else len(self.query)
        self.check_total(copies + sum(min(len(item), budget) for item in items))
        parts: dict[int, list[int]] = {}
        truncated = [0] * len(items)
        for index, item in enumerate(items):
            if index in self.errors:
                continue
            kept = item if spec.truncate == "error" else self._cut_item(index, item, budget)
            if len(kept) > budget:  # as the special tokens alone may be
                field = spec.names.item_tokens if budget < room else "the model's context"
                self.fail_too_long(index, len(item), budget, field)
                continue
            if not kept and not self.query:
                self.fail_empty(index)
                continue
            truncated[index] = len(item) - len(kept)
            parts[index] = kept + self.query if spec.item_first else kept
        return self.pack([] if spec.item_first else self.query, parts, truncated)

    def head_size(self, prefix: Int32s) -> int:
        """See `RowBuilder.head_size`."""
        return 0 if self.spec.item_first else len(self.query)

    def _encode_items(self) -> list[list[int]]:
        special = self.spec.add_special_tokens and self.spec.item_first
        if isinstance(self.items[0], str):
            texts = [item for item in self.items if isinstance(item, str)]
            items = self.tokenizer.encode_batch(texts, add_special_tokens=special)
            bos = self.tokenizer.bos_token_id
            if self.spec.add_special_tokens and not self.query and bos is not None:
                return [item or [bos] for item in items]
            return items
        items = [item for item in self.items if isinstance(item, list)]
        for index, item in enumerate(items):
            problem = token_id_problem(f"{self.spec.names.items}[{index}]", item, self.limits.vocab_size)
            if problem:
                self.errors[index] = ItemError(ScoreCode.INVALID_TOKEN_ID, problem)
        return items

    def _cut_item(self, index: int, item: list[int], budget: int) -> list[int]:
        if len(item) <= budget:
            return item
        text = self.items[index]
        if not isinstance(text, str):
            return cut_ids(item, budget, self.spec.truncation_side)

        def encode(rest: str) -> list[int]:
            return self.encode(rest, self.spec.item_first)

        return self.cut(text, len(item) - budget, encode, budget, self.spec.truncation_side).ids


class JointRowBuilder(RowBuilder):
    """Tokenises query and item as one text."""

    def build(self) -> ScoringRows:
        """Builds one row for each item. See `RowBuilder.build`."""
        spec = self.spec
        texts = [item for item in self.items if isinstance(item, str)]
        chars = len(texts) * self.fixed_chars() + sum(map(len, texts))
        check_joined(chars, self.limits.scoring.max_joined_chars, self.spec.names.items)
        truncated = [0] * len(texts)
        if spec.max_item_tokens is not None:
            texts = [self._limit_item(index, text, truncated) for index, text in enumerate(texts)]
        rows = self._encode(texts)
        parts: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if index not in self.errors:
                found = self._fit(index, texts[index], row, truncated)
                if found is not None:
                    parts[index] = found
        return self.pack([], parts, truncated)

    def head_size(self, prefix: Int32s) -> int:
        """Compares the row with that of another item. See `RowBuilder.head_size`."""
        if self.fixed_chars() < LONG_HEAD:
            return 0
        other = self._encode([OTHER_ITEM])[0][: len(prefix)]
        return _common_prefix([prefix[: len(other)].tolist(), other])

    def fixed_chars(self) -> int:
        """Returns how many characters of a row are not its item's."""
        return len(self.query_text)

    def _encode(self, items: list[str]) -> list[list[int]]:
        special = self.spec.add_special_tokens
        return self.tokenizer.encode_batch([self._join(item) for item in items], add_special_tokens=special)

    def _join(self, item: str) -> str:
        return item + self.query_text if self.spec.item_first else self.query_text + item

    def _limit_item(self, index: int, text: str, truncated: list[int]) -> str:
        """Cuts an item to `max_item_tokens`, or records that it is too long."""
        maximum = self.spec.max_item_tokens or 0
        own = len(self.encode_spans(text).ids)
        if own <= maximum:
            return text
        if self.spec.truncate == "error":
            self.fail_too_long(index, own, maximum, self.spec.names.item_tokens)
            return text
        cut = self.cut(text, own - maximum, lambda rest: self.encode(rest, False), maximum, self.spec.truncation_side)
        truncated[index] = own - len(cut.ids)
        return cut.text

    def _fit(self, index: int, text: str, row: list[int], truncated: list[int]) -> list[int] | None:
        """Returns the row's ids, cut to the model's context; None if the item fails."""
        maximum = self.max_row_tokens
        self.texts[index] = self._join(text)
        if not row and self.spec.add_special_tokens and self.tokenizer.bos_token_id is not None:
            return [self.tokenizer.bos_token_id]
        if not row:
            self.fail_empty(index)
            return None
        if len(row) <= maximum:
            return row
        if self.spec.truncate == "error":
            self.fail_too_long(index, len(row), maximum, "the model's context, query included")
            return None

        def encode(rest: str) -> list[int]:
            return self.encode(self._join(rest), True)

        cut = self.cut(text, len(row) - maximum, encode, maximum, self.spec.truncation_side)
        if len(cut.ids) > maximum:
            raise self._query_too_long(len(cut.ids))
        truncated[index] += len(row) - len(cut.ids)
        self.texts[index] = self._join(cut.text)
        return cut.ids


class TemplateRowBuilder(JointRowBuilder):
    """Tokenises the text that a template makes of query and item, with control tokens only where it writes them."""

    plain = True

    def __init__(
        self,
        tokenizer: TokenizerProtocol,
        query: Query,
        items: Items,
        spec: PromptSpec,
        limits: PromptLimits,
        template: FilledTemplate,
    ) -> None:
        """Encodes the query and writes the frame around the items. Raises ScoringError like RowBuilder."""
        super().__init__(tokenizer, query, items, spec._replace(item_first=False, add_special_tokens=False), limits)
        self.frame = template.frame(self.query_text)
        self.can_split = template.template.can_split

    def fixed_chars(self) -> int:
        """Returns how many characters of a row are the template's."""
        return len(self.frame.head) + len(self.frame.tail)

    def suffix(self) -> str:
        """Returns the template's text behind the item."""
        return self.frame.tail

    def _encode(self, items: list[str]) -> list[list[int]]:
        frame = self.frame
        if self.can_split and (all(items) or frame.empty == frame.head + frame.tail):
            return SplitFrame.of(frame, self.tokenizer).rows(items, self.tokenizer)
        rows = [frame.row(item) for item in items]
        return self.tokenizer.encode_batch(rows, add_special_tokens=False, plain=True)

    def _join(self, item: str) -> str:
        return self.frame.row(item)


class PairRowBuilder(RowBuilder):
    """Joins two texts by the control tokens that the model's tokenizer writes around a pair.

    Control tokens stand nowhere else: their strings in a text are ordinary characters. Where a row is too long, tokens
    are dropped from the longer text first, as the libraries of these models do.
    """

    plain = True

    def __init__(
        self, tokenizer: TokenizerProtocol, query: Query, items: Items, spec: PromptSpec, limits: PromptLimits
    ) -> None:
        """Encodes the query. Raises ScoringError like RowBuilder, and for a tokenizer that joins no pairs."""
        if tokenizer.pair_frame is None or not isinstance(query, str):
            raise refusal(
                spec.names.query, "be a text that the model's tokenizer can join with another. Given: another one."
            )
        super().__init__(tokenizer, query, items, spec._replace(add_special_tokens=False), limits)
        self.frame = tokenizer.pair_frame

    def build(self) -> ScoringRows:
        """Builds one row for each item. See `RowBuilder.build`."""
        spec, frame = self.spec, self.frame
        room = self.max_row_tokens - frame.size
        if room < 0 or (spec.truncate == "error" and len(self.query) > room):
            raise self._query_too_long(len(self.query) + frame.size)
        texts = [item for item in self.items if isinstance(item, str)]
        parts: dict[int, list[int]] = {}
        truncated, ends = [0] * len(texts), dict[int, int]()  # tokens before `between`
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False, plain=True)
        most = room if spec.max_item_tokens is None else spec.max_item_tokens
        self.check_total(sum(frame.size + min(len(self.query) + min(len(item), most), room) for item in encoded))
        for index, item in enumerate(encoded):
            if index in self.errors:
                continue
            maximum = len(item) if spec.max_item_tokens is None else spec.max_item_tokens
            fits = room - len(self.query)
            if len(item) > min(maximum, fits) and spec.truncate == "error":
                field = spec.names.item_tokens if maximum < fits else "the model's context, query included"
                self.fail_too_long(index, len(item), min(maximum, fits), field)
                continue
            own = cut_ids(item, maximum, spec.truncation_side)
            first, second = longest_first(len(self.query), len(own), room)
            query, own = cut_ids(self.query, first, spec.truncation_side), cut_ids(own, second, spec.truncation_side)
            truncated[index] = len(item) - len(own)
            parts[index] = [*frame.before, *query, *frame.between, *own, *frame.after]
            ends[index] = len(frame.before) + len(query)
        rows = unshared(self.pack([], parts, truncated))  # without those that have ids the model lacks
        if frame.first_of_between is None:
            return rows
        return rows._replace(
            segments=np.array([ends[index] for index in rows.items], np.int32) + frame.first_of_between
        )

    def head_size(self, prefix: Int32s) -> int:
        """See `RowBuilder.head_size`. These rows share nothing."""
        return 0


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts are kept so that both fit `room`: the longer one is cut first, and both to
    halves where each is longer than one; the second then has the odd token if it is the longer one."""
    short, long = min(first, second), max(first, second)
    if first + second <= room:
        return first, second
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    return (long, short) if first > second else (short, long)


def check_tokens(given: int, maximum: int, field: str, advice: str = "Send fewer items.") -> None:
    """Checks the tokens of all rows of a request together. Raises ScoringError if `given` is more than `maximum`."""
    if given > maximum:
        message = f"The request's rows must be at most {maximum} tokens together. Given: {given}. {advice}"
        raise ScoringError(ScoreCode.REQUEST_TOO_LARGE, message, field)


def check_joined(
    given: int, maximum: int, field: str, advice: str = "Send fewer items or use the concat seam."
) -> None:
    """Checks the characters of all joined texts of a request together.

    Raises:
        ScoringError: `given` is more than `maximum`.
    """
    if given > maximum:
        message = f"The joined text must be at most {maximum} characters. Given: {given}. {advice}"
        raise ScoringError(ScoreCode.REQUEST_TOO_LARGE, message, field)


def cut_ids(ids: list[int], keep: int, side: Side) -> list[int]:
    """Returns at most `keep` ids: the first ones if the right side is cut off, else the last ones."""
    if len(ids) <= keep:
        return ids
    if not keep:
        return []
    return ids[:keep] if side == "right" else ids[-keep:]


def cut_text(
    spans: list[tuple[int, int]], text: str, excess: int, side: Side, encode: Callable[[str], list[int]], maximum: int
) -> CutText:
    """Drops tokens of a text from one side until the rest encodes to at most `maximum` ids.

    A cut may change how the rest is tokenised, and a token may be a part of a character, so the rest is measured and
    cut again. Every round drops at least one token more.

    Args:
        spans: Where each token of `text` stands in it, as [start, end) in characters.
        text: The text to shorten.
        excess: How many tokens are dropped first.
        side: The side that is cut off.
        encode: Encodes the rest as the row holds it.
        maximum: How many ids `encode` may return.

    Returns:
        The rest and its ids. The rest is empty if nothing fits: the caller then decides by the length of `ids`.
    """
    keep = len(spans)
    while True:
        keep = max(0, keep - max(1, excess))
        rest = _kept_text(text, spans, keep, side)
        ids = encode(rest)
        excess = len(ids) - maximum
        if excess <= 0 or not keep:
            return CutText(rest, ids)


def _kept_text(text: str, spans: list[tuple[int, int]], keep: int, side: Side) -> str:
    if not keep:
        return ""
    return text[: spans[keep - 1][1]] if side == "right" else text[spans[len(spans) - keep][0] :]


def is_unicode(text: str) -> bool:
    """Tells whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _common_prefix(rows: list[list[int]]) -> int:
    """Returns the length of the longest common beginning.

    That of the first and the last row in lexicographic order is that of all rows.
    """
    low, high = min(rows), max(rows)
    if low == high:
        return len(low)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
