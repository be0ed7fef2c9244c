"""SmallLoads: where little waits, steps are no larger than those that cost the host little.

Of a few thousand tokens a large step would be one, whose kernels the host launches while the device waits for them;
small ones are replayed (`engine.model.cuda_graphs.prefill`), several of them in less time. And whoever is answered by
one large step
comes again with all the others, to the next large step: the load would never come apart by itself.

Pace: whether drafting is worth its time, as measured: seconds for a token of a row, with drafts and without.

Turns: which kind of step comes next, by the weighted time that each has had.
"""

from collections.abc import Iterable

from engine.batch.input_batch import StepKind, StepSize
from engine.scheduler.request_state import Generation, Phase, Scoring

PERIOD = 128  # steps, the first of which try both ways
TRIAL = 4  # steps of each way
SMOOTHING = 0.3


class Pace:
    """Asked before each step that may draft, and told what it took. Without `adaptive` it always says yes."""

    def __init__(self, *, adaptive: bool) -> None:
        self._adaptive = adaptive
        self._steps = 0
        self._cost: dict[bool, float] = {}  # seconds a token of a row, smoothed, by whether the step drafted

    def drafts(self) -> bool:
        """Whether the next step drafts."""
        place = self._steps % PERIOD
        if not self._adaptive or place < TRIAL:
            return True
        if place < 2 * TRIAL:
            return False
        return self._cost[True] <= self._cost[False]

    def took(self, drafted: bool, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` >= 1 rows has emitted `tokens` >= 1 tokens."""
        cost = seconds * rows / tokens
        known = self._cost.get(drafted, cost)
        self._cost[drafted] = known + SMOOTHING * (cost - known)
        self._steps += 1


WEIGHTS = {StepKind.DECODE: 2.0, StepKind.PREFILL: 1.0, StepKind.SCORE: 1.0}


class Turns:
    """The kinds of `WEIGHTS`; a verify step is a decode step's turn."""

    def __init__(self, decode_gap_s: float) -> None:
        self._decode_gap_s = decode_gap_s
        self._spent = dict.fromkeys(WEIGHTS, 0.0)  # weighted seconds by kind
        self._had_work: set[StepKind] = set()
        self._last_decode = 0.0

    def order(self, working: Iterable[StepKind], now: float) -> list[StepKind]:
        """The kinds that have work, the one that is due first. Decode steps are, once their rows have waited for the
        gap."""
        work = set(working)
        kinds = [kind for kind in WEIGHTS if kind in work]
        known = [self._spent[kind] for kind in kinds if kind in self._had_work]
        for kind in kinds:
            if kind not in self._had_work:  # what was idle re-enters level with the others
                self._spent[kind] = max(self._spent[kind], min(known, default=max(self._spent.values())))
                if kind is StepKind.DECODE:
                    self._last_decode = now
        self._had_work = work
        kinds.sort(key=lambda kind: self._spent[kind])
        if StepKind.DECODE in kinds and now - self._last_decode >= self._decode_gap_s:
            kinds.sort(key=lambda kind: kind is not StepKind.DECODE)
        return kinds

    def decodes(self, now: float) -> None:
        """The step planned at `now` is one of running rows."""
        self._last_decode = now

    def took(self, kind: StepKind, seconds: float) -> None:
        """A step of `kind` has ended."""
        turn = StepKind.DECODE if kind is StepKind.VERIFY else kind
        self._spent[turn] += seconds / WEIGHTS[turn]
        if turn is StepKind.DECODE:
            self._last_decode += seconds  # its rows wait from its end: else slow decoding would always be due


MOST_STEPS = 4  # small steps that together take about as long as a large one of their tokens


class SmallLoads:
    def __init__(self) -> None:
        self.largest: StepSize | None = None  # of the steps that cost little; None: none do

    def budget(self, most: int, prompts: Iterable[Generation], scores: Iterable[Scoring]) -> int | None:
        """The tokens of a small step, where all that waits is cut into few of them and each of its steps would be one;
        None where a step of `most` tokens is to be had, or would be as small."""
        largest = self.largest
        if largest is None or most <= largest.tokens:
            return None
        tokens = sequences = attended = 0
        for sizes in (map(_of_prompt, prompts), map(_of_scores, scores)):
            for size in sizes:
                tokens, sequences, attended = tokens + size.tokens, sequences + size.sequences, attended + size.attended
                if tokens > MOST_STEPS * largest.tokens:
                    return None
        # Cut at any token they are alike: else a step would be cut, and be none of those that cost little.
        steps = max(1.0, tokens / largest.tokens)
        return (
            largest.tokens if sequences <= steps * largest.sequences and attended <= steps * largest.attended else None
        )


def _of_prompt(work: Generation) -> StepSize:
    """What is left of the job's prompts, nothing of which is known to be cached before its row is admitted."""
    filling = [row for row in work.branches if row.phase is Phase.PREFILL and row.to_compute]
    tokens, before = sum(row.to_compute for row in filling), sum(row.computed for row in filling)
    waits = any(row.phase is Phase.WAITING for row in work.branches)  # the first computes it for the others
    new = tokens + (len(work.job.prompt) if waits else 0)
    return StepSize(new, len(filling) + waits, new + before)


def _of_scores(work: Scoring) -> StepSize:
    """What is left of the job's rows, with what the steps in flight compute."""
    rows = work.items - work.next_item
    return StepSize(work.queued, rows, work.queued + rows * len(work.job.prefix) + len(work.part_slots))
