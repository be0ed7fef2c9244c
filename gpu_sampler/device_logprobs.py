"""Log-probabilities of rows of logits on a device, by the sampler's own kernels: what `logprobs.py` does there.

Shape legend: R rows, V vocabulary, N top-N, C ids a row.
"""

import torch

from gpu_sampler.kernels.count_ahead import rank_drawn
from gpu_sampler.kernels.row_stats import row_stats
from gpu_sampler.kernels.select import AloneImage, report_alone
from gpu_sampler.output import OutputWords, SampleOutput
from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.workspace import Workspace

MOST_TOP = 256  # the list holds one more


def report(
    logits_RV: torch.Tensor,
    *,
    tokens_R: torch.Tensor | None = None,
    n_top: int = 0,
    ids_RC: torch.Tensor | None = None,
) -> SampleOutput:
    """Raw log-probabilities and ranks of `tokens_R` (if given), the first `n_top` <= 256 tokens, and those of `ids_RC`.

    One read of the logits, and another one where a token's rank is asked for. Ids outside of [0, V) get -inf, rank 0.
    """
    if not 0 <= n_top <= MOST_TOP:
        raise ValueError(f"`n` must be in [0, {MOST_TOP}]. Given: {n_top}.")
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    if logits_RV.stride(1) != 1 and vocab > 1:
        logits_RV = logits_RV.contiguous()
    if ids_RC is None:
        ids_RC = torch.empty((rows, 0), dtype=torch.int32, device=device)
    ids_RC = ids_RC.clamp(INVALID_TOKEN, vocab).to(device, torch.int32)
    out = OutputWords.empty(rows, n_top, ids_RC.shape[1], device).split()
    if tokens_R is None:
        out.tokens.fill_(INVALID_TOKEN)
    else:
        out.tokens.copy_(tokens_R.clamp(INVALID_TOKEN, vocab))
    if rows == 0:
        return out
    image, work = AloneImage.on(device), Workspace(rows, vocab, device, alone=True)
    slots_R = torch.zeros(rows, dtype=torch.int32, device=device)
    row_stats(logits_RV, slots_R, image.table, None, work, processed=False)
    report_alone(logits_RV, slots_R, image, work, out, ids_RC)
    if tokens_R is not None:
        rank_drawn(logits_RV, slots_R, image, work, out, side=False, processed=False, masked=False)
    return out
