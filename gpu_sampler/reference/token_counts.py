"""Reference of `update_token_counts`: what a drawn token changes in the state."""

import numpy as np

from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag


def update_token_counts(state: SamplingState, slots: Ids, tokens: Ids) -> None:
    """Advances the positions of `slots`; counts and remembers `tokens` where the slot's features look at them."""
    # Slot 0 is padding and may be named many times: it must not advance by accident of being named.
    state.position[slots] += (slots > 0).astype(np.int32)
    needs = (state.flags[slots] & np.uint32(SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS)) != 0
    for slot, token in zip(slots[needs].tolist(), tokens[needs].tolist(), strict=True):
        if token == INVALID_TOKEN:
            continue
        if state.flags[slot] & SlotFlag.COUNTS:
            state.count(slot, token)
        state.last_tokens[slot, :-1] = state.last_tokens[slot, 1:]
        state.last_tokens[slot, -1] = token
