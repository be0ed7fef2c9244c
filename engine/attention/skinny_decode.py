"""Attention of captured steps of few rows: by a kernel that cuts each row's context on the device, without a plan."""

from typing import Any, Final

import torch

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW
from engine.attention.plans import Kind, Sequences

MOST_ROWS: Final = 8  # of a captured step
LONGEST: Final = 1024  # tokens of a row's context; longer ones are read faster by the library's many small pieces


class NarrowDecoder:
    """A `GraphDecoder` of up to `MOST_ROWS` rows and one kind of layer.

    What rows attend to lies in the step's buffers, where a replay reads it; that is all there is to plan. Steps of one
    device run one after another, so that they may share the `room` in which programs hand each other their parts.
    """

    def __init__(self, kind: Kind, indptr: torch.Tensor, indices: torch.Tensor, room: Any) -> None:
        """`indptr` i32 [rows + 1] and `indices` i32 on the device."""
        self._kind, self._indptr, self._indices, self._room = kind, indptr, indices, room
        self.run: Any = self._run

    def plan(self, kind: Kind, given: Sequences) -> None:
        """Takes what the rows attend to from where the step has it."""
        self._indptr.copy_(given.kv_indptr, non_blocking=True)
        self._indices[: len(given.kv_indices)].copy_(given.kv_indices)

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Nothing: the buffers hold it already."""

    def _run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor, return_lse: bool = False
    ) -> Any:
        """As a FlashInfer wrapper: [T, H, D], and with `return_lse` also f32 [T, H] in base 2."""
        from engine.kernels.skinny_decode_attention import narrow_attention  # Triton is no part of a CPU's installation

        kind = self._kind
        found = narrow_attention(
            q,
            *cache,
            self._indptr,
            self._indices,
            self._room,
            scale=kind.scale,
            softcap=kind.softcap if kind.softcap != NO_SOFTCAP else 0.0,
            window=kind.window if kind.window != NO_WINDOW else 0,
            out_RHD=out,
        )
        return found if return_lse else out
