"""Reference of `update_token_counts`: what a drawn token changes in the state."""

import numpy as np

from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag


def update_token_counts(state: SamplingState, slots: Ids, tokens: Ids) -> None:
    """Advances the positions of `slots`; counts and remembers `tokens` where the slot's features look at them."""
    # Slot 0 is padding and may be named many times: it must not advance.
    state.position[slots] += (slots > 0).astype(np.int32)
    counted = (state.flags[slots] & np.uint32(SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS)) != 0
    for slot, token in zip(slots[counted].tolist(), tokens[counted].tolist(), strict=True):
        if token == INVALID_TOKEN:
            continue
        if state.flags[slot] & SlotFlag.COUNTS:
            state.count(slot, token)
        state.last_tokens[slot, :-1] = state.last_tokens[slot, 1:]
        state.last_tokens[slot, -1] = token
