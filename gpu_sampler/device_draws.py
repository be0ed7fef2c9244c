"""The draws of the torch sampler, one function a route, each on all rows given to it.

Shape legend: R rows, V vocabulary, G groups of 128 ids (g an id's place in its group), C candidates of a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpu_sampler.device_noise import RowNoise
from gpu_sampler.device_state import DeviceRows
from gpu_sampler.reference.philox import Purpose

GROUP = 128
MAX_DRAWS = 4096
DRAWS_AT_ONCE = 16
_MOST_NOISE = 4096  # rows x rounds at once: bounds the memory of their noise
_ID_MASK = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LOW = float("-inf")


class Row(NamedTuple):
    """Logits of R rows and their group maxima."""

    logits_RGg: Tensor  # f32 [R, G, 128], NaN and +inf as -inf, padded with -inf
    best_RG: Tensor  # f32 [R, G] maxima
    best_R1: Tensor  # f32 [R, 1] the row's maximum, 0 where nothing is finite
    empty_R: Tensor  # bool, nothing is finite
    bad_R: Tensor  # bool, there was NaN or +inf

    def select(self, rows: Tensor) -> "Row":
        return Row(*(field[rows] for field in self))


class Candidates(NamedTuple):
    """The first C tokens of the total order."""

    ids_RC: Tensor  # i64
    values_RC: Tensor  # f32, -inf beyond the last finite one


def first_of(mask_RN: Tensor) -> Tensor:
    """i64 [R, 1] index of the first True of each row, the last index where there is none (argmax promises no first)."""
    count = mask_RN.shape[-1]
    indices = torch.arange(count, device=mask_RN.device)
    return torch.where(mask_RN, indices, count - 1).amin(-1, keepdim=True)


def read(logits_RV: Tensor) -> Row:
    """The logits as fp32 groups."""
    padding = -logits_RV.shape[1] % GROUP
    values_RV = logits_RV.to(torch.float32)
    largest_R = values_RV.amax(1)
    values_RV = torch.where(values_RV < float("inf"), values_RV, _LOW)
    if padding:
        values_RV = torch.nn.functional.pad(values_RV, (0, padding), value=_LOW)
    logits_RGg = values_RV.view(len(values_RV), -1, GROUP)
    best_RG = logits_RGg.amax(2)
    best_R1 = best_RG.amax(1, keepdim=True)
    empty_R1 = best_R1 == _LOW
    return Row(logits_RGg, best_RG, best_R1.masked_fill(empty_R1, 0.0), empty_R1[:, 0], ~(largest_R < float("inf")))


def greedy(row: Row) -> Tensor:
    """i64 [R] the first token of the total order."""
    group_R1 = first_of(row.best_RG == row.best_R1)
    inside_Rg = row.logits_RGg.gather(1, group_R1[..., None].expand(-1, -1, GROUP))[:, 0]
    return (group_R1 * GROUP + first_of(inside_Rg == row.best_R1))[:, 0]


def group_weights(row: Row, temperatures_R1: Tensor) -> Tensor:
    """f32 [R, G] sums of exp((z - group maximum) / T), 0 where the group has nothing finite."""
    best_RG1 = row.best_RG.masked_fill(row.best_RG == _LOW, 0.0)[..., None]
    return torch.exp((row.logits_RGg - best_RG1) / _divisor(temperatures_R1)[..., None]).sum(2)


def total_weight(row: Row, weights_RG: Tensor, temperatures_R1: Tensor) -> Tensor:
    """f64 [R, 1] sum over the row of exp((z - maximum) / T)."""
    shift_RG = (row.best_RG - row.best_R1).to(torch.float64) / _divisor(temperatures_R1)
    return (weights_RG.to(torch.float64) * torch.exp(shift_RG)).sum(1, keepdim=True)


def two_level(
    row: Row, weights_RG: Tensor, temperatures_R1: Tensor, noise: RowNoise, at_R: Tensor, draw: int | Tensor = 0
) -> Tensor:
    """i64 [R] tokens of the unfiltered law: one Gumbel number a group, then one a token of the group that won.

    `at_R` are the rows to draw from, any of them more than once; all the other arguments but `draw` have one entry for
    each row there is. `draw` is the round of a rejection, [R, 1] or 0.
    """
    noise, divisor_R1, best_R1 = noise.rows(at_R), _divisor(temperatures_R1)[at_R], row.best_R1[at_R]
    scores_RG = torch.log(weights_RG[at_R]) + (row.best_RG[at_R] - best_R1) / divisor_R1
    noise_RG = noise.of_blocks(Purpose.SAMPLE_GROUP, torch.zeros_like(at_R), scores_RG.shape[1], draw)
    group_R = _first_best(scores_RG + noise_RG)[:, 0]
    first_R = group_R * GROUP
    scores_Rg = (row.logits_RGg[at_R, group_R] - best_R1) / divisor_R1
    scores_Rg = scores_Rg + noise.of_blocks(Purpose.SAMPLE_TOKEN, first_R, GROUP, draw)
    return first_R + _first_best(scores_Rg)[:, 0]


def first_candidates(row: Row, count: int) -> Candidates:
    """The first `count` tokens of the total order, by the group lemma: they lie in the first `count` groups ordered by
    (maximum, lower id), whatever the ties."""
    groups = row.best_RG.shape[1]
    group_ids_RC = _ids_of(torch.topk(_keys(row.best_RG, _arange(groups, row)), min(count, groups), dim=1).values)
    values_RCg = row.logits_RGg.gather(1, group_ids_RC[..., None].expand(-1, -1, GROUP))
    ids_RCg = group_ids_RC[..., None] * GROUP + _arange(GROUP, row)
    keys_RC = torch.topk(_keys(values_RCg, ids_RCg).flatten(1), min(count, values_RCg[0].numel()), dim=1).values
    return Candidates(_ids_of(keys_RC), _values_of(keys_RC))


class Drawn(NamedTuple):
    tokens_R: Tensor  # i64
    fits_R: Tensor  # bool, false where the nucleus may be wider than the candidates


def from_candidates(
    candidates: Candidates, row: Row, rows: DeviceRows, noise: RowNoise, total_R1: Tensor | None
) -> Drawn:
    """Top-k, then top-p, then min-p on the sorted candidates, then one Gumbel number for each that is left.

    `total_R1` is the weight of the whole row, the measure of p where there is no top-k; None if all rows have one.
    """
    divisor_R1 = _divisor(rows.temperatures_R1)
    above_RC = candidates.values_RC - row.best_R1
    limited_R1 = rows.top_k_R1 > 0
    places = _arange(above_RC.shape[1], row)
    inside_RC = (candidates.values_RC > _LOW) & (~limited_R1 | (places < rows.top_k_R1))
    masses_RC = torch.exp(above_RC.to(torch.float64) / divisor_R1) * inside_RC
    through_RC = masses_RC.cumsum(1)
    before_RC = torch.nn.functional.pad(through_RC[:, :-1], (1, 0))
    listed_R1 = through_RC[:, -1:]
    total_R1 = listed_R1 if total_R1 is None else torch.where(limited_R1, listed_R1, total_R1)
    nucleus_RC = (rows.top_p_R1 >= 1) | (before_RC < rows.top_p_R1 * total_R1) | (places == 0)
    least_R1 = torch.log(rows.min_p_R1) * divisor_R1
    kept_RC = inside_RC & nucleus_RC & (above_RC >= least_R1)
    scores_RC = (above_RC / divisor_R1 + noise.of_ids(Purpose.SAMPLE_TOKEN, candidates.ids_RC)).masked_fill(
        ~kept_RC, _LOW
    )
    tokens_R = candidates.ids_RC.gather(1, _first_best(scores_RC))[:, 0]
    all_listed_R1 = candidates.values_RC[:, -1:] == _LOW
    if above_RC.shape[1] >= row.logits_RGg[0].numel():
        all_listed_R1 = torch.ones_like(all_listed_R1)
    return Drawn(tokens_R, (limited_R1 | all_listed_R1 | (listed_R1 >= rows.top_p_R1 * total_R1))[:, 0])


class Rejected(NamedTuple):
    tokens_R: Tensor  # i64
    scanned_R: Tensor  # bool, no draw was accepted and the token was drawn from the listed nucleus


def by_rejection(row: Row, weights_RG: Tensor, rows: DeviceRows, noise: RowNoise) -> Rejected:
    """Tokens of nuclei too wide to list: draws of the unfiltered law, round by round, until one has less than p of the
    mass before it; after 4,096 rounds one Gumbel number a token of the nucleus. Each row takes its first accepted
    round, so the number of rounds tried at once changes nothing. The host waits after every block of rounds."""
    kept_RV = _nucleus(row, rows)
    tokens_R = torch.zeros_like(row.empty_R, dtype=torch.int64)
    pending = torch.arange(len(tokens_R), device=tokens_R.device)
    start, at_once = 0, DRAWS_AT_ONCE
    while start < MAX_DRAWS and len(pending):
        draws = torch.arange(start, min(start + at_once, MAX_DRAWS), device=pending.device)
        at, rounds = pending.repeat_interleave(len(draws)), draws.repeat(len(pending))[:, None]
        drawn = two_level(row, weights_RG, rows.temperatures_R1, noise, at, rounds)
        good = kept_RV[at, drawn].view(-1, len(draws))
        drawn = drawn.view(-1, len(draws)).gather(1, first_of(good))[:, 0]
        found = good.any(1)
        tokens_R[pending[found]] = drawn[found]
        pending, start = pending[~found], start + len(draws)
        at_once = max(at_once, min(2 * at_once, _MOST_NOISE // max(1, len(pending))))
    scanned_R = torch.zeros_like(row.empty_R)
    if len(pending):
        scanned_R[pending] = True
        zero = torch.zeros_like(pending)
        noise_RV = noise.rows(pending).of_blocks(Purpose.SAMPLE_TOKEN, zero, kept_RV.shape[1], MAX_DRAWS)
        above_RV = (row.logits_RGg[pending].flatten(1) - row.best_R1[pending]) / _divisor(rows.temperatures_R1[pending])
        tokens_R[pending] = _first_best((above_RV + noise_RV).masked_fill(~kept_RV[pending], _LOW))[:, 0]
    return Rejected(tokens_R, scanned_R)


def _nucleus(row: Row, rows: DeviceRows) -> Tensor:
    """bool [R, 128 G] whether the mass strictly before a token is below p of the whole: the whole row, sorted once."""
    values_RV = row.logits_RGg.flatten(1)
    keys_RV = _keys(values_RV, _arange(values_RV.shape[1], row)).sort(1, descending=True).values
    above_RV = (_values_of(keys_RV) - row.best_R1).to(torch.float64)
    through_RV = torch.exp(above_RV / _divisor(rows.temperatures_R1)).cumsum(1)
    before_RV = torch.nn.functional.pad(through_RV[:, :-1], (1, 0))
    kept_RV = (before_RV < rows.top_p_R1 * through_RV[:, -1:]) & (above_RV > _LOW)
    return torch.zeros_like(kept_RV).scatter(1, _ids_of(keys_RV), kept_RV)


def _divisor(temperatures_R1: Tensor) -> Tensor:
    """T, and 1 on greedy rows, whose draws are not used."""
    return torch.where(temperatures_R1 > 0, temperatures_R1, 1.0)


def _first_best(scores_RN: Tensor) -> Tensor:
    """i64 [R, 1] the first index of the largest score."""
    return first_of(scores_RN == scores_RN.amax(1, keepdim=True))


def _arange(count: int, row: Row) -> Tensor:
    return torch.arange(count, device=row.best_RG.device)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """i64 that sort as (value descending, id ascending) do, largest first: order-preserving bits << 32 | ~id."""
    bits = (values + 0.0).view(torch.int32)  # -0 + 0 is +0
    ordered = torch.where(bits < 0, bits ^ _MAGNITUDE, bits).to(torch.int64)
    return (ordered << 32) | (_ID_MASK - ids)


def _ids_of(keys: Tensor) -> Tensor:
    return _ID_MASK - (keys & _ID_MASK)


def _values_of(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return torch.where(ordered < 0, ordered ^ _MAGNITUDE, ordered).view(torch.float32)
