"""The exact kept set of rows: the whole row sorted, masses summed in the total order, cut by top-p, then min-p.

Used where a nucleus is too wide to list: by rejection as its membership test, and for the kept mass that processed
log-probabilities need. Shape legend: R rows, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.keys import First, first_of_order, row_keys

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class Cut(NamedTuple):
    kept_RC: npt.NDArray[np.bool_]  # of the tokens in the total order; a prefix
    mass_R: Float64s  # of the kept tokens, relative to exp(max / T)


class Nucleus(NamedTuple):
    first: First  # [R, V] the whole total order
    cut: Cut


def cut_first(
    first: First,
    max_R: Float64s,
    temperatures_R: npt.NDArray[np.floating],
    top_p_R: Float32s,
    min_p_R: Float32s,
    total_R: Float64s | None,
) -> Cut:
    """Steps 5 and 6 on the first C tokens: a token stays iff the mass strictly before it is below p of `total` (None:
    of these tokens), the first always, and iff its value reaches max + T ln(min_p). Sums run in order, so that columns
    of no mass at the end change nothing."""
    t_R1 = temperatures_R.astype(np.float64)[:, None]
    above_RC = first.values_RC.astype(np.float64) - max_R[:, None]
    through_RC = np.cumsum(np.exp(above_RC / t_R1), axis=1)
    total_R1 = (through_RC[:, -1] if total_R is None else total_R)[:, None]
    before_RC = np.zeros_like(through_RC)
    before_RC[:, 1:] = through_RC[:, :-1]
    p_R1 = top_p_R.astype(np.float64)[:, None]
    kept_RC = (p_R1 >= 1) | (before_RC < p_R1 * total_R1)
    kept_RC[:, :1] = True
    kept_RC &= (first.values_RC > -np.inf) & (above_RC >= least_above(temperatures_R, min_p_R)[:, None])
    count_R = kept_RC.sum(axis=1)
    last_R1 = np.maximum(count_R - 1, 0)[:, None]
    return Cut(kept_RC, np.where(count_R > 0, np.take_along_axis(through_RC, last_R1, axis=1)[:, 0], 0.0))


def least_above(temperatures_R: npt.NDArray[np.floating], min_p_R: Float32s) -> Float64s:
    """float64 [R] T ln(min_p), -inf where min_p is 0: how far below the maximum a token may be."""
    with np.errstate(divide="ignore"):
        return temperatures_R.astype(np.float64) * np.log(min_p_R.astype(np.float64))


def nucleus_scan(
    values_RV: Float32s,
    max_R: Float64s,
    temperatures_R: npt.NDArray[np.floating],
    top_p_R: Float32s,
    min_p_R: Float32s,
) -> Nucleus:
    """The kept set of rows without top-k."""
    first = first_of_order(row_keys(values_RV), values_RV.shape[1])
    return Nucleus(first, cut_first(first, max_R, temperatures_R, top_p_R, min_p_R, None))
