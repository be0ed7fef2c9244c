"""Computes log-probabilities of one row, raw or processed: of the drawn token, of the first tokens, of chosen ids.

All come from one formula, so that a token has the same float wherever it is reported.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.filters import Int64s, first, rank
from gpu_sampler.reference.softmax_stats import Float32s
from gpu_sampler.sampling_params import INVALID_TOKEN


class View(NamedTuple):
    """Says which numbers of a row are reported: (`values_V` - `shift`) / `temperature` - `log_sum`.

    Ranks count in the order of `values_V`. With `kept`, all other tokens have -inf.
    """

    values_V: Float32s
    log_sum: float  # of the scaled values
    shift: float
    temperature: float
    kept: Int64s | None

    def logprobs(self, ids: Int64s) -> Float32s:
        """Returns float32 [n]; -inf for removed tokens and for ids outside of the vocabulary."""
        inside = (ids >= 0) & (ids < len(self.values_V))
        safe = np.where(inside, ids, 0)
        values = self.values_V[safe].astype(np.float64)
        # -inf - -inf where the row has nothing finite; -inf where a difference leaves the range of float32
        with np.errstate(invalid="ignore", over="ignore"):
            found = ((values - self.shift) / self.temperature - self.log_sum).astype(np.float32)
        out = inside & (values > -np.inf)
        if self.kept is not None:
            out &= np.isin(safe, self.kept)
        return np.where(out, found, np.float32(-np.inf))

    def top(self, n: int) -> tuple[npt.NDArray[np.int32], Float32s]:
        """Returns the first n of the order, removed ones at -inf, then INVALID_TOKEN where no finite value is left."""
        ids = np.full(n, INVALID_TOKEN, np.int64)
        found = first(self.values_V, n)
        ids[: len(found)] = found
        ids[: len(found)][self.values_V[found] == -np.inf] = INVALID_TOKEN
        return ids.astype(np.int32), self.logprobs(ids)

    def rank(self, token: int) -> int:
        """Returns the 1-based place of a token."""
        return rank(self.values_V, token)


def raw_view(z_V: Float32s) -> View:
    """Views log-softmax of the logits as the model gave them, T = 1, no filter."""
    best = max(float(z_V.max()), float(np.finfo(np.float32).min))  # taken off first: finite in an empty row too
    with np.errstate(divide="ignore"):
        log_sum = float(np.log(np.exp(z_V.astype(np.float64) - best).sum()))
    return View(z_V, log_sum, best, 1.0, None)


def processed_view(z_V: Float32s, temperature: float, kept: Int64s | None) -> View:
    """Views the row after all steps: at its temperature, over its kept tokens. Greedy rows have T = 1 and no filter.

    `z_V` is the row after penalties.
    """
    if temperature == 0:
        return raw_view(z_V)
    best = float(z_V.max())
    values = (z_V if kept is None else z_V[kept]).astype(np.float64)
    log_sum = float(np.log(np.exp((values - best) / temperature).sum()))
    return View(z_V, log_sum, best, temperature, kept)
