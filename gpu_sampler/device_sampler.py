"""The torch sampler for a device: greedy, temperature, top-k and top-p rows without leaving it.

It serves CUDA until each op has its own kernel. Same law, total order, noise and routes as the reference, so the same
tokens, except where the two best perturbed values lie within 1e-4 of each other or a mass within 1e-5 of p Z. All rows
of a call run through the same operations with shapes that depend on (R, V) alone, and each row then takes the result of
its own branch, so that nothing of a row depends on its neighbours and the call can be part of a CUDA graph. Only where
some row may have a nucleus (branch `nucleus`) does the host wait, to learn whether one is wider than 256 tokens.

Shape legend: R rows, V vocabulary, G groups of 128 ids, C candidates of a row, N top-N, L chosen ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_sampler.device_draws import (
    Candidates,
    Row,
    by_rejection,
    first_candidates,
    from_candidates,
    greedy,
    group_weights,
    read,
    total_weight,
    two_level,
)
from gpu_sampler.device_noise import RowNoise
from gpu_sampler.device_state import DeviceRows, DeviceState, Slots
from gpu_sampler.output import LaunchPlan, RowFlag, SampleOutput
from gpu_sampler.params import INVALID_TOKEN, SamplingParams

MAX_CANDIDATES = 256
_SMALL_BUCKET = 64
_SORTED_AT_ONCE = 32  # rows whose nucleus is too wide: bounds the memory of their sort


class DeviceSample(NamedTuple):
    output: SampleOutput  # tensors; tokens INVALID_TOKEN where unresolved
    unresolved: Tensor  # bool [R]: not drawn here, the caller takes the row to the reference


class _Tokens(NamedTuple):
    tokens_R: Tensor  # i64
    unresolved_R: Tensor  # bool
    rejection_R: Tensor  # bool, drawn by rejection
    scanned_R: Tensor  # bool, of these the nucleus was listed in the end


def device_branch(params: SamplingParams) -> str | None:
    """`greedy`, `plain`, `candidates` or `nucleus`; None for a row that needs the reference. A function of the row's
    own parameters. Min-p is done here only where top-k bounds the candidates."""
    bans = params.bad_words_ids or (params.min_tokens > 0 and params.stop_token_ids)
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if params.logit_bias or bans or params.allowed_token_ids is not None or penalties != (1.0, 0.0, 0.0):
        return None
    if params.temperature == 0:
        return "greedy"
    if params.top_k > 0:
        return "candidates" if params.top_k <= MAX_CANDIDATES else None
    if params.min_p > 0:
        return None
    return "nucleus" if params.top_p < 1 else "plain"


class DeviceSampler:
    """Parameters, seeds and positions by slot on the device; `sample` reads no host value of them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._state = DeviceState(num_slots, self.device)

    def stage(self, slot: int, params: SamplingParams, seed: int, branch: int = 0, position: int = 0) -> None:
        """Sets everything of a slot, on the host; `position` is the index of the next token to draw."""
        self._state.stage(slot, params, seed, branch, position)

    def apply(self) -> None:
        """Brings what was staged to the device in one copy, in stream order; nothing staged, nothing done."""
        self._state.apply()

    def positions(self) -> Tensor:
        """i32 [num_slots] on the device."""
        return self._state.positions()

    def sample(
        self,
        logits_RV: Tensor,
        slots_R: Slots,
        plan: LaunchPlan,
        *,
        n_top: int | None = None,
        chosen_RL: Tensor | None = None,
        wait: bool = True,
    ) -> DeviceSample:
        """One token a row; each row's position advances by one. Of `plan` only which branches occur is used.

        `n_top` None: no log-probabilities. N: raw log-probability and rank of the token, and the first N tokens.
        `chosen_RL` i64 [R, L] on the device: ids to report too, -inf for those outside the vocabulary.
        `wait` False: the host never waits, and a row with a wide nucleus is left unresolved.
        """
        if logits_RV.ndim != 2 or logits_RV.shape[1] != self.vocab_size or logits_RV.device.type != self.device.type:
            got = f"{tuple(logits_RV.shape)} on {logits_RV.device}"
            raise ValueError(f"got logits {got}, expected (R, {self.vocab_size}) on {self.device}")
        if n_top is not None and not 0 <= n_top <= MAX_CANDIDATES:
            raise ValueError(f"got n_top {n_top}, expected 0 to {MAX_CANDIDATES}")
        slots = self._state.slots(slots_R)
        branches = {name for name, rows in plan.branches if len(rows)}
        if branches <= {"greedy"} and n_top is None and chosen_RL is None:
            drawn = self._greedy_only(logits_RV)
        else:
            top_k = self._state.largest_top_k(slots_R)
            drawn = self._mixed(logits_RV, self._state.rows(slots), branches, top_k, n_top, chosen_RL, wait)
        self._state.advance(slots)
        return drawn

    def _greedy_only(self, logits_RV: Tensor) -> DeviceSample:
        """One pass. A row with NaN or +inf is flagged and left unresolved: its maximum hides the finite ones."""
        best_R, tokens_R = logits_RV.max(dim=1)  # the first of equal values; NaN before all others
        bad_R, empty_R = ~(best_R < float("inf")), best_R == -float("inf")
        none_R = torch.zeros_like(bad_R)
        return _sample(_Tokens(tokens_R, bad_R, none_R, none_R), bad_R, empty_R)

    def _mixed(
        self,
        logits_RV: Tensor,
        rows: DeviceRows,
        branches: set[str],
        top_k: int | None,
        n_top: int | None,
        chosen_RL: Tensor | None,
        wait: bool,
    ) -> DeviceSample:
        row = read(logits_RV)
        candidates = None
        if branches & {"candidates", "nucleus"} or n_top:
            small = "nucleus" not in branches and top_k is not None and max(top_k, n_top or 0) <= _SMALL_BUCKET
            candidates = first_candidates(row, _SMALL_BUCKET if small else MAX_CANDIDATES)
        drawn = _draw(row, candidates, rows, branches, wait)
        sample = _sample(drawn, row.bad_R, row.empty_R)
        if n_top is None and chosen_RL is None:
            return sample
        return sample._replace(output=_with_logprobs(sample.output, row, candidates, n_top or 0, chosen_RL))


def _draw(row: Row, candidates: Candidates | None, rows: DeviceRows, branches: set[str], wait: bool) -> _Tokens:
    """Every row by its own branch; only branches that occur are computed."""
    none_R = torch.zeros_like(row.empty_R)
    drawn = _Tokens(greedy(row), none_R, none_R, none_R)
    noise = RowNoise(rows.seeds_R, rows.positions_R, rows.branches_R)
    temperatures_R1, sampled_R = rows.temperatures_R1, rows.temperatures_R1[:, 0] > 0
    filtered_R = sampled_R & ((rows.top_k_R1 > 0) | (rows.top_p_R1 < 1))[:, 0]
    weights_RG = group_weights(row, temperatures_R1) if branches & {"plain", "nucleus"} else None
    if "plain" in branches and weights_RG is not None:
        every_R = torch.arange(len(none_R), device=none_R.device)
        plain_R = two_level(row, weights_RG, temperatures_R1, noise, every_R)
        drawn = drawn._replace(tokens_R=torch.where(sampled_R & ~filtered_R, plain_R, drawn.tokens_R))
    if candidates is None or not branches & {"candidates", "nucleus"}:
        return drawn
    total_R1 = None if weights_RG is None else total_weight(row, weights_RG, temperatures_R1)
    found = from_candidates(candidates, row, rows, noise, total_R1)
    unresolved_R = filtered_R & ~found.fits_R
    drawn = drawn._replace(tokens_R=torch.where(filtered_R, found.tokens_R, drawn.tokens_R), unresolved_R=unresolved_R)
    if "nucleus" in branches and weights_RG is not None and wait:
        drawn = _resolve(drawn, row, weights_RG, rows, noise)
    return drawn


def _resolve(drawn: _Tokens, row: Row, weights_RG: Tensor, rows: DeviceRows, noise: RowNoise) -> _Tokens:
    """Draws the unresolved rows by rejection. The host waits to learn which they are."""
    tokens_R, scanned_R = drawn.tokens_R, drawn.scanned_R
    pending = drawn.unresolved_R.nonzero()[:, 0]
    for start in range(0, len(pending), _SORTED_AT_ONCE):
        part = pending[start : start + _SORTED_AT_ONCE]
        found = by_rejection(row.select(part), weights_RG[part], rows.select(part), noise.rows(part))
        tokens_R = tokens_R.index_copy(0, part, found.tokens_R)
        scanned_R = scanned_R.index_copy(0, part, found.scanned_R)
    return _Tokens(tokens_R, torch.zeros_like(drawn.unresolved_R), drawn.unresolved_R, scanned_R)


def _sample(drawn: _Tokens, bad_R: Tensor, empty_R: Tensor) -> DeviceSample:
    tokens_R = drawn.tokens_R.masked_fill(drawn.unresolved_R | empty_R, INVALID_TOKEN).to(torch.int32)
    flags_R = bad_R * int(RowFlag.BAD_VALUE) + empty_R * int(RowFlag.NO_TOKEN)
    flags_R += drawn.rejection_R * int(RowFlag.REJECTION) + drawn.scanned_R * int(RowFlag.NUCLEUS_SCAN)
    output = SampleOutput(tokens_R, None, None, None, None, None, flags_R.to(torch.int32))
    return DeviceSample(output, drawn.unresolved_R & ~empty_R)


def _with_logprobs(
    output: SampleOutput, row: Row, candidates: Candidates | None, n_top: int, chosen_RL: Tensor | None
) -> SampleOutput:
    """Raw log-probabilities, all from one formula, so that a token's is the same number in each place."""
    lse_R1 = row.best_R1.to(torch.float64) + torch.log(total_weight(row, group_weights(row, _one(row)), _one(row)))
    values_RV = row.logits_RGg.flatten(1)
    valid_R1 = (output.tokens >= 0)[:, None]
    tokens_R1 = output.tokens.to(torch.int64).clamp(min=0)[:, None]
    value_R1 = values_RV.gather(1, tokens_R1)
    ids = torch.arange(values_RV.shape[1], device=values_RV.device)
    ahead_RV = (values_RV > value_R1) | ((values_RV == value_R1) & (ids < tokens_R1))
    output = output._replace(
        logprobs=_logprobs(value_R1, lse_R1).masked_fill(~valid_R1, -float("inf"))[:, 0],
        ranks=torch.where(valid_R1, 1 + ahead_RV.sum(1, keepdim=True), 0)[:, 0].to(torch.int32),
    )
    if n_top and candidates is not None:
        values_RN, ids_RN = candidates.values_RC[:, :n_top], candidates.ids_RC[:, :n_top]
        output = output._replace(
            top_ids=ids_RN.masked_fill(values_RN == -float("inf"), INVALID_TOKEN).to(torch.int32),
            top_logprobs=_logprobs(values_RN, lse_R1),
        )
    if chosen_RL is not None:
        inside_RL = (chosen_RL >= 0) & (chosen_RL < values_RV.shape[1])
        chosen = _logprobs(values_RV.gather(1, chosen_RL.to(torch.int64) * inside_RL), lse_R1)
        output = output._replace(chosen_logprobs=chosen.masked_fill(~inside_RL, -float("inf")))
    return output


def _one(row: Row) -> Tensor:
    return torch.ones_like(row.best_R1)


def _logprobs(values: Tensor, lse_R1: Tensor) -> Tensor:
    """f32 value - logsumexp; -inf for a value of -inf, in a row with nothing finite too."""
    return (values.to(torch.float64) - lse_R1).to(torch.float32).masked_fill(values == -float("inf"), -float("inf"))
