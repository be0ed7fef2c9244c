"""Checks bounds by count and by mass, draws among what they keep, rejection of many rounds, and the scan after it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

import gpu_sampler.kernels.gumbel as drawing
import gpu_sampler.kernels.nucleus_fallback as fallback_kernel
import gpu_sampler.reference.filters as reference_filters
import tests.support.agreement as agreement
from gpu_sampler.kernels.common import LOG2_E, RowLogits
from gpu_sampler.kernels.nucleus_fallback import ValueScale, bound_of, draw_kept, reach
from gpu_sampler.kernels.philox import NoiseKey
from gpu_sampler.output import RowFlag
from gpu_sampler.reference.filters import first, nucleus_scan
from gpu_sampler.reference.softmax_stats import softmax_stats
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.workspace import DRAWS
from tests.support.edges import pair_of_samplers, values

MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
OFF = float("-inf")
Float32s = npt.NDArray[np.float32]


@triton.jit
def _scan_kernel(
    logits, row_stride, side_ids, side, side_stride, length, numbers, top_ks, seeds, counts, masses, tokens, V,
    ID_BITS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A row's k-th key if top_k > 0, else the end of its nucleus; then all that it keeps, and one draw of that."""
    r = tl.program_id(0)
    own = side + r * side_stride if SIDE else None
    row = RowLogits(logits + r * row_stride, side_ids + r * side_stride, own, length, None, -1, 0, V)
    temperature = tl.load(numbers + 5 * r + 1)
    unit = ValueScale(tl.load(numbers + 5 * r), temperature, (1.0 / temperature) * LOG2_E)
    top_k = tl.load(top_ks + r)
    log_min_p = tl.load(numbers + 5 * r + 4)
    if top_k > 0:
        bound = bound_of(row, unit, top_k, ID_BITS, False)
    else:
        wanted = tl.load(numbers + 5 * r + 2) * tl.load(numbers + 5 * r + 3)
        bound = bound_of(row, unit, wanted, ID_BITS, True)
    count, mass = reach(row, unit, bound, log_min_p)
    noise_key = NoiseKey(tl.load(seeds + r).to(tl.uint64, bitcast=True), 3, 1)
    token, _ = draw_kept(row, unit, bound, log_min_p, noise_key, 2)
    tl.store(counts + r, count)
    tl.store(masses + r, mass)
    tl.store(tokens + r, token)


Case = tuple[str, float, int, float, float]  # kind, temperature, top_k, top_p, min_p
CASES: list[Case] = [
    ("smooth", 1.0, 1, 1.0, 0.0),
    ("tied", 0.7, 64, 1.0, 0.0),
    ("tied", 1.0, 257, 1.0, 0.0),
    ("flat", 1.0, 100, 1.0, 0.0),
    ("almost flat", 1.7, 300, 1.0, 0.9),
    ("blocks", 1.0, 9, 1.0, 0.0),
    ("flat", 1.0, 0, 0.75, 0.0),
    ("flat", 1.0, 0, 1e-9, 0.0),
    ("almost flat", 1.0, 0, 0.3, 0.0),
    ("smooth", 0.5, 0, 0.95, 0.0),
    ("steep", 1.0, 0, 0.9, 0.0),
    ("one", 1.0, 0, 0.5, 0.0),
    ("almost flat", 1.0, 0, 0.99, 0.97),
]


def scanned(device: str, rows_RV: Float32s, singles: npt.NDArray[np.int64], off: int = 0) -> list[Any]:
    """[(count, mass, token)] of a row a case; its `singles` are given as a side list. `off` is added to top_k."""
    count, size = rows_RV.shape
    held = rows_RV.copy()
    held[:, singles] = -np.inf
    sides = rows_RV[:, singles] if len(singles) else np.zeros((count, 1), np.float32)
    numbers = np.array(
        [
            (z_V.max(), t, p, softmax_stats(z_V, t).total(t), np.log(m) if m > 0 else OFF)
            for z_V, (_, t, _, p, m) in zip(rows_RV, CASES, strict=True)
        ],
        np.float32,
    )

    def on(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    ids = np.tile(singles if len(singles) else np.zeros(1, np.int64), (count, 1)).astype(np.int32)
    counts, tokens = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2))
    masses = torch.zeros(count, device=device)
    top_ks = np.array([k + off * (k > 0) for _, _, k, _, _ in CASES], np.int32)
    _scan_kernel[(count,)](
        on(held),
        size,
        on(ids),
        on(sides),
        ids.shape[1],
        len(singles),
        on(numbers),
        on(top_ks),
        torch.arange(count, device=device),
        counts,
        masses,
        tokens,
        size,
        ID_BITS=max(1, (size - 1).bit_length()),
        SIDE=len(singles) > 0,
        num_warps=8,
    )
    return list(zip(counts.tolist(), masses.tolist(), tokens.tolist(), strict=True))


def kept_by_reference(z_V: Float32s, case: Case) -> npt.NDArray[np.int64]:
    _, temperature, top_k, top_p, min_p = case
    log_min_p = float(np.log(min_p)) if min_p > 0 else OFF
    if not top_k:
        return nucleus_scan(z_V, temperature, top_p, log_min_p)
    ids = first(z_V, top_k)
    x = (z_V[ids].astype(np.float64) - z_V.max()) / temperature
    kept: npt.NDArray[np.int64] = ids[(z_V[ids] > -np.inf) & (x >= log_min_p)]
    return kept


def scans_agree(found: list[Any], rows_RV: Float32s) -> bool:
    """The number and the mass of what is kept are the reference's, and the token is one of it."""
    for (count, mass, token), z_V, case in zip(found, rows_RV, CASES, strict=True):
        kept = kept_by_reference(z_V, case)
        weights = np.exp((z_V[kept].astype(np.float64) - z_V.max()) / case[1])
        if count != len(kept) or abs(mass - weights.sum()) > 5e-6 * weights.sum():
            return False
        if token not in kept:
            return False
    return True


def scan_rows(size: int) -> Float32s:
    rng = np.random.default_rng(size)
    return np.stack([values(kind, size, rng) for kind, *_ in CASES])


LONG = [pytest.param(size, side, marks=pytest.mark.gpu) for size in (32_003, 151_936, 262_144) for side in (0, 40)]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("size", "side"), [(1111, 0), (700, 40), *LONG])
def test_bounds_keep_what_the_reference_keeps(device: str, size: int, side: int) -> None:
    rows = scan_rows(size)
    singles = np.random.default_rng(1).choice(size, side, replace=False)
    assert scans_agree(scanned(device, rows, singles), rows)


@pytest.mark.full
def test_bound_of_another_k_fails_the_same_check(device: str) -> None:
    rows, none = scan_rows(700), np.empty(0, np.int64)
    assert not scans_agree(scanned(device, rows, none, off=1), rows)


def test_draw_among_the_kept_is_the_reference_and_another_mass_is_seen(device: str) -> None:
    rows = scan_rows(700)
    found = scanned(device, rows, np.empty(0, np.int64))
    agreed = 0
    for number, ((_, _, token), z_V, case) in enumerate(zip(found, rows, CASES, strict=True)):
        row = reference_filters.Row(z_V, float(z_V.max()), case[1], 0, 1, 0, np.uint64(number), 1, 3, np.empty(0, int))
        kept = kept_by_reference(z_V, case)
        agreed += token == reference_filters._draw_kept([row], [kept], round_=2)[0]
    assert agreed == len(CASES)
    assert scans_agree(found, rows)
    assert not scans_agree([(count, mass * 1.0001, token) for count, mass, token in found], rows)


def rounds_of(sampler: Sampler, slot: int, z_V: Float32s) -> int:
    """How many draws the reference needs for a row."""
    row: Any = agreement.reference_row(z_V, sampler.state, slot)
    stats = softmax_stats(row.others_V, row.temperature)
    kept = set(nucleus_scan(row.z_V, row.temperature, row.top_p, row.log_min_p).tolist())
    draws = (agreement.two_level(row, stats, round_)[0] for round_ in range(reference_filters.MAX_DRAWS))
    return next(
        (round_ for round_, token in enumerate(draws, start=1) if token in kept), reference_filters.MAX_DRAWS + 1
    )


def refused_rows(device: str, mode: LogprobsMode, count: int, size: int, params: dict[str, Any]) -> Any:
    """(samplers, logits) of rows that keep about one token in ten of many that weigh almost the same."""
    rng = np.random.default_rng(size)
    rows = np.stack([values("almost flat", size, rng) for _ in range(count)])
    pair = pair_of_samplers(count + 1, size, device, mode)
    for slot in range(1, count + 1):
        for sampler in pair:
            sampler.admit(slot, SamplingParams(logprobs=2, **params), [], seed=slot)
    return *pair, rows


OF_MANY: list[dict[str, Any]] = [{"top_p": 0.12}, {"min_p": 0.89}, {"top_p": 0.9, "min_p": 0.89}]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("params", OF_MANY, ids=str)
def test_rows_that_refuse_many_draws_agree(device: str, params: dict[str, Any]) -> None:
    ours, reference, rows = refused_rows(device, "raw_logprobs", 4, 3001, params)
    most = max(rounds_of(reference, slot, z_V) for slot, z_V in enumerate(rows, start=1))
    assert most > DRAWS + 4  # beyond those that one read judges
    found = agreement.step_agrees(ours, reference, torch.from_numpy(rows).to(device), range(1, 5))
    assert found.holds and RowFlag.REJECTION in found.flags, found


@pytest.mark.gpu
@pytest.mark.parametrize("params", [*OF_MANY, {"top_p": 0.01}, {"top_p": 0.03, "min_p": 0.8}], ids=str)
@pytest.mark.parametrize("size", [32_003, 151_936])
def test_many_rows_that_refuse_many_draws_agree(device: str, size: int, params: dict[str, Any]) -> None:
    ours, reference, rows = refused_rows(device, "raw_logprobs", 200, size, params)
    found = agreement.step_agrees(ours, reference, torch.from_numpy(rows).to(device), range(1, 201))
    assert found.holds and RowFlag.REJECTION in found.flags, found


def test_row_with_few_tokens_above_min_p_is_listed_however_wide_its_nucleus(device: str) -> None:
    """Top-p alone would keep 2,700 tokens, min-p 100: the route is that of what both keep."""
    ours, reference, rows = refused_rows(device, "raw_logprobs", 4, 3001, {"top_p": 0.9, "min_p": 0.93})
    found = agreement.step_agrees(ours, reference, torch.from_numpy(rows).to(device), range(1, 5))
    assert found.holds and not found.flags, found


FEW_DRAWS = 8


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("params", "mode"), list(zip(OF_MANY, (*MODES, MODES[0]), strict=True)), ids=str)
def test_row_that_used_up_its_draws_is_scanned(
    device: str, params: dict[str, Any], mode: LogprobsMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is drawn by rejection only if it keeps more than 256 tokens, so that 4,096 draws miss them all once in
    10^60 rows of this size. The interpreter reads the limit when it runs; compiled, the next test's long rows do."""
    if device == "cuda":
        pytest.skip("the limit is compiled in")
    ours, reference, rows = refused_rows(device, mode, 8, 3001, params)
    used_up = [rounds_of(reference, slot, z_V) > FEW_DRAWS for slot, z_V in enumerate(rows, start=1)]
    assert any(used_up)
    monkeypatch.setattr(reference_filters, "MAX_DRAWS", FEW_DRAWS)
    monkeypatch.setattr(agreement, "MAX_DRAWS", FEW_DRAWS)
    for module in (drawing, fallback_kernel):
        monkeypatch.setattr(module, "_MAX_DRAWS", tl.constexpr(FEW_DRAWS))
    found = agreement.step_agrees(ours, reference, torch.from_numpy(rows).to(device), range(1, 9))
    assert found.holds and RowFlag.NUCLEUS_SCAN in found.flags, found


@pytest.mark.gpu
@pytest.mark.parametrize("params", [{"top_p": 256.5 / 262_144}, {"min_p": 1.0}], ids=str)
def test_long_rows_that_used_up_their_draws_are_scanned(device: str, params: dict[str, Any]) -> None:
    """257 of 262,144 equal tokens are kept, so that 4,096 draws miss them all in one row of 56: of 256 rows without
    log-probabilities those that were scanned are flagged, and the first four of them are the reference's."""
    size, rows = 262_144, 256
    z_V = np.full(size, np.float32(-3))
    z_V[np.random.default_rng(2).choice(size, 257, replace=False)] += np.float32("min_p" in params) / 1024
    ours, reference = pair_of_samplers(rows + 1, size, device, "raw_logprobs")
    for slot in range(1, rows + 1):
        for sampler in (ours, reference):
            sampler.admit(slot, SamplingParams(**params), [], seed=slot)
    logits = torch.from_numpy(z_V).to(device).expand(rows, size).contiguous()
    output = ours.fetch(ours.sample(logits, range(1, rows + 1))).result()
    scanned_rows = np.flatnonzero(output.flags & int(RowFlag.NUCLEUS_SCAN))
    assert len(scanned_rows) >= 1 and (output.flags & int(RowFlag.REJECTION)).all()
    slots = (scanned_rows[:4] + 1).tolist()
    expected = reference.sample(np.broadcast_to(z_V, (len(slots), size)), slots)
    assert output.tokens[scanned_rows[:4]].tolist() == expected.tokens.tolist()
    assert (expected.flags == output.flags[scanned_rows[:4]]).all()
