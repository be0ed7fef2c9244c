"""Twin of `narrow_attention`: what single tokens attend to, in float64.

Shape legend: R rows, H query heads, G key/value heads, D head dim, A attended tokens.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.label_scores import Float64s
from gpu_sampler.reference.order import Float32s

Int32s = npt.NDArray[np.int32]


def narrow_attention(
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
