"""Twin of `label_scores`: log-probabilities of labels among themselves, from the labels' rows of the head alone.

The softmax over L labels cancels the normaliser of the whole vocabulary, so this is exact.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.order import Float32s


def label_scores(
    hidden_ND: Float32s, head_LD: Float32s, bias_L: Float32s | None = None, scale: float = 1.0, softcap: float = 0.0
) -> npt.NDArray[np.float32]:
    """float32 [N, L]: log-softmax over the labels of softcap(scale x (h . w + b))."""
    z = head_logits(hidden_ND, head_LD, bias_L, scale, softcap)
    z = z - z.max(axis=1, keepdims=True)
    found: Float32s = (z - np.log(np.exp(z).sum(axis=1, keepdims=True))).astype(np.float32)
    return found


def head_logits(
    hidden_ND: Float32s, head_LD: Float32s, bias_L: Float32s | None, scale: float, softcap: float
) -> npt.NDArray[np.float64]:
    """float64 [N, L] logits of some rows of the head."""
    z = hidden_ND.astype(np.float64) @ head_LD.astype(np.float64).T
    if bias_L is not None:
        z = z + bias_L
    z = z * scale
    return np.asarray(softcap * np.tanh(z / softcap) if softcap else z, np.float64)
