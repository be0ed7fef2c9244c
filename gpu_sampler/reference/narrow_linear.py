"""Twin of `narrow_linear`: a linear layer, or two of which one gates the other, in float64.

Shape legend: M rows, N columns of the output, K width of a row.
"""

import numpy as np

from gpu_sampler.reference.label_scores import Float64s
from gpu_sampler.reference.order import Float32s


def narrow_linear(
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
