"""Reference of the scan in `nucleus_fallback`: how many first tokens of the total order a row keeps."""

import numpy as np

from gpu_sampler.reference.softmax_stats import Float64s
from gpu_sampler.reference.total_order import Float32s, Int64s, first


def kept_prefix(x_n: Float64s, total: float, top_p: float, log_min_p: float) -> int:
    """Returns how many candidates stay, at least one.

    A token stays if and only if the mass strictly before it is below top_p x total and x >= ln(min_p).

    Args:
        x_n: (z - best) / T of candidates in order.
        total: the mass that top-p refers to, in units of exp(0) for the best token.
        top_p: 1 = off.
        log_min_p: -inf = off.
    """
    stays = x_n >= log_min_p
    if top_p < 1:
        weights = np.exp(x_n)
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        stays &= before < top_p * total
    return max(1, len(stays) if stays.all() else int(stays.argmin()))


def nucleus_scan(z_V: Float32s, temperature: float, top_p: float, log_min_p: float) -> Int64s:
    """Returns ids of the kept tokens of a row without top-k, in the total order."""
    order = first(z_V, len(z_V))
    order = order[: max(1, int(np.count_nonzero(z_V > -np.inf)))]
    x = (z_V[order].astype(np.float64) - float(z_V[order[0]])) / temperature
    return order[: kept_prefix(x, float(np.exp(x).sum()), top_p, log_min_p)]
