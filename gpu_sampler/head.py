"""Log-probabilities from hidden rows and the LM head without the logits [N, V]: kernels on CUDA, twins on a CPU.

Shape legend: N rows, V vocabulary, L labels, D width of a hidden row.
"""

import torch

from gpu_sampler.reference import head_logprob as twins
from gpu_sampler.reference import label_scores as label_twins
from gpu_sampler.reference.head_logprob import Rounding, TargetLogprobs

_LOGITS_AT_ONCE = 1 << 24  # of the twin, which holds them in float64


def head_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    round_logits: Rounding | None = None,
) -> TargetLogprobs:
    """Log-probability, rank, log-sum-exp, is-greedy and flags of one target a row, as tensors on the rows' device.

    Logits are cap(scale (h . w + b)), summed in fp32 and, with `round_logits`, rounded last as a head that stores
    16-bit logits would. Targets on the CPU are checked (ValueError); those on a device are not, since that would wait
    for it: one outside of [0, V) gives -inf and rank 0.
    """
    if targets_N.device.type == "cpu" and len(targets_N) and not 0 <= targets_N.min() <= targets_N.max() < len(head_VD):
        given = f"{int(targets_N.min())} to {int(targets_N.max())}"
        raise ValueError(f"`targets` must be in [0, {len(head_VD)}). Given: {given}.")
    if hidden_ND.is_cuda:
        from gpu_sampler.kernels.head_logprob import head_logprob as kernel

        targets_N = targets_N.to(hidden_ND.device)
        return kernel(hidden_ND, head_VD, targets_N, bias_V, scale, softcap, round_logits)
    head, bias = head_VD.float().numpy(), None if bias_V is None else bias_V.float().numpy()
    hidden, targets, step = hidden_ND.float().numpy(), targets_N.numpy(), max(1, _LOGITS_AT_ONCE // len(head_VD))
    parts = [
        twins.head_logprob(hidden[i : i + step], head, targets[i : i + step], bias, scale, softcap, round_logits)
        for i in range(0, max(1, len(hidden)), step)
    ]
    fields = (torch.cat([torch.from_numpy(x) for x in field]) for field in zip(*parts, strict=True))
    logprobs, ranks, log_sums, is_greedy, flags = fields
    return TargetLogprobs(logprobs, ranks, log_sums.float(), is_greedy, flags)


def label_scores(
    hidden_ND: torch.Tensor,
    head_LD: torch.Tensor,
    bias_L: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """f32 [N, L] log-probabilities among at most 128 labels, whose rows of the head (and bias) were gathered before.

    NaN and +inf count as -inf; a row with nothing finite has -inf everywhere.
    """
    if hidden_ND.is_cuda:
        from gpu_sampler.kernels.label_scores import label_scores as kernel

        return kernel(hidden_ND, head_LD, bias_L, scale, softcap)
    bias = None if bias_L is None else bias_L.float().numpy()
    head, hidden = head_LD.float().numpy(), hidden_ND.float().numpy()
    return torch.from_numpy(label_twins.label_scores(hidden, head, bias, scale, softcap))
