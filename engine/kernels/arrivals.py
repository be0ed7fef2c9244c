"""Holds the counters by which the programs of a tile tell which of them ends last."""

from typing import Final

import torch

MIN_COUNTERS: Final = 1 << 14
_counters: dict[torch.device, list[torch.Tensor]] = {}


def arrivals(device: torch.device, count: int) -> torch.Tensor:
    """Returns i32 zeros, at least `count`, which a kernel leaves as zeros.

    Launches of one stream share them. A captured graph names the array, so that an array is kept when a larger one
    takes its place.
    """
    found = _counters.setdefault(device, [])
    if not found or len(found[-1]) < count:
        found.append(torch.zeros(max(count, MIN_COUNTERS), dtype=torch.int32, device=device))
    return found[-1]
