"""`sample`: what a list keeps, a draw of the whole row, and the route that each row takes whatever rows stand beside
it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import LOG2_E, RowLogits
from gpu_sampler.kernels.gumbel import log_weights, two_level
from gpu_sampler.kernels.philox import NoiseKey
from gpu_sampler.kernels.top_n import RowFilters, kept_of_list
from gpu_sampler.reference.filters import Row, first, kept_prefix
from gpu_sampler.reference.softmax_stats import softmax_stats
from gpu_sampler.sampler import LogprobsMode
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.workspace import LIST, NOTHING_PENDING, PENDING, PENDING_MASS, PENDING_REJECTION, PENDING_SCAN
from tests.support import agreement
from tests.support.edges import pair_of_samplers, values

_LIST: tl.constexpr = tl.constexpr(LIST)
OFF = float("-inf")
Float32s = npt.NDArray[np.float32]


@triton.jit
def _kept_kernel(keys, counts, numbers, top_ks, out, weights_out):
    r = tl.program_id(0)
    own = numbers + r * 5
    top_k = tl.load(top_ks + r)
    listed = tl.load(keys + r * _LIST + tl.arange(0, _LIST))
    filters = RowFilters(
        tl.load(own), tl.load(own + 1), top_k, tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
    )  # fmt: skip
    _, weights, kept = kept_of_list(listed, tl.load(counts + r), filters, top_k > 0)
    tl.store(out + r * _LIST + tl.arange(0, _LIST), kept.to(tl.int32))
    tl.store(weights_out + r, tl.sum(tl.where(kept, weights, 0.0), axis=0))


@triton.jit
def _draw_kernel(
    logits, V, G, side_ids, side, length, best, temperature, seeds, position, branch, tokens, drawn_values,
    GROUPS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    round_ = tl.program_id(0)
    at = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    z = tl.load(logits + at, mask=at < V, other=-float("inf"))
    m = tl.max(z, axis=1)
    scale = (1.0 / temperature) * LOG2_E
    s = tl.sum(tl.exp2((z - tl.where(m > -float("inf"), m, 0.0)[:, None]) * scale), axis=1)
    noise_key = NoiseKey(tl.load(seeds).to(tl.uint64, bitcast=True), position, branch)
    row = RowLogits(logits, side_ids, side if SIDE else None, length, None, -1, 0, V)
    weights = log_weights(m, s, best, temperature)
    token, value = two_level(row, weights, best, temperature, noise_key, round_, GROUPS)
    tl.store(tokens + round_, token)
    tl.store(drawn_values + round_, value)


def on(device: str, array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def kept_by_kernel(
    device: str, z_V: Float32s, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[int, float]:
    """(number of kept tokens, their weight) of the list of the whole row's first tokens."""
    ids = first(z_V, min(len(z_V), LIST))
    ids = ids[z_V[ids] > -np.inf]
    bits = z_V[ids].view(np.int32)
    keys = np.full(LIST, -(2**63))
    keys[: len(ids)] = (np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64) << 32) | (ids ^ 0xFFFFFFFF)
    total = softmax_stats(z_V, temperature).total(temperature)
    log_min_p = float(np.log(min_p)) if min_p > 0 else OFF
    numbers = np.array([z_V.max(), temperature, top_p, log_min_p, total], np.float32)
    out, weight = torch.zeros(LIST, dtype=torch.int32, device=device), torch.zeros(1, device=device)
    counts, top_ks = (on(device, np.array([x], np.int32)) for x in (len(ids), top_k))
    _kept_kernel[(1,)](on(device, keys), counts, on(device, numbers), top_ks, out, weight, num_warps=8)
    kept = out.cpu().numpy()
    number = int(kept.sum())
    assert kept[:number].all()  # a prefix
    return number, float(weight)


def kept_by_reference(z_V: Float32s, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[int, float]:
    ids = first(z_V, top_k or len(z_V))
    ids = ids[z_V[ids] > -np.inf]
    x = (z_V[ids].astype(np.float64) - float(z_V.max())) / temperature
    total = float(np.exp(x).sum())
    number = kept_prefix(x, total, top_p, float(np.log(min_p)) if min_p > 0 else -np.inf)
    return number, float(np.exp(x[:number]).sum())


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.01, 1.0])
def test_list_keeps_what_the_reference_keeps(device: str, top_p: float, min_p: float) -> None:
    """Equal values weigh 1 to both, so that a tie at p of 2^n or at min_p = 1 has one answer."""
    rng = np.random.default_rng(4)
    for kind in ("flat", "tied", "smooth", "one"):
        z_V = values(kind, 256, rng)
        for top_k in (0, 1, 64, 256) if kind != "smooth" or top_p != 1 - 2**-24 else ():
            for temperature in (1.0, 0.3):
                found = kept_by_kernel(device, z_V, temperature, top_k, top_p, min_p)
                expected = kept_by_reference(z_V, temperature, top_k, top_p, min_p)
                assert found[0] == expected[0], (kind, top_k, temperature)
                assert found[1] == pytest.approx(expected[1], rel=2e-6)


@pytest.mark.parametrize("fault", [(0, 1), (1e-3, 0)])
def test_list_of_another_k_or_p_is_seen(device: str, fault: tuple[float, int]) -> None:
    z_V = values("flat", 256, np.random.default_rng(4))
    found = kept_by_kernel(device, z_V, 1.0, 64 + fault[1], 0.75 + fault[0], 0.0)
    assert found[0] != kept_by_reference(z_V, 1.0, 64, 0.75, 0.0)[0]


def draws_of_kernel(device: str, row: Row, rounds: int, side: bool) -> tuple[list[int], Float32s]:
    groups = max(4, triton.next_power_of_2(-(-len(row.z_V) // 128)))
    singles = row.singles if side else np.zeros(1, np.int64)
    tokens = torch.zeros(rounds, dtype=torch.int32, device=device)
    drawn = torch.zeros(rounds, device=device)
    _draw_kernel[(rounds,)](
        on(device, row.others_V),
        len(row.z_V),
        groups,
        on(device, singles.astype(np.int32)),
        on(device, row.z_V[singles]),
        len(singles),
        row.best,
        row.temperature,
        on(device, np.array([row.seed]).view(np.int64)),
        row.position,
        row.branch,
        tokens,
        drawn,
        GROUPS=groups,
        SIDE=side,
        num_warps=8,
    )
    return tokens.tolist(), drawn.cpu().numpy()


def drawn_row(size: int, kind: str, singles: int, seed: int, temperature: float = 1.0) -> Row:
    rng = np.random.default_rng([size, seed])
    z_V, chosen = values(kind, size, rng), np.sort(rng.choice(size, singles, replace=False))
    z_V[chosen] += np.float32(2)
    return Row(z_V, float(z_V.max()), temperature, 0, 1.0, 0.0, np.uint64(2**63 + seed), 1, 7, chosen)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("kind", ["smooth", "tied", "blocks", "flat", "steep"])
@pytest.mark.parametrize(("size", "singles"), [(1, 0), (129, 0), (700, 5), (1111, 0)])
def test_draw_of_a_whole_row_is_the_reference_in_every_round(device: str, kind: str, size: int, singles: int) -> None:
    row = drawn_row(size, kind, singles, 3, 0.7)
    stats = softmax_stats(row.others_V, row.temperature)
    tokens, drawn = draws_of_kernel(device, row, 16, singles > 0)
    expected = [agreement.two_level(row, stats, round_) for round_ in range(16)]
    clear = [gap > agreement.SCORE_GAP for _, gap in expected]
    assert sum(clear) >= 15
    assert [t for t, sure in zip(tokens, clear, strict=True) if sure] == [
        t for (t, _), sure in zip(expected, clear, strict=True) if sure
    ]
    assert (drawn == row.z_V[tokens]).all()


def test_draw_of_another_round_is_seen(device: str) -> None:
    row = drawn_row(700, "smooth", 0, 3)
    stats = softmax_stats(row.z_V, 1.0)
    tokens, _ = draws_of_kernel(device, row, 16, False)
    assert tokens != [agreement.two_level(row, stats, round_ + 1)[0] for round_ in range(16)]


NOTHING, TO_REJECT, TO_SCAN, TO_REPORT = (
    int(x.value) for x in (NOTHING_PENDING, PENDING_REJECTION, PENDING_SCAN, PENDING_MASS)
)
ROUTES: list[tuple[dict[str, Any], str, int, int]] = [  # params, kind of values, pending raw, pending processed
    ({"temperature": 0, "logprobs": 1}, "flat", NOTHING, NOTHING),
    ({"logprobs": 1}, "smooth", NOTHING, NOTHING),
    ({"top_k": 256, "logprobs": 1}, "smooth", NOTHING, NOTHING),
    ({"top_k": 257, "logprobs": 1}, "smooth", TO_SCAN, TO_SCAN),
    ({"top_p": 0.9, "logprobs": 1}, "steep", NOTHING, NOTHING),
    ({"top_p": 0.9, "logprobs": 1}, "flat", TO_REJECT, TO_REJECT),
    ({"top_p": 0.9, "min_p": 0.1, "logprobs": 1}, "flat", TO_REJECT, TO_REJECT),
    ({"min_p": 0.1, "logprobs": 1}, "steep", NOTHING, NOTHING),
    ({"min_p": 0.1, "logprobs": 1}, "almost flat", NOTHING, TO_REPORT),
    ({"min_p": 0.1}, "almost flat", NOTHING, NOTHING),
    ({"top_p": 0.9}, "none", NOTHING, NOTHING),
]


def pending_of(device: str, mode: LogprobsMode, chosen: list[int], rows: int) -> list[int]:
    """Returns what `sample` leaves for `nucleus_fallback` in a batch of `rows` rows, first the chosen routes."""
    size = 700
    ours, _ = pair_of_samplers(rows + 1, size, device, mode)
    picked = [ROUTES[i] for i in [*chosen, *range(rows - len(chosen))][:rows]]
    logits = [values(kind, size, np.random.default_rng(5)) for _, kind, _, _ in picked]
    for slot, (params, *_) in enumerate(picked, start=1):
        ours.admit(slot, SamplingParams(**params), [], seed=slot)
    ours.sample(on(device, np.stack(logits)), range(1, rows + 1))
    on_device: Any = ours._triton
    found: list[int] = on_device.reserve(rows).ints[: len(chosen), PENDING.value].tolist()
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_route_of_a_row_is_its_own_and_unchanged_by_neighbours(device: str, mode: LogprobsMode) -> None:
    expected = [route[3 if mode == "processed_logprobs" else 2] for route in ROUTES]
    everyone = list(range(len(ROUTES)))
    assert pending_of(device, mode, everyone, len(ROUTES)) == expected
    assert pending_of(device, mode, everyone[::-1], len(ROUTES)) == expected[::-1]
    for i in (3, 5, 8):
        assert pending_of(device, mode, [i], 1) == [expected[i]]
