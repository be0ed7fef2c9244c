"""The torch sampler: its noise word for word, its tokens against a slow computation of the same noise, its routes, its
isolation of rows. The same tests run on CUDA with `-m gpu`, with those of its streams and speed at the end.

Its law is tested in test_law.py, on the CPU.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler import device_draws
from gpu_sampler.device_draws import first_candidates, read
from gpu_sampler.device_noise import Purpose, RowNoise, gumbels, philox_words
from gpu_sampler.device_sampler import DeviceSample, DeviceSampler, device_branch
from gpu_sampler.output import LaunchPlan, RowFlag
from gpu_sampler.params import SamplingParams
from gpu_sampler.testing.cases import coarse_logits
from gpu_sampler.testing.draws import DrawRow, LawCase, device_plan, reference_draws, rows_of, torch_draws
from gpu_sampler.testing.law import expected_logprobs, kept_tokens, total_order

ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SEEDS = (0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF)
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=256, min_p=0.01, temperature=1.7),
    SamplingParams(temperature=1.9, top_p=0.97),
    SamplingParams(temperature=1e-5),
]


def ids(words: list[int], device: str) -> list[torch.Tensor]:
    return [torch.tensor(word, device=device) for word in words]


@ON
@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_the_known_answers_of_random123(
    counter: list[int], seed: int, expected: list[int], device: str
) -> None:
    c0, c1, c2, c3 = ids(counter, device)
    assert [int(word) for word in philox_words((c0, c1, c2, c3), torch.tensor(seed, device=device))] == expected


def slow_words(counter: list[int], seed: int) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & 0xFFFFFFFF, (left >> 32) ^ c[3] ^ k[1], left & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def slow_gumbel(seed: int, position: int, branch: int, purpose: int, token: int, draw: int) -> float:
    word = slow_words([token >> 2, position, purpose << 16 | draw, branch], seed)[token & 3]
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2.0**-24)))


def slow_token(logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, position: int, branch: int) -> int:
    """The token by the routes of the design, one number at a time in float64."""
    values = [float(x) for x in logits]
    order = total_order(values)
    if params.temperature == 0:
        return order[0]
    temperature = max(params.temperature, 1e-6)

    def perturbed(tokens: list[int], draw: int) -> int:
        noise = {t: slow_gumbel(seed, position, branch, Purpose.SAMPLE_TOKEN, t, draw) for t in tokens}
        return max(tokens, key=lambda t: (values[t] - values[order[0]]) / temperature + noise[t])

    def two_level(draw: int) -> int:
        scores = []
        for group in range(-(-len(values) // 128)):
            weights = [math.exp((x - values[order[0]]) / temperature) for x in values[128 * group : 128 * group + 128]]
            noise = slow_gumbel(seed, position, branch, Purpose.SAMPLE_GROUP, group, draw)
            scores.append(math.log(max(math.fsum(weights), 1e-300)) + noise)
        best = scores.index(max(scores))
        return perturbed(list(range(128 * best, min(128 * best + 128, len(values)))), draw)

    if params.top_k == 0 and params.top_p == 1:
        return two_level(0)
    kept = kept_tokens(values, params)
    if params.top_k > 0 or len(kept) <= 256:
        return perturbed(kept, 0)
    draw = 0
    while (token := two_level(draw)) not in kept:
        draw += 1
    return token


@ON
@pytest.mark.parametrize("size", [1, 3, 17, 111, 128, 129, 700])
def test_tokens_are_those_of_the_slow_computation(size: int, device: str) -> None:
    rows = []
    for i in range(48 if size < 700 else 24):
        logits_V = coarse_logits(size, i, 0.3 if i % 2 else 1.5)
        case = LawCase(logits_V=logits_V, params=MIXED[i % len(MIXED)], outputs=(0,) * (i % 5))
        rows.append(DrawRow(case, SEEDS[i % len(SEEDS)] ^ i, i % 3))
    tokens = torch_draws(rows, 1, device)[:, 0]
    expected = [slow_token(c.logits_V, c.params, seed, len(c.outputs), branch) for c, seed, branch in rows]
    assert tokens.tolist() == expected


@ON
@pytest.mark.parametrize("size", [40, 700])
def test_tokens_are_those_of_the_reference_sampler(size: int, device: str) -> None:
    """Two best perturbed values within 1e-4 would excuse a difference; one in some ten thousand rows has them."""
    rows = []
    for i, seed in enumerate(np.random.default_rng(size).integers(0, 2**64, 1000, np.uint64, endpoint=False)):
        logits_V = coarse_logits(size, i, 0.3 if i % 2 else 1.5)
        rows.append(DrawRow(LawCase(logits_V=logits_V, params=MIXED[i % len(MIXED)]), int(seed), i % 3))
    differ = torch_draws(rows, 2, device) != reference_draws(rows, 2)
    assert differ.sum() <= 2


@ON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 17, 128, 301, 32003])
def test_greedy_takes_the_lowest_id_of_the_largest_logits(size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = (torch.randn(7, 2 * size, generator=generator) * 4).round().to(dtype) / 4
    logits = wide.to(device)[:, :size]  # rows are not contiguous
    sampled = draw_all([SamplingParams(temperature=0.0)] * 7, logits)
    values = logits.cpu().float()
    expected = [int((row == row.max()).nonzero()[0]) for row in values]
    assert sampled.output.tokens.tolist() == expected
    assert not sampled.unresolved.any()
    mixed = draw_all([SamplingParams(temperature=0.0)] * 6 + [SamplingParams()], logits)
    assert mixed.output.tokens.tolist()[:6] == expected[:6]


def draw_all(params: list[SamplingParams], logits: torch.Tensor, **options: Any) -> DeviceSample:
    sampler = DeviceSampler(len(params) + 1, logits.shape[1], logits.device)
    for slot, row in enumerate(params, start=1):
        sampler.stage(slot, row, seed=1000 + slot)
    sampler.apply()
    branches = [device_branch(row) for row in params]
    plan = LaunchPlan(tuple((str(name), np.flatnonzero([b == name for b in branches])) for name in set(branches)))
    return sampler.sample(logits, np.arange(1, len(params) + 1), plan, **options)


@ON
def test_row_does_not_depend_on_its_neighbours_slot_or_place(device: str) -> None:
    rows = [
        DrawRow(LawCase(logits_V=coarse_logits(300, i), params=MIXED[i % 8]), 2**60 + 77 * i, i % 2) for i in range(16)
    ]
    together = torch_draws(rows, 3, device)
    alone = np.concatenate([torch_draws([row], 3, device) for row in rows])
    backwards = torch_draws(rows[::-1], 3, device)[::-1]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, backwards)


@ON
def test_stream_resumed_at_a_position_goes_on_with_the_same_tokens(device: str) -> None:
    case = LawCase(logits_V=coarse_logits(300, 3), params=SamplingParams(top_k=40))
    whole = torch_draws(rows_of(case, 9), 5, device)
    rest = LawCase(logits_V=case.logits_V, params=case.params, outputs=(1, 1))
    np.testing.assert_array_equal(torch_draws(rows_of(rest, 9), 3, device), whole[:, 2:])


@ON
def test_staging_touches_its_slot_only_and_is_seen_only_when_applied(device: str) -> None:
    sampler = DeviceSampler(5, 17, device)
    for slot in (1, 2, 3):
        sampler.stage(slot, SamplingParams(), seed=slot, position=10 * slot)
    sampler.apply()
    plan = LaunchPlan((("plain", np.arange(2)),))
    logits = torch.zeros(2, 17, device=device)
    sampler.sample(logits, np.array([1, 3]), plan)
    assert sampler.positions().tolist() == [0, 11, 20, 31, 0]
    sampler.stage(2, SamplingParams(), seed=9, position=7)
    assert sampler.positions().tolist() == [0, 11, 20, 31, 0]
    sampler.apply()
    assert sampler.positions().tolist() == [0, 11, 7, 31, 0]
    sampler.sample(logits, torch.tensor([0, 0], device=device), plan)  # padding rows share the dummy slot
    assert sampler.positions().tolist()[1:] == [11, 7, 31, 0]
    with pytest.raises(ValueError, match="slot 5"):
        sampler.stage(5, SamplingParams(), seed=0)
    with pytest.raises(ValueError, match=r"expected \(R, 17\)"):
        sampler.sample(torch.zeros(2, 18, device=device), np.array([1, 3]), plan)


@ON
@pytest.mark.parametrize("params", MIXED, ids=lambda params: device_branch(params))
def test_values_that_are_no_numbers_flag_their_row_and_no_other(params: SamplingParams, device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(300, i) for i in range(5)])).to(device)
    clean = draw_all([params] * 5, logits)
    logits[1, 7], logits[2, 299], logits[3] = math.nan, math.inf, -math.inf
    # one plain row more, so that greedy rows are tested in company; alone they are below
    dirty = draw_all([params] * 5 + [SamplingParams()], torch.cat([logits, logits[:1]]))
    bad, none = int(RowFlag.BAD_VALUE), int(RowFlag.NO_TOKEN)
    assert (dirty.output.flags & (bad | none)).tolist() == [0, bad, bad, none, 0, 0]
    assert dirty.output.tokens[[0, 4]].tolist() == clean.output.tokens[[0, 4]].tolist()
    assert int(dirty.output.tokens[3]) == -1
    assert not dirty.unresolved.any()
    removed = logits.clone()
    removed[1, 7] = removed[2, 299] = -math.inf
    assert dirty.output.tokens[:3].tolist() == draw_all([params] * 5, removed).output.tokens[:3].tolist()


@ON
def test_greedy_batch_leaves_rows_with_bad_values_to_the_reference(device: str) -> None:
    logits = torch.zeros(4, 200, device=device)
    logits[0, 150], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    sampled = draw_all([SamplingParams(temperature=0.0)] * 4, logits)
    assert sampled.unresolved.tolist() == [True, True, False, False]
    assert sampled.output.tokens.tolist() == [-1, -1, -1, 0]
    bad, none = int(RowFlag.BAD_VALUE), int(RowFlag.NO_TOKEN)
    assert sampled.output.flags.tolist() == [bad, bad, none, 0]


@ON
@pytest.mark.parametrize("count", [1, 20, 64, 256])
def test_groups_with_the_largest_maxima_hold_the_first_tokens(count: int, device: str) -> None:
    rng = np.random.default_rng(count)
    rows = [
        rng.normal(size=1200),
        np.round(rng.normal(size=1200)),  # ties in every group
        np.zeros(1200),
        np.repeat(rng.normal(size=60), 20),
        np.where(np.arange(1200) < 300, 5.0, rng.normal(size=1200)),
        np.where(np.arange(1200) % 7 == 0, 0.0, -np.inf),
        np.where(np.arange(1200) == 1199, -0.0, 0.0),
    ]
    logits = torch.from_numpy(np.stack(rows).astype(np.float32)).to(device)
    found = first_candidates(read(logits), count)
    for i, row in enumerate(rows):
        order = total_order(row.astype(np.float32).tolist())[:count]
        assert found.ids_RC[i, : len(order)].tolist() == order
        assert found.values_RC[i, : len(order)].tolist() == row[order].astype(np.float32).tolist()


@ON
def test_bucket_of_candidates_does_not_change_a_token(device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i) for i in range(40)])).to(device)
    params = [SamplingParams(top_k=k) for k in range(1, 41)]
    small, large = draw_all(params, logits), draw_all(params, logits, n_top=100)
    assert small.output.tokens.tolist() == large.output.tokens.tolist()


@ON
def test_wide_nucleus_is_left_unresolved_where_the_host_may_not_wait(device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i, 0.3) for i in range(3)])).to(device)
    params = [SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_p=0.1)]
    waited, not_waited = draw_all(params, logits), draw_all(params, logits, wait=False)
    assert (waited.output.flags & int(RowFlag.REJECTION) != 0).tolist() == [True, False, False]
    assert not waited.unresolved.any()
    assert not_waited.unresolved.tolist() == [True, False, False]
    assert not_waited.output.tokens.tolist() == [-1, *waited.output.tokens.tolist()[1:]]


@ON
@pytest.mark.parametrize("at_once", [1, 5])
def test_number_of_rounds_tried_at_once_does_not_change_a_token(
    at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i, 0.2) for i in range(20)])).to(device)
    params = [SamplingParams(top_p=0.45)] * 20
    expected = draw_all(params, logits)
    assert (expected.output.flags & int(RowFlag.REJECTION)).bool().any()
    monkeypatch.setattr(device_draws, "DRAWS_AT_ONCE", at_once)
    assert draw_all(params, logits).output.tokens.tolist() == expected.output.tokens.tolist()


@ON
def test_row_that_no_round_accepts_goes_to_the_reference(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draws, "MAX_DRAWS", 0)
    logits = torch.from_numpy(coarse_logits(700, 1, 0.2))[None].to(device)
    sampled = draw_all([SamplingParams(top_p=0.9)], logits)
    assert sampled.unresolved.tolist() == [True]
    assert sampled.output.tokens.tolist() == [-1]


@ON
@pytest.mark.parametrize("size", [17, 300])
def test_logprobs_ranks_and_first_tokens_are_those_of_the_raw_logits(size: int, device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(size, i) for i in range(8)])).to(device)
    chosen = torch.tensor([[0, size - 1, size, -1, 2**31 - 1, 3, 3]] * 8, device=device)
    output = draw_all(MIXED, logits, n_top=5, chosen_RL=chosen).output
    for i in range(8):
        expected = expected_logprobs(logits[i].cpu().numpy(), MIXED[i], "raw_logprobs")
        token = int(output.tokens[i])
        assert output.logprobs is not None and output.ranks is not None and output.chosen_logprobs is not None
        assert output.top_ids is not None and output.top_logprobs is not None
        assert float(output.logprobs[i]) == pytest.approx(expected.logprobs[token], abs=2e-5)
        assert expected.order[int(output.ranks[i]) - 1] == token
        assert output.top_ids[i].tolist() == expected.order[:5]
        np.testing.assert_allclose(output.top_logprobs[i].cpu(), expected.logprobs[expected.order[:5]], atol=2e-5)
        wanted = [expected.logprobs[t] if 0 <= t < size else -np.inf for t in chosen[i].tolist()]
        np.testing.assert_allclose(output.chosen_logprobs[i].cpu(), wanted, atol=2e-5)
        if token in expected.order[:5]:  # the same float wherever a token's number appears
            assert float(output.top_logprobs[i, expected.order.index(token)]) == float(output.logprobs[i])


def test_branch_is_a_function_of_the_parameters() -> None:
    assert [device_branch(params) for params in MIXED] == [
        *("greedy", "plain", "candidates", "nucleus", "plain", "candidates", "nucleus", "plain")
    ]
    for other in (
        SamplingParams(logit_bias=((1, 1.0),)),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(bad_words_ids=((1,),)),
        SamplingParams(min_tokens=1, stop_token_ids=(2,)),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=257),
    ):
        assert device_branch(other) is None
    with pytest.raises(ValueError, match="row 0 needs the reference"):
        device_plan([DrawRow(LawCase(logits_V=coarse_logits(3, 1), params=SamplingParams(min_p=0.1)), 1)])


def test_noise_of_blocks_and_of_ids_is_the_same_number_for_an_id() -> None:
    noise = RowNoise(torch.tensor([5, -9]), torch.tensor([3, 2**31 - 1]), torch.tensor([0, 7]))
    first = torch.tensor([0, 128])
    blocks = noise.of_blocks(Purpose.SAMPLE_TOKEN, first, 100, 3)
    assert torch.equal(blocks, noise.of_ids(Purpose.SAMPLE_TOKEN, first[:, None] + torch.arange(100), 3))
    slow = slow_gumbel(2**64 - 9, 2**31 - 1, 7, Purpose.SAMPLE_TOKEN, 134, 3)
    assert blocks[1, 6].item() == pytest.approx(slow, rel=1e-6)
    assert gumbels(torch.tensor([0xFFFFFFFF])).item() == pytest.approx(-2.8115, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [(0,), (0, 1), (0, 1, 2)])
def test_graph_replays_go_on_with_new_noise_and_equal_eager(branches: tuple[int, ...]) -> None:
    """Nothing on these branches waits for the device, and positions advance there."""
    rows = [MIXED[branches[i % len(branches)]] for i in range(32)]
    logits = torch.randn(32, 32003, device="cuda").to(torch.bfloat16)
    plan = device_plan([DrawRow(LawCase(logits_V=coarse_logits(3, 1), params=params), 1) for params in rows])
    slots = torch.arange(1, 33, device="cuda")

    def prepared() -> DeviceSampler:
        sampler = DeviceSampler(33, 32003, "cuda")
        for slot, params in enumerate(rows, start=1):
            sampler.stage(slot, params, seed=slot)
        sampler.apply()
        return sampler

    eager = prepared()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [eager.sample(logits, slots, plan).output.tokens for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured = prepared()
    graph = torch.cuda.CUDAGraph()
    captured.sample(logits, slots, plan)  # warms the caches that a capture may not fill
    with torch.cuda.graph(graph):
        tokens = captured.sample(logits, slots, plan).output.tokens
    for step in (1, 2, 3):
        graph.replay()
        assert torch.equal(tokens, expected[step])


@pytest.mark.gpu
def test_greedy_batch_costs_less_than_150_microseconds() -> None:
    logits = torch.randn(256, 151_936, device="cuda").to(torch.bfloat16)
    sampler = DeviceSampler(257, 151_936, "cuda")
    for slot in range(1, 257):
        sampler.stage(slot, SamplingParams(temperature=0.0), seed=slot)
    sampler.apply()
    slots, plan = torch.arange(1, 257, device="cuda"), LaunchPlan((("greedy", np.arange(256)),))
    sampler.sample(logits, slots, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            sampler.sample(logits, slots, plan)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)  # microseconds a call
    assert float(np.median(times)) < 150
