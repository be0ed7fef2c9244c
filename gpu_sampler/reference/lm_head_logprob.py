"""Reference of `head_logprob`: the full LM head, then a log-softmax.

Shape legend: N rows, V vocabulary, D width of a hidden row.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag
from gpu_sampler.reference.filters import Int64s, rank
from gpu_sampler.reference.softmax_stats import Float32s

Float64s = npt.NDArray[np.float64]


def head_logits(
    hidden_ND: Float32s, head_VD: Float32s, bias_V: Float32s | None, scale: float, softcap: float
) -> Float64s:
    """Returns logits float64 [N, V]: cap(scale (h . w + b)), cap(z) = softcap tanh(z / softcap)."""
    with np.errstate(invalid="ignore"):
        z_NV = hidden_ND.astype(np.float64) @ head_VD.astype(np.float64).T
        if bias_V is not None:
            z_NV = z_NV + bias_V
        z_NV = z_NV * scale
    return np.asarray(softcap * np.tanh(z_NV / softcap) if softcap else z_NV, np.float64)


def log_sums(z_NV: Float64s) -> Float64s:
    """Returns logarithms [N] of sums of exponentials; 0 for a row without a finite value: -inf minus it is -inf."""
    peak_N = z_NV.max(axis=1, initial=-np.inf)
    alive_N = peak_N > -np.inf
    peak_N = np.where(alive_N, peak_N, 0.0)
    totals_N = np.exp(z_NV - peak_N[:, None]).sum(axis=1)
    return np.asarray(peak_N + np.log(np.where(alive_N, totals_N, 1.0)), np.float64)


Rounding = Literal["bf16", "fp16"]


class TargetLogprobs(NamedTuple):
    """Holds the scores of one target a row: numpy arrays here, tensors from the kernel."""

    logprobs: Any  # f32 [N]; -inf where the target's logit is -inf
    ranks: Any  # i32 [N], 1-based place in the total order
    log_sums: Any  # [N], log-sum-exp of the whole row, -inf where nothing is finite; float64 here, f32 from the kernel
    is_greedy: Any  # bool [N], the target's logit is the row's largest
    flags: Any  # i32 [N], RowFlag BAD_VALUE and NO_TOKEN


def head_logprob(
    hidden_ND: Float32s,
    head_VD: Float32s,
    targets_N: Int64s,
    bias_V: Float32s | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    round_logits: Rounding | None = None,
) -> TargetLogprobs:
    """Computes log-probability and rank of one target a row; ValueError for a target outside of [0, V).

    Logits are those of `head_logits`, rounded last as a head that stores them in `round_logits` would. NaN and +inf
    count as -inf and flag their row.
    """
    if len(targets_N) and (targets_N.min() < 0 or targets_N.max() >= len(head_VD)):
        raise ValueError(f"`targets` must be in [0, {len(head_VD)}). Given: {targets_N.min()} to {targets_N.max()}.")
    z_NV = head_logits(hidden_ND, head_VD, bias_V, scale, softcap)
    if round_logits:
        z_NV = rounded(z_NV, round_logits)
    bad_NV = ~(z_NV < np.inf)  # NaN compares false too
    z_NV = np.where(bad_NV, -np.inf, z_NV)
    largest_N = z_NV.max(axis=1, initial=-np.inf)
    at_N = z_NV[np.arange(len(z_NV)), targets_N]
    empty_N = largest_N == -np.inf
    sums_N = log_sums(z_NV)
    ranks = [rank(row.astype(np.float32), int(target)) for row, target in zip(z_NV, targets_N, strict=True)]
    return TargetLogprobs(
        logprobs=(at_N - sums_N).astype(np.float32),
        ranks=np.array(ranks, np.int32),
        log_sums=np.where(empty_N, -np.inf, sums_N),
        is_greedy=(at_N.astype(np.float32) == largest_N.astype(np.float32)) & ~empty_N,
        flags=(bad_NV.any(axis=1) * RowFlag.BAD_VALUE | empty_N * RowFlag.NO_TOKEN).astype(np.int32),
    )


def rounded(z: Float64s, to: Rounding) -> Float64s:
    """Returns the nearest numbers of a 16-bit type, ties to even, by way of float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        z_f32 = z.astype(np.float32)
        if to == "fp16":
            return z_f32.astype(np.float16).astype(np.float64)
    bits = z_f32.view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(z), np.nan, bits.view(np.float32)).astype(np.float64)
