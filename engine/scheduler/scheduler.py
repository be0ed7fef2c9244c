"""What runs next: a step of the kind whose turn it is, and who is admitted, grown or preempted for it.

One kind a step: mixed batches make attention tiles and graphs fit neither. The scheduler changes what the jobs are
(slots taken, tokens counted as computed) when it plans a step; `engine.core` launches it and reads it.
"""

import numpy as np

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.request_cost import answer_cost
from engine.requests import EngineError, Int64s
from engine.sampler_interface import RowSampler
from engine.scheduler.fair_queue import STOP, FairQueue
from engine.scheduler.policy import Pace, SmallLoads, Turns
from engine.scheduler.request_state import Generation, Phase, Request, RequestTable, Scoring
from engine.scheduler.running_batch import Decoding, Rows
from engine.scheduler.score_batcher import ScoreSteps
from engine.scheduler.step import Step, decode_sequences
from engine.scheduler.step_time_model import Budgets

NO_ROWS = np.empty(0, np.int32)


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        pool: KVCacheManager,
        table: RequestTable,
        sampler: RowSampler,
        max_len: int,
        vocab_size: int,
        max_targets: int | None,
    ) -> None:
        quantum = max(64, config.token_budget // 8)
        self._costs = config.costs
        self._kv_cache = pool
        self._table = table
        self._speculation = config.speculation
        self.pace = Pace(adaptive=config.speculation.adaptive)
        self.prefilling: FairQueue[Generation] = FairQueue(quantum)
        self.scoring: FairQueue[Scoring] = FairQueue(quantum)
        self.rows = Rows(config, pool, table, sampler, max_len)
        self.score_steps = ScoreSteps(pool, vocab_size, max_targets)
        self.small_loads = SmallLoads()
        self.decoding = Decoding()
        self.filling: set[Request] = set()  # admitted rows with tokens to prefill
        self.refused: list[tuple[Generation, EngineError]] = []  # found impossible at admission
        self.turns = Turns(config.decode_gap_s)
        self._budgets = Budgets(config, table.token_table.device)
        self._over = {StepKind.PREFILL: False, StepKind.SCORE: False}  # the last step, or attempt at one, left work
        self._closed = False  # no row is admitted to the step that is being planned
        self._cut = False  # it holds less than it could, because little waits
        pool.on_pressure = self._release_idle

    def add(self, work: Generation | Scoring) -> None:
        if isinstance(work, Generation):
            self.prefilling.add(work)
        else:
            self.scoring.add(work)

    def remove(self, work: Generation | Scoring) -> None:
        if isinstance(work, Generation):
            self.prefilling.remove(work)
        else:
            self.scoring.remove(work)

    def forget(self, request: Request) -> None:
        """The row takes part in no further step, or not before it is admitted again."""
        self.decoding.discard(request)
        self.filling.discard(request)

    def plan(self, now: float) -> Step | None:
        """The next step, or None: nothing to do, or nothing before a step in flight has finished."""
        step = self._next(now)
        if step is not None:
            step.planned = now
            # What is left beside a isolated job says nothing of how fast a queue is worked off.
            step.waiting = self._backlog() and not step.isolated
        return step

    def _next(self, now: float) -> Step | None:
        kinds = self.turns.order(self._kinds(), now)
        for kind in kinds:
            self._cut = False
            if kind is StepKind.DECODE:
                step = self._decode()
            elif kind is StepKind.PREFILL:
                step = self._prefill()
                self._over[kind] = bool(self.prefilling) and not self._cut
            else:
                step = self._score()
                self._over[kind] = bool(self.scoring) and not self._cut
            if step is not None:
                if kind is StepKind.DECODE:
                    self.turns.decodes(now)
                return step
        if StepKind.DECODE not in kinds and self.decoding:  # rows resumed without anything to prefill
            self.turns.decodes(now)
            return self._decode()
        return None

    def _kinds(self) -> list[StepKind]:
        """Of the steps that there is work for."""
        work = {StepKind.DECODE: self.decoding, StepKind.PREFILL: self.prefilling, StepKind.SCORE: self.scoring}
        return [kind for kind, rows in work.items() if rows]

    def _backlog(self) -> bool:
        """Whether there is more work than steps hold. What only waits for its turn beside running rows is none: it may
        all fit the next step, and few rows are no measure of a machine."""
        over = self._over
        return (over[StepKind.PREFILL] and bool(self.prefilling)) or (over[StepKind.SCORE] and bool(self.scoring))

    def account(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """A step of `kind` has taken `seconds`."""
        self.turns.took(kind, seconds)
        self._budgets.took(kind, tokens, seconds)

    def _budget(self, kind: StepKind) -> int:
        """Tokens of a step, which are fewer where so small a load is done sooner."""
        most = self._budgets.most(kind, decoding=bool(self.decoding))
        small = self.small_loads.budget(most, self.prefilling, self.scoring)
        self._cut = small is not None
        return most if small is None else small

    # Prefill: chunks of prompts. A row whose chunk completes it is sampled, unless it resumes.

    def _prefill(self) -> Step | None:
        if not self.filling and not self._table.free:
            return None
        grants: dict[Request, int] = {}
        owner: list[Generation] = []  # the first job of the step: a isolated one shares it with nobody
        self._closed = not self._table.free or (self.score_steps.starving and bool(self.scoring))

        def give(work: Generation, allowance: int, left: int) -> int:
            if self._closed and not self.filling:
                return STOP
            if owner and owner[0] is not work and (owner[0].isolated or work.isolated):
                return 0
            spent = self._fill(work, allowance, grants)
            if spent and not owner:
                owner.append(work)
            return spent

        used = self.prefilling.serve(self._budget(StepKind.PREFILL), give)
        return self._prefill_step(grants, used) if grants else None

    def _fill(self, work: Generation, allowance: int, grants: dict[Request, int]) -> int:
        """Admits the job's rows and gives them up to `allowance` tokens of the step."""
        spent = 0
        waiting = False
        for request in work.branches:
            if spent >= allowance:
                return spent
            if request.phase is Phase.WAITING and not self._closed and self._may_start(request):
                error = self._admit(request)
                if error is not None:
                    self.refused.append((work, error))
                    self.prefilling.remove(work)
                    return spent
            if request.phase is Phase.PREFILL and request.to_compute > 0:
                n = min(request.to_compute, allowance - spent)
                request.computed += n
                grants[request] = grants.get(request, 0) + n
                spent += n
            if request.to_compute == 0:
                self.filling.discard(request)
            waiting = waiting or request.phase is Phase.WAITING or request.to_compute > 0
        if not waiting:
            self.prefilling.remove(work)
        return spent

    def _may_start(self, request: Request) -> bool:
        """The first open branch computes the prompt; the others wait and find it."""
        work = request.parent
        return work.prompt_done or request is next(r for r in work.branches if r.phase is not Phase.CLOSED)

    def _admit(self, request: Request) -> EngineError | None:
        admitted = self.rows.admit(request)
        if isinstance(admitted, EngineError):
            return admitted
        if not admitted:
            self._closed = True  # nobody overtakes a row that waits for room
        elif request.phase is Phase.DECODE:
            self.decoding.add(request)
        else:
            self.filling.add(request)
        if admitted and not request.preemptions:
            self.prefilling.charge(request.parent, answer_cost(request.parent.job, len(request.output), self._costs))
        return None

    def _prefill_step(self, grants: dict[Request, int], used: int) -> Step:
        table = self._table
        sequences: list[ScheduledSequence] = []
        step = Step(kind=StepKind.PREFILL, sequences=sequences, tokens=used, members=list(grants))
        step.charges = [(request.parent, n) for request, n in grants.items()]
        for request, n in grants.items():
            slot, end = request.slot, request.computed
            sampled = request.to_compute == 0 and not len(request.output)
            slots = table.slots[slot]
            ids = table.tokens[slot, end - n : end]
            rows = np.array([n - 1], np.int32) if sampled else NO_ROWS
            sequences.append(ScheduledSequence(slot, slots[: end - n], slots[end - n : end], ids, rows))
            if request.to_compute == 0:
                request.phase = Phase.DECODE
                self.decoding.add(request)
                step.completed.append(request)
            if sampled:
                step.requests.append(request)
        step.slots = np.array([request.slot for request in step.requests], np.int64)
        step.positions = table.length[step.slots]
        table.length[step.slots] += 1
        return step

    # Decode: one token of every running row, and with speculation several, which is a verify step.

    def _decode(self) -> Step | None:
        table = self._table
        drafting = self._speculation.method != "none" and self.pace.drafts()
        while True:
            slots, requests = self.decoding.next()
            length = table.length[slots]
            over = length >= table.limit[slots]  # these end with a token that is in flight
            if over.any():
                left = np.flatnonzero(~over)
                slots, length, requests = slots[left], length[left], [requests[row] for row in left.tolist()]
            if not len(slots):
                return None
            most_drafts = self._most_drafts(slots, length, drafting)
            missing = length + most_drafts - table.capacity[slots]
            short = missing > 0
            if not short.any() or self.rows.grow(slots[short], missing[short]):
                break
            if self._kv_cache.in_flight:
                return None  # whom to preempt is known once its last token is
            self._preempt()
        kind = StepKind.VERIFY if most_drafts.any() else StepKind.DECODE
        step = Step(kind=kind, sequences=[], tokens=len(slots), slots=slots, positions=length, most_drafts=most_drafts)
        step.drafting, step.requests = drafting, requests
        if kind is StepKind.DECODE:
            decode_sequences(step, table)
        return step

    def _most_drafts(self, slots: Int64s, length: Int64s, drafting: bool) -> Int64s:
        """i64 [R]. As many as the row can use, or none: what a row draws may depend on the number, so that it must
        follow from the row itself where its draws are to be repeatable."""
        spec = self._speculation
        if spec.method == "none":
            return np.zeros(len(slots), np.int64)
        most: Int64s = np.minimum(spec.num_speculative_tokens, self._table.limit[slots] - length - 1)
        if drafting:
            return most
        if spec.seeded_rejection_sample_method not in ("standard", "block"):
            return np.zeros_like(most)
        for row, slot in enumerate(slots.tolist()):
            if self.decoding.row(slot).parent.job.params.seed is None:
                most[row] = 0
        return most

    def _preempt(self) -> None:
        """Sends the least important, then youngest row back to the queue with its tokens. No step is in flight."""
        running = [r for r in self._table.requests if r is not None]
        victim = max(running, key=lambda r: (r.parent.priority, r.parent.arrival, r.branch))
        self.forget(victim)
        self.rows.preempt(victim)
        self.prefilling.add(victim.parent)

    # Score: prefixes and items.

    def _score(self) -> Step | None:
        sequences: list[ScheduledSequence] = []
        step = Step(kind=StepKind.SCORE, sequences=sequences, tokens=0)
        self.score_steps.begin(sequences, step.scratch, self._budget(StepKind.SCORE), self.scoring.first())

        def give(work: Scoring, allowance: int, left: int) -> int:
            spent = self.score_steps.give(work, allowance, left)
            if spent > 0:
                step.charges.append((work, spent))
            if work.launched:
                self.scoring.remove(work)
            return spent

        step.tokens = self.scoring.serve(self.score_steps.budget, give)
        step.parts = self.score_steps.end()
        return step if sequences else None

    def _release_idle(self) -> None:
        """Score jobs that no step is computing let go of what they hold. Never for a job whose turn comes later: two
        that do not fit together would otherwise throw each other out for ever."""
        if self._kv_cache.in_flight:
            return
        asking = min(map(_turn, self.score_steps.touched), default=None)
        for work in self.scoring:
            if work not in self.score_steps.touched and (asking is None or asking < _turn(work)):
                self.score_steps.release(work)


def _turn(work: Scoring) -> tuple[int, int]:
    """A strict order of the jobs: the first of them is never thrown out and never overtaken."""
    return work.priority, work.arrival
