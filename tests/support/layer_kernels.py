"""References of the decoder-layer kernels of `engine.kernels`, in float64 on the host.

Shape legend: M rows, N columns of the output, K width of a row; T tokens, R rows of single tokens, H query heads, G
key/value heads, D head dim, A attended tokens.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.lm_head_logprob import Float64s
from gpu_sampler.reference.softmax_stats import Float32s

Int32s = npt.NDArray[np.int32]


def skinny_gemm(
    x_MK: Float32s, weight_NK: Float32s, bias_N: Float32s | None = None, *, gated: bool = False
) -> Float64s:
    """Computes a linear layer, or a pair of them in which one gates the other.

    Args:
        x_MK: [M, K].
        weight_NK: [N, K]; gated: [2 N, K], the gate's rows first.
        bias_N: One entry for each row of the weight.
        gated: silu(z) = z / (1 + exp(-z)) of the first half of the products multiplies the second.

    Returns:
        float64 [M, N], before it is rounded.
    """
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
    """Normalises and rotates heads by their token's position.

    Args:
        heads_THD: [T, H, D].
        cos_TD: [T, D], `sin_TD` alike: halves (a, b) become (a cos - b sin, b cos + a sin) (RoPE, Su et al. 2021).
        sin_TD: [T, D].
        norm_D: [D], the weight of an RMSNorm before the rotation (Zhang and Sennrich 2019); None: no norm.
        eps: The norm's epsilon.

    Returns:
        float64 [T, H, D], before it is rounded.
    """
    x_THD = heads_THD.astype(np.float64)
    if norm_D is not None:
        x_THD = x_THD / np.sqrt((x_THD**2).mean(axis=2, keepdims=True) + eps) * norm_D
    low, high = np.split(x_THD, 2, axis=2)
    rotated_THD = np.concatenate((-high, low), axis=2)
    return np.asarray(x_THD * cos_TD[:, None] + rotated_THD * sin_TD[:, None], np.float64)


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
    """Attends with each row over its own slots.

    Args:
        q_RHD: [R, H, D].
        keys: [slots, 1, G, D].
        values: [slots, 1, G, D].
        indptr: [R + 1]; row r attends to the last `window` of indices[indptr[r] : indptr[r + 1]].
        indices: [A].
        scale: Multiplies the scores.
        softcap: Scores z become softcap tanh(z / softcap); 0: they stay.
        window: 0: all.

    Returns:
        float64 [R, H, D], and the log-sum-exps float64 [R, H] in base 2.
    """
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


def rms_norm(x_MN: Float32s, weight_N: Float32s, eps: float, *, offset: float = 0.0) -> Float64s:
    """Normalises rows by their root mean square.

    Args:
        x_MN: [M, N].
        weight_N: [N].
        eps: Is added to the mean square.
        offset: Is added to the weight.

    Returns:
        float64 [M, N], before it is rounded.
    """
    x = x_MN.astype(np.float64)
    return np.asarray(x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * (weight_N + offset), np.float64)
