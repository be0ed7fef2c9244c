"""Allocates buffers between words of poison, so that a write outside of one shows."""

from typing import Any, Final

import torch

GUARD: Final = 1024  # words before and behind each buffer
POISON: Final = 0x5EED


class Guarded:
    """Buffers that stand between words of poison."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of its kind, which begins as aligned as a tensor of its own."""
        words = -(-tensor.numel() * tensor.element_size() // 4)
        whole = torch.full((words + 2 * GUARD,), POISON, dtype=torch.int32, device=tensor.device)
        self.buffers.append(whole)
        inside = whole[GUARD : GUARD + words].view(tensor.dtype)
        return inside[: tensor.numel()].view(tensor.shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.like(tensor).copy_(tensor)

    def guard(self, holder: Any) -> None:
        """Replaces every tensor that is an attribute of `holder`."""
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                setattr(holder, name, self.copy(value))

    def intact(self) -> bool:
        return all((x[:GUARD] == POISON).all() and (x[-GUARD:] == POISON).all() for x in self.buffers)
