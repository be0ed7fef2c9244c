"""Reference of `apply_logits_processors`: bias, allowed ids, bans and penalties of one row, in that order.

A row of a speculated run sees the drafts before it (`ahead`) as tokens that were drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.softmax_stats import Float32s
from gpu_sampler.state.host_state import COUNT, Overlay, SamplingState, SlotFlag

_LARGEST = np.finfo(np.float32).max
_PROCESSED = int(SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK)


class RowPosition(NamedTuple):
    """Says where a row stands: the slot that it is drawn for, and `offset` positions after the slot's own."""

    slot: int
    offset: int = 0
    ahead: tuple[int, ...] = ()  # the drafts before it in its run that the vocabulary has


def apply_logits_processors(
    z_V: Float32s, state: SamplingState, slot: int, offset: int = 0, ahead: Sequence[int] = ()
) -> Float32s:
    """Returns the processed row, float32 [V]; the row itself stays as it is."""
    flags = int(state.flags[slot])
    if not flags & _PROCESSED:
        return z_V
    z_V = z_V.copy()
    overlay = overlay_behind(state, slot, ahead)
    if len(overlay.ids):
        z_V[overlay.ids] = penalised(z_V[overlay.ids], overlay, state, slot)
    if flags & int(SlotFlag.HAS_MASK):
        z_V[~state.allowed(slot)] = -np.inf
    z_V[banned_now(state, slot, offset, ahead)] = -np.inf
    return z_V


def penalised(z_n: Float32s, overlay: Overlay, state: SamplingState, slot: int) -> Float32s:
    """Returns float32 [n]: bias, repetition for tokens seen, frequency and presence for generated ones; rounded once.

    A token outside of the allowed ids, or banned, becomes -inf afterwards, which no penalty would change.
    """
    counts = overlay.counts & COUNT
    x = z_n.astype(np.float64) + overlay.bias
    repetition = float(state.repetition[slot])
    x = np.where(overlay.counts != 0, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - counts * float(state.frequency[slot]) - np.where(counts > 0, float(state.presence[slot]), 0.0)
    with np.errstate(over="ignore"):  # below the range: -inf; a penalty never makes +inf
        return np.minimum(x, _LARGEST).astype(np.float32)


def overlay_behind(state: SamplingState, slot: int, ahead: Sequence[int]) -> Overlay:
    """Returns the slot's overlay as it would be with `ahead` drawn: see `SamplingState.count`."""
    overlay = state.overlay(slot)
    if not ahead or not state.flags[slot] & SlotFlag.COUNTS:
        return overlay
    ids, counts = overlay.ids.tolist(), overlay.counts.tolist()
    for token in ahead:
        if token in ids:
            counts[ids.index(token)] += 1
        elif len(ids) < state.overlay_cap[slot]:
            ids.append(token)
            counts.append(1)
    bias = np.zeros(len(ids), np.float32)
    bias[: len(overlay.bias)] = overlay.bias
    return Overlay(np.array(ids, np.int32), np.array(counts, np.int32), bias)


def banned_now(state: SamplingState, slot: int, offset: int = 0, ahead: Sequence[int] = ()) -> npt.NDArray[np.int64]:
    """Returns ids banned at this position: stop ids before `min_tokens`, and tokens that would end a bad word."""
    banned: list[int] = []
    if state.position[slot] + offset < state.min_tokens[slot]:
        banned.extend(state.stop_ids.get(slot, ()))
    last = np.append(state.last_tokens[slot], ahead)
    for word in state.bad_words.get(slot, ()):
        if tuple(last[len(last) - len(word) + 1 :]) == word[:-1]:
            banned.append(word[-1])
    return np.array(banned, np.int64)
