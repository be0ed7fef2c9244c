"""The jobs that the step loop holds, as arithmetic, and the table of running rows.

Legend: W the longest sequence, S request slots (slot 0 is the dummy of padding rows).

Jobs as the caller gave them become work that the step loop holds.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.input_batch import DecodeSequences, ScheduledSequence
from engine.channels import Receiver
from engine.kv_cache.prefix_cache import NO_SLOTS, TreeNode
from engine.model.lm_head import RowLogprobs
from engine.requests import Float32s, GenerateRequest, Int32s, Int64s, LikelihoodRequest, ScoreRequest, UInt8s
from engine.scheduler.logprob_buffer import Columns, Kept


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSED = "closed"


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """What every job has: its place in the order of things, and the account of its tokens."""

    request_id: str
    arrival: int
    priority: int
    tenant: Hashable  # jobs without a tenant share one
    isolated: bool
    deadline: float  # on the engine's clock; inf without one
    submitted: float
    receiver: Receiver
    domain: Hashable  # root of the prefix tree
    queued: int  # tokens still to be computed before it runs, counted in the engine's queue
    started: float | None = None  # launch of its first step
    closed: bool = False

    def queue_s(self, now: float) -> float:
        return (now if self.started is None else self.started) - self.submitted

    def compute_s(self, now: float) -> float:
        return 0.0 if self.started is None else now - self.started


@dataclass(slots=True, kw_only=True, eq=False)
class Generation(Work):
    """A GenerateRequest and its branches. The first branch prefills the prompt; the others find it in the tree."""

    job: GenerateRequest
    branches: "list[Request]" = field(default_factory=list)
    cached: int = 0  # prompt tokens that the first branch found in the tree
    open: int = 0  # branches that have not finished
    prompt_done: bool = False  # the prompt was computed once, so that the other branches find it
    every: int = 1  # tokens that a chunk holds at least, unless it is a branch's last
    wants_logprobs: bool = False
    first: float | None = None  # when the first token of any branch was there

    def prefill_s(self) -> float:
        return 0.0 if self.started is None or self.first is None else self.first - self.started


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One branch: one row of a decode step, one request slot while it runs.

    shared <= computed <= target <= length: tokens whose keys and values the tree owns, that are computed, that must be
    before the row decodes, and that are known. `output` holds the sampled tokens while the row does not run.
    """

    parent: Generation
    branch: int
    output: Int32s
    new_from: int = 0  # tokens of the output that the caller has
    slot: int = 0
    phase: Phase = Phase.WAITING
    node: TreeNode | None = None
    shared: int = 0
    computed: int = 0
    target: int = 0
    preemptions: int = 0
    drafted: int = 0  # tokens that the caller has not been told of yet
    accepted: int = 0  # of them, those that became output
    kept: list[Columns] = field(default_factory=list)  # log-probabilities that wait while the row does not run

    @property
    def prompt(self) -> Int32s:
        return self.parent.job.prompt

    @property
    def to_compute(self) -> int:
        return self.target - self.computed

    def tokens(self) -> Int32s:
        """Prompt and output of a row that does not run."""
        return np.concatenate((self.prompt, self.output)) if len(self.output) else self.prompt


@dataclass(slots=True, kw_only=True, eq=False)
class Scoring(Work):
    """A job of rows behind one prefix, and what it holds: the prefix and at most one unfinished row."""

    job: ScoreRequest | LikelihoodRequest
    head: Hashable  # what is read of the head: the jobs of one step agree in it
    status: UInt8s  # [N]
    cached: Int32s  # [N]
    items: int  # N
    next_item: int = 0  # row
    pending: int = 0  # answers launched and not finished
    prefix_slots: Int32s = field(default_factory=lambda: NO_SLOTS)  # [prefix_done]
    prefix_owned: int = 0  # prefix_slots[prefix_owned:] belong to this job, the others to the tree
    prefix_cached: int = 0
    node: TreeNode | None = None
    part_slots: Int32s = field(default_factory=lambda: NO_SLOTS)  # of row `next_item`, computed so far
    head_s: float = 0.0  # of its steps, spent behind the last layer

    @property
    def launched(self) -> bool:
        return self.next_item == self.items


@dataclass(slots=True, kw_only=True, eq=False)
class LabelScoring(Scoring):
    """A ScoreRequest: one answer a row."""

    job: ScoreRequest
    label_logprobs: Float32s  # [N, L]
    ends: Int64s  # [N + 1] tokens of the items before; an empty item counts as one

    def item(self, index: int) -> tuple[int, Int32s]:
        """How many prefix tokens the item attends to, and its own tokens. An empty item stands for the last token of
        the prefix, computed again: its logits are wanted, not its keys."""
        ids = self.job.ids[self.job.starts[index] : self.job.starts[index + 1]]
        if len(ids):
            return len(self.job.prefix), ids
        return len(self.job.prefix) - 1, self.job.prefix[-1:]


@dataclass(slots=True, kw_only=True, eq=False)
class Likelihood(Scoring):
    """A LikelihoodRequest: an answer a wanted token. `part_slots` begin with what the row shares with the one before;
    those
    of the last row are held until the job ends."""

    job: LikelihoodRequest
    targets: Int32s  # [W] the wanted tokens
    offsets: Int64s  # [N + 1] wanted tokens of the rows before
    found: RowLogprobs  # numpy, [W]
    own: Int32s  # tokens of row `next_item` after the prefix
    asked: int = 0  # of `own`, tokens after which nothing is wanted any more

    @property
    def to_compute(self) -> int:
        """Tokens of the row that are left; its last one is no input."""
        return len(self.own) - 1 - len(self.part_slots)

    @property
    def first_wanted(self) -> int:
        """The place in `own` after which the row's first wanted token comes."""
        return len(self.own) - 1 - int(self.job.wanted[self.next_item])

    def advance(self) -> Int32s:
        """Goes on to the next row; returns the slots that it does not share."""
        self.next_item += 1
        self.asked = 0
        if self.launched:
            return NO_SLOTS
        at, shared = self.next_item, int(self.job.shared[self.next_item])
        self.own = np.concatenate((self.own[:shared], self.job.ids[self.job.starts[at] : self.job.starts[at + 1]]))
        spare, self.part_slots = self.part_slots[shared:], self.part_slots[:shared]
        return spare


class RequestTable:
    """Request slot -> row. Columns are numpy on the host; `token_table` is on the model's device and is written in
    stream order, so that a decode step can read tokens that the host has not seen yet."""

    def __init__(self, rows: int, width: int, vocab_size: int, device: torch.device, *, twin: bool = False) -> None:
        """`twin`: a draft model computes the rows too, in the same pool slots."""
        size = rows + 1
        self.requests: list[Request | None] = [None] * size
        self.token_table = torch.zeros((size, width), dtype=torch.int32, device=device)
        self.tokens = np.zeros((size, width), np.int32)  # as far as the host knows them
        self.slots = np.zeros((size, width), np.int32)  # pool slots by position
        self._slots_of = list(self.slots)
        self.length = np.zeros(size, np.int64)  # tokens, those in flight included
        self.known = np.zeros(size, np.int64)  # tokens the host has read
        self.capacity = np.zeros(size, np.int64)  # positions that have a pool slot
        self.limit = np.zeros(size, np.int64)  # tokens at which the row ends
        self.open = np.zeros(size, np.bool_)  # rows that have not ended
        self.due = np.zeros(size, np.int64)  # tokens with which the row has to be looked at; at each of them until told
        self.keeps = np.zeros(size, np.bool_)  # rows whose log-probabilities wait for a chunk
        self.kept = Kept(size)
        self.seen = np.zeros(size, np.int64) if twin else None  # first positions that the draft model has computed
        self._stops = np.zeros((size, vocab_size), np.bool_)  # pages that nobody writes cost no memory
        self._free = list(range(rows, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        return len(self.requests) - 1 - len(self._free)

    def admit(self, request: Request, tokens: Int32s, limit: int) -> int:
        """Gives the row a slot and writes its tokens to both tables. The caller has seen that one is free."""
        slot = self._free.pop()
        n = len(tokens)
        self.requests[slot] = request
        self.tokens[slot, :n] = tokens
        self.token_table[slot, :n].copy_(torch.from_numpy(np.ascontiguousarray(tokens, np.int32)), non_blocking=True)
        self.length[slot] = self.known[slot] = n
        self.capacity[slot] = 0
        self.limit[slot] = limit
        self.open[slot], self.due[slot] = True, 0
        self.keeps[slot] = request.parent.wants_logprobs and request.parent.every > 1
        self._stops[slot, list(request.parent.job.params.stop_token_ids)] = True
        request.slot = slot
        return slot

    def run(self, slot: int, start: int, end: int, ids: Int32s | None, rows: Int32s) -> ScheduledSequence:
        """The row's tokens start .. end as a run of a step."""
        slots = self.slots[slot]
        return ScheduledSequence(slot, slots[:start], slots[start:end], ids, rows)

    def last_tokens(self, slots: Int64s, length: Int64s) -> DecodeSequences:
        """The last of so many tokens of each of these rows as runs of a step."""
        return DecodeSequences(slots, length - 1, self.slots, self._slots_of)

    def computed(self, slot: int, tokens: int) -> int:
        """Of the row's first `tokens` tokens, those that every model has computed."""
        return tokens if self.seen is None else min(tokens, int(self.seen[slot]))

    def release(self, request: Request) -> None:
        slot = request.slot
        self._stops[slot, list(request.parent.job.params.stop_token_ids)] = False
        self.requests[slot] = None
        self.kept.take(slot)
        self._free.append(slot)
        request.slot = 0

    def add_slots(self, slot: int, more: Int32s) -> None:
        start = int(self.capacity[slot])
        self.slots[slot, start : start + len(more)] = more
        self.capacity[slot] = start + len(more)

    def is_stop(self, slots: Int64s, tokens: Int32s) -> npt.NDArray[np.bool_]:
        """bool, of the shape of both together: whether each token ends its row. `tokens` may hold INVALID_TOKEN."""
        return self._stops[slots, np.maximum(tokens, 0)] & (tokens >= 0)


def item_ends(lengths: Int64s) -> Int64s:
    """i64 [N + 1]: tokens computed of the items before, of items of so many tokens; an empty one computes one."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.maximum(lengths, 1, out=ends[1:])
    return ends if len(lengths) == 1 else np.cumsum(ends, out=ends)


def scoring(
    job: ScoreRequest,
    ends: Int64s,
    receiver: Receiver,
    arrival: int,
    submitted: float,
    deadline: float,
    domain: Hashable,
    cost: int,
) -> LabelScoring:
    """`ends` are the job's `item_ends`."""
    n, labels = len(ends) - 1, len(job.labels)
    label_logprobs = np.empty((n, labels), np.float32)
    label_logprobs.fill(np.nan)
    return LabelScoring(
        request_id=job.request_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        isolated=job.isolated,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=cost,
        job=job,
        head="labels" if job.full else job.labels.tobytes(),
        label_logprobs=label_logprobs,
        status=np.zeros(n, np.uint8),
        cached=np.zeros(n, np.int32),
        items=n,
        ends=ends,
    )


def likelihood(
    job: LikelihoodRequest,
    receiver: Receiver,
    arrival: int,
    submitted: float,
    deadline: float,
    domain: Hashable,
    cost: int,
) -> Likelihood:
    n, chosen = len(job.wanted), len(job.chosen)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(job.wanted, dtype=np.int64)))
    return Likelihood(
        request_id=job.request_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        isolated=job.isolated,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=cost,
        job=job,
        head=("targets", bool(job.top or chosen)),  # alone they may come from another kernel
        status=np.zeros(n, np.uint8),
        cached=np.zeros(n, np.int32),
        items=n,
        targets=_targets(job),
        offsets=offsets,
        found=RowLogprobs.blank(int(offsets[-1]), job.top, chosen),
        own=job.ids[: job.starts[1]],
    )


def _targets(job: LikelihoodRequest) -> Int32s:
    """The wanted tokens of all rows. None of them is shared."""
    ends = zip(job.starts[1:].tolist(), job.wanted.tolist(), strict=True)
    return np.concatenate([job.ids[end - wanted : end] for end, wanted in ends])


def generation(
    job: GenerateRequest,
    receiver: Receiver,
    arrival: int,
    submitted: float,
    deadline: float,
    domain: Hashable,
    every: int,
    cost: int,
) -> Generation:
    work = Generation(
        request_id=job.request_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        isolated=job.isolated,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=cost,
        job=job,
        every=every,
        wants_logprobs=job.params.logprobs is not None or job.params.logprob_token_ids is not None,
        open=job.params.n,
    )
    empty = np.empty(0, np.int32)
    for branch in range(job.params.n):
        output = job.emitted[branch] if job.emitted else empty
        work.branches.append(Request(parent=work, branch=branch, output=output, new_from=len(output)))
    return work
