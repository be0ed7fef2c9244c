"""StepPolicy: decides which kind of step runs next, how large it is, and whether a decode step drafts.

One kind a step: mixed batches fit neither the attention tiles nor the CUDA graphs.
"""

from collections.abc import Iterable

import torch

from engine.batch.input_batch import StepKind, StepSize
from engine.config import EngineConfig
from engine.scheduler.request_state import GenerationState, Phase, ScoringState
from engine.scheduler.step_time_model import StepTimeModel

# Shares of the time of the kinds that have work; a verify step counts as a decode step.
WEIGHTS = {StepKind.DECODE: 2.0, StepKind.PREFILL: 1.0, StepKind.SCORE: 1.0}
MAX_GRAPHED_STEPS = 4  # graphed steps that together take about as long as one large step of their tokens
DRAFT_PERIOD = 128  # decode steps; the first ones try both ways
DRAFT_TRIAL = 4  # decode steps of each way
SMOOTHING = 0.3


class StepPolicy:
    """Decides by weighted fair time among kinds, by measured step times, and by the measured gain of drafting."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.largest_graphed: StepSize | None = None  # largest prefill step that is a CUDA graph; None: none is
        self._times = StepTimeModel(config, device)
        self._decode_gap_s = config.decode_gap_s
        self._adaptive_drafts = config.speculation.adaptive
        self._spent = dict.fromkeys(WEIGHTS, 0.0)  # weighted seconds by kind
        self._had_work: set[StepKind] = set()
        self._last_decode = 0.0
        self._decode_steps = 0
        self._token_s: dict[bool, float] = {}  # seconds a token of a row, smoothed, by whether the step drafted

    # Which kind runs next.

    def order(self, kinds_with_work: Iterable[StepKind], now: float) -> list[StepKind]:
        """Returns the kinds that have work, the one that is due first.

        The kind with the least weighted time is due, but decode steps come first once the running rows have waited for
        `decode_gap_s`.
        """
        work = set(kinds_with_work)
        kinds = [kind for kind in WEIGHTS if kind in work]
        known = [self._spent[kind] for kind in kinds if kind in self._had_work]
        for kind in kinds:
            if kind not in self._had_work:  # an idle kind re-enters level with the others
                self._spent[kind] = max(self._spent[kind], min(known, default=max(self._spent.values())))
                if kind is StepKind.DECODE:
                    self._last_decode = now
        self._had_work = work
        kinds.sort(key=lambda kind: self._spent[kind])
        if StepKind.DECODE in kinds and now - self._last_decode >= self._decode_gap_s:
            kinds.sort(key=lambda kind: kind is not StepKind.DECODE)
        return kinds

    def decode_planned(self, now: float) -> None:
        """Notes that the step planned at `now` decodes the running rows."""
        self._last_decode = now

    def step_ended(self, kind: StepKind, tokens: int, seconds: float) -> None:
        """Charges a step that has ended to its kind, and learns its time."""
        turn = StepKind.DECODE if kind is StepKind.VERIFY else kind
        self._spent[turn] += seconds / WEIGHTS[turn]
        if turn is StepKind.DECODE:
            self._last_decode += seconds  # its rows wait from its end: else slow decoding would always be due
        self._times.add(kind, tokens, seconds)

    # How large a prefill or score step is.

    def max_tokens(self, kind: StepKind, *, decoding: bool) -> int:
        """Returns the most tokens that the next step of a kind may have; `decoding`: running rows wait for its end."""
        return self._times.max_tokens(kind, decoding=decoding)

    def graphed_tokens(
        self, max_tokens: int, prompts: Iterable[GenerationState], scores: Iterable[ScoringState]
    ) -> int | None:
        """Returns the tokens of a CUDA-graphed step, where a few of them do everything that waits.

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
        if largest is None or max_tokens <= largest.tokens:
            return None
        tokens = sequences = attended = 0
        for sizes in (map(_prompt_size, prompts), map(_score_size, scores)):
            for size in sizes:
                tokens, attended = tokens + size.tokens, attended + size.attended
                sequences += size.sequences
                if tokens > MAX_GRAPHED_STEPS * largest.tokens:
                    return None
        # The work is cut at any token, so each step must have room for its share of sequences and context.
        steps = max(1.0, tokens / largest.tokens)
        fits = sequences <= steps * largest.sequences and attended <= steps * largest.attended
        return largest.tokens if fits else None

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
        cost = seconds * rows / tokens
        known = self._token_s.get(drafted, cost)
        self._token_s[drafted] = known + SMOOTHING * (cost - known)
        self._decode_steps += 1


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
