"""Twin of `patch_rows`: bias, allowed ids, bans and penalties of one row, in that order."""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.order import Float32s
from gpu_sampler.state import COUNT, Overlay, SamplingState, SlotFlag

_LARGEST = np.finfo(np.float32).max


def patch_rows(z_V: Float32s, state: SamplingState, slot: int) -> Float32s:
    """float32 [V]: the row after steps 1 and 2 of the order of operations. The row itself is left alone."""
    flags = SlotFlag(int(state.flags[slot]))
    if not flags & (SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK):
        return z_V
    z_V = z_V.copy()
    overlay = state.overlay(slot)
    if len(overlay.ids):
        z_V[overlay.ids] += overlay.bias
    if flags & SlotFlag.HAS_MASK:
        z_V[~state.allowed(slot)] = -np.inf
    z_V[banned_now(state, slot)] = -np.inf
    if flags & SlotFlag.COUNTS:
        z_V[overlay.ids] = penalised(z_V[overlay.ids], overlay, state, slot)
    return z_V


def penalised(z_n: Float32s, overlay: Overlay, state: SamplingState, slot: int) -> Float32s:
    """float32 [n]: repetition for every token seen, then frequency and presence for those generated."""
    counts = overlay.counts & COUNT
    repetition = state.repetition[slot]
    with np.errstate(over="ignore"):
        repeated = np.where(z_n > 0, z_n / repetition, z_n * repetition)
    z_n = np.where(overlay.counts != 0, np.minimum(repeated, _LARGEST), z_n)  # a penalty never makes +inf
    z_n = z_n - counts.astype(np.float32) * state.frequency[slot]
    z_n = z_n - np.where(counts > 0, state.presence[slot], np.float32(0))
    return z_n.astype(np.float32)


def banned_now(state: SamplingState, slot: int) -> npt.NDArray[np.int64]:
    """Ids banned at this position only: stop ids before `min_tokens`, and tokens that would end a bad word."""
    banned: list[int] = []
    if state.position[slot] < state.min_tokens[slot]:
        banned.extend(state.stop_ids.get(slot, ()))
    last = state.last_tokens[slot]
    for word in state.bad_words.get(slot, ()):
        if tuple(last[len(last) - len(word) + 1 :]) == word[:-1]:
            banned.append(word[-1])
    return np.array(banned, np.int64)
