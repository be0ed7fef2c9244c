"""Attends in captured decode steps of few rows, by a kernel that cuts each row's context on the device.

There is no plan on the host and no launch that joins the pieces, and a row's bits do not depend on the rows beside it.
Gain: a row of 300 tokens takes 6.8 us where FlashInfer's kernels take 9.5; at 4,000 tokens these win (14.8 and 12.4),
hence the bounds below (`benchmarks/results/skinny-decode-attention.json`). Switch: `engine.graphs`.
"""

from typing import TYPE_CHECKING, Any, Final

import torch

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW
from engine.attention.plans import AttentionParams, Sequences

if TYPE_CHECKING:  # Triton is no part of a CPU's installation
    from engine.kernels.skinny_decode_attention import SplitKVWorkspace

MAX_ROWS: Final = 8  # of a captured step
MAX_CONTEXT: Final = 1024  # tokens of a row's context; FlashInfer reads longer ones faster, in graphs of their own


class SkinnyDecoder:
    """Implements `GraphDecoder` for up to `MAX_ROWS` rows and layers of equal parameters.

    The slots that rows attend to lie in the step's buffers, where a replay reads them: there is nothing else to plan.
    Steps of one device run one after another and share the `workspace`.
    """

    def __init__(
        self, params: AttentionParams, indptr: torch.Tensor, indices: torch.Tensor, workspace: "SplitKVWorkspace"
    ) -> None:
        """
        Args:
            params: The layers' parameters.
            indptr: i32 [rows + 1] on the device, written by `plan` or by the caller.
            indices: i32 on the device, likewise.
            workspace: For `MAX_ROWS` rows of such heads.
        """
        self._params, self._indptr, self._indices, self._workspace = params, indptr, indices, workspace
        self.run: Any = self._run
        self.can_replan = True

    def plan(self, params: AttentionParams, sequences: Sequences) -> None:
        """Copies what the rows attend to into the buffers."""
        self._indptr.copy_(sequences.kv_indptr, non_blocking=True)
        self._indices[: len(sequences.kv_indices)].copy_(sequences.kv_indices)

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Does nothing: the buffers hold what rows attend to."""

    def _run(
        self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor, return_lse: bool = False
    ) -> Any:
        """Returns [T, H, D], and with `return_lse` also f32 [T, H] in base 2, as a FlashInfer wrapper does."""
        from engine.kernels.skinny_decode_attention import skinny_decode_attention

        params = self._params
        found = skinny_decode_attention(
            q,
            *cache,
            self._indptr,
            self._indices,
            self._workspace,
            scale=params.scale,
            softcap=params.softcap if params.softcap != NO_SOFTCAP else 0.0,
            window=params.window if params.window != NO_WINDOW else 0,
            out_RHD=out,
        )
        return found if return_lse else out
