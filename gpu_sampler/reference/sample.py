"""Runs the whole reference sampler: rows of logits and a state in, tokens and log-probabilities out.

    targets       logits processors (`logits_processors`), then temperature, top-k, top-p and min-p (`filters`)
    draw          the token of each row
    report        log-probabilities (`logprobs`)

Shape legend: R rows, V vocabulary, N the largest top-N, C the largest number of chosen ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference import filters
from gpu_sampler.reference.filters import Int64s, clean, nucleus_scan
from gpu_sampler.reference.logits_processors import RowPosition, apply_logits_processors, overlay_behind
from gpu_sampler.reference.logprobs import View, processed_view, raw_view
from gpu_sampler.reference.softmax_stats import Float32s
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag


class Targets(NamedTuple):
    """Holds rows that are ready to be drawn from. Drawing adds to `flags` and `kept`."""

    raw_RV: Float32s  # without NaN and +inf
    processed_RV: list[Float32s]  # [R] of [V]: after bias, bans and penalties
    state: SamplingState
    places: Sequence[RowPosition]  # [R]
    routes: list[str]  # [R]: see `branch`, or `empty`
    rows: dict[int, filters.Row]  # by index, of the rows that are drawn at random
    kept: list[Int64s | None]  # [R]: the kept tokens in order, where they are known
    flags: npt.NDArray[np.uint32]  # [R]


def branch(state: SamplingState, slot: int) -> str:
    """Returns `greedy`, `plain`, `candidates` (a top-k bounds them) or `nucleus`, by the slot's numbers alone."""
    if state.temperature[slot] == 0:
        return "greedy"
    if state.top_k[slot]:
        return "candidates"
    return "nucleus" if state.top_p[slot] < 1 or state.min_p[slot] > 0 else "plain"


def sample(logits_RV: Float32s, state: SamplingState, slots: Ids, processed: bool) -> SampleOutput:
    """Draws one token a row; see `Sampler.sample`. It leaves the state alone, and bad values never raise."""
    rows = targets(logits_RV, state, [RowPosition(slot) for slot in slots.tolist()])
    return report(rows, draw(rows, range(len(slots))), processed)


def targets(logits_RV: Float32s, state: SamplingState, places: Sequence[RowPosition]) -> Targets:
    """Processes the rows, and applies their filters as far as drawing needs it."""
    raw_RV, bad_R = clean(logits_RV)
    raw, largest_R = list(raw_RV), raw_RV.max(axis=1)
    processed_RV = [apply_logits_processors(row, state, *place) for row, place in zip(raw, places, strict=True)]
    # A repetition penalty near 0 or a bias can leave the finite range only downwards: no second `clean` is needed.
    flags = np.where(bad_R, np.uint32(RowFlag.BAD_VALUE), np.uint32(0)).astype(np.uint32)
    routes = [branch(state, place.slot) for place in places]
    found = Targets(raw_RV, processed_RV, state, places, routes, {}, [None] * len(places), flags)
    for index, place in enumerate(places):
        row = processed_RV[index]
        if (largest_R[index] if row is raw[index] else row.max()) == -np.inf:
            flags[index] |= np.uint32(RowFlag.NO_TOKEN)
            routes[index] = "empty"
        elif routes[index] != "greedy":
            found.rows[index] = _row(row, state, place)
            if routes[index] != "plain":
                found.kept[index], flag = filters.keep(found.rows[index])
                flags[index] |= np.uint32(flag)
                if found.kept[index] is None:
                    flags[index] |= np.uint32(RowFlag.REJECTION)
    return found


def _row(z_V: Float32s, state: SamplingState, place: RowPosition) -> filters.Row:
    slot = place.slot
    return filters.Row(
        z_V,
        float(z_V.max()),
        float(state.temperature[slot]),
        int(state.top_k[slot]),
        float(state.top_p[slot]),
        float(state.min_p[slot]),
        state.seed[slot],
        int(state.branch[slot]),
        int(state.position[slot]) + place.offset,
        overlay_behind(state, slot, place.ahead).ids.astype(np.int64),
    )


def draw(targets: Targets, indices: Sequence[int]) -> Ids:
    """Draws the tokens i32 [R] of the rows at `indices` with their SAMPLE noise; others have INVALID_TOKEN."""
    tokens = np.full(len(targets.places), INVALID_TOKEN, np.int32)
    by_route: dict[str, list[int]] = {"greedy": [], "plain": [], "listed": [], "rejected": [], "empty": []}
    for index in indices:
        filtered = targets.routes[index] in ("candidates", "nucleus")
        own = ("rejected" if targets.kept[index] is None else "listed") if filtered else targets.routes[index]
        by_route[own].append(index)
    for index in by_route["greedy"]:
        tokens[index] = filters.greedy(targets.processed_RV[index])
    if plain := by_route["plain"]:
        tokens[plain] = filters.draw_plain([targets.rows[index] for index in plain])
    if listed := by_route["listed"]:
        kept = [ids for ids in (targets.kept[index] for index in listed) if ids is not None]
        tokens[listed] = filters.draw_kept([targets.rows[index] for index in listed], kept)
    for index in by_route["rejected"]:
        drawn = filters.draw_by_rejection(targets.rows[index])
        tokens[index] = drawn.token
        targets.flags[index] |= np.uint32(drawn.flags)
        targets.kept[index] = drawn.kept
    return tokens


def scan(targets: Targets, index: int) -> Int64s | None:
    """Returns the kept tokens of a row, None where all are kept; scans a nucleus too wide for a list."""
    if targets.kept[index] is None and targets.routes[index] == "nucleus":
        row = targets.rows[index]
        targets.kept[index] = nucleus_scan(row.z_V, row.temperature, row.top_p, row.log_min_p)
        targets.flags[index] |= np.uint32(RowFlag.NUCLEUS_SCAN)
    return targets.kept[index]


def report(targets: Targets, tokens: Ids, processed: bool) -> SampleOutput:
    """Returns the output for `tokens` [R]; rows with INVALID_TOKEN report nothing."""
    state, slots = targets.state, np.array([place.slot for place in targets.places], np.int64)
    wants = (state.flags[slots] & np.uint32(SlotFlag.WANTS_LOGPROBS)) != 0
    if not wants.any():
        return SampleOutput(tokens, None, None, None, None, None, targets.flags)
    rows, max_top = len(slots), int(state.n_top[slots[wants]].max())
    max_chosen = int(state.n_chosen[slots[wants]].max())
    logprobs, ranks = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.int32)
    top_ids = np.full((rows, max_top), INVALID_TOKEN, np.int32)
    top_logprobs = np.full((rows, max_top), -np.inf, np.float32)
    chosen = np.full((rows, max_chosen), -np.inf, np.float32)
    for index in np.flatnonzero(wants & (tokens != INVALID_TOKEN)).tolist():
        slot, token = int(slots[index]), int(tokens[index])
        view = _view(targets, index) if processed else raw_view(targets.raw_RV[index])
        logprobs[index], ranks[index] = view.logprobs(np.array([token]))[0], view.rank(token)
        n, c = int(state.n_top[slot]), int(state.n_chosen[slot])
        top_ids[index, :n], top_logprobs[index, :n] = view.top(n)
        chosen[index, :c] = view.logprobs(state.chosen_ids[slot, :c].astype(np.int64))
    return SampleOutput(tokens, logprobs, ranks, top_ids, top_logprobs, chosen, targets.flags)


def _view(targets: Targets, index: int) -> View:
    temperature = float(targets.state.temperature[targets.places[index].slot])
    return processed_view(targets.processed_RV[index], temperature, scan(targets, index))
