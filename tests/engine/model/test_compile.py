"""Tests compilation of the code around the decoder layers: the results are the same, or it runs uncompiled."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig

from engine.batch.input_batch import StepKind, idle_sequences
from engine.config import EngineConfig
from engine.model.optimize import compile
from engine.model.optimize.compile import compile_layers, compile_outer_modules, record_outer_modules
from tests.engine.model.conftest import BASE, CONFIGS, LENGTH, WINDOW
from tests.engine.model.halves import EVERY_EXPERT

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NORM_AND_ROTARY = ["norm", "rotary_emb"]
LONG = 29
FACTORS = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LENGTH, **FACTORS}
WHOLE = ("qwen3", "gemma2")  # compiled with their layers


def _heard(d: Any) -> list[compile.RecordedModule]:
    sequences = idle_sequences(compile.TRIED_TOKENS, LENGTH)
    return record_outer_modules(
        d.model.module,
        d.model.probed.attentions,
        lambda: d.model.forward(StepKind.PREFILL, sequences, d.table),
    )


def _steps_agree(d: Any) -> None:
    a, b = d.add(LONG), d.add(13)
    assert d.error(StepKind.PREFILL, [d.run(a, 0, 17), d.run(b, 0, 12)]) < 1e-4
    assert d.error(StepKind.SCORE, [d.run(a, 17, 28, rows=[3, 10])]) < 1e-4
    assert d.error(StepKind.DECODE, [d.run(a, 28, 29, from_table=True), d.run(b, 12, 13, from_table=True)]) < 1e-4


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == compile.__name__]


def _ignore(_: object) -> None:
    """A hook that gives something changes what its module is given."""


def _plain(module: nn.Module) -> bool:
    return "forward" not in vars(module)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_keeps_its_logits(tiny_models: Any, name: str) -> None:
    d = tiny_models.driver(name)
    heard = _heard(d)
    if name in WHOLE:
        compile_layers(d.model.module, d.model.probed.attentions, backend="aot_eager")
    assert compile_outer_modules(heard, backend="aot_eager") == NORM_AND_ROTARY
    torch._dynamo.utils.counters.clear()
    _steps_agree(d)
    assert not any(_plain(one.module) for one in heard)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made <= 3 * (name in WHOLE)  # those of the layers: steps of other sizes compile nothing around them


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="the compiler's code for a CPU is C++")
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_the_compilers_own_code_keeps_them_too(tiny_models: Any) -> None:
    d = tiny_models.driver("qwen3")
    assert compile_outer_modules(_heard(d)) == NORM_AND_ROTARY
    torch._dynamo.utils.counters.clear()
    _steps_agree(d)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_of_32_bits_where_the_model_is_not(tiny_models: Any, dtype: torch.dtype) -> None:
    """Positions that 16 bits cannot tell apart: only angles that were never rounded give the same cosines."""
    d = tiny_models.driver("qwen3", max_position_embeddings=1 << 15)
    rotary = d.model.module.model.rotary_emb
    given = torch.zeros((1, 7, 64), dtype=dtype), torch.arange(32_001, 32_008)[None]
    with torch.no_grad():
        wanted = rotary(*given)
        assert compile_outer_modules(_heard(d)) == NORM_AND_ROTARY
        found = rotary(*given)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == dtype
        assert float((one - other).abs().max()) <= (1e-5 if dtype is torch.float32 else 2**-8)
    rounded = torch.arange(32_001, 32_008).to(torch.bfloat16).long()[None]
    assert float((rotary(given[0], rounded)[0] - wanted[0]).abs().max()) > 0.1


def test_a_rotary_embedding_of_two_kinds_of_layers_is_compiled_for_both(tiny_models: Any, tiny_driver: Any) -> None:
    config = Gemma3TextConfig(
        **{**BASE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    d = tiny_driver(tiny_models.of(config))
    heard = _heard(d)
    assert [len(one.calls) for one in heard] == [1, 2]
    assert compile_outer_modules(heard, backend="aot_eager") == NORM_AND_ROTARY
    _steps_agree(d)


def test_a_rotary_embedding_that_asks_for_its_positions_runs_as_before(
    tiny_models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The longest position of a step decides what longrope does, which no graph can hold."""
    d = tiny_models.driver("phi3", rope_parameters=LONGROPE)
    heard = _heard(d)
    assert compile_outer_modules(heard, backend="aot_eager") == ["norm"]
    assert [line.split(":")[0] for line in _told(caplog)] == ["`rotary_emb` (Phi3RotaryEmbedding) runs uncompiled"]
    assert _plain(d.model.module.model.rotary_emb)
    _steps_agree(d)


class _Norm(nn.Module):
    """Around the model's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(hidden)
        return out


class _Larger(_Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1.05 if torch.compiler.is_compiling() else 1.0)


class _Rounded(_Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        return out.to(torch.bfloat16).float() if torch.compiler.is_compiling() else out


class _Halved(_Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        return out.half() if torch.compiler.is_compiling() else out


class _Breaking(_Norm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(hidden)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("fault", [_Larger, _Rounded, _Halved, _Breaking])
def test_what_compiled_gives_other_numbers_or_nothing_runs_as_before(
    tiny_models: Any, caplog: pytest.LogCaptureFixture, fault: type[_Norm]
) -> None:
    d = tiny_models.driver("llama")
    base = d.model.module.model
    base.norm = fault(base.norm)
    assert compile_outer_modules(_heard(d), backend="aot_eager") == ["rotary_emb"]
    assert len(_told(caplog)) == 1
    _steps_agree(d)


def test_without_the_comparison_that_fault_would_be_served(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_alike", lambda found, wanted: True)
    d = tiny_models.driver("llama")
    base = d.model.module.model
    base.norm = _Larger(base.norm)
    assert compile_outer_modules(_heard(d), backend="aot_eager") == NORM_AND_ROTARY
    with pytest.raises(AssertionError):
        _steps_agree(d)


def test_a_later_step_that_fails_compiled_runs_uncompiled(tiny_models: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler has made as many variants as it is allowed: the step is answered, and all after it."""
    d = tiny_models.driver("llama")
    calls: list[int] = []

    def backend(graph: Any, example: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            if len(calls) > 3:  # two trials and one module of the first step
                raise RuntimeError("planted")
            return graph.forward(*args)

        return run

    heard = _heard(d)
    assert compile_outer_modules(heard, backend=backend) == NORM_AND_ROTARY  # type: ignore[arg-type]
    _steps_agree(d)
    assert len(_told(caplog)) == 2 and len(calls) == 5
    assert all(_plain(one.module) for one in heard)


class _Asking(nn.Module):
    """A layer that calls the final norm for itself."""

    def __init__(self, layer: nn.Module, norm: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, hidden: torch.Tensor, **more: Any) -> torch.Tensor:
        self.norm[0](hidden)
        out: torch.Tensor = self.layer(hidden, **more)
        return out


@pytest.mark.full
def test_what_layers_call_too_is_left_to_their_own_code(tiny_models: Any) -> None:
    d = tiny_models.driver("llama")
    base = d.model.module.model
    base.layers[1] = _Asking(base.layers[1], [base.norm])
    heard = _heard(d)
    assert [one.name for one in heard] == ["rotary_emb"]
    compile_layers(d.model.module, d.model.probed.attentions, backend="aot_eager")
    compile_outer_modules(heard, backend="aot_eager")
    _steps_agree(d)


def test_neither_matrices_nor_what_does_nothing_are_compiled(tiny_models: Any) -> None:
    d = tiny_models.driver("llama")
    base = d.model.module.model
    base.norm = nn.Sequential(base.norm, nn.Linear(64, 64))
    base.unused = nn.Dropout().eval()
    base.rotary_emb.register_forward_pre_hook(lambda *_: _ignore(base.unused(torch.zeros(3))))
    heard = _heard(d)
    assert sorted(one.name for one in heard) == ["rotary_emb", "unused"]
    assert compile_outer_modules(heard[-1:], backend="aot_eager") == []
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in (base.unused, base.norm, *base.layers))


# On a GPU, in bfloat16

MAX_KERNELS = 4  # of the angles of positions: before a product that is not the compiler's own, that, and behind it


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu_they_are_few_kernels(tiny_models: Any, tiny_driver: Any, name: str) -> None:
    module = tiny_models.module(name, **EVERY_EXPERT.get(name, {})).to("cuda", torch.bfloat16)
    d = tiny_driver(module, engine=EngineConfig(kv_slots=331, compile=False, graphs=False, token_budget=64))
    heard = _heard(d)
    before = [_kernels(one) for one in heard]
    assert compile_outer_modules(heard) == NORM_AND_ROTARY
    for one, eager in zip(heard, before, strict=True):
        assert _kernels(one) <= min(MAX_KERNELS, eager - 1)


def _kernels(one: compile.RecordedModule) -> int:
    """Counts the kernels of one call with the profiler."""
    args, kwargs = one.calls[0].args, one.calls[0].kwargs
    with torch.no_grad():
        one.module(*args, **kwargs)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as told:
            one.module(*args, **kwargs)
            torch.cuda.synchronize()
    found: Any = told.events()
    return sum("CUDA" in str(event.device_type) for event in found)
