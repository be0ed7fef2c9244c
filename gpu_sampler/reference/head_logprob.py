"""Twin of `head_logprob`: the full head, a log-softmax, and the target's place in the total order."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.label_scores import head_logits
from gpu_sampler.reference.order import Float32s, Int64s, rank


class TargetLogprobs(NamedTuple):
    logprobs: npt.NDArray[np.float32]  # [N]
    ranks: npt.NDArray[np.int32]  # [N], 1-based
    log_sums: npt.NDArray[np.float64]  # [N], log-sum-exp of the whole row


def head_logprob(
    hidden_ND: Float32s,
    head_VD: Float32s,
    targets_N: Int64s,
    bias_V: Float32s | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> TargetLogprobs:
    """Log-probability and rank of one target a row. Targets outside [0, V) raise ValueError."""
    if len(targets_N) and (targets_N.min() < 0 or targets_N.max() >= len(head_VD)):
        raise ValueError(f"`targets` must be in [0, {len(head_VD)}). Given: {targets_N.min()} to {targets_N.max()}.")
    z = head_logits(hidden_ND, head_VD, bias_V, scale, softcap)
    best = z.max(axis=1)
    sums = best + np.log(np.exp(z - best[:, None]).sum(axis=1))
    at = z[np.arange(len(z)), targets_N]
    ranks = [rank(row.astype(np.float32), int(target)) for row, target in zip(z, targets_N, strict=True)]
    return TargetLogprobs((at - sums).astype(np.float32), np.array(ranks, np.int32), sums)
