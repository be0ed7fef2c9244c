"""Reference of `softmax_stats`: maxima and sums of a row by groups of 128 ids."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

GROUP: Final = 128  # ids of a group; contiguous, which the group lemma of `sample` needs; part of RNG_VERSION
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class SoftmaxStats(NamedTuple):
    """Holds, by group, the largest value (-inf if there is none) and the sum of exp((z - largest) / T)."""

    maxima_G: Float64s
    sums_G: Float64s
    best: float  # the largest value of the row

    def log_weights(self, best: float, temperature: float) -> Float64s:
        """Returns ln of each group's sum of exp((z - best) / T), -inf for an empty group."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(self.sums_G) + (self.maxima_G - best) / temperature
        logs[self.sums_G == 0] = -np.inf
        return logs

    def total(self, temperature: float) -> float:
        """Returns the sum of exp((z - best) / T) over the row.

        It does not use `log_weights`: ln and exp would round the sum of equal tokens, and an exact tie at top_p would
        keep one token too many.
        """
        with np.errstate(invalid="ignore"):  # -inf - -inf where the row has nothing finite
            weights = self.sums_G * np.exp((self.maxima_G - self.best) / temperature)
        weights[self.sums_G == 0] = 0.0
        return float(weights.sum())


def softmax_stats(z_V: Float32s, temperature: float) -> SoftmaxStats:
    """Returns the statistics of a row that holds neither NaN nor +inf."""
    groups = grouped(z_V)
    maxima = groups.max(axis=1)
    safe = np.where(np.isneginf(maxima), 0.0, maxima)[:, None]
    sums = np.exp((groups - safe) / temperature).sum(axis=1)
    return SoftmaxStats(maxima, sums, float(maxima.max()))


def grouped(z_V: Float32s) -> Float64s:
    """Returns float64 [G, 128], the last group filled up with -inf."""
    count = -(-len(z_V) // GROUP)
    padded = np.full(count * GROUP, -np.inf)
    padded[: len(z_V)] = z_V
    return padded.reshape(count, GROUP)
