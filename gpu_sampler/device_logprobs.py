"""Log-probabilities of rows of logits on a device, by the sampler's own kernels: what `logprobs.py` does there.

Shape legend: R rows, V vocabulary, N top-N, C ids a row.
"""

import torch

from gpu_sampler.alone_image import AloneImage
from gpu_sampler.kernels.row_stats import row_stats
from gpu_sampler.kernels.select import report_alone
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

    One read of the logits, which also counts the ranks. Ids outside of [0, V) get -inf, rank 0.
    """
    if not 0 <= n_top <= MOST_TOP:
        raise ValueError(f"`n` must be in [0, {MOST_TOP}]. Given: {n_top}.")
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    if logits_RV.stride(1) != 1 and vocab > 1:
        logits_RV = logits_RV.contiguous()
    if ids_RC is None:
        ids_RC = torch.empty((rows, 0), dtype=torch.int32, device=device)
    out = OutputWords.empty(rows, n_top, ids_RC.shape[1], device).split()
    if tokens_R is None:
        out.tokens.fill_(INVALID_TOKEN)
    else:
        out = out._replace(tokens=_as_i32(tokens_R, vocab, device))
    if rows == 0:
        return out
    image, work = AloneImage.on(device), Workspace(rows, vocab, device, alone=True)
    slots_R = image.slots if rows <= len(image.slots) else torch.zeros(rows, dtype=torch.int32, device=device)
    targets_R = None if tokens_R is None else out.tokens
    splits = row_stats(logits_RV, slots_R, image.table, None, work, processed=False, targets_R=targets_R)
    report_alone(
        logits_RV, slots_R, image, work, out, _as_i32(ids_RC, vocab, device), splits if tokens_R is not None else 0
    )
    return out


def _as_i32(ids: torch.Tensor, vocab: int, device: torch.device) -> torch.Tensor:
    """Ids of any integer type as the kernels take them; what is outside of [0, V) stays outside."""
    if ids.dtype != torch.int32:
        ids = ids.clamp(INVALID_TOKEN, vocab)
    return ids.to(device, torch.int32).contiguous()
