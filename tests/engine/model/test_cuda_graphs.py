"""Buckets and compiled layers on a CPU; on a GPU the paged kernels, compiled layers and graphs against torch."""

from typing import Any

import pytest
import torch

from engine.attention import skinny_decode
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import StepKind
from engine.model.cuda_graphs.decode import buckets
from engine.model.optimize.compile import compile_layers
from engine.model.optimize.decoder_layers import decoder_layers
from tests.engine.model.conftest import SIX
from tests.engine.model.halves import BF16, FULL, PLAIN, largest_difference, on_gpu

KINDS = {"llama": 1, "mistral": 1, "gemma2": 2, "gpt_oss": 2}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (2, (2,)),
        (3, (2, 3)),
        (16, (2, 4, 8, 16)),
        (64, (2, 4, 8, 16, 32, 64)),
        (100, (2, 4, 8, 16, 32, 64, 96, 100)),
    ],
)
def test_buckets_end_with_the_largest_row_count(most: int, sizes: tuple[int, ...]) -> None:
    assert buckets(most) == sizes


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", KINDS)
def test_compiled_layers_give_the_same_from_one_graph_a_kind(tiny_models: Any, name: str) -> None:
    torch.compiler.reset()
    d = tiny_models.driver(name, num_hidden_layers=4)
    attentions = d.model.probed.attentions
    assert len(decoder_layers(d.model.module, attentions)) == 4
    torch._dynamo.utils.counters.clear()
    compile_layers(d.model.module, attentions, backend="aot_eager")
    a, b = d.add(29), d.add(13)
    assert d.error(StepKind.PREFILL, [d.run(a, 0, 17), d.run(b, 0, 12)]) < 1e-5
    assert d.error(StepKind.PREFILL, [d.run(a, 17, 28)]) < 1e-5
    assert d.error(StepKind.DECODE, [d.run(a, 28, 29, from_table=True), d.run(b, 12, 13, from_table=True)]) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == KINDS[name] + 1  # the last layer is another one
    torch.compiler.reset()


def test_a_model_without_a_list_of_layers_says_so(tiny_models: Any) -> None:
    module = tiny_models.module("llama")
    with pytest.raises(ValueError, match=r"engine\.compile"):
        decoder_layers(module, [torch.nn.Identity()] * 3)


# On a GPU, in bfloat16


def _steps(d: Any) -> list[torch.Tensor]:
    """The logits of a mixed prefill, a chunk over a shared prefix, decode steps of 1, 2 and 3 rows, a verify step."""
    a, b = d.add(47), d.add(29)
    c = d.add(31, shares=(a, 11))
    steps = [
        (StepKind.PREFILL, [d.run(a, 0, 11), d.run(b, 0, 17), d.run(c, 11, 24), d.run(a, 11, 40)]),
        (StepKind.SCORE, [d.run(b, 17, 26), d.run(c, 24, 28)]),
        (StepKind.DECODE, [d.run(a, 40, 41, from_table=True)]),
        (StepKind.DECODE, [d.run(one, at, at + 1, from_table=True) for one, at in ((a, 41), (b, 26))]),
        (StepKind.DECODE, [d.run(one, at, at + 1, from_table=True) for one, at in ((a, 42), (b, 27), (c, 28))]),
        (StepKind.VERIFY, [d.run(a, 43, 46), d.run(b, 28, 29, rows=[0, 0, 0]), d.run(c, 29, 31, rows=[0, 1, 1])]),
    ]
    return [d.model.forward(kind, sequences, d.table).float().clone() for kind, sequences in steps]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("name", SIX)
def test_paged_kernels_agree_with_torch(tiny_models: Any, tiny_driver: Any, name: str) -> None:
    module = on_gpu(tiny_models, name)
    reference = tiny_driver(on_gpu(tiny_models, name), backend=TorchAttention(), engine=PLAIN)
    assert largest_difference(_steps(tiny_driver(module, engine=PLAIN)), _steps(reference)) < BF16


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("name", SIX)
@pytest.mark.parametrize("longest", [0, skinny_decode.MAX_CONTEXT], ids=["the library's attention", "our attention"])
def test_compiled_layers_and_graphs_agree_with_eager(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, name: str, longest: int
) -> None:
    monkeypatch.setattr(skinny_decode, "MAX_CONTEXT", longest)
    torch.compiler.reset()
    eager = tiny_driver(on_gpu(tiny_models, name), engine=PLAIN)
    full = tiny_driver(on_gpu(tiny_models, name), engine=FULL)
    reported: list[str] = []
    full.model.warm_up(lambda stage, seconds: reported.append(stage))
    full.model.share_contexts()
    assert reported == ["attention kernels", "compile", "graphs", "likelihoods"]
    assert largest_difference(_steps(full), _steps(eager)) < BF16


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_a_replayed_step_gives_the_same_bits_as_before(tiny_models: Any, tiny_driver: Any) -> None:
    d = tiny_driver(on_gpu(tiny_models, "qwen3"), engine=FULL)
    d.model.warm_up(lambda stage, seconds: None)
    a = d.add(21)
    d.model.forward(StepKind.PREFILL, [d.run(a, 0, 20)], d.table)
    rows = [d.model.forward(StepKind.DECODE, [d.run(a, 20, 21, from_table=True)], d.table).clone() for _ in range(3)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("dim", (96, 80, 128))
def test_padded_head_dims_agree_with_torch(tiny_models: Any, tiny_driver: Any, dim: int) -> None:
    module = on_gpu(tiny_models, "llama", head_dim=dim)
    reference = tiny_driver(on_gpu(tiny_models, "llama", head_dim=dim), backend=TorchAttention(), engine=PLAIN)
    d = tiny_driver(module, engine=PLAIN)
    assert d.model.kv_storage.keys[0].shape[3] == 128
    assert largest_difference(_steps(d), _steps(reference)) < BF16


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_sinks_take_their_weight(tiny_models: Any, tiny_driver: Any) -> None:
    """With large sinks an error in their base or sign would be far outside of the bound."""
    modules = [on_gpu(tiny_models, "gpt_oss") for _ in range(2)]
    for module in modules:
        for layer in module.model.layers:
            layer.self_attn.sinks.data = torch.linspace(-3, 3, 4, device="cuda", dtype=torch.bfloat16)
    reference = tiny_driver(modules[1], backend=TorchAttention(), engine=PLAIN)
    assert largest_difference(_steps(tiny_driver(modules[0], engine=PLAIN)), _steps(reference)) < BF16
