"""One step of the reference sampler: rows of logits on the host and the state of their slots give tokens.

Shape legend: R rows, V vocabulary, N top-N, C chosen ids.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.reference.keys import clean
from gpu_sampler.reference.patch_rows import patch_rows
from gpu_sampler.reference.report import Basis, Report, full_basis, kept_basis, report
from gpu_sampler.reference.select import (
    Selected,
    SelectRows,
    select_candidates,
    select_greedy,
    select_nucleus,
    select_plain,
)
from gpu_sampler.state import Rows, SamplingState, SlotFlag

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
_SELECT = {"plain": select_plain, "candidates": select_candidates, "nucleus": select_nucleus}


class _Step(NamedTuple):
    """Arrays over the R rows of a step."""

    raw_RV: Float32s
    values_RV: Float32s  # after bias, bans and penalties
    rows: Rows
    drawn: Selected
    flags_R: npt.NDArray[np.uint32]


def branches_of(state: SamplingState, slots_R: Int64s) -> dict[str, Int64s]:
    """Row indices of each branch that occurs: greedy, plain, candidates, nucleus. A row's branch is a function of its
    own parameters."""
    greedy = state.has(slots_R, SlotFlag.GREEDY)
    limited = ~greedy & (state.top_k[slots_R] > 0)
    nucleus = ~greedy & ~limited & ((state.top_p[slots_R] < 1) | (state.min_p[slots_R] > 0))
    masks = {"greedy": greedy, "plain": ~(greedy | limited | nucleus), "candidates": limited, "nucleus": nucleus}
    return {name: np.flatnonzero(mask) for name, mask in masks.items() if mask.any()}


def sample_on_host(
    state: SamplingState,
    logits_RV: Float32s,
    slots_R: Int64s,
    branches: Mapping[str, Int64s],
    mode: LogprobsMode,
) -> SampleOutput:
    """Draws, reports and moves the rows on. Whatever the logits hold, it raises nothing: flags say what was wrong."""
    raw_RV, bad_R = clean(logits_RV)
    values_RV, overflow_R = _patched(state, raw_RV, slots_R)
    rows = state.rows(slots_R)
    drawn = _draw(values_RV, rows, branches)
    flags_R = drawn.flags_R | _flag(bad_R | overflow_R, RowFlag.BAD_VALUE)
    flags_R |= _flag(drawn.tokens_R == INVALID_TOKEN, RowFlag.NO_TOKEN)
    output = _reported(state, _Step(raw_RV, values_RV, rows, drawn, flags_R), slots_R, mode)
    state.advance(slots_R, drawn.tokens_R)
    return output


def _flag(rows_R: npt.NDArray[np.bool_], flag: RowFlag) -> npt.NDArray[np.uint32]:
    return rows_R.astype(np.uint32) * np.uint32(flag)


def _patched(state: SamplingState, raw_RV: Float32s, slots_R: Int64s) -> tuple[Float32s, npt.NDArray[np.bool_]]:
    """A copy with steps 1 and 2 done on rows with an overlay, and which of them left the fp32 range."""
    at = np.flatnonzero(state.has(slots_R, SlotFlag.HAS_OVERLAY))
    overflow_R = np.zeros(len(slots_R), np.bool_)
    if not len(at):
        return raw_RV, overflow_R
    patched_RV = raw_RV.copy()
    some = patched_RV[at]
    overflow_R[at] = patch_rows(some, [state.row_overlay(int(slot)) for slot in slots_R[at]])
    patched_RV[at] = some
    return patched_RV, overflow_R


def _draw(values_RV: Float32s, rows: Rows, branches: Mapping[str, Int64s]) -> Selected:
    count = len(values_RV)
    drawn = Selected(
        np.full(count, INVALID_TOKEN, np.int64),
        np.zeros(count, np.uint32),
        np.full(count, -np.inf, np.float32),
        np.zeros(count, np.int64),
        np.zeros(count),
    )
    for name, at in branches.items():
        some = values_RV if len(at) == count else values_RV[at]
        if name == "greedy":
            drawn.tokens_R[at] = select_greedy(some)
            continue
        for whole, piece in zip(drawn, _SELECT[name](some, SelectRows(*rows.take(at))), strict=True):
            whole[at] = piece
    return drawn


def _reported(state: SamplingState, step: _Step, slots_R: Int64s, mode: LogprobsMode) -> SampleOutput:
    tokens_R, flags_R = step.drawn.tokens_R.astype(np.int32), step.flags_R
    at = np.flatnonzero(state.has(slots_R, SlotFlag.WANTS_LOGPROBS))
    if not len(at):
        return SampleOutput(tokens_R, None, None, None, None, None, flags_R)
    n_top = state.n_top[slots_R[at]].astype(np.int64)
    chosen = state.chosen_ids[slots_R[at], : int(state.n_chosen[slots_R[at]].max())]
    if mode == "raw_logprobs":
        found = report(full_basis(step.raw_RV[at]), tokens_R[at], n_top, chosen)
        return _spread(tokens_R, flags_R, [(at, found)], int(n_top.max()), chosen.shape[1])
    parts = []
    greedy = state.has(slots_R[at], SlotFlag.GREEDY)
    for rows, wanted in ((at[greedy], greedy), (at[~greedy], ~greedy)):
        if len(rows):
            basis = full_basis(step.values_RV[rows]) if wanted is greedy else _kept(step, rows)
            parts.append((rows, report(basis, tokens_R[rows], n_top[wanted], chosen[wanted])))
    rejected = np.zeros(len(flags_R), np.bool_)
    rejected[at] = (flags_R[at] & np.uint32(RowFlag.REJECTION)) != 0
    flags_R |= _flag(rejected, RowFlag.NUCLEUS_SCAN)
    return _spread(tokens_R, flags_R, parts, int(n_top.max()), chosen.shape[1])


def _kept(step: _Step, at: Int64s) -> Basis:
    drawn = step.drawn
    return kept_basis(
        step.values_RV[at], step.rows.temperatures_R[at], drawn.mass_R[at], drawn.least_R[at], drawn.last_R[at]
    )


def _spread(
    tokens_R: npt.NDArray[np.int32],
    flags_R: npt.NDArray[np.uint32],
    parts: list[tuple[Int64s, Report]],
    n_top: int,
    n_chosen: int,
) -> SampleOutput:
    """Rows that asked for nothing are padding."""
    rows = len(tokens_R)
    output = SampleOutput(
        tokens_R,
        np.full(rows, -np.inf, np.float32),
        np.zeros(rows, np.int32),
        np.full((rows, n_top), INVALID_TOKEN, np.int32),
        np.full((rows, n_top), -np.inf, np.float32),
        np.full((rows, n_chosen), -np.inf, np.float32),
        flags_R,
    )
    for at, found in parts:
        width = found.top_ids_RN.shape[1]  # the vocabulary may be smaller than N, and parts differ in it
        output.logprobs[at] = found.logprobs_R  # type: ignore[index]
        output.ranks[at] = found.ranks_R  # type: ignore[index]
        output.top_ids[at, :width] = found.top_ids_RN  # type: ignore[index]
        output.top_logprobs[at, :width] = found.top_logprobs_RN  # type: ignore[index]
        output.chosen_logprobs[at] = found.chosen_logprobs_RC  # type: ignore[index]
    return output
