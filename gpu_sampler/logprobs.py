"""Computes log-probabilities for rows that nothing is sampled from.

Numpy arrays and tensors alike. Tensors on CUDA go through the sampler's kernels, everything else through float64 on the
CPU. Some functions take rows of logits, others hidden rows and the LM head, without the logits [N, V]. Nothing here
imports Triton before a tensor is on CUDA: a CPU service runs without it.

Shape legend: R rows of logits, N hidden rows (or the N of top-N), V vocabulary, C ids a row, L labels, D width of a
hidden row.
"""

from typing import Any

import numpy as np
import torch

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.reference import lm_head_logprob as reference
from gpu_sampler.reference.lm_head_logprob import Rounding, TargetLogprobs
from gpu_sampler.sampling_params import INVALID_TOKEN

_LOGITS_AT_ONCE = 1 << 24  # of the reference, which holds them in float64


def head_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    round_logits: Rounding | None = None,
) -> TargetLogprobs:
    """Computes the log-probability and rank of one target a row, from hidden rows and the whole LM head.

    Logits are cap(scale (h . w + b)), summed in fp32.

    Args:
        hidden_ND: [N, D] bf16, fp16 or f32.
        head_VD: [V, D] of the same type.
        targets_N: int ids [N].
        bias_V: [V] of any float type.
        scale: a factor of the logits.
        softcap: cap(z) = softcap tanh(z / softcap); 0 for none.
        round_logits: rounds the logits last, as a head that stores 16-bit logits would.

    Returns:
        Log-probability, rank, log-sum-exp, is-greedy and flags, as tensors on the rows' device. A target on a device
        outside of [0, V) gives -inf and rank 0: a check would wait for the device.

    Raises:
        ValueError: a target on the CPU is out of range, or the shapes do not belong together.
    """
    if targets_N.device.type == "cpu" and len(targets_N) and not 0 <= targets_N.min() <= targets_N.max() < len(head_VD):
        given = f"{int(targets_N.min())} to {int(targets_N.max())}"
        raise ValueError(f"`targets` must be in [0, {len(head_VD)}). Given: {given}.")
    if hidden_ND.is_cuda:
        from gpu_sampler.kernels.lm_head_logprob import head_logprob as kernel

        targets_N = targets_N.to(hidden_ND.device)
        return kernel(hidden_ND, head_VD, targets_N, bias_V, scale, softcap, round_logits)
    head, bias = head_VD.float().numpy(), None if bias_V is None else bias_V.float().numpy()
    hidden, targets, step = hidden_ND.float().numpy(), targets_N.numpy(), max(1, _LOGITS_AT_ONCE // len(head_VD))
    parts = [
        reference.head_logprob(hidden[i : i + step], head, targets[i : i + step], bias, scale, softcap, round_logits)
        for i in range(0, max(1, len(hidden)), step)
    ]
    fields = (torch.cat([torch.from_numpy(x) for x in field]) for field in zip(*parts, strict=True))
    logprobs, ranks, log_sums, is_greedy, flags = fields
    return TargetLogprobs(logprobs, ranks, log_sums.float(), is_greedy, flags)


def chosen_logprobs(logits: Any, ids: Any) -> tuple[Any, Any]:
    """Computes log-softmax of logits [R, V] at `ids` [R, C] (or [C], the same for every row).

    Returns:
        Log-probabilities f32 [R, C], -inf for an id outside of [0, V) and in a row without a finite value; and flags
        i32 [R], of RowFlag BAD_VALUE and NO_TOKEN. Both are of the kind, and on the device, of the logits.
    """
    if _by_kernels(logits):
        rows = _tensor(ids).to(logits.device, non_blocking=True)
        out = _report(logits, ids_RC=rows.expand(len(logits), -1) if rows.ndim == 1 else rows)
        return out.chosen_logprobs, out.flags
    z, flags = _clean(_tensor(logits))
    at = _tensor(ids).to(z.device, torch.int64)
    at = at.expand(z.shape[0], -1) if at.ndim == 1 else at
    inside = (at >= 0) & (at < z.shape[1])
    found = z.gather(1, at.clamp(0, z.shape[1] - 1)).masked_fill(~inside, -torch.inf)
    return _like(logits, _minus(found, _log_sums(z)), flags)


def token_logprobs(logits: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """Computes (log-probability f32 [R, 1], flags i32 [R], rank i32 [R]) of one token a row.

    Log-probabilities and flags are those of `chosen_logprobs`. The rank is 1-based, and 0 for INVALID_TOKEN and for
    a token of -inf.
    """
    if _by_kernels(logits):
        given = _report(logits, tokens_R=_tensor(tokens).to(logits.device, non_blocking=True))
        return given.logprobs[:, None], given.flags, given.ranks  # type: ignore[index]
    logprobs, flags = chosen_logprobs(logits, _tensor(tokens)[:, None])
    z, _ = _clean(_tensor(logits))
    at = _tensor(tokens).to(z.device, torch.int64)[:, None]
    value = z.gather(1, at.clamp(0, z.shape[1] - 1))
    ids = torch.arange(z.shape[1], device=z.device)
    ahead = ((z > value) | ((z == value) & (ids < at))).sum(1)
    known = (at[:, 0] >= 0) & (at[:, 0] < z.shape[1]) & (value[:, 0] > -torch.inf)
    ranks = torch.where(known, 1 + ahead, 0).to(torch.int32)
    return logprobs, flags, (ranks if isinstance(logits, torch.Tensor) else ranks.numpy())


def topk_logprobs(logits: Any, n: int) -> tuple[Any, Any]:
    """Lists (ids i32 [R, n], logprobs f32 [R, n]), the first n of the total order that have any probability.

    The lists are padded with INVALID_TOKEN and -inf.
    """
    if _by_kernels(logits):
        listed = _report(logits, n_top=n)
        return listed.top_ids, listed.top_logprobs
    z, _ = _clean(_tensor(logits))
    count = min(n, z.shape[1])
    first, values = _first(z, count)
    ids = torch.full((z.shape[0], n), INVALID_TOKEN, dtype=torch.int32, device=z.device)
    logprobs = torch.full((z.shape[0], n), -torch.inf, device=z.device)
    ids[:, :count] = first.to(torch.int32)
    logprobs[:, :count] = _minus(values, _log_sums(z))
    ids.masked_fill_(logprobs == -torch.inf, INVALID_TOKEN)
    return (ids, logprobs) if isinstance(logits, torch.Tensor) else (ids.numpy(), logprobs.numpy())


def label_logprobs(logits_RL: torch.Tensor) -> torch.Tensor:
    """Computes log-softmax over labels alone, f32 [R, L], from their logits.

    It is summed in float64 on the CPU and in float32 on a device, each row by itself. A row with NaN or +inf, or with
    nothing but -inf, is NaN throughout.
    """
    wide = torch.float64 if logits_RL.device.type == "cpu" else torch.float32
    return torch.log_softmax(logits_RL, 1, dtype=wide).float()


def _by_kernels(logits: Any) -> bool:
    """Returns whether our kernels compute the logits."""
    return isinstance(logits, torch.Tensor) and logits.is_cuda


def _report(logits_RV: torch.Tensor, **wanted: Any) -> SampleOutput:
    from gpu_sampler.device_logprobs import report  # needs Triton

    return report(logits_RV, **wanted)


def _tensor(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    host = np.ascontiguousarray(array)
    return torch.from_numpy(host if host.flags.writeable else host.copy())  # torch warns of read-only arrays


def _clean(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float64 on the CPU and float32 on a device, NaN and +inf as -inf; and flags i32 [R]."""
    z = logits_RV.to(torch.float64 if logits_RV.device.type == "cpu" else torch.float32)
    bad = ~(z < torch.inf)
    z = z.masked_fill(bad, -torch.inf)
    empty = (z == -torch.inf).all(1)
    flags = bad.any(1) * int(RowFlag.BAD_VALUE) + empty * int(RowFlag.NO_TOKEN)
    return z, flags.to(torch.int32)


def _first(z_RV: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids i64 [R, n], values [R, n]), the first n of the order, faster than by sorting rows.

    `topk` breaks ties in any way: it only says where the cut is, and the tokens at the cut are taken by lowest id.
    """
    if n == 0:
        return torch.empty((len(z_RV), 0), dtype=torch.int64, device=z_RV.device), z_RV[:, :0]
    cut = torch.topk(z_RV, n, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, level = z_RV > cut, z_RV == cut
    kept = above | (level & (level.cumsum(1) <= n - above.sum(1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(len(z_RV), n)
    order = torch.sort(z_RV.gather(1, ids), dim=1, descending=True, stable=True)
    return ids.gather(1, order.indices), order.values


def _log_sums(z_RV: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of each row's sum of exponentials, [R, 1]; -inf for a row without a finite value.

    On the CPU numpy sums a contiguous row pairwise and by itself: a row's floats do not depend on how many rows stand
    beside it, nor on its strides.
    """
    if z_RV.device.type != "cpu":
        return torch.logsumexp(z_RV, 1, keepdim=True)
    rows = np.ascontiguousarray(z_RV.detach().numpy())
    peaks = rows.max(axis=1, keepdims=True, initial=-np.inf)
    peaks = np.where(np.isfinite(peaks), peaks, 0)
    with np.errstate(divide="ignore"):
        return torch.from_numpy(peaks + np.log(np.exp(rows - peaks).sum(axis=1, keepdims=True)))


def _minus(values: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    found = (values - log_sums).to(torch.float32)
    return found.masked_fill(values == -torch.inf, -torch.inf)


def _like(given: Any, logprobs: torch.Tensor, flags: torch.Tensor) -> tuple[Any, Any]:
    return (logprobs, flags) if isinstance(given, torch.Tensor) else (logprobs.numpy(), flags.numpy())
