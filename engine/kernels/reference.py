"""Twin of `skinny_decode_attention`: what single tokens attend to, in float64.

Shape legend: R rows, H query heads, G key/value heads, D head dim, A attended tokens.

Twin of `skinny_gemm`: a linear layer, or two of which one gates the other, in float64.

Shape legend: M rows, N columns of the output, K width of a row.

Twin of `qk_norm_rope`: heads normed and turned by their token's position, in float64.

Shape legend: T tokens, H heads, D head dim.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.lm_head_logprob import Float64s
from gpu_sampler.reference.total_order import Float32s


def skinny_gemm(
    x_MK: Float32s, weight_NK: Float32s, bias_N: Float32s | None = None, *, gated: bool = False
) -> Float64s:
    """float64 [M, N], before it is rounded. `gated`: the weight is [2 N, K], and the first half of what it gives goes
    through silu(z) = z / (1 + exp(-z)) and is multiplied with the second."""
    z_MN = x_MK.astype(np.float64) @ weight_NK.astype(np.float64).T
    if bias_N is not None:
        z_MN = z_MN + bias_N
    if not gated:
        return z_MN
    gate_MN, up_MN = np.split(z_MN, 2, axis=1)
    with np.errstate(over="ignore"):
        return np.asarray(gate_MN / (1 + np.exp(-gate_MN)) * up_MN, np.float64)


def qk_norm_rope(
    heads_THD: Float32s, cos_TD: Float32s, sin_TD: Float32s, norm_D: Float32s | None = None, eps: float = 0.0
) -> Float64s:
    """float64 [T, H, D], before it is rounded. With `norm_D` each head goes through RMSNorm with this weight first
    (Zhang and Sennrich 2019); then its halves (a, b) become (a cos - b sin, b cos + a sin) (Su et al. 2021)."""
    x_THD = heads_THD.astype(np.float64)
    if norm_D is not None:
        x_THD = x_THD / np.sqrt((x_THD**2).mean(axis=2, keepdims=True) + eps) * norm_D
    low, high = np.split(x_THD, 2, axis=2)
    turned_THD = np.concatenate((-high, low), axis=2)
    return np.asarray(x_THD * cos_TD[:, None] + turned_THD * sin_TD[:, None], np.float64)


Int32s = npt.NDArray[np.int32]


def skinny_decode_attention(
    q_RHD: Float32s,
    keys: Float32s,
    values: Float32s,
    indptr: Int32s,
    indices: Int32s,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[Float64s, Float64s]:
    """(float64 [R, H, D], float64 [R, H] log-sum-exps in base 2). Keys and values [slots, 1, G, D]; row r attends to
    the last `window` (0: all) of the slots indices[indptr[r] : indptr[r + 1]]."""
    rows, heads, dim = q_RHD.shape
    group = heads // keys.shape[2]
    out, lse = np.zeros((rows, heads, dim)), np.zeros((rows, heads))
    for row in range(rows):
        slots = indices[indptr[row] : indptr[row + 1]][-window:]
        for head in range(heads):
            k_AD, v_AD = (pool[slots, 0, head // group].astype(np.float64) for pool in (keys, values))
            scores = scale * (k_AD @ q_RHD[row, head].astype(np.float64))
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            best = scores.max()
            weights = np.exp(scores - best)
            out[row, head] = weights @ v_AD / weights.sum()
            lse[row, head] = (best + np.log(weights.sum())) / np.log(2)
    return out, lse
