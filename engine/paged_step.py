"""PagedStep: what the attention of every step over a paged pool does, eager or captured."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from engine.attention_plans import Kind

if TYPE_CHECKING:  # Triton is no part of a CPU's installation
    from gpu_sampler.kernels.narrow_rotation import Rotation

Append = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class PagedStep(ABC):
    """An `AttentionStep` that writes a layer's keys and values into the pool, and attends by what was planned for such
    a layer."""

    def __init__(self, append: Append, slots: torch.Tensor) -> None:
        """`append(k, v, keys, values, slots)` writes; `slots` i32 [T] on the device."""
        self._append, self._slots = append, slots

    @abstractmethod
    def run_of(self, kind: Kind) -> Any:
        """What attends in a layer of `kind`, as a FlashInfer wrapper's `run`: it has its plan."""

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H, E]."""
        kind = Kind(q_THD.shape[1], k_TGD.shape[1], keys.shape[3], window, softcap, scale)
        q, k, v = (_padded(one.to(keys.dtype), kind.dim) for one in (q_THD, k_TGD, v_TGE))
        self._append(k, v, keys, values, self._slots)
        out = self._mixed(q, kind, keys, values, sinks)
        return out if v_TGE.shape[2] == kind.dim else out[..., : v_TGE.shape[2]].contiguous()

    def attend_rotating(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        rotation: "Rotation",
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `attend`, of queries and keys before their norm and rotation, which `narrow_rotation` takes."""
        from gpu_sampler.kernels.narrow_rotation import narrow_rotation

        kind = Kind(q_THD.shape[1], k_TGD.shape[1], keys.shape[3], window, softcap, scale)
        q = narrow_rotation(q_THD, k_TGD, v_TGE, rotation, keys, values, self._slots)
        return self._mixed(q, kind, keys, values, sinks)

    def _mixed(
        self, q: torch.Tensor, kind: Kind, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, H, D] of the pool, which has the step's keys and values by now."""
        run = self.run_of(kind)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if sinks is None:
            run(q, (keys, values), out=out)
        else:
            _, lse = run(q, (keys, values), out=out, return_lse=True)
            out = out * _share_of_tokens(lse, sinks).to(out.dtype)
        return out


def _share_of_tokens(lse_TH: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[T, H, 1]: what is left for the tokens when a sink takes its weight. The log-sum-exp is in base 2."""
    return torch.sigmoid(lse_TH * math.log(2) - sinks.float()).unsqueeze(-1)


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    if tensor.shape[2] != dim:
        return F.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
