"""Requests and sequences as the step thread holds them, and the table of running sequences.

A request becomes a `RequestState`: a `GenerationState` with one `SequenceState` a branch, a `LabelScoreState`, a
`PoolingState`, or a `LikelihoodState`. The states hold arithmetic only; `RunningBatch` and `ScoreBatcher` take and
return pool slots.

Shape legend: W positions of the longest sequence, S request slots (slot 0 is the dummy of padding rows), N rows of a
scoring request, L labels, K numbers of an answer, T wanted tokens of all rows.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.input_batch import DecodeSequences, ScheduledSequence
from engine.channels import ResultSink, TokenSink
from engine.kv_cache.manager import NO_SLOTS, TreeNode
from engine.model.lm_head import RowLogprobs
from engine.requests import (
    ABSENT,
    EngineRequest,
    Float32s,
    GenerateRequest,
    Int32s,
    Int64s,
    LikelihoodRequest,
    PoolingRequest,
    PoolingResult,
    RowsRequest,
    RowStatus,
    ScoreRequest,
    ScoreResult,
    StepTokens,
    UInt8s,
)
from gpu_sampler.output import SampleOutput, VerifyOutput

NO_TOKENS = np.empty(0, np.int32)
# Log-probabilities of k tokens: sampled f32 [k], ranks i32 [k], top ids i32 [k, N], theirs f32 [k, N], of the chosen
# ids f32 [k, C].
LogprobColumns = tuple[Float32s | None, Int32s | None, Int32s | None, Float32s | None, Float32s | None]
Array = npt.NDArray[Any]
BLOCK = 64  # tokens
PRIORITIES = 1 << 33  # more than a request can have
MAX_AHEAD = 32_768  # tokens: a small isolated request goes before all others, since other suspects wait for its end


class Phase(Enum):
    """Says what a sequence does next."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSED = "closed"


class Submission(TypedDict):
    """Holds what the engine adds to a request when it takes it."""

    results: ResultSink
    arrival: int
    submitted: float
    deadline: float
    domain: Hashable
    queued: int


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """Holds what every request has: its place among the others, and its account of tokens."""

    request: EngineRequest
    results: ResultSink
    arrival: int  # number of the request, ascending
    submitted: float  # on the engine's clock, seconds
    deadline: float  # on the engine's clock, seconds; inf without one
    domain: Hashable  # root of the prefix tree
    queued: int  # tokens still to be computed before it runs, counted in the engine's queue
    tenant: str = field(init=False)
    priority: int = field(init=False)
    queue_priority: int = field(init=False)  # by which it waits; lower is earlier. A small isolated request is first
    isolated: bool = field(init=False)  # shares no step; a generation may cease to be so
    started: float | None = None  # launch of its first step
    closed: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.tenant, self.priority, self.isolated = request.tenant, request.priority, request.isolated
        ahead = self.isolated and self.queued <= MAX_AHEAD
        self.queue_priority = self.priority - PRIORITIES * ahead

    def queue_s(self, now: float) -> float:
        """Returns the seconds from submission to the first step."""
        return (now if self.started is None else self.started) - self.submitted

    def compute_s(self, now: float) -> float:
        """Returns the seconds since the first step."""
        return 0.0 if self.started is None else now - self.started


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationState(RequestState):
    """Holds a GenerateRequest and its branches.

    The first branch prefills the prompt; the others find it in the prefix tree.
    """

    request: GenerateRequest
    branches: "list[SequenceState]" = field(init=False)
    cached: int = 0  # prompt tokens that the first branch found in the tree
    open: int = field(init=False)  # branches that have not finished
    prompt_done: bool = False  # the prompt was computed once, so that the other branches find it
    stream_interval: int = 1  # tokens that a chunk holds at least, unless it is the last of a branch
    wants_logprobs: bool = field(init=False)
    first_token: float | None = None  # when the first token of any branch was there

    def __post_init__(self) -> None:
        RequestState.__post_init__(self)
        params, emitted = self.request.params, self.request.emitted or (NO_TOKENS,) * self.request.params.n
        self.open = params.n
        self.wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self.branches = [
            SequenceState(parent=self, branch=branch, output=output, sent=len(output))
            for branch, output in enumerate(emitted)
        ]

    def prefill_s(self) -> float:
        """Returns the seconds from the first step to the first token."""
        return 0.0 if self.started is None or self.first_token is None else self.first_token - self.started


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """Holds one branch of a generation: one row of a decode step, and one request slot while it runs.

    shared <= computed <= target <= length: tokens whose keys and values the tree owns, that are computed, that must be
    computed before the sequence decodes, and that are known. `output` holds the sampled tokens while it does not run.
    """

    parent: GenerationState
    branch: int
    output: Int32s
    sent: int = 0  # tokens of the output that the caller has
    slot: int = 0
    phase: Phase = Phase.WAITING
    node: TreeNode | None = None
    shared: int = 0
    computed: int = 0
    target: int = 0
    kept: int = 0  # once it is closed: tokens whose keys and values go to the tree when its slots are freed
    preemptions: int = 0
    turn: int = 0  # its latest one in decode steps that hold a part of the rows, ascending
    drafted: int = 0  # drafted tokens that no chunk has reported yet
    accepted: int = 0  # those of them that became output
    unsent_logprobs: list[LogprobColumns] = field(default_factory=list)  # kept while the sequence does not run

    @property
    def prompt(self) -> Int32s:
        return self.parent.request.prompt

    @property
    def to_compute(self) -> int:
        return self.target - self.computed

    def tokens(self) -> Int32s:
        """Returns prompt and output of a sequence that does not run."""
        return np.concatenate((self.prompt, self.output)) if len(self.output) else self.prompt


@dataclass(slots=True, kw_only=True, eq=False)
class ScoringState(RequestState):
    """Holds a request of rows behind one prefix, with the slots of the prefix and of at most one unfinished row."""

    request: RowsRequest
    items: int = field(init=False)  # N
    head_key: Hashable = field(init=False)  # which part of the head it reads: the requests of one step agree in it
    status: UInt8s = field(init=False)  # [N]
    cached: Int32s = field(init=False)  # [N]
    next_item: int = 0  # row
    pending: int = 0  # answers launched and not finished
    prefix_slots: Int32s = field(default_factory=lambda: NO_SLOTS)  # of the prefix, computed so far
    prefix_owned: int = 0  # prefix_slots[prefix_owned:] belong to this request, the others to the tree
    prefix_cached: int = 0
    node: TreeNode | None = None
    part_slots: Int32s = field(default_factory=lambda: NO_SLOTS)  # of row `next_item`, computed so far
    head_s: float = 0.0  # seconds of its steps behind the last layer

    def __post_init__(self) -> None:
        RequestState.__post_init__(self)
        self.items = len(self.request.starts) - 1
        self.status = np.zeros(self.items, np.uint8)
        self.cached = np.zeros(self.items, np.int32)

    @property
    def launched(self) -> bool:
        return self.next_item == self.items


@dataclass(slots=True, kw_only=True, eq=False)
class ItemState(ScoringState):
    """Holds a request whose answers are K numbers each, read after tokens of its rows: after the last one, unless a
    subclass says otherwise."""

    ends: Int64s  # [N + 1] its `item_ends`
    width: int = field(init=False)  # K
    values: Float32s = field(init=False)  # [N, K], an answer a row

    def item(self, index: int) -> tuple[int, Int32s]:
        """Returns how many prefix tokens an item attends to, and its own tokens.

        An empty item stands for the last token of the prefix, computed again: its logits are wanted, not its keys.
        """
        ids = self.request.ids[self.request.starts[index] : self.request.starts[index + 1]]
        if len(ids):
            return len(self.request.prefix), ids
        return len(self.request.prefix) - 1, self.request.prefix[-1:]

    def answers(self, index: int, first: int, last: int) -> tuple[int, Int32s]:
        """Finds the answers after an item's tokens first .. last - 1. Where `first` is negative, as many other tokens
        stand before the item.

        Returns:
            The number of the first of them among all answers, and their places, counted from `first`.
        """
        whole = last == max(1, int(self.request.starts[index + 1] - self.request.starts[index]))
        return index, np.array([last - 1 - first], np.int32) if whole else NO_TOKENS

    def fail(self, answers: Int64s) -> None:
        """Marks the rows of answers that are not finite."""
        self.status[answers] = RowStatus.NONFINITE

    def first_segment(self, index: int) -> int | None:
        """Returns how many tokens of an item stand before its second segment; None where it has none."""
        return None

    def result(self, now: float) -> ScoreResult | PoolingResult:
        """Returns the request's result once all rows are answered."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class LabelScoreState(ItemState):
    """Holds a ScoreRequest, whose answers are the log-probabilities or the logits of its L labels."""

    request: ScoreRequest

    def __post_init__(self) -> None:
        ScoringState.__post_init__(self)
        request = self.request
        self.head_key = "labels" if request.full else (request.labels.tobytes(), request.raw_logits)
        self.width = len(self.request.labels)
        self.values = np.empty((self.items, self.width), np.float32)
        self.values.fill(np.nan)

    def result(self, now: float) -> ScoreResult:
        return ScoreResult(
            label_logprobs=self.values,
            status=self.status,
            cached=self.cached,
            queue_s=self.queue_s(now),
            compute_s=self.compute_s(now),
            head_s=self.head_s,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class PoolingState(ItemState):
    """Holds a PoolingRequest, whose answers are the numbers of the model's pooling head."""

    request: PoolingRequest
    width: int  # K, of the head

    def __post_init__(self) -> None:
        ScoringState.__post_init__(self)
        self.head_key = self.request.task
        self.values = np.full((self.request.answers, self.width), np.nan, np.float32)

    def answers(self, index: int, first: int, last: int) -> tuple[int, Int32s]:
        positions = self.request.positions
        if not len(positions):
            return ItemState.answers(self, index, first, last)
        start = int(self.request.starts[index])
        low, high = np.searchsorted(positions, (start + max(first, 0), start + last)).tolist()
        return low, positions[low:high] - (start + first)

    def fail(self, answers: Int64s) -> None:
        positions = self.request.positions
        if len(positions):
            answers = np.searchsorted(self.request.starts, positions[answers], "right") - 1
        ItemState.fail(self, answers)

    def first_segment(self, index: int) -> int | None:
        return int(self.request.segments[index]) if len(self.request.segments) else None

    def result(self, now: float) -> PoolingResult:
        return PoolingResult(
            values=self.values,
            status=self.status,
            cached=self.cached,
            queue_s=self.queue_s(now),
            compute_s=self.compute_s(now),
            head_s=self.head_s,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class LikelihoodState(ScoringState):
    """Holds a LikelihoodRequest, which has one answer a wanted token.

    `part_slots` begin with the tokens that the row shares with the one before. Those of the last row are held until the
    request ends.
    """

    request: LikelihoodRequest
    targets: Int32s = field(init=False)  # [T] the wanted tokens
    offsets: Int64s = field(init=False)  # [N + 1] wanted tokens of the rows before
    found: RowLogprobs = field(init=False)  # numpy, [T]
    own: Int32s = field(init=False)  # tokens of row `next_item` after the prefix
    answered: int = 0  # tokens of `own` after which nothing is wanted any more

    def __post_init__(self) -> None:
        ScoringState.__post_init__(self)
        request, chosen = self.request, len(self.request.chosen)
        self.head_key = ("targets", bool(request.top or chosen))  # without either another kernel may serve it
        self.targets = _targets(request)
        self.offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(request.wanted, dtype=np.int64)))
        self.found = RowLogprobs.blank(len(self.targets), request.top, chosen)
        self.own = request.ids[: request.starts[1]]

    @property
    def to_compute(self) -> int:
        """Returns the tokens of the row that are left; its last one is no input."""
        return len(self.own) - 1 - len(self.part_slots)

    @property
    def first_wanted(self) -> int:
        """Returns the place in `own` after which the first wanted token of the row stands."""
        return len(self.own) - 1 - int(self.request.wanted[self.next_item])

    def advance(self) -> Int32s:
        """Goes on to the next row; returns the pool slots that it does not share."""
        self.next_item += 1
        self.answered = 0
        if self.launched:
            return NO_SLOTS
        at, shared = self.next_item, int(self.request.shared[self.next_item])
        starts = self.request.starts
        self.own = np.concatenate((self.own[:shared], self.request.ids[starts[at] : starts[at + 1]]))
        spare, self.part_slots = self.part_slots[shared:], self.part_slots[:shared]
        return spare


class LogprobBuffer:
    """Keeps the log-probabilities of tokens that wait for the next chunk of their sequence, in the order of the tokens.

    It writes those of one step for all sequences in one operation, and takes those of a sequence out when its chunk is
    due. Each request slot has a block of tokens in one table; full blocks move to a list of their own, so that the
    table stays small however long a sequence is.

    Shapes: S request slots, R rows of a step, k tokens, N top ids of a row, C chosen ids.
    """

    def __init__(self, slots: int) -> None:
        self._tables: list[Array | None] = [None] * 5  # one for each of LogprobColumns, [S, BLOCK, *]
        self._count = np.zeros(slots, np.int64)  # [S] tokens of the slot's block
        self._full_blocks: dict[int, list[LogprobColumns]] = {}  # by slot, oldest first
        self._slots = slots

    def add(self, slots: npt.NDArray[np.int64], out: SampleOutput, rows: npt.NDArray[np.int64]) -> None:
        """Adds one token for each of several slots.

        Args:
            slots: i64 [R], the request slots.
            out: the output of the step.
            rows: i64 [R], the row of `out` of each slot.
        """
        at = self._count[slots]
        for index, values in enumerate(columns_of(out)):
            if values is not None:
                place: tuple[Any, ...] = (slots, at, *map(slice, values.shape[1:]))
                self._table(index, values)[place] = values[rows]
        self._count[slots] = at + 1
        for slot in slots[at + 1 == BLOCK].tolist():
            self._close_block(slot)

    def put(self, slot: int, columns: LogprobColumns) -> None:
        """Adds several tokens of one slot."""
        self._close_block(slot)
        self._full_blocks.setdefault(slot, []).append(columns)

    def take(self, slot: int) -> list[LogprobColumns]:
        """Removes and returns everything of a slot, oldest first."""
        self._close_block(slot)
        return self._full_blocks.pop(slot, [])

    def _close_block(self, slot: int) -> None:
        count = int(self._count[slot])
        if count:
            sampled, ranks, ids, top, chosen = (None if t is None else t[slot, :count].copy() for t in self._tables)
            self._full_blocks.setdefault(slot, []).append((sampled, ranks, ids, top, chosen))
            self._count[slot] = 0

    def _table(self, index: int, values: Array) -> Array:
        """Returns the table of a column, at least as wide as the step's values [R, *]."""
        table = self._tables[index]
        shape = (self._slots, BLOCK, *values.shape[1:])
        if table is None or table.shape < shape:
            wider = np.zeros(shape, values.dtype)
            if table is not None:
                wider[tuple(map(slice, table.shape))] = table
            self._tables[index] = table = wider
        return table


def columns_of(out: SampleOutput | VerifyOutput) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the log-probability columns of a step's rows, [R, *] each."""
    return out.logprobs, out.ranks, out.top_ids, out.top_logprobs, out.chosen_logprobs


class StreamTable:
    """Knows the streams whose every token is a chunk, by request slot: all that chunks say beside the token.

    Shapes: S request slots, R rows of a step.
    """

    def __init__(self, slots: int) -> None:
        self.is_open = np.zeros(slots, np.bool_)  # [S]
        self._sinks: dict[int, TokenSink] = {}
        self._sink_ids = np.zeros(slots, np.int64)  # of the sinks that the table holds
        self._streams = np.zeros((slots, 2), np.int32)
        self._branches = np.zeros(slots, np.int32)
        self._cached = np.zeros(slots, np.int32)
        self._started = np.zeros(slots, np.float64)  # on the engine's clock, seconds
        self._seconds = np.zeros((slots, 3), np.float64)  # queue, nothing, prefill
        self._scored = np.zeros(slots, np.bool_)
        self._widths = np.full((slots, 2), ABSENT, np.int32)

    def open(self, sequence: SequenceState) -> None:
        """Adds a sequence that has its first token. From here on nothing of this changes but the time."""
        state, slot = sequence.parent, sequence.slot
        params = state.request.params
        sink = self._sinks[slot] = state.results.token_sink
        self._sink_ids[slot], self._streams[slot] = id(sink), state.results.stream
        self._branches[slot], self._cached[slot] = sequence.branch, state.cached
        self._started[slot] = state.started or 0.0
        self._seconds[slot] = state.queue_s(0.0), 0.0, state.prefill_s()
        self._scored[slot] = state.wants_logprobs
        chosen = params.logprob_token_ids
        self._widths[slot] = (
            ABSENT if params.logprobs is None else params.logprobs,
            ABSENT if chosen is None else len(chosen),
        )
        self.is_open[slot] = True

    def close(self, slot: int) -> None:
        """Takes a slot's stream out, if there is one."""
        self.is_open[slot] = False
        self._sinks.pop(slot, None)

    def tokens(self, slots: Int64s, out: SampleOutput, rows: Int64s, now: float) -> list[tuple[TokenSink, StepTokens]]:
        """Returns the tokens of open streams, together for each sink.

        Args:
            slots: i64 [R], the request slots of the streams.
            out: the output of the step, which the result does not share.
            rows: i64 [R], the row of `out` of each stream.
            now: the engine's time, seconds.
        """
        order = np.argsort(self._sink_ids[slots], kind="stable")
        slots, rows = slots[order], rows[order]
        seconds = self._seconds[slots]
        seconds[:, 1] = now - self._started[slots]
        columns = (None if column is None else column[rows] for column in columns_of(out))
        tokens = StepTokens(
            self._streams[slots],
            self._branches[slots],
            out.tokens[rows],
            self._cached[slots],
            seconds,
            self._scored[slots],
            self._widths[slots],
            *columns,
        )
        ends = [*(np.flatnonzero(np.diff(self._sink_ids[slots])) + 1).tolist(), len(slots)]
        starts = [0, *ends[:-1]]
        return [
            (self._sinks[int(slots[start])], tokens.rows(start, end)) for start, end in zip(starts, ends, strict=True)
        ]


class RequestTable:
    """Maps request slots to running sequences.

    Columns are numpy arrays on the host. `token_table` is on the model's device and is written in stream order, so that
    a decode step can read tokens that the host has not seen yet: a sequence's last one, and drafts behind it. Steps
    bring the tokens of prompts with them.
    """

    def __init__(
        self, rows: int, max_len: int, vocab_size: int, device: torch.device, *, draft_model: bool = False
    ) -> None:
        """Makes an empty table.

        Args:
            rows: sequences that run at the same time.
            max_len: tokens of the longest sequence, W.
            vocab_size: ids of the vocabulary.
            device: where the model reads tokens.
            draft_model: whether a draft model computes the sequences too, in the same pool slots.
        """
        size = rows + 1
        self.max_len, self.vocab_size = max_len, vocab_size
        self.sequences: list[SequenceState | None] = [None] * size
        self.token_table = torch.zeros((size, max_len), dtype=torch.int32, device=device)
        self.tokens = np.zeros((size, max_len), np.int32)  # as far as the host knows them
        self.slots = np.zeros((size, max_len), np.int32)  # pool slots by position
        self._slots_of = list(self.slots)
        self.length = np.zeros(size, np.int64)  # tokens, those in flight included
        self.known = np.zeros(size, np.int64)  # tokens that the host has read
        self.capacity = np.zeros(size, np.int64)  # positions that have a pool slot
        self.limit = np.zeros(size, np.int64)  # tokens at which the sequence ends
        self.open = np.zeros(size, np.bool_)  # sequences that have not ended
        self.due = np.zeros(size, np.int64)  # tokens with which the next chunk is due; 0: each token is looked at
        self.buffers_logprobs = np.zeros(size, np.bool_)  # sequences whose log-probabilities wait for a chunk
        self.streams = StreamTable(size)
        self.logprobs = LogprobBuffer(size)
        # First positions that the draft model has computed.
        self.seen = np.zeros(size, np.int64) if draft_model else None
        self._stops = np.zeros((size, vocab_size), np.bool_)  # pages that are never written cost no memory
        self._free = list(range(rows, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        return len(self.sequences) - 1 - len(self._free)

    def admit(self, sequence: SequenceState, tokens: Int32s, limit: int) -> int:
        """Gives a sequence a slot and writes its tokens, and on the device the last of one that goes on. The caller has
        seen that a slot is free.

        Args:
            sequence: the sequence.
            tokens: i32 [n], its prompt and output.
            limit: tokens at which it ends.

        Returns:
            The request slot.
        """
        slot = self._free.pop()
        n = len(tokens)
        self.sequences[slot] = sequence
        self.tokens[slot, :n] = tokens
        if len(sequence.output):
            self.token_table[slot, n - 1] = int(tokens[n - 1])
        self.length[slot] = self.known[slot] = n
        self.capacity[slot] = 0
        self.limit[slot] = limit
        self.open[slot], self.due[slot] = True, 0
        self.streams.close(slot)
        self.buffers_logprobs[slot] = sequence.parent.wants_logprobs and sequence.parent.stream_interval > 1
        self._stops[slot, list(sequence.parent.request.params.stop_token_ids)] = True
        sequence.slot = slot
        return slot

    def run(self, slot: int, start: int, end: int, ids: Int32s | None, rows: Int32s) -> ScheduledSequence:
        """Returns the tokens start .. end of a sequence for a step."""
        slots = self.slots[slot]
        return ScheduledSequence(slot, slots[:start], slots[start:end], ids, rows)

    def last_tokens(self, slots: Int64s, length: Int64s) -> DecodeSequences:
        """Returns the last of `length` [R] tokens of the sequences in `slots` [R] as sequences of a step."""
        return DecodeSequences(slots, length - 1, self.slots, self._slots_of)

    def computed(self, slot: int, tokens: int) -> int:
        """Returns how many of the first `tokens` tokens of a sequence every model has computed."""
        return tokens if self.seen is None else min(tokens, int(self.seen[slot]))

    def release(self, sequence: SequenceState) -> None:
        """Takes the slot back."""
        slot = sequence.slot
        self._stops[slot, list(sequence.parent.request.params.stop_token_ids)] = False
        self.sequences[slot] = None
        self.streams.close(slot)
        self.logprobs.take(slot)
        self._free.append(slot)
        sequence.slot = 0

    def add_slots(self, slot: int, more: Int32s) -> None:
        """Appends pool slots to those of a sequence."""
        start = int(self.capacity[slot])
        self.slots[slot, start : start + len(more)] = more
        self.capacity[slot] = start + len(more)

    def add_slots_of_rows(self, slots: Int64s, counts: Int64s, more: Int32s) -> None:
        """Appends pool slots to those of several sequences: the first counts[0] of `more` to the first, and so on."""
        starts = self.capacity[slots]
        at = np.arange(len(more)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        self.slots[np.repeat(slots, counts), at] = more
        self.capacity[slots] = starts + counts

    def is_stop(self, slots: Int64s, tokens: Int32s) -> npt.NDArray[np.bool_]:
        """Tells whether each token ends its sequence: bool, in the broadcast shape of both arguments.

        `tokens` may hold INVALID_TOKEN.
        """
        return self._stops[slots, np.maximum(tokens, 0)] & (tokens >= 0)


def item_ends(lengths: Int64s) -> Int64s:
    """Returns the tokens that are computed for the items before each, i64 [N + 1].

    Args:
        lengths: i64 [N], the tokens of each item; an empty one computes one.
    """
    if len(lengths) == 1:  # as most requests have it
        return np.array((0, max(1, lengths.item())), np.int64)
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.maximum(lengths, 1, out=ends[1:])
    return np.cumsum(ends, out=ends)


def _targets(request: LikelihoodRequest) -> Int32s:
    """Returns the wanted tokens of all rows, [T]. None of them is shared."""
    ends = zip(request.starts[1:].tolist(), request.wanted.tolist(), strict=True)
    return np.concatenate([request.ids[end - wanted : end] for end, wanted in ends])
