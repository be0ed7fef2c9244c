"""Twin of `narrow_rotation`: heads normed and turned by their token's position, in float64.

Shape legend: T tokens, H heads, D head dim.
"""

import numpy as np

from gpu_sampler.reference.label_scores import Float64s
from gpu_sampler.reference.order import Float32s


def narrow_rotation(
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
