"""The whole reference sampler: rows of logits and a state in, tokens and log-probabilities out.

Shape legend: R rows, V vocabulary, N the largest top-N, C the largest number of chosen ids.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.reference import select
from gpu_sampler.reference.logprobs import View, processed_view, raw_view
from gpu_sampler.reference.nucleus_scan import nucleus_scan
from gpu_sampler.reference.order import Float32s, Int64s, clean
from gpu_sampler.reference.patch_rows import patch_rows
from gpu_sampler.state import Ids, SamplingState, SlotFlag


class _Answer(NamedTuple):
    """What is known of each row while it is drawn."""

    tokens: Ids  # [R]
    flags: npt.NDArray[np.uint32]  # [R]
    kept: list[Int64s | None]  # [R]


def branch(state: SamplingState, slot: int) -> str:
    """`greedy`, `plain`, `candidates` (a top-k bounds them) or `nucleus`: a function of the slot's numbers alone."""
    if state.temperature[slot] == 0:
        return "greedy"
    if state.top_k[slot]:
        return "candidates"
    return "nucleus" if state.top_p[slot] < 1 or state.min_p[slot] > 0 else "plain"


def sample(logits_RV: Float32s, state: SamplingState, slots: Ids, processed: bool) -> SampleOutput:
    """One token a row. Reads the state and leaves it alone; no content of the logits raises."""
    raw_RV, bad_R = clean(logits_RV)
    patched = [patch_rows(row, state, int(slot)) for row, slot in zip(raw_RV, slots, strict=True)]
    # A repetition penalty near 0 or a bias can leave the finite range only downwards: no second `clean` is needed.
    flags = np.where(bad_R, np.uint32(RowFlag.BAD_VALUE), np.uint32(0)).astype(np.uint32)
    answer = _Answer(np.full(len(slots), INVALID_TOKEN, np.int32), flags, [None] * len(slots))
    by_branch: dict[str, list[int]] = {"greedy": [], "plain": [], "candidates": [], "nucleus": []}
    for index, slot in enumerate(slots.tolist()):
        if patched[index].max() == -np.inf:
            answer.flags[index] |= np.uint32(RowFlag.NO_TOKEN)
        else:
            by_branch[branch(state, slot)].append(index)
    for index in by_branch["greedy"]:
        answer.tokens[index] = select.greedy(patched[index])
    rows = {
        i: _row(patched[i], state, int(slots[i])) for name in by_branch if name != "greedy" for i in by_branch[name]
    }
    _draw_together(select.draw_plain, by_branch["plain"], rows, answer)
    _draw_filtered(by_branch["candidates"] + by_branch["nucleus"], rows, answer)
    return _report(raw_RV, patched, state, slots, answer, processed)


def _row(z_V: Float32s, state: SamplingState, slot: int) -> select.Row:
    return select.Row(
        z_V,
        float(z_V.max()),
        float(state.temperature[slot]),
        int(state.top_k[slot]),
        float(state.top_p[slot]),
        float(state.min_p[slot]),
        state.seed[slot],
        int(state.branch[slot]),
        int(state.position[slot]),
        state.overlay(slot).ids.astype(np.int64),
    )


def _draw_together(
    draw: Callable[[list[select.Row]], list[int]], indices: list[int], rows: dict[int, select.Row], answer: _Answer
) -> None:
    if indices:
        answer.tokens[indices] = draw([rows[index] for index in indices])


def _draw_filtered(indices: list[int], rows: dict[int, select.Row], answer: _Answer) -> None:
    listed: list[int] = []
    for index in indices:
        kept, flag = select.keep(rows[index])
        answer.flags[index] |= np.uint32(flag)
        answer.kept[index] = kept
        if kept is not None:
            listed.append(index)
            continue
        drawn = select.draw_by_rejection(rows[index])
        answer.tokens[index] = drawn.token
        answer.flags[index] |= np.uint32(drawn.flags)
        answer.kept[index] = drawn.kept
    if listed:
        kept_rows = [kept for kept in (answer.kept[index] for index in listed) if kept is not None]
        answer.tokens[listed] = select.draw_kept([rows[index] for index in listed], kept_rows)


def _report(
    raw_RV: Float32s, patched: list[Float32s], state: SamplingState, slots: Ids, answer: _Answer, processed: bool
) -> SampleOutput:
    wants = (state.flags[slots] & np.uint32(SlotFlag.WANTS_LOGPROBS)) != 0
    if not wants.any():
        return SampleOutput(answer.tokens, None, None, None, None, None, answer.flags)
    rows, most_top = len(slots), int(state.n_top[slots[wants]].max())
    most_chosen = int(state.n_chosen[slots[wants]].max())
    logprobs, ranks = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.int32)
    top_ids = np.full((rows, most_top), INVALID_TOKEN, np.int32)
    top_logprobs = np.full((rows, most_top), -np.inf, np.float32)
    chosen = np.full((rows, most_chosen), -np.inf, np.float32)
    for index in np.flatnonzero(wants & ((answer.flags & np.uint32(RowFlag.NO_TOKEN)) == 0)).tolist():
        slot, token = int(slots[index]), int(answer.tokens[index])
        view = _view(patched[index], state, slot, answer, index) if processed else raw_view(raw_RV[index])
        logprobs[index], ranks[index] = view.logprobs(np.array([token]))[0], view.rank(token)
        n, c = int(state.n_top[slot]), int(state.n_chosen[slot])
        top_ids[index, :n], top_logprobs[index, :n] = view.top(n)
        chosen[index, :c] = view.logprobs(state.chosen_ids[slot, :c].astype(np.int64))
    return SampleOutput(answer.tokens, logprobs, ranks, top_ids, top_logprobs, chosen, answer.flags)


def _view(z_V: Float32s, state: SamplingState, slot: int, answer: _Answer, index: int) -> View:
    kept = answer.kept[index]
    temperature = float(state.temperature[slot])
    if kept is None and branch(state, slot) == "nucleus":
        min_p = float(state.min_p[slot])
        log_min_p = float(np.log(min_p)) if min_p > 0 else -np.inf
        kept = nucleus_scan(z_V, temperature, float(state.top_p[slot]), log_min_p)
        answer.flags[index] |= np.uint32(RowFlag.NUCLEUS_SCAN)
    return processed_view(z_V, temperature, kept)
