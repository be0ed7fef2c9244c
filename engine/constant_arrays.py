"""ConstantArrays: arrays that every step names and none changes."""

from typing import NamedTuple

import torch

LEAST = 1024


class Constants(NamedTuple):
    """Replaced by longer ones, never changed: a captured graph keeps those it saw."""

    rows: torch.Tensor  # i32 [n + 1]: 0, 1, 2, ...
    zeros: torch.Tensor  # i32 [n]
    ones: torch.Tensor  # i32 [n]
    host_ones: torch.Tensor  # i32 [n], pinned

    @classmethod
    def of(cls, count: int, device: torch.device) -> "Constants":
        return cls(
            rows=torch.arange(count + 1, dtype=torch.int32, device=device),
            zeros=torch.zeros(count, dtype=torch.int32, device=device),
            ones=torch.ones(count, dtype=torch.int32, device=device),
            host_ones=torch.ones(count, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )


class ConstantArrays:
    """The longest that a step of this device has asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._longest = Constants.of(LEAST, device)

    def at_least(self, count: int) -> Constants:
        """Arrays of at least `count` entries."""
        if count > len(self._longest.ones):
            self._longest = Constants.of(1 << (count - 1).bit_length(), self._device)
        return self._longest
