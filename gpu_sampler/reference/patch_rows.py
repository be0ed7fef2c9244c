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
        z_V[overlay.ids] = penalised(z_V[overlay.ids], overlay, state, slot)
    if flags & SlotFlag.HAS_MASK:
        z_V[~state.allowed(slot)] = -np.inf
    z_V[banned_now(state, slot)] = -np.inf
    return z_V


def penalised(z_n: Float32s, overlay: Overlay, state: SamplingState, slot: int) -> Float32s:
    """float32 [n]: bias; repetition for every token seen; frequency and presence for those generated. Rounded once.

    A token outside of the allowed ids, or banned, becomes -inf afterwards, which no penalty would change.
    """
    counts = overlay.counts & COUNT
    x = z_n.astype(np.float64) + overlay.bias
    repetition = float(state.repetition[slot])
    x = np.where(overlay.counts != 0, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - counts * float(state.frequency[slot]) - np.where(counts > 0, float(state.presence[slot]), 0.0)
    with np.errstate(over="ignore"):  # below the range: -inf; a penalty never makes +inf
        return np.minimum(x, _LARGEST).astype(np.float32)


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
