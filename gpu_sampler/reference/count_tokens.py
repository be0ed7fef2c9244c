"""Counts a produced token in its row's overlay: found by one compare over the list, or appended to it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]


class OverlayArrays(NamedTuple):
    """The arena's arrays, one entry an index, and where each slot's extent lies in them."""

    ids: Int32s
    counts: Int32s  # outputs counted, and the bits of `patch_rows`
    bias: npt.NDArray[np.float32]
    start: npt.NDArray[np.int64]  # by slot, as the next two
    length: Int32s
    capacity: Int32s


def count_tokens(overlay: OverlayArrays, slots: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer]) -> None:
    """One token for each of these slots. A negative id is no token. A full extent takes no new entry: it was sized for
    every token that the request may produce, so only a token that will be dropped finds it full."""
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        if token < 0:
            continue
        start, length = int(overlay.start[slot]), int(overlay.length[slot])
        found = np.flatnonzero(overlay.ids[start : start + length] == token)
        if len(found):
            overlay.counts[start + int(found[0])] += 1
        elif length < overlay.capacity[slot]:
            overlay.ids[start + length] = token
            overlay.counts[start + length] = 1
            overlay.bias[start + length] = 0.0
            overlay.length[slot] += 1
