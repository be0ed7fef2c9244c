"""Captured steps of few rows attend by the skinny kernel, without a plan of the library's. Its reference stands for the
kernel here; on a GPU (test_cuda_graphs.py, test_draft_graphs.py) it is the kernel."""

from typing import Any

import pytest
import torch

from engine.attention import skinny_decode
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.flashinfer_wrappers import Wrappers
from engine.attention.interface import NO_WINDOW
from engine.attention.skinny_decode import MAX_CONTEXT, MAX_ROWS, SkinnyDecoder
from engine.batch.input_batch import StepKind
from tests.engine.model.conftest import SIX
from tests.engine.model.stand_in import Replayed

CPU = torch.device("cpu")


@pytest.fixture
def asked(stand_in: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a call of the kernel: its rows."""
    pytest.importorskip("triton")
    from engine.kernels import skinny_decode_attention as kernels
    from tests.support.layer_kernels import skinny_decode_attention

    calls: list[int] = []

    def by_reference(*given: Any, out_RHD: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, _ = given
        out, lse = skinny_decode_attention(*(one.numpy() for one in tensors), **options)
        calls.append(len(out))
        return out_RHD.copy_(torch.from_numpy(out)), torch.from_numpy(lse).float()

    def has_skinny_kernel(self: FlashInferAttention, params: Any) -> bool:
        self._workspaces[params] = None
        return True

    monkeypatch.setattr(kernels, "skinny_decode_attention", by_reference)
    monkeypatch.setattr(FlashInferAttention, "_has_skinny_kernel", has_skinny_kernel)
    return calls


def _largest_error(tiny_models: Any, tiny_driver: Any, name: str, longest: int = MAX_CONTEXT) -> float:
    """Returns the largest error of decode and verify steps behind a prefill of three sequences."""
    backend = FlashInferAttention(CPU, torch.float32)
    d = tiny_driver(tiny_models.module(name), backend=backend)
    with torch.no_grad():
        options: dict[str, Any] = {"max_rows": 2 * MAX_ROWS, "attended": 600, "longest": longest}
        made = Replayed(d.model.probed, **options)
    d.model._decode_graphs = made
    for _ in range(3):
        d.add(30)
    d.model.forward(StepKind.PREFILL, [d.run(index, 0, 20, rows=[]) for index in range(3)], d.table)
    errors = [d.error(StepKind.DECODE, [d.run(index, 20, 21, from_table=True) for index in range(3)])]
    for first, last in ((0, 2), (1, 3)):  # eight tokens, and nine
        ends = ((26, [0, 1, 2, 3, 4]), (24, [0, 1, 2, 2, 2]), (27, [0, 1, 2, 3, 4]))[first:last]
        sequences = [d.run(index, 21, end, rows=rows) for index, (end, rows) in enumerate(ends, first)]
        errors.append(d.error(StepKind.VERIFY, sequences))
    errors.append(d.error(StepKind.DECODE, [d.run(0, 26, 27, from_table=True)]))
    assert made.replays == [4, 8, 16, 2]
    return float(max(errors))


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", SIX)
def test_steps_of_few_rows_give_what_each_sequence_gives_alone(
    tiny_models: Any, tiny_driver: Any, asked: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    captured: list[int] = []
    theirs: Any = Wrappers.graph_decoder

    def noted(self: Wrappers, kind: Any, buffers: Any, rows: int) -> Any:
        captured.append(rows)
        return theirs(self, kind, buffers, rows)

    monkeypatch.setattr(Wrappers, "graph_decoder", noted)
    assert _largest_error(tiny_models, tiny_driver, name) < 1e-5
    assert {*asked} == {2, 4, 8} and {*captured} == {16}


def test_only_steps_with_a_longer_row_are_the_librarys(
    tiny_models: Any, tiny_driver: Any, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the first step sees 21 tokens, those of all others up to 27."""
    monkeypatch.setattr(skinny_decode, "MAX_CONTEXT", 24)
    assert _largest_error(tiny_models, tiny_driver, "qwen3", longest=4096) < 1e-5
    assert {*asked} == {4}


@pytest.mark.parametrize(("name", "field", "value"), [("mistral", "window", NO_WINDOW), ("gemma2", "softcap", 0.0)])
def test_a_kind_without_its_window_or_cap_fails_the_same_check(
    tiny_models: Any,
    tiny_driver: Any,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    field: str,
    value: Any,
) -> None:
    theirs: Any = SkinnyDecoder.__init__

    def forgets(self: SkinnyDecoder, kind: Any, *given: Any) -> None:
        theirs(self, kind._replace(**{field: value}), *given)

    monkeypatch.setattr(SkinnyDecoder, "__init__", forgets)
    assert _largest_error(tiny_models, tiny_driver, name) > 1e-4
