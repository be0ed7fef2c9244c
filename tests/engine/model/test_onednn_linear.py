"""Linear layers by oneDNN give what torch's own give, and other models are left alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig
from engine.model.hf_model import HFModel
from engine.model.optimize import onednn_linear, traced_base
from engine.model.optimize.onednn_linear import (
    FEW_ROWS,
    MIN_WEIGHTS,
    OneDnnLinear,
    linear,
    padded_rows,
    use_onednn,
)
from tests.engine.model.conftest import CONFIGS, SLOTS

ENGINE = EngineConfig(kv_slots=SLOTS)
pytestmark = pytest.mark.skipif(not onednn_linear.available(), reason="this build of torch has no oneDNN")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of x in calls of oneDNN, which takes layers of any size."""
    shapes, product = list[tuple[int, ...]](), onednn_linear._product
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 1)

    def noting(x: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return product(x, *others)

    monkeypatch.setattr(onednn_linear, "_product", noting)
    return shapes


def _changed(module: nn.Module) -> int:
    return sum(isinstance(one, OneDnnLinear) for one in module.modules())


def test_rows_are_padded_by_an_eighth_at_most_to_few_sizes() -> None:
    assert [padded_rows(rows) for rows in (1, 2, 16, 17, 33, 128, 129, 1000)] == [2, 2, 16, 18, 36, 128, 144, 1024]
    every = [padded_rows(rows) for rows in range(1, 16_385)]
    assert all(rows <= padded <= 1.125 * rows for rows, padded in enumerate(every[1:], 2))
    assert len(set(every)) == 15 + 8 * 10


@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (19,), (1, 33), (3, 11), (0,)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_torchs_own(asked: list[tuple[int, ...]], shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn((*shape, 24), generator=generator), torch.randn((40, 24), generator=generator)
    bias = torch.randn(40, generator=generator) if biased else None
    found, own = linear(x, weight, bias), F.linear(x, weight, bias)
    assert found.shape == own.shape and len(asked) == 1
    torch.testing.assert_close(found, own, rtol=0, atol=2e-5)


def test_a_row_that_is_left_out_of_padding_would_be_seen(
    asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plants the fault: rows are padded to fewer than there are."""
    monkeypatch.setattr(onednn_linear, "padded_rows", lambda rows: rows - 1)
    with pytest.raises(RuntimeError):
        linear(torch.ones(19, 24), torch.ones(40, 24), None)


@pytest.mark.parametrize(("inputs", "outputs"), [(768, 768), (768, 3072), (3072, 768), (512, 512)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn((200, inputs), generator=generator), torch.randn((outputs, inputs), generator=generator)
    whole = linear(x, weight, None)
    for rows in (1, 2, 3, 7, 8, 17, 64, 130):
        assert torch.equal(linear(x[:rows], weight, None), whole[:rows])
    assert torch.equal(linear(x[40:41], weight, None), whole[40:41])


@pytest.mark.parametrize(("rows", "calls"), [(1, 0), (FEW_ROWS, 0), (FEW_ROWS + 1, 1), (1000, 1)])
def test_small_layers_multiply_few_rows_by_torch(
    asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, rows: int, calls: int
) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 40 * 24 + 1)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn((rows, 24), generator=generator), torch.randn((40, 24), generator=generator)
    torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight), rtol=0, atol=2e-5)
    assert len(asked) == calls
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 40 * 24)
    linear(x, weight, None)
    assert len(asked) == calls + 1


def test_a_traced_step_has_few_rows() -> None:
    """Its small layers are torch's for any number of rows."""
    assert FEW_ROWS >= traced_base.MAX_TOKENS


def test_layers_of_every_size_are_changed() -> None:
    smaller = nn.Linear(MIN_WEIGHTS >> 9, (1 << 9) - 1)
    large = nn.Linear(MIN_WEIGHTS >> 9, 1 << 9)
    assert use_onednn(nn.ModuleList([smaller, large])) == 2 == _changed(nn.ModuleList([smaller, large]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_gives_its_own_rows(
    tiny_models: Any, tiny_driver: Any, asked: list[tuple[int, ...]], name: str
) -> None:
    d = tiny_driver(tiny_models.module(name), engine=ENGINE)
    assert _changed(d.model.module)
    asked.clear()
    index = d.add(23)
    assert d.error(StepKind.SCORE, [d.run(index, 0, 23, rows=[3, 22])]) < 1e-4
    assert asked


def test_logits_of_hidden_rows_have_the_bits_of_the_models_own(
    tiny_models: Any, tiny_driver: Any, asked: list[tuple[int, ...]]
) -> None:
    model = tiny_driver(tiny_models.module("llama"), engine=ENGINE).model
    hidden = torch.randn((7, model.head.weight.shape[1]), generator=torch.Generator().manual_seed(0))
    asked.clear()
    assert torch.equal(model.head.rows(hidden), model.module.lm_head(hidden)) and len(asked) == 2


def test_a_layer_that_mixes_rows_is_refused(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault in the product, which the packing check finds."""
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(onednn_linear, "_product", lambda x, weight, bias: F.linear(x.roll(1, dims=-2), weight, bias))
    with pytest.raises(Exception, match="packed steps change its rows"):
        HFModel(tiny_models.module("llama"), ENGINE)


def test_other_models_keep_their_layers(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _changed(HFModel(tiny_models.module("llama"), replace(ENGINE, onednn_linear=False)).module)
    assert use_onednn(tiny_models.module("llama").to(torch.bfloat16)) == 0  # torch itself takes it to oneDNN
    monkeypatch.setattr(onednn_linear, "available", lambda: False)
    assert use_onednn(tiny_models.module("llama")) == 0
