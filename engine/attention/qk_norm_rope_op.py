"""Defines the op of compiled skinny layers that attends with queries and keys before their norm and rotary embedding.

The fusion pass puts it where a layer norms, rotates and attends (`engine.model.optimize.fusion_passes`). Paged steps on
CUDA have one kernel for norm, rotation and the write to the KV storage (`engine.kernels.qk_norm_rope`). Elsewhere torch
computes norm and rotation, and the step attends as usual.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim.
"""

import torch

from engine.attention.flashinfer_backend import PagedStep
from engine.attention.interface import AttentionCall, OtherFields, current_step
from engine.utils.torch_ops import operation
from gpu_sampler.backend import runs_kernels


def _output_shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@operation(
    "attend_qk_norm_rope(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, "
    "float eps, Tensor(a!) keys, Tensor(b!) values, float scale, int window, float softcap, Tensor? sinks) -> Tensor",
    _output_shape,
)
def _attend_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    *others: *OtherFields,
) -> torch.Tensor:
    """Norms and rotates q and k, then attends.

    Args:
        q: (1, T, H, D).
        k: (1, T, G, D).
        v: (1, T, G, E).
        cos: (1, T, D), and `sin` alike: the rotary embedding of each token.
        sin: (1, T, D).
        q_norm: [D], the weight of the queries' RMSNorm, or None.
        k_norm: [D], given with `q_norm` alone.
        eps: The epsilon of both norms.
        others: The other fields of an `AttentionCall`.

    Returns:
        (1, T, H, E).
    """
    step, call = current_step(), AttentionCall(q[0], k[0], v[0], *others)
    if isinstance(step, PagedStep) and runs_kernels(q.device):
        from engine.kernels.qk_norm_rope import Rotation, fits  # Triton is no part of a CPU's installation

        if fits(*call[:4]):
            return step.attend_qk_norm_rope(call, Rotation(cos[0], sin[0], q_norm, k_norm, eps)).unsqueeze(0)
    q_THD = _norm_rope(call.q_THD, q_norm, eps, cos[0], sin[0])
    k_TGD = _norm_rope(call.k_TGD, k_norm, eps, cos[0], sin[0])
    return step.attend(call._replace(q_THD=q_THD, k_TGD=k_TGD)).unsqueeze(0)


def _norm_rope(
    x_THD: torch.Tensor, norm_D: torch.Tensor | None, eps: float, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> torch.Tensor:
    """Computes what `engine.kernels.qk_norm_rope` does to heads, in float32 and rounded once."""
    wide = x_THD.float()
    if norm_D is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm_D.float()
    low, high = wide.chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    return (wide * cos_TD[:, None].float() + rotated * sin_TD[:, None].float()).to(x_THD.dtype)
