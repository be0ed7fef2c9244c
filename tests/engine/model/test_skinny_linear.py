"""Steps of few rows go through the kernel, others through the library's own code, compiled or not. The place of the
kernel is taken by torch here; on a GPU it is the kernel."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.batch.input_batch import StepKind
from engine.model.compatibility import UnsupportedModel
from engine.model.cuda_graphs.decode import CapturedStep
from engine.model.optimize import skinny_linear
from engine.model.optimize.compile import compile_layers
from engine.model.optimize.decoder_layers import decoder_layers
from engine.model.optimize.fused_projections import fuse_projections
from engine.model.optimize.skinny_linear import SkinnyLinear, SkinnyMlp, skinny_step, use_skinny_linears
from engine.model.packing_check import PackingCheck
from tests.engine.model.halves import BF16, PLAIN, largest_difference, on_gpu
from tests.engine.model.linears import Asked, linear_of_torch, noted

GATED = ("llama", "qwen3", "mistral", "granite", "cohere")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return noted(monkeypatch)


def _logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=torch.arange(7)[None], use_cache=False).logits
    return logits


def _eager(tiny_models: Any, name: str) -> Any:
    """A model in bfloat16, its projections merged, with the library's own attention."""
    module = tiny_models.module(name).to(torch.bfloat16)
    fuse_projections(module)
    return module


@pytest.mark.parametrize("name", GATED)
def test_few_rows_go_through_the_kernel_and_others_have_the_bits_of_before(
    tiny_models: Any, asked: list[Asked], name: str
) -> None:
    module = _eager(tiny_models, name)
    before = _logits(module)
    assert use_skinny_linears([*module.model.layers, module.lm_head]) == 4 * 3 + 1
    assert torch.equal(_logits(module), before) and not asked
    with skinny_step(16):
        found = _logits(module)
    assert [one.gated for one in asked] == [False, False, True, False] * 3 + [False]
    assert not any(one.added for one in asked)  # uncompiled layers do that themselves
    assert float((found - before).abs().max() / before.abs().max()) < BF16
    asked.clear()
    with skinny_step(17):
        assert torch.equal(_logits(module), before) and not asked
    assert torch.equal(_logits(module), before) and not asked


def test_a_model_without_such_an_mlp_has_narrow_linears_alone(tiny_models: Any, asked: list[Asked]) -> None:
    module = _eager(tiny_models, "gemma2")  # its activation is another
    before = _logits(module)
    assert use_skinny_linears(list(module.model.layers)) == 4 * 3
    with skinny_step(2):
        found = _logits(module)
    assert asked == [Asked(gated=False, added=False)] * 12
    assert float((found - before).abs().max() / before.abs().max()) < BF16


def test_no_weight_is_held_twice_and_tied_ones_stay_tied(tiny_models: Any) -> None:
    module = tiny_models.module("qwen3", tie_word_embeddings=True).to(torch.bfloat16)
    fuse_projections(module)
    numbers = sum(one.numel() for one in module.parameters())
    use_skinny_linears([*module.model.layers, module.lm_head])
    assert sum(one.numel() for one in module.parameters()) == numbers
    assert module.lm_head.weight is module.model.embed_tokens.weight and type(module.lm_head) is SkinnyLinear


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layers_have_one_more_variant_for_few_rows(tiny_models: Any, asked: list[Asked]) -> None:
    d = tiny_models.driver("llama", num_hidden_layers=4)
    attentions = d.model.probed.attentions
    layers = decoder_layers(d.model.module, attentions)
    skinny_linears_of_any_type(layers)
    compile_layers(d.model.module, attentions, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    index, counts = d.add(23), []
    for few in (False, True, False, True):
        step = [d.run(index, 0, 5)]
        with skinny_step(2 if few else 64):
            assert d.error(StepKind.PREFILL, step) < 1e-4
        counts.append(len(asked))
    assert counts[0] == 0 and counts[1] == counts[2] == counts[3] // 2 == 4 * 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # the last layer and the others, few rows or not


def skinny_linears_of_any_type(layers: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny_linear, "HALVES", (torch.float32,))
        assert use_skinny_linears(layers) > 0


def _mlp(block: type[nn.Module] | None = None, **more: Any) -> nn.Module:
    """Returns a merged SiLU MLP, in a parent."""
    parent = nn.Module()
    parent.mlp = (block or Gated)()
    for name, module in more.items():
        setattr(parent.mlp, name, module)
    parent.to(torch.bfloat16)
    fuse_projections(parent)
    return parent


class Gated(nn.Module):
    limit = float("inf")

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj = nn.Linear(48, 32)
        self.act_fn: nn.Module = nn.SiLU()
        for one in (self.gate_proj, self.up_proj):
            nn.init.normal_(one.weight, std=0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(hidden)).clamp(max=self.limit)
        out: torch.Tensor = self.down_proj(gate * self.up_proj(hidden))
        return out


class Limited(Gated):
    limit = 7.0


class Exchanged(Gated):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(hidden)
        out: torch.Tensor = self.down_proj(gate * self.act_fn(self.up_proj(hidden)))
        return out


class Residual(Gated):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden)


def test_an_mlp_of_that_form_is_narrow() -> None:
    parent = _mlp()
    assert use_skinny_linears([parent]) == 2
    assert isinstance(parent.mlp, SkinnyMlp)


@pytest.mark.parametrize("block", [Limited, Exchanged, Residual])
def test_an_mlp_that_does_more_stays(block: type[nn.Module]) -> None:
    parent = _mlp(block)
    assert use_skinny_linears([parent]) == 2
    assert type(parent.mlp) is block


def test_an_mlp_with_another_activation_or_unmerged_stays() -> None:
    for parent in (_mlp(act_fn=nn.GELU()), _mlp(up_proj=nn.Linear(32, 48, bias=False))):
        use_skinny_linears([parent])
        assert type(parent.mlp) is Gated


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


@pytest.mark.parametrize(
    "linear", [nn.Linear(32, 8), nn.Linear(40, 8).half(), _Scaled(32, 8).half(), nn.Identity(), nn.Bilinear(16, 16, 8)]
)
def test_what_the_kernel_would_not_multiply_stays(linear: nn.Module) -> None:
    """Numbers of 32 bits, rows of no multiple of 16, and what is no plain linear layer."""
    assert use_skinny_linears([linear]) == 0


def _neighbour(x: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
    return linear_of_torch(x.roll(1, -2), *given, **more)


def test_the_packing_check_inside_finds_a_kernel_that_mixes_rows(
    tiny_models: Any, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels import skinny_gemm as kernels

    d = tiny_models.driver("llama")
    proof = PackingCheck(d.model.probed, max_model_len=d.model.max_model_len)
    skinny_linears_of_any_type(decoder_layers(d.model.module, d.model.probed.attentions))
    with skinny_step(1):
        proof.run()
    assert asked
    monkeypatch.setattr(kernels, "skinny_gemm", _neighbour)
    proof.run()
    with skinny_step(1), pytest.raises(UnsupportedModel, match="packed steps change"):
        proof.run()


class _Recording:
    """A model that notes whether it was asked as one of few rows."""

    def __init__(self) -> None:
        self.few: list[bool] = []

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.few.append(skinny_linear._few)
        return SimpleNamespace(logits=torch.zeros((1, input_ids.shape[1], 3)))


def test_captured_steps_of_up_to_16_rows_are_of_few(stand_in: Any) -> None:
    from engine.attention.flashinfer_backend import FlashInferAttention

    backend = FlashInferAttention(torch.device("cpu"), torch.float32)
    module = _Recording()
    for rows in (2, 8, 16, 17, 32):
        ids = torch.zeros(rows, dtype=torch.int64)
        step = CapturedStep(module, backend, {}, rows)
        step.logits(ids, ids, ids.int())
    assert module.few == [True, True, True, False, False] and not skinny_linear._few


# On a GPU, in bfloat16

EAGER = replace(PLAIN, graphs=True, max_graph_batch_size=8)
GRAPHS = {"eager layers": EAGER, "compiled layers": replace(EAGER, compile=True)}


def _decoded(d: Any) -> list[torch.Tensor]:
    """Logits of decode steps of 1, 3 and 5 rows and of a verify step of 5 tokens, after a prefill."""
    done = {d.add(length): length - 6 for length in (31, 17, 23, 9, 13)}
    d.model.forward(StepKind.PREFILL, [d.run(one, 0, length) for one, length in done.items()], d.table)
    found = []
    for count in (1, 3, 5):
        rows = list(done)[:count]
        sequences = [d.run(one, done[one], done[one] + 1, from_table=True) for one in rows]
        found.append(d.model.forward(StepKind.DECODE, sequences, d.table).float().clone())
        done |= {one: done[one] + 1 for one in rows}
    sequences = [d.run(one, done[one], done[one] + new) for one, new in zip(done, (3, 2), strict=False)]
    return [*found, d.model.forward(StepKind.VERIFY, sequences, d.table).float().clone()]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("engine", GRAPHS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_captured_steps_of_few_rows_agree_with_eager_ones(
    tiny_models: Any, tiny_driver: Any, name: str, engine: str
) -> None:
    d = tiny_driver(on_gpu(tiny_models, name), engine=GRAPHS[engine])
    d.model.warm_up(lambda stage, seconds: None)
    assert any(isinstance(one, SkinnyLinear) for one in d.model.module.modules())
    found = _decoded(d)
    assert d.model.graph_replays == len(found)
    eager = tiny_driver(on_gpu(tiny_models, name), engine=PLAIN)
    assert not any(isinstance(one, SkinnyLinear) for one in eager.model.module.modules())
    assert largest_difference(found, _decoded(eager)) < BF16


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_captured_step_with_a_kernel_that_mixes_rows_does_not(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels import skinny_gemm as kernels

    d = tiny_driver(on_gpu(tiny_models, "llama"), engine=GRAPHS["eager layers"])
    monkeypatch.setattr(kernels, "skinny_gemm", _neighbour)
    d.model.warm_up(lambda stage, seconds: None)
    assert largest_difference(_decoded(d), _decoded(tiny_driver(on_gpu(tiny_models, "llama"), engine=PLAIN))) > BF16
