"""The last layer computes the wanted rows alone, and they are the rows that it would give otherwise."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.attention.interface import forward_context
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import StepKind, pack
from engine.model.lm_head import WantedRows
from engine.model.optimize.compile import compile_layers
from engine.model.optimize.last_layer import restrict_last_layer
from tests.engine.model.conftest import CONFIGS

NARROWED = dict.fromkeys(CONFIGS, 2) | {"gpt_oss": 1}  # whose experts give more than rows
LONG, SHORT = 23, 9


class Counting(nn.Module):
    """Notes of how many tokens it is asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[int] = []

    def forward(self, hidden: torch.Tensor) -> Any:
        self.seen.append(hidden.shape[1])
        return self.inner(hidden)


def _narrowed(module: Any) -> list[WantedRows]:
    return [one for one in module.modules() if isinstance(one, WantedRows)]


@pytest.mark.parametrize("name", CONFIGS)
def test_wanted_rows_are_those_of_the_model_alone(tiny_models: Any, name: str) -> None:
    d = tiny_models.driver(name)
    found = _narrowed(d.model.module)
    assert len(found) == NARROWED[name]
    counts = []
    for one in found:
        one.inner = Counting(one.inner)
        counts.append(one.inner)
    long, short = d.add(LONG), d.add(SHORT)
    sequences = [d.run(long, 0, LONG, rows=[3, LONG - 1]), d.run(short, 0, SHORT, rows=[SHORT - 1])]
    assert d.error(StepKind.SCORE, sequences) < 1e-4
    assert [count.seen for count in counts] == [[3]] * len(found)


def test_keys_and_values_alone_need_no_row_of_it(tiny_models: Any) -> None:
    d = tiny_models.driver("llama")
    for one in _narrowed(d.model.module):
        one.inner = Counting(one.inner)
    index = d.add(LONG)
    d.model.fill(StepKind.PREFILL, [d.run(index, 0, LONG - 1, rows=[])], d.table)
    assert all(not one.inner.seen for one in _narrowed(d.model.module))
    assert d.error(StepKind.SCORE, [d.run(index, LONG - 1, LONG)]) < 1e-4


def test_a_row_asked_for_twice_is_given_twice(tiny_models: Any) -> None:
    d = tiny_models.driver("qwen3")
    index = d.add(LONG)
    assert d.error(StepKind.SCORE, [d.run(index, 0, LONG, rows=[4, 4, 7])]) < 1e-4


def test_compiled_layers_get_no_rows(tiny_models: Any) -> None:
    """One piece of compiled code whatever is wanted, and however much."""
    d = tiny_models.driver("llama")
    compile_layers(d.model.module, d.model.probed.attentions, backend="aot_eager")
    torch._dynamo.reset()
    index = d.add(LONG)
    torch._dynamo.utils.counters.clear()
    for rows in ([LONG - 1], [2, 5, 8], list(range(LONG)), [0]):
        assert d.error(StepKind.SCORE, [d.run(index, 0, LONG, rows=rows)]) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the last layer, and all others


class Mixing(nn.Module):
    """Looks at the token before."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=1)


class Pair(nn.Module):
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        return hidden, 1


@pytest.mark.parametrize("mlp", [Mixing(), Pair(), nn.Bilinear(2, 2, 2)])
def test_what_does_not_treat_tokens_alone_stays(tiny_models: Any, mlp: nn.Module) -> None:
    module = tiny_models.module("llama")
    module.model.layers[-1].mlp = mlp
    assert restrict_last_layer(module, [layer.self_attn for layer in module.model.layers]) == 1
    assert module.model.layers[-1].mlp is mlp


def test_a_step_that_names_no_rows_gets_all(tiny_models: Any) -> None:
    d = tiny_models.driver("llama")
    run = d.run(d.add(SHORT), 0, SHORT, rows=[SHORT - 1])
    batch = pack(StepKind.SCORE, [run], d.table, d.model.device)
    with forward_context(TorchAttention().plan(batch)), torch.no_grad():
        rows = d.model.module(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False).logits[0]
    assert float((rows - d.alone(0)).abs().max() / d.alone(0).abs().max()) < 1e-4
