"""Twin of `label_scores`: log-probabilities of labels among themselves, from the labels' rows of the head alone.

The softmax over L labels cancels the normaliser of the whole vocabulary, so this is exact.
Shape legend: N rows, L labels, D width of a hidden row.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.order import Float32s

Float64s = npt.NDArray[np.float64]


def label_scores(
    hidden_ND: Float32s, head_LD: Float32s, bias_L: Float32s | None = None, scale: float = 1.0, softcap: float = 0.0
) -> Float32s:
    """f32 [N, L]: log-softmax over the labels of `head_logits`.

    NaN and +inf count as -inf. A label of -inf scores -inf; a row with nothing finite has only such labels.
    """
    z_NL = head_logits(hidden_ND, head_LD, bias_L, scale, softcap)
    z_NL = np.where(z_NL < np.inf, z_NL, -np.inf)  # NaN compares false too
    return (z_NL - log_sums(z_NL)[:, None]).astype(np.float32)


def head_logits(
    hidden_ND: Float32s, head_LD: Float32s, bias_L: Float32s | None, scale: float, softcap: float
) -> Float64s:
    """float64 [N, L] logits cap(scale (h . w + b)) of some rows of the head; cap(z) = softcap tanh(z / softcap)."""
    with np.errstate(invalid="ignore"):
        z_NL = hidden_ND.astype(np.float64) @ head_LD.astype(np.float64).T
        if bias_L is not None:
            z_NL = z_NL + bias_L
        z_NL = z_NL * scale
    return np.asarray(softcap * np.tanh(z_NL / softcap) if softcap else z_NL, np.float64)


def log_sums(z_NV: Float64s) -> Float64s:
    """[N] logarithms of the sums of exponentials; 0 for a row without a finite value, so that -inf minus it is -inf."""
    peak_N = z_NV.max(axis=1, initial=-np.inf)
    alive_N = peak_N > -np.inf
    peak_N = np.where(alive_N, peak_N, 0.0)
    totals_N = np.exp(z_NV - peak_N[:, None]).sum(axis=1)
    return np.asarray(peak_N + np.log(np.where(alive_N, totals_N, 1.0)), np.float64)
