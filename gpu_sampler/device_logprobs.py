"""Reads log-probabilities off rows of logits on a device, with the sampler's kernels.

Shape legend: R rows, V vocabulary, C ids a row.
"""

import torch

from gpu_sampler.kernels import sample
from gpu_sampler.kernels.softmax_stats import softmax_stats
from gpu_sampler.output import OutputWords, SampleOutput
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.state.device_state import StatelessRows
from gpu_sampler.workspace import LogitRows, Workspace

MAX_TOP = 256  # the list holds one more


def report(
    logits_RV: torch.Tensor,
    *,
    tokens_R: torch.Tensor | None = None,
    n_top: int = 0,
    ids_RC: torch.Tensor | None = None,
) -> SampleOutput:
    """Computes raw log-probabilities on a device, by one read of the logits.

    Args:
        logits_RV: [R, V] of any float type.
        tokens_R: ids [R] whose log-probabilities and ranks are computed.
        n_top: how many first tokens of the order are listed, at most 256.
        ids_RC: ids [R, C] whose log-probabilities are computed.

    Returns:
        Tensors. Ids outside of [0, V) get -inf and rank 0.

    Raises:
        ValueError: `n_top` is out of range.
    """
    if not 0 <= n_top <= MAX_TOP:
        raise ValueError(f"`n` must be in [0, {MAX_TOP}]. Given: {n_top}.")
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
    state, work = StatelessRows.on(device), Workspace(rows, vocab, device, scoring=True)
    slots_R = state.slots if rows <= len(state.slots) else torch.zeros(rows, dtype=torch.int32, device=device)
    given = LogitRows(logits_RV, slots_R, state, work, side=False, processed=False)
    splits = softmax_stats(given, masked=False, targets_R=None if tokens_R is None else out.tokens)
    sample.report(given, out, ids_RC=_as_i32(ids_RC, vocab, device), splits=splits)
    return out


def _as_i32(ids: torch.Tensor, vocab: int, device: torch.device) -> torch.Tensor:
    """Returns ids of any integer type as the kernels take them; ids outside of [0, V) stay outside."""
    if ids.dtype != torch.int32:
        ids = ids.clamp(INVALID_TOKEN, vocab)
    return ids.to(device, torch.int32).contiguous()
