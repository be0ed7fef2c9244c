"""Scheduler: plans the next `Step`.

A generation is *waiting* until its sequences are admitted: a request slot and pool slots for the prompt are free. It is
then *running*: *prefill* steps compute the prompt in chunks, and *decode* steps compute one token of every running
sequence, or several that are verified together. When the pool is full, the least important and youngest sequence is
*preempted*: it gives its slots back, keeps its tokens and waits again. So it is when its tenant has more rows than its
share and another waits for one. Scoring requests have no decode phase; *score*
steps compute their prefix and rows. `StepPolicy` says which kind of step is next, `FairQueue` whose tokens go into a
prefill or score step, `RunningBatch` owns the running sequences, and `ScoreBatcher` cuts scoring requests into steps.
Planning changes the states (slots taken, tokens counted as computed); `engine.core` launches the step and reads it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import Stopwatch
from engine.model.lm_head import RowLogprobs
from engine.request_cost import answer_cost
from engine.requests import EngineError, Float32s, Int32s, Int64s
from engine.scheduler.fair_queue import STOP, TURNS, ActiveTenants, FairQueue
from engine.scheduler.policy import StepPolicy
from engine.scheduler.request_state import (
    GenerationState,
    Phase,
    RequestState,
    RequestTable,
    ScoringState,
    SequenceState,
)
from engine.scheduler.running_batch import RunningBatch
from engine.scheduler.score_batcher import ScoreBatcher, ScorePart, rank
from gpu_sampler.output import SampleOutput, VerifyOutput
from gpu_sampler.sampler import Sampler

NO_ROWS = np.empty(0, np.int32)
# Numpy arrays of one step: a prefill step that samples nothing has none. Label log-probabilities are f32 [R, L] of the
# rows of all parts, L the most labels of a part, and a pooling head's numbers are f32 [R, K]; target log-probabilities
# are those of all parts' rows.
StepOutput = SampleOutput | VerifyOutput | RowLogprobs | Float32s | None


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """Holds what the model computes in one step, and whose rows come back. R rows are sampled."""

    kind: StepKind
    sequences: Sequence[ScheduledSequence]
    tokens: int  # new tokens
    sampled: list[SequenceState] = field(default_factory=list)  # [R] the rows to sample, in order of the logits
    slots: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] their request slots
    positions: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] where their new tokens belong
    max_drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] verify: drafts that have room
    drafts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))  # [R] verify: drafts that were made
    drafting: bool = False  # whether rows are drafted for that need not be
    missing_q: int = 0  # verify: rows drafted from a distribution that is not known
    prefilled: list[SequenceState] = field(default_factory=list)  # rows of a prefill step, sampled or not
    completed: list[SequenceState] = field(default_factory=list)  # rows whose prefill this step ends
    parts: list[ScorePart] = field(default_factory=list)  # the rows of a score step, in order of the logits
    prefixes: dict[ScoringState, int] = field(default_factory=dict)  # tokens of a prefix that are computed behind it
    scratch: list[Int32s] = field(default_factory=list)  # pool slots to free once the step has finished
    charges: list[tuple[RequestState, int]] = field(default_factory=list)  # new tokens by request
    planned: float = 0.0  # the engine's time, seconds
    launched: float = 0.0
    waiting: bool = False  # there was more work than steps hold
    result: Callable[[], StepOutput] | None = None  # waits for the device and returns the output; None: there is none
    drafting_watch: Stopwatch | None = None
    head_watch: Stopwatch | None = None  # of a score step: from the last layer to the rows' answers

    @property
    def isolated(self) -> bool:
        """Tells whether the step belongs to an isolated request, which shares it with no other."""
        rows = self.prefilled or self.sampled
        first = rows[0].parent if rows else self.parts[0][0] if self.parts else None
        return first is not None and first.isolated

    def begin(self) -> None:
        """Sets the start of the requests for which nothing was computed before."""
        for row in self.prefilled or self.sampled:
            if row.parent.started is None:
                row.parent.started = self.launched
        for state, _ in self.parts:
            if state.started is None:
                state.started = self.launched

    def requests(self) -> list[RequestState]:
        """Returns the requests that the step computes for, each once."""
        rows = self.prefilled or self.sampled
        return list({id(s): s for s in [*(r.parent for r in rows), *(state for state, _ in self.parts)]}.values())


def decode_sequences(step: Step, table: RequestTable) -> None:
    """Fills in the sequences of a decode step: the last token of each row, after which the row has one more."""
    step.sequences = table.last_tokens(step.slots, step.positions)
    table.length[step.slots] += 1


class Scheduler:
    """Holds the waiting and running requests, and plans one step at a time. The step thread alone touches it."""

    def __init__(
        self,
        config: EngineConfig,
        kv_cache: KVCacheManager,
        table: RequestTable,
        sampler: Sampler,
        max_targets: int | None,
        *,
        whole_rows: bool = False,
    ) -> None:
        """Makes a scheduler without requests.

        Args:
            config: the engine's configuration.
            kv_cache: the pool slots.
            table: the request slots.
            sampler: the sampler's state of running sequences.
            max_targets: rows of one call of `CausalLM.target_logprobs`; None: any number.
            whole_rows: no row of a scoring request is cut (`HeadInfo.whole_rows`).
        """
        quantum = max(64, config.token_budget // TURNS)
        self._costs = config.costs
        self._speculation = config.speculation
        self.kv_cache = kv_cache
        self.table = table
        self.prompts: FairQueue[GenerationState] = FairQueue(quantum)  # with sequences that wait or prefill
        self.scores: FairQueue[ScoringState] = FairQueue(quantum)  # with rows that no step computes yet
        self.tenants = ActiveTenants()
        self.running = RunningBatch(config, kv_cache, table, sampler)
        self.score_batcher = ScoreBatcher(kv_cache, table.vocab_size, max_targets, whole_rows=whole_rows)
        self.policy = StepPolicy(config, table.token_table.device)
        self.refused: list[tuple[GenerationState, EngineError]] = []  # found impossible at admission
        # Whether the last step of the kind, or attempt at one, left work over.
        self._left_over = {StepKind.PREFILL: False, StepKind.SCORE: False}
        self._admission_closed = False  # no sequence is admitted to the step that is being planned
        self._no_room = False  # the last sequence that was to be admitted found no room
        self._over_share: frozenset[str] = frozenset()  # tenants that get no row while another waits for its share
        self._several_tenants = False  # are active while the step is planned
        self._cut = False  # the step holds less than it could, because little waits
        kv_cache.on_pressure = self._release_idle

    def add(self, state: GenerationState | ScoringState) -> None:
        """Queues a request."""
        if isinstance(state, GenerationState):
            self.prompts.add(state)
        else:
            self.scores.add(state)

    def remove(self, state: GenerationState | ScoringState) -> None:
        """Takes a request out of its queue. Nothing happens to one that is not there."""
        if isinstance(state, GenerationState):
            self.prompts.remove(state)
        else:
            self.scores.remove(state)

    def plan(self, now: float) -> Step | None:
        """Plans the next step.

        Returns:
            The step; None where there is nothing to do, or nothing before a step in flight has finished.
        """
        step = self._next(now)
        if step is not None:
            step.planned = now
            # The work left beside an isolated request says nothing about how fast a queue is worked off.
            step.waiting = self._backlog() and not step.isolated
        return step

    def _next(self, now: float) -> Step | None:
        if not self._share_rows():
            return None
        self._several_tenants = self.tenants.several(now)
        decoding = self.running.decoding
        work = {StepKind.DECODE: decoding, StepKind.PREFILL: self.prompts, StepKind.SCORE: self.scores}
        kinds = self.policy.order(
            [kind for kind, waiting in work.items() if waiting], now, prompts_yield=self._prompts_yield()
        )
        if StepKind.DECODE in kinds and self.running.isolated_first:
            kinds.sort(key=lambda kind: kind is not StepKind.DECODE)
        for kind in kinds:
            step = self._plan_kind(kind)
            if step is not None:
                if kind is StepKind.DECODE:
                    self.policy.decode_planned(now)
                elif kind is StepKind.PREFILL:
                    self.policy.prefill_planned(now)
                return step
        if StepKind.DECODE not in kinds and decoding:  # sequences resumed without anything to prefill
            self.policy.decode_planned(now)
            return self._plan_decode()
        return None

    def _plan_kind(self, kind: StepKind) -> Step | None:
        self._cut = False
        if kind is StepKind.DECODE:
            return self._plan_decode()
        if kind is StepKind.PREFILL:
            step = self._plan_prefill()
            self._left_over[kind] = bool(self.prompts) and not self._cut
        else:
            step = self._plan_score()
            self._left_over[kind] = bool(self.scores) and not self._cut
        return step

    def _backlog(self) -> bool:
        """Tells whether there is more work than steps hold.

        Work that only waits for its turn beside running sequences is none: it may all fit the next step, and few rows
        are no measure of a machine.
        """
        left = self._left_over
        return (left[StepKind.PREFILL] and bool(self.prompts)) or (left[StepKind.SCORE] and bool(self.scores))

    def _max_tokens(self, kind: StepKind) -> int:
        """Returns the tokens of the next step, which are fewer where graphed steps do a small load sooner."""
        tokens = self.policy.max_tokens(
            kind, decoding=bool(self.running.decoding), several_tenants=self._several_tenants
        )
        graphed = self.policy.graphed_tokens(tokens, self.prompts, self.scores)
        self._cut = graphed is not None
        return tokens if graphed is None else graphed

    # Prefill: chunks of prompts. A sequence whose chunk completes its prompt is sampled, unless it resumes.

    def _plan_prefill(self) -> Step | None:
        prefilling = self.running.prefilling
        if not prefilling and not self.table.free:
            return None
        chunks: dict[SequenceState, int] = {}
        owner: list[GenerationState] = []  # the first request of the step: an isolated one shares it with no other
        self._admission_closed = not self.table.free or (self.score_batcher.starving and bool(self.scores))

        def give(state: GenerationState, allowance: int, left: int) -> int:
            if self._admission_closed and not prefilling:
                return STOP
            if self._admission_closed and not any(row.phase is Phase.PREFILL for row in state.branches):
                return 0
            if owner and owner[0] is not state and (owner[0].isolated or state.isolated):
                return 0
            spent = self._prefill(state, allowance, chunks)
            if spent and not owner:
                owner.append(state)
            return spent

        budget = self._max_tokens(StepKind.PREFILL)
        used = self.prompts.serve(budget, give)
        if not chunks and prefilling:  # those that hold slots may stand behind many that wait for some
            used = self._prefill_admitted(budget, give)
        return self._prefill_step(chunks, used) if chunks else None

    def _share_rows(self) -> bool:
        """Takes a row from a tenant that holds more than its share, if another waits for a part of its own.

        Rows run for as long as their answers are: a tenant that came first would keep all of them until then. The row
        goes on later, where it was.

        Returns:
            False where a row is to be taken once the step in flight has finished.
        """
        if not self.prompts or (self.table.free and not self._no_room and not self._over_share):
            return True
        # Nearly all requests of the queue wait, so that one or two of each tenant are looked at.
        waiting = {
            tenant: priority for tenant, priority, requests in self.prompts.by_tenant() if any(map(_waits, requests))
        }
        if self._over_share.issuperset(waiting):
            self._over_share = frozenset()
        if not waiting or (self.table.free and not self._no_room):
            return True
        rows = [one for one in self.table.sequences if one is not None and _may_yield(one)]
        held = Counter(sequence.parent.tenant for sequence in rows)
        share = max(1, len(rows) // len(held.keys() | waiting.keys()))
        needy = [priority for tenant, priority in waiting.items() if held[tenant] < share]
        over = [one for one in rows if held[one.parent.tenant] > share and one.parent.priority >= min(needy, default=0)]
        if not needy or not over:
            return True
        if self.kv_cache.in_flight:
            return False
        self._over_share = frozenset(one.parent.tenant for one in over)
        self._no_room = False
        self._preempt(max(over, key=_least_important))
        return True

    def _prompts_yield(self) -> bool:
        """Tells whether prompts yield to running rows.

        A fuller batch is worth the delay to a tenant whose own prompts fill it, but not to another. So the prompts of
        tenants that have their share of the rows that decode yield to rows of others.
        """
        if not (self._several_tenants and self.prompts and self.running.decoding):
            return False
        tenants = {tenant for tenant, *_ in self.prompts.by_tenant()}
        held = Counter(row.parent.tenant for row in self.running.decoding.values())
        share = max(1, held.total() // len(held.keys() | tenants))
        return min(held[tenant] for tenant in tenants) >= share and not tenants.issuperset(held)

    def _prefill_admitted(self, budget: int, give: Callable[[GenerationState, int, int], int]) -> int:
        """Serves the admitted requests in order of priority and arrival; returns the tokens used."""
        used = 0
        for state in sorted({row.parent for row in self.running.prefilling}, key=rank):
            spent = give(state, budget - used, budget - used) if used < budget else 0
            self.prompts.charge(state, spent)
            used += spent
        return used

    def _prefill(self, state: GenerationState, allowance: int, chunks: dict[SequenceState, int]) -> int:
        """Admits the sequences of a request and gives them up to `allowance` tokens of the step."""
        spent = 0
        unfinished = False
        for sequence in state.branches:
            if spent >= allowance:
                return spent
            if self._admissible(sequence):
                error = self._admit(sequence)
                if error is not None:
                    self.refused.append((state, error))
                    self.prompts.remove(state)
                    return spent
            if sequence.phase is Phase.PREFILL and sequence.to_compute > 0:
                n = min(sequence.to_compute, allowance - spent)
                sequence.computed += n
                chunks[sequence] = chunks.get(sequence, 0) + n
                spent += n
            if sequence.to_compute == 0:
                self.running.prefilling.discard(sequence)
            unfinished = unfinished or sequence.phase is Phase.WAITING or sequence.to_compute > 0
        if not unfinished:
            self.prompts.remove(state)
        return spent

    def _admissible(self, sequence: SequenceState) -> bool:
        if sequence.phase is not Phase.WAITING or self._admission_closed:
            return False
        return sequence.parent.tenant not in self._over_share and _may_start(sequence)

    def _admit(self, sequence: SequenceState) -> EngineError | None:
        admitted = self.running.admit(sequence)
        if isinstance(admitted, EngineError):
            return admitted
        self._no_room = not admitted
        if not admitted:
            self._admission_closed = True  # no sequence overtakes one that waits for room
            return None
        if sequence.parent.tenant not in self._over_share:
            self._over_share = frozenset()
        if not sequence.preemptions:
            state = sequence.parent
            self.prompts.charge(state, answer_cost(state.request, len(sequence.output), self._costs))
        return None

    def _prefill_step(self, chunks: dict[SequenceState, int], used: int) -> Step:
        table = self.table
        scheduled: list[ScheduledSequence] = []
        step = Step(kind=StepKind.PREFILL, sequences=scheduled, tokens=used, prefilled=list(chunks))
        step.charges = [(sequence.parent, n) for sequence, n in chunks.items()]
        for sequence, n in chunks.items():
            slot, end = sequence.slot, sequence.computed
            sampled = sequence.to_compute == 0 and not len(sequence.output)
            rows = np.array([n - 1], np.int32) if sampled else NO_ROWS
            scheduled.append(table.run(slot, end - n, end, table.tokens[slot, end - n : end], rows))
            if sequence.to_compute == 0:
                sequence.phase = Phase.DECODE
                self.running.start_decoding(sequence)
                step.completed.append(sequence)
            if sampled:
                step.sampled.append(sequence)
        step.slots = np.array([sequence.slot for sequence in step.sampled], np.int64)
        step.positions = table.length[step.slots]
        table.length[step.slots] += 1
        return step

    # Decode: one token of every running sequence; with speculation several, which is a verify step.

    def _plan_decode(self) -> Step | None:
        table = self.table
        drafting = self._speculation.method != "none" and self.policy.drafts()
        max_rows = self.policy.max_rows(drafting) if self._several_tenants else None
        while True:
            slots, sequences = self.running.next_rows(max_rows)
            length = table.length[slots]
            over = length >= table.limit[slots]  # these end with a token that is in flight
            if over.any():
                left = np.flatnonzero(~over)
                slots, length, sequences = slots[left], length[left], [sequences[row] for row in left.tolist()]
            if not len(slots):
                return None
            max_drafts = self._max_drafts(slots, length, drafting)
            missing = length + max_drafts - table.capacity[slots]
            short = missing > 0
            if not short.any() or self.running.grow(slots[short], missing[short]):
                break
            if self.kv_cache.in_flight:
                return None  # the sequence to preempt is known once its last token is
            self.preempt_one()
        kind = StepKind.VERIFY if max_drafts.any() else StepKind.DECODE
        step = Step(kind=kind, sequences=[], tokens=len(slots), slots=slots, positions=length, max_drafts=max_drafts)
        step.drafting, step.sampled = drafting, sequences
        if kind is StepKind.DECODE:
            decode_sequences(step, table)
        return step

    def _max_drafts(self, slots: Int64s, length: Int64s, drafting: bool) -> Int64s:
        """Returns the drafts that each row may have, i64 [R]: as many as it can use, or none.

        A row's draws may depend on the number, so it must follow from the row itself where its draws are to be
        repeatable.
        """
        spec = self._speculation
        if spec.method == "none":
            return np.zeros(len(slots), np.int64)
        usable: Int64s = np.minimum(spec.num_speculative_tokens, self.table.limit[slots] - length - 1)
        if drafting:
            return usable
        if spec.seeded_rejection_sample_method not in ("standard", "block"):
            return np.zeros_like(usable)
        for row, slot in enumerate(slots.tolist()):
            if self.running.decoding[slot].parent.request.params.seed is None:
                usable[row] = 0
        return usable

    def preempt_one(self) -> None:
        """Sends the least important, then youngest sequence back to the queue with its tokens. No step is in flight."""
        running = [sequence for sequence in self.table.sequences if sequence is not None]
        self._preempt(max(running, key=_least_important))

    def _preempt(self, victim: SequenceState) -> None:
        self.running.preempt(victim)
        self.prompts.add(victim.parent)

    # Score: prefixes and rows.

    def _plan_score(self) -> Step | None:
        scheduled: list[ScheduledSequence] = []
        step = Step(kind=StepKind.SCORE, sequences=scheduled, tokens=0)
        self.score_batcher.begin(scheduled, step.scratch, self._max_tokens(StepKind.SCORE), self.scores.first())

        def give(state: ScoringState, allowance: int, left: int) -> int:
            spent = self.score_batcher.give(state, allowance, left)
            if spent > 0:
                step.charges.append((state, spent))
                step.prefixes[state] = len(state.prefix_slots)
            if state.launched:
                self.scores.remove(state)
            return spent

        first, budget = self.scores.first(), self.score_batcher.budget
        step.tokens = self.scores.serve(budget, give)
        if not scheduled:  # the first one may stand behind many that found no room
            step.tokens = max(0, give(first, budget, budget))
            self.scores.charge(first, step.tokens)
        step.parts = self.score_batcher.end()
        return step if scheduled else None

    def _release_idle(self) -> None:
        if not self.kv_cache.in_flight:
            self.score_batcher.release_idle()


def _least_important(sequence: SequenceState) -> tuple[int, int, int]:
    """Returns the place of a sequence in the order in which they give way: the last one first."""
    return sequence.parent.priority, sequence.parent.arrival, sequence.branch


def _may_yield(sequence: SequenceState) -> bool:
    return sequence.phase is not Phase.CLOSED and not sequence.parent.isolated


def _waits(state: GenerationState) -> bool:
    """Tells whether a sequence of the request waits for nothing but a row."""
    return any(one.phase is Phase.WAITING and _may_start(one) for one in state.branches)


def _may_start(sequence: SequenceState) -> bool:
    """Tells whether a waiting branch may start: the first open one computes the prompt, the others find it."""
    state = sequence.parent
    return state.prompt_done or sequence is next(one for one in state.branches if one.phase is not Phase.CLOSED)
