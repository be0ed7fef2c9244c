"""Which sizes of steps are captured as a model starts, and which size a step is padded to before and after the rest."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.attention import flashinfer_wrappers
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.batch.input_batch import StepKind
from engine.model.cuda_graphs.decode import buckets
from engine.model.cuda_graphs.prefill import token_counts
from engine.model.cuda_graphs.sizes import GraphSizes
from tests.engine.model.halves import BF16, EAGER, SMALL, largest_difference, on_gpu
from tests.engine.model.stand_in import Replayed, ReplayedPrefill


@pytest.mark.parametrize(
    ("sizes", "first", "later"),
    [
        (buckets(2), [2], []),
        (buckets(100), [100, 64, 32, 16, 8, 4, 2], [96]),
        (buckets(256), [256, 128, 64, 32, 16, 8, 4, 2], [224, 192, 160, 96]),
        (token_counts(1024), [1024, 512, 256, 128, 64, 32], [768]),
        ((), [], []),
    ],
)
def test_the_largest_and_powers_of_two_come_first(sizes: tuple[int, ...], first: list[int], later: list[int]) -> None:
    captured = list[int]()
    held = GraphSizes(sizes, captured.append)
    assert captured == first
    while held.capture_next():
        pass
    assert captured == first + later
    assert all(size in held and held.fitting(size) == size for size in sizes)


def test_a_step_is_padded_to_the_smallest_size_that_is_captured() -> None:
    held = GraphSizes(buckets(256), lambda size: None)
    assert [held.fitting(size) for size in (1, 65, 128, 129, 256, 257)] == [2, 128, 128, 256, 256, None]
    assert held.capture_next()
    assert 224 in held and 192 not in held
    assert [held.fitting(size) for size in (129, 224, 225)] == [224, 224, 256]


def test_a_size_that_cannot_be_captured_has_no_graph() -> None:
    def capture(size: int) -> None:
        if size == 96:
            raise RuntimeError("out of memory")

    held = GraphSizes(buckets(100), capture)
    with pytest.raises(RuntimeError, match="memory"):
        held.capture_next()
    assert held.fitting(96) == 100 and 96 not in held


def test_steps_use_the_sizes_that_are_captured_later(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step of 5 rows, and prompts of 65 and 34 tokens."""
    monkeypatch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", 384 << 20)  # a stand-in touches none of it
    d = tiny_driver(tiny_models.module("qwen3"), backend=FlashInferAttention(torch.device("cpu"), torch.float32))
    monkeypatch.setattr("engine.model.cuda_graphs.decode.BUCKET_STEP", 3)
    monkeypatch.setattr("engine.model.cuda_graphs.prefill.COUNT_STEP", 24)
    monkeypatch.setattr("engine.model.cuda_graphs.prefill.TOKEN_COUNTS", (32, 64))
    with torch.no_grad():
        decode = d.model._decode_graphs = Replayed(d.model.probed, max_rows=8, attended=200)
        prefill = d.model._prefill_graphs = ReplayedPrefill(d.model.probed, 72, decode.memory)
    a, b, *others = d.add(72), d.add(40), *(d.add(2) for _ in range(5))
    d.model.fill(StepKind.PREFILL, [d.run(one, 0, 1, rows=[]) for one in others], d.table)

    def run() -> None:
        decode.replays.clear()
        prefill.replays.clear()
        assert d.error(StepKind.PREFILL, [d.run(a, 0, 65)]) < 1e-5
        assert d.error(StepKind.PREFILL, [d.run(b, 0, 34)]) < 1e-5
        assert d.error(StepKind.DECODE, [d.run(one, 1, 2, from_table=True) for one in others]) < 1e-5

    run()
    assert (prefill.replays, decode.replays) == ([72, 64], [8])
    while d.model.capture_next():
        pass
    run()
    assert (prefill.replays, decode.replays) == ([72, 48], [6])


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_graphs_that_another_thread_captures_between_steps_agree_with_eager(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a service does: it warms up in one thread, and its step thread captures."""
    monkeypatch.setattr("engine.model.cuda_graphs.decode.BUCKET_STEP", 3)
    monkeypatch.setattr("engine.model.cuda_graphs.prefill.COUNT_STEP", 24)
    torch.compiler.reset()
    eager, full = (tiny_driver(on_gpu(tiny_models, "qwen3"), engine=one) for one in (EAGER, SMALL))
    full.model.warm_up(lambda stage, seconds: None)
    wanted, found, replays = _steps(eager), list[list[torch.Tensor]](), list[int]()

    def serve() -> None:
        torch.cuda.set_device(0)
        left = True
        while left:
            before = full.model.graph_replays
            found.append(_steps(full))
            replays.append(full.model.graph_replays - before)
            left = full.model.capture_next()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(serve).result()
    assert len(found) == 1 + len([3, 6]) + len([72, 48, 24])
    assert replays == [4] * len(found)  # the filled tokens are a step, too
    for one in found:
        assert largest_difference(one, wanted) < BF16


def _steps(d: Any) -> list[torch.Tensor]:
    """The logits of prompts of 65 and 20 tokens, and of a decode step of five rows."""
    lengths = (72, 24, *[3] * 5)
    a, b, *others = range(len(lengths)) if d.ids else map(d.add, lengths)
    d.model.fill(StepKind.PREFILL, [d.run(one, 0, 1, rows=[]) for one in others], d.table)
    steps = [
        (StepKind.PREFILL, [d.run(a, 0, 65)]),
        (StepKind.PREFILL, [d.run(b, 0, 20)]),
        (StepKind.DECODE, [d.run(one, 1, 2, from_table=True) for one in others]),
    ]
    return [d.model.forward(kind, sequences, d.table).float().clone() for kind, sequences in steps]
