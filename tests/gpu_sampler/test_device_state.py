"""The slots of the torch sampler: staging, positions, resumed streams; on CUDA also graphs and the speed of greedy."""

import numpy as np
import pytest
import torch

from gpu_sampler.device_sampler import DeviceSampler
from gpu_sampler.device_state import DeviceState
from gpu_sampler.output import LaunchPlan
from gpu_sampler.params import SamplingParams
from gpu_sampler.testing.cases import MIXED, coarse_logits
from gpu_sampler.testing.draws import LawCase, device_plan, rows_of, torch_draws

ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def resumed_streams_agree(device: str) -> bool:
    case = LawCase(logits_V=coarse_logits(300, 3), params=SamplingParams(top_k=40))
    whole = torch_draws(rows_of(case, 9), 5, device)
    rest = LawCase(logits_V=case.logits_V, params=case.params, outputs=(1, 1))
    return bool((torch_draws(rows_of(rest, 9), 3, device) == whole[:, 2:]).all())


@ON
def test_stream_resumed_at_a_position_goes_on_with_the_same_tokens(device: str) -> None:
    assert resumed_streams_agree(device)


def test_position_that_does_not_advance_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceState, "advance", lambda self, slots_R: None)
    assert not resumed_streams_agree("cpu")


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


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [(0,), (0, 1), (0, 1, 2)])
def test_graph_replays_go_on_with_new_noise_and_equal_eager(branches: tuple[int, ...]) -> None:
    """Nothing on these branches waits for the device, and positions advance there."""
    rows = [MIXED[branches[i % len(branches)]] for i in range(32)]
    logits = torch.randn(32, 32003, device="cuda").to(torch.bfloat16)
    plan = device_plan(rows)
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
