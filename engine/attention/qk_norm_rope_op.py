"""The op of compiled layers of few rows that attends with queries and keys before their norm and rotation.

Paged steps on a GPU have a kernel for these and for the pool's store (`narrow_rotation`); elsewhere they are computed
as written here, and the step attends as ever.

Shape legend: T packed tokens, H query heads, G key/value heads, D query/key dim, E value dim.
"""

import torch

from engine.attention.flashinfer_backend import PagedStep
from engine.attention.interface import running_step
from engine.utils.torch_ops import operation


def _attended_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@operation(
    "attend_rotating(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor(a!) keys, Tensor(b!) values, float scale, int window, float softcap, Tensor? sinks) -> Tensor",
    _attended_shape,
)
def _attend_rotating(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q (1, T, H, D), k (1, T, G, D), v (1, T, G, E), cos and sin (1, T, D), norms [D], pool tensors (slots, 1, G, D or
    E) -> (1, T, H, E)."""
    step, more = running_step(), (keys, values, scale, window, softcap, sinks)
    if isinstance(step, PagedStep) and q.is_cuda:
        from engine.kernels.qk_norm_rope import Rotation, fits  # Triton is no part of a CPU's installation

        if fits(q[0], k[0], v[0], keys):
            rotation = Rotation(cos[0], sin[0], q_norm, k_norm, eps)
            return step.attend_rotating(q[0], k[0], v[0], rotation, *more).unsqueeze(0)
    q_THD, k_TGD = _turned(q[0], q_norm, eps, cos[0], sin[0]), _turned(k[0], k_norm, eps, cos[0], sin[0])
    return step.attend(q_THD, k_TGD, v[0], *more).unsqueeze(0)


def _turned(
    x_THD: torch.Tensor, norm_D: torch.Tensor | None, eps: float, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> torch.Tensor:
    """As `engine.kernels.reference`, in float32."""
    wide = x_THD.float()
    if norm_D is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm_D.float()
    low, high = wide.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (wide * cos_TD[:, None].float() + turned * sin_TD[:, None].float()).to(x_THD.dtype)
