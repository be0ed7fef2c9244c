"""Checks that a sampler answers as the reference does: integers equal, numbers near, close calls counted.

A close call is a row whose draw hangs on less than float32 can tell: its two best perturbed values lie within 1e-4 of
each other, or a mass that was compared with p Z lies within 1e-5 Z of it. There either answer is accepted, and at most
one row of 1,000 may need that. The reports of a row that agrees must agree as well.

Shape legend: R rows, V vocabulary, N a row's own top-N, C its own number of chosen ids.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference.filters import CANDIDATES, MAX_DRAWS, Row, clean, first, scaled
from gpu_sampler.reference.logits_processors import apply_logits_processors
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.reference.softmax_stats import GROUP, SoftmaxStats, softmax_stats
from gpu_sampler.sampler import Sampler
from gpu_sampler.state.host_state import SamplingState, SlotFlag

SCORE_GAP: Final = 1e-4
MASS_GAP: Final = 1e-5  # of Z
LOGPROB_ERROR: Final = 2e-5
FLOAT32_ERROR: Final = 2.5e-7  # two units of the last place, where those are the larger error
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


class Agreement(NamedTuple):
    """Counts of all rows that were compared."""

    rows: int
    close: int  # answered otherwise than by the reference, on a close call
    wrong: tuple[str, ...]  # what is wrong with the other rows that were
    flags: RowFlag  # raised by any of them

    @property
    def holds(self) -> bool:
        return not self.wrong and 1000 * self.close <= self.rows

    def __add__(self, other: Any) -> "Agreement":
        rows, close, wrong, flags = other
        return Agreement(self.rows + rows, self.close + close, self.wrong + wrong, self.flags | flags)


NOTHING: Final = Agreement(0, 0, (), RowFlag(0))


def step_agrees(ours: Sampler, reference: Sampler, logits_RV: torch.Tensor, slots: Sequence[int]) -> Agreement:
    """One step of both samplers on the same rows (`logits_RV` on the device of `ours`, which may write into them)."""
    host_RV = logits_RV.detach().to("cpu", torch.float32).numpy().copy()
    rows = [reference_row(row, reference.state, slot) for row, slot in zip(clean(host_RV)[0], slots, strict=True)]
    asked = [asked_by(reference.state, slot) for slot in slots]
    expected = reference.sample(host_RV, slots)
    found = ours.fetch(ours.sample(logits_RV, slots)).result()
    close, wrong = 0, []
    for index, row in enumerate(rows):
        faults = list(_faults(found, expected, index, asked[index], row))
        if faults and row is not None and close_call(row):
            close += 1
        elif faults:
            wrong.append(f"row {index}, slot {slots[index]}: {'; '.join(faults)}")
    return Agreement(len(rows), close, tuple(wrong), RowFlag(int(np.bitwise_or.reduce(found.flags))))


def asked_by(state: SamplingState, slot: int) -> tuple[int, int] | None:
    """(N, C) of a slot that wants log-probabilities."""
    wants = state.flags[slot] & np.uint32(SlotFlag.WANTS_LOGPROBS)
    return (int(state.n_top[slot]), int(state.n_chosen[slot])) if wants else None


def reference_row(z_V: npt.NDArray[np.float32], state: SamplingState, slot: int) -> Row | None:
    """How the reference is about to draw a row without NaN and +inf; None where it draws nothing at random."""
    patched = apply_logits_processors(z_V, state, slot)
    if state.temperature[slot] == 0 or patched.max() == -np.inf:
        return None
    numbers = (float(x[slot]) for x in (state.temperature, state.top_k, state.top_p, state.min_p))
    temperature, top_k, top_p, min_p = numbers
    key = (np.uint64(state.seed[slot]), int(state.branch[slot]), int(state.position[slot]))
    singles = state.overlay(slot).ids.astype(np.int64)
    return Row(patched.copy(), float(patched.max()), temperature, int(top_k), top_p, min_p, *key, singles)


def _faults(
    found: SampleOutput, expected: SampleOutput, index: int, asked: tuple[int, int] | None, row: Row | None
) -> Iterator[str]:
    """Yields what is wrong with a row, in words. Reports that it did not ask for are padding, as in the reference."""
    got: Any = found
    for name, wanted in zip(SampleOutput._fields, expected, strict=True):
        if (wanted is None) != (getattr(got, name) is None):
            yield f"{name}: one of the two is None"
        elif wanted is not None:
            own = getattr(got, name)[index]
            if not _same(np.asarray(own), np.asarray(wanted[index]), unsure_tail(row)):
                yield f"{name}: {_shown(own)}, expected {_shown(wanted[index])}"


def _same(own: npt.NDArray[Any], wanted: npt.NDArray[Any], unsure: bool) -> bool:
    if wanted.dtype != np.float32:
        return np.array_equal(own.astype(np.int64), wanted.astype(np.int64))
    if own.shape != wanted.shape:
        return False
    shown = np.isfinite(wanted)
    if unsure:  # which of the last tokens stay, float32 cannot tell
        shown &= np.isfinite(own)
    elif not np.array_equal(np.isfinite(own), shown):
        return False
    near = np.abs(own[shown] - wanted[shown]) <= allowed_error(wanted[shown]) + MASS_GAP * unsure
    return bool(near.all() and np.isfinite(np.where(own == -np.inf, 0, own)).all())


def allowed_error(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.maximum(np.float32(LOGPROB_ERROR), np.float32(FLOAT32_ERROR) * np.abs(logprobs))


def unsure_tail(row: Row | None) -> bool:
    """Whether p is so near to 1 that p Z is Z to float32: then any token of the last 1e-5 may stay or not."""
    return row is not None and 1 - MASS_GAP < row.top_p < 1


def _shown(values: Any) -> str:
    return np.array2string(np.asarray(values), threshold=8, precision=6)


def close_call(row: Row) -> bool:
    """Whether the draw of a row, by its own route, hangs on less than float32 can tell."""
    if not row.top_k and row.top_p == 1 and row.min_p == 0:
        return two_level(row, softmax_stats(row.others_V, row.temperature), 0)[1] < SCORE_GAP
    ids = first(row.z_V, row.top_k or len(row.z_V))
    ids = ids[row.z_V[ids] > -np.inf]
    x = scaled(row, ids)
    weights = np.exp(x)
    before = np.cumsum(weights) - weights
    total = float(weights.sum())
    unsure = np.abs(x - row.log_min_p) <= MASS_GAP * np.maximum(1, np.abs(x))
    if row.top_p < 1:
        unsure |= np.abs(before - row.top_p * total) <= MASS_GAP * total
    kept = (x >= row.log_min_p) & ((row.top_p == 1) | (before < row.top_p * total))
    kept[0] = True
    if row.top_k or (kept | unsure)[: CANDIDATES + 1].sum() <= CANDIDATES:
        scores = np.where(kept, x + _noise(row, ids, Purpose.SAMPLE_TOKEN, 0), -np.inf)
        return bool(unsure.any()) or _gap(scores) < SCORE_GAP
    return _close_rejection(row, dict(zip(ids.tolist(), zip(kept.tolist(), unsure.tolist(), strict=True), strict=True)))


def _close_rejection(row: Row, stays: dict[int, tuple[bool, bool]]) -> bool:
    """`stays`: for each finite token whether it is kept, and whether that is unsure."""
    stats = softmax_stats(row.others_V, row.temperature)
    for round_ in range(MAX_DRAWS):
        token, gap = two_level(row, stats, round_)
        kept, unsure = stays[token]
        if gap < SCORE_GAP or unsure:
            return True
        if kept:
            return False
    return False


def two_level(row: Row, stats: SoftmaxStats, round_: int) -> tuple[int, float]:
    """(token, the smallest gap between a winner and its runner-up) of one draw of the whole row."""
    groups = np.arange(len(stats.sums_G))
    scores = stats.log_weights(row.best, row.temperature) + _noise(row, groups, Purpose.SAMPLE_GROUP, round_)
    alone = scaled(row, row.singles) + _noise(row, row.singles, Purpose.SAMPLE_TOKEN, round_)
    gap, winner = _gap(np.append(scores, alone)), int(np.append(scores, alone).argmax())
    if winner >= len(scores):
        return int(row.singles[winner - len(scores)]), gap
    ids = np.arange(winner * GROUP, min((winner + 1) * GROUP, len(row.z_V)))
    others = Row(row.others_V, *row[1:])
    inside = scaled(others, ids) + _noise(row, ids, Purpose.SAMPLE_TOKEN, round_)
    return int(ids[inside.argmax()]), min(gap, _gap(inside))


def _noise(row: Row, ids: Int64s, purpose: Purpose, round_: int) -> Float64s:
    return gumbel(words(row.seed, ids, row.position, purpose, round_, row.branch)).astype(np.float64)


def _gap(scores: Float64s) -> float:
    """Between the largest two; inf where there is only one."""
    held = np.sort(scores[scores > -np.inf])
    return float(held[-1] - held[-2]) if len(held) > 1 else float("inf")
