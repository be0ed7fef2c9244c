"""StepPolicy: decides which kind of step runs next, how large it is, and whether a decode step drafts.

One kind a step: mixed batches fit neither the attention tiles nor the CUDA graphs. `StepTimeModel` predicts how long
steps take: a line for each kind of step, a part that is the same for every step, and a part a token.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch

from engine.batch.input_batch import StepKind, StepSize
from engine.config import MAX_RUNNING_BOUND, EngineConfig
from engine.scheduler.request_state import GenerationState, Phase, ScoringState

# Shares of the time of generation and scoring: those of their kinds that have work. A verify step is a decode step.
WEIGHTS = {StepKind.DECODE: 2.0, StepKind.PREFILL: 1.0, StepKind.SCORE: 1.0}
MAX_GRAPHED_STEPS = 4  # graphed steps that together take about as long as one large step of their tokens
DRAFT_PERIOD = 128  # decode steps; the first ones try both ways
DRAFT_TRIAL = 4  # decode steps of each way
SMOOTHING = 0.3

MIN_BUDGET = {"cpu": 32, "cuda": 256}  # tokens of a step, however slow the machine seems
MIN_MEASURED = 32  # tokens of a step that tells how fast it is
UNKNOWN_BUDGET = 512  # tokens of a step for whose end others wait, before any time is known
REACH = 2  # times the largest of the latest steps: beyond that the line is a guess, and others would wait for it
SHARED_STEP_S = {"cpu": 0.006, "cuda": 0.1}  # while requests of several tenants come
STEP_S = {"cpu": 0.1, "cuda": 0.4}  # a large model's matrix products lose a twentieth in shorter steps of a GPU
FIXED_SHARE = 1 / 8  # of a step at most: a large model on a CPU would lose half its rate in short ones
GAP_STEPS = 4  # decode steps that running rows wait at most, where `decode_gap_s` is shorter
WAITED_FIXED_SHARE = 1 / 2  # of one for whose end others wait, or whose time the configuration bounds
DECAY = 0.9  # weight that a step keeps with each later one
ROWS_DECAY = 0.97  # the same of a decode step, for its rows
TRY_PERIOD = 16  # decode steps: the last one tries another number of rows
OUTLIER_FACTOR = 2.0  # times longer or shorter than expected
MIN_KNOWN_STEPS = 3  # steps after which an outlier is passed over
MIN_SPREAD = 0.05  # of the mean size: steps that are all alike do not tell the two parts apart


class StepPolicy:
    """Decides by weighted fair time of generation and scoring, by measured step times and the gain of drafting."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.largest_graphed: StepSize | None = None  # largest prefill step that is a CUDA graph; None: none is
        self._times = StepTimeModel(config, device)
        self._decode_gap_s = config.decode_gap_s
        self._decode_s: float | None = None  # seconds of a decode step, smoothed; None: none has ended
        self._adaptive_drafts = config.speculation.adaptive
        self._spent = {True: 0.0, False: 0.0}  # weighted seconds of scoring and of generation
        self._had_work: set[StepKind] = set()
        self._latest = True  # whether scoring, or generation, was idle more lately
        self._last_decode = self._last_prefill = 0.0
        self._decode_steps = 0
        self._token_s: dict[bool, float] = {}  # seconds a token of a row, smoothed, by whether the step drafted

    # Which kind runs next.

    def order(self, kinds_with_work: Iterable[StepKind], now: float, *, prompts_yield: bool = False) -> list[StepKind]:
        """Returns the kinds that have work, the one that is due first.

        Generation and scoring share the time by weight; of two that are due, the one that was idle goes first. Prefill
        steps come before decode steps, so that the batch is full before it decodes: a decode step takes about as long
        for few rows as for many. Once the running rows have waited for `_gap_s` a decode step comes before
        everything.

        Args:
            kinds_with_work: The kinds.
            now: Seconds, of the clock of `decode_planned`.
            prompts_yield: Decode steps come first for `decode_gap_s` after a prefill step.
        """
        work = set(kinds_with_work)
        if StepKind.DECODE in work - self._had_work:
            self._last_decode = now
        for scores in (True, False):
            if self._weight(work, scores) and not self._weight(self._had_work, scores):
                self._spent[scores] = max(self._spent.values())  # what was idle does not make up for it
                self._latest = scores
        self._had_work = work
        decode_last = not prompts_yield or now - self._last_prefill >= self._decode_gap_s
        if now - self._last_decode >= self._gap_s:
            return sorted(work, key=lambda kind: (kind is not StepKind.DECODE, self._spent[_scores(kind)], kind))
        last = StepKind.DECODE if decode_last else StepKind.PREFILL
        return sorted(work, key=lambda kind: (*self._place(kind), kind is last))

    @property
    def _gap_s(self) -> float:
        """Returns the seconds that running rows wait for a prefill or score step.

        Where decoding is slow, a gap of less than a few of its steps spares the rows little. The prompts that wait
        would be computed a few at a time, and decode steps of the few rows there are would come between them.
        """
        return max(self._decode_gap_s, GAP_STEPS * (self._decode_s or 0.0))

    def _place(self, kind: StepKind) -> tuple[float, bool]:
        scores = _scores(kind)
        return self._spent[scores], scores != self._latest

    @staticmethod
    def _weight(kinds: Iterable[StepKind], scores: bool) -> float:
        """Returns the weight of scoring, or of generation, where these kinds have work; 0 without any."""
        return sum(WEIGHTS[kind] for kind in kinds if _scores(kind) == scores)

    def decode_planned(self, now: float) -> None:
        """Notes that the step planned at `now` decodes the running rows."""
        self._last_decode = now

    def prefill_planned(self, now: float) -> None:
        """Notes that the step planned at `now` computes prompts."""
        self._last_prefill = now

    def step_ended(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """Charges a step that has ended to generation or scoring, and learns its time."""
        turn = StepKind.DECODE if kind is StepKind.VERIFY else kind
        self._spent[_scores(turn)] += seconds / self._weight(self._had_work | {turn}, _scores(turn))
        if turn is StepKind.DECODE:
            self._last_decode += seconds  # its rows wait from its end: else slow decoding would always be due
        elif turn is StepKind.PREFILL:
            self._last_prefill += seconds
        self._times.add(kind, tokens, seconds)

    # How large a prefill or score step is.

    def max_tokens(self, kind: StepKind, *, decoding: bool, several_tenants: bool = False) -> int:
        """Returns the most tokens that the next prefill or score step may have.

        Args:
            kind: The kind of the step.
            decoding: Running rows wait for its end.
            several_tenants: So may a request of another tenant, which has no part in what the step computes.
        """
        return self._times.max_tokens(kind, self._gap_s if decoding else None, several_tenants=several_tenants)

    def max_rows(self, drafting: bool) -> int:
        """Returns the most rows that a decode step may have while requests of several tenants come."""
        return self._times.max_rows(drafting)

    def graphed_tokens(
        self, max_tokens: int, prompts: Iterable[GenerationState], scores: Iterable[ScoringState]
    ) -> int | None:
        """Returns the tokens of a CUDA-graphed step, where a few of them do everything that waits: the most, or half.

        The host launches the kernels of an eager step of a few thousand tokens while the device waits for them; graphed
        steps of the same tokens are replayed in less time. Moreover, callers that one large step answers come again
        together, to the next large step, and the load would never spread.

        Args:
            max_tokens: tokens that the step may have.
            prompts: generations with tokens to prefill.
            scores: scoring requests with rows to compute.

        Returns:
            None where not every step would be graphed, or where `max_tokens` is as small.
        """
        largest = self.largest_graphed
        if largest is None or max_tokens <= largest.tokens // 2:
            return None
        tokens = sequences = attended = 0
        for sizes in (map(_prompt_size, prompts), map(_score_size, scores)):
            for size in sizes:
                tokens, attended = tokens + size.tokens, attended + size.attended
                sequences += size.sequences
                if tokens > MAX_GRAPHED_STEPS * largest.tokens or sequences > MAX_GRAPHED_STEPS * largest.sequences:
                    return None
        # The work is cut at any token, so each step must have room for its share of sequences and context. Steps of
        # half the tokens have room for as much context.
        for parts in (1, 2):
            cut = largest.tokens // parts
            steps = max(1.0, tokens / min(cut, max_tokens))
            fits = parts * sequences <= steps * largest.sequences and attended <= steps * largest.attended
            if steps <= MAX_GRAPHED_STEPS and fits:
                return cut if cut < max_tokens else None
        return None

    # Whether a decode step drafts.

    def drafts(self) -> bool:
        """Tells whether the next decode step drafts. Without `speculation.adaptive` it always does."""
        place = self._decode_steps % DRAFT_PERIOD
        if not self._adaptive_drafts or place < DRAFT_TRIAL:
            return True
        if place < 2 * DRAFT_TRIAL:
            return False
        return self._token_s[True] <= self._token_s[False]

    def decode_ended(self, drafted: bool, rows: int, tokens: int, seconds: float) -> None:
        """Learns from a decode step of `rows` >= 1 rows that emitted `tokens` >= 1 tokens in `seconds`."""
        self._times.add_rows(drafted, rows, seconds)
        before = seconds if self._decode_s is None else self._decode_s
        self._decode_s = before + SMOOTHING * (seconds - before)
        cost = seconds * rows / tokens
        known = self._token_s.get(drafted, cost)
        self._token_s[drafted] = known + SMOOTHING * (cost - known)
        self._decode_steps += 1


class StepTimeModel:
    """Predicts the time of steps, and bounds their tokens or rows by it."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._token_budget = config.token_budget
        self._min_budget = MIN_BUDGET[device.type]
        self._step_s = STEP_S[device.type] if config.max_step_s is None else config.max_step_s
        self._fixed_share = FIXED_SHARE if config.max_step_s is None else WAITED_FIXED_SHARE
        self._shared_step_s = min(SHARED_STEP_S[device.type], self._step_s)
        self._fits = {kind: StepTimeFit() for kind in StepKind}
        self._row_fits = {drafting: RowTimeFit() for drafting in (False, True)}

    def max_tokens(self, kind: StepKind, gap_s: float | None, *, several_tenants: bool = False) -> int:
        """Returns the most tokens that a prefill or score step may have.

        Args:
            kind: the kind of the step.
            gap_s: the seconds that running rows wait for the step at most; None: none waits.
            several_tenants: whether requests of several tenants come.
        """
        fit = self._fits[kind]
        within = fit.tokens_within(self._step_s, self._fixed_share) if gap_s is None else fit.tokens_within(gap_s)
        if several_tenants:
            within = min(within, fit.tokens_within(self._shared_step_s))
        if gap_s is not None or several_tenants:
            within = min(within, max(UNKNOWN_BUDGET, REACH * fit.largest))
        return int(min(self._token_budget, max(self._min_budget, within)))

    def max_rows(self, drafting: bool) -> int:
        """Returns the most rows that a decode step may have while requests of several tenants come."""
        fit, seconds = self._row_fits[drafting], self._shared_step_s
        within = fit.unlike_size(seconds) if fit.tries_a_size else fit.tokens_within(seconds)
        if fit.largest:
            within = min(within, REACH * fit.largest)
        return int(min(MAX_RUNNING_BOUND, max(1, within)))

    def add(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """Learns from a step that has ended."""
        if seconds > 0 and tokens >= MIN_MEASURED:
            self._fits[kind].add(tokens, seconds)

    def add_rows(self, drafted: bool, rows: int, seconds: float) -> None:
        """Learns from a decode step that has ended."""
        if seconds > 0:
            self._row_fits[drafted].add(rows, seconds)


class StepTimeFit:
    """Fits a line through the times of the latest steps of one kind by least squares.

    While the steps are all alike the slope stays as it was.

    A delay that counted would make the steps that follow small, and small steps tell little about larger ones: they
    would stay small. So a step that takes far longer than expected is passed over, and so is one that takes far
    shorter, as the next one does where that one was only read late. The line begins again at a second outlier on the
    same side, with no expected step between them, and at the first that is far shorter than the very first steps, which
    are slow for reasons of their own.
    """

    decay: ClassVar = DECAY

    def __init__(self) -> None:
        self.largest = 0.0  # tokens of the largest of the latest steps
        self._passed = set[int]()  # outliers since the last step that counted: 1 longer, -1 shorter
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._weight = self._n = self._s = self._nn = self._ns = 0.0
        self._slope: float | None = None  # seconds a token

    def add(self, tokens: int, seconds: float) -> None:
        """Takes a step of `tokens` tokens that took `seconds`."""
        outlier, known = self._outlier(tokens, seconds), self._steps >= MIN_KNOWN_STEPS
        if outlier and known and outlier not in self._passed:
            self._passed.add(outlier)
            return
        if outlier < 0 or (outlier and known):
            self._begin()
        self._passed.clear()
        self.largest = max(tokens, DECAY * self.largest)
        self._steps += 1
        self._weight = self.decay * self._weight + 1
        self._n = self.decay * self._n + tokens
        self._s = self.decay * self._s + seconds
        self._nn = self.decay * self._nn + tokens * tokens
        self._ns = self.decay * self._ns + tokens * seconds
        n, s = self._n / self._weight, self._s / self._weight
        spread = self._nn / self._weight - n * n
        if spread > (MIN_SPREAD * n) ** 2:
            self._slope = (self._ns / self._weight - n * s) / spread

    def tokens_within(self, seconds: float, fixed_share: float = WAITED_FIXED_SHARE) -> float:
        """Returns the tokens of a step that takes `seconds`, or one whose fixed part is `fixed_share` of it, if longer.

        Where the fixed part is most of a step, shorter ones would not end much sooner, and would do far less. The
        result is infinite while nothing is known.
        """
        if not self._steps:
            return float("inf")
        fixed, each = self._parts()
        return float("inf") if each <= 0 else max(seconds - fixed, fixed / fixed_share - fixed) / each

    def _parts(self) -> tuple[float, float]:
        """Returns the seconds of a step, and of each token. A line steeper than the mean would begin below 0, and one
        that falls end there."""
        mean = self._s / self._n
        each = mean if self._slope is None else min(max(self._slope, 0.0), mean)
        return (self._s - each * self._n) / self._weight, each

    def _outlier(self, tokens: int, seconds: float) -> int:
        """Returns 1 for a step far longer than expected, -1 for one far shorter, else, or while nothing is known, 0."""
        if not self._steps:
            return 0
        expected = self._expected(tokens)
        return int(seconds > OUTLIER_FACTOR * expected) - int(seconds < expected / OUTLIER_FACTOR)

    def _expected(self, tokens: int) -> float:
        fixed, each = self._parts()
        return fixed + each * tokens


class RowTimeFit(StepTimeFit):
    """Fits the line of decode steps, which a row makes little longer, and what else the machine does much.

    A line that began again while the machine is busy, or a batch small, would hold steps at a row. So once it is known
    a step counts as `OUTLIER_FACTOR` times more or less than expected at most, and is remembered longer. And a wrong
    line may hold steps at one size, which tells nothing of it: now and then another size is tried.
    """

    decay: ClassVar = ROWS_DECAY

    def add(self, tokens: int, seconds: float) -> None:
        """Takes a step of `tokens` rows that took `seconds`."""
        if self._steps >= MIN_KNOWN_STEPS:
            expected = self._expected(tokens)
            seconds = min(max(seconds, expected / OUTLIER_FACTOR), OUTLIER_FACTOR * expected)
        super().add(tokens, seconds)

    @property
    def tries_a_size(self) -> bool:
        """Whether the next step should be of another size than the latest ones: to tell the step's own part from that
        of a row, or to learn whether they still are what they were."""
        return self._slope is None or not self._steps % TRY_PERIOD

    def unlike_size(self, seconds: float) -> float:
        """Returns the rows of a step that would tell the parts apart: half, or twice, those of the latest steps, as
        they take longer than `seconds` or not. The result is infinite while nothing is known."""
        if not self._steps:
            return float("inf")
        rows = self._n / self._weight
        return rows / 2 if rows >= 2 and self._s / self._weight > seconds else 2 * rows


def _scores(kind: StepKind) -> bool:
    return kind is StepKind.SCORE


def _prompt_size(state: GenerationState) -> StepSize:
    """Returns what is left of the prompts. The cached part of a waiting prompt is known only once it is admitted."""
    filling = [row for row in state.branches if row.phase is Phase.PREFILL and row.to_compute]
    tokens, before = sum(row.to_compute for row in filling), sum(row.computed for row in filling)
    waits = any(row.phase is Phase.WAITING for row in state.branches)  # the first computes it for the others
    new = tokens + (len(state.request.prompt) if waits else 0)
    return StepSize(new, len(filling) + waits, new + before)


def _score_size(state: ScoringState) -> StepSize:
    """Returns what is left of the rows, with what the steps in flight compute."""
    rows = state.items - state.next_item
    attended = state.queued + rows * len(state.request.prefix) + len(state.part_slots)
    return StepSize(state.queued, rows, attended)
