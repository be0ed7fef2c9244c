"""Compiled layers: sums become parts of products where rows are few, rotations parts of attention; what is of another
form stays as it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, AttentionCall, forward_context
from engine.batch.input_batch import StepKind
from engine.model.optimize import fusion_passes
from engine.model.optimize.compile import compile_layers
from engine.model.optimize.decoder_layers import decoder_layers
from engine.model.optimize.fused_projections import fuse_projections
from engine.model.optimize.fusion_passes import FusionBackend
from engine.model.optimize.skinny_linear import skinny_step, use_skinny_linears
from tests.engine.model.halves import BF16, EVERY_EXPERT
from tests.engine.model.linears import Asked, noted
from tests.engine.model.test_skinny_linear import skinny_linears_of_any_type

PLAIN = Asked(gated=False, added=False)
SUM, GATED = PLAIN._replace(added=True), PLAIN._replace(gated=True)
LLAMA = [PLAIN, SUM, GATED, SUM]
LAYERS = {  # what a layer asks of the kernel
    "llama": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "gpt_oss": [PLAIN, SUM],
    "qwen3_moe": [PLAIN, SUM],
    "granite": [PLAIN, PLAIN, GATED, PLAIN],  # multiplies what it adds
    "gemma2": [PLAIN] * 4,  # has a norm behind the product
}
ROTATIONS = {  # by how a layer's rotation is joined: with norms, or without; GPT-OSS writes its in another way
    "llama": False,
    "qwen3": True,
    "mistral": False,
    "gemma2": False,
    "granite": False,
    "gpt_oss": None,
}
ROWS = 5
WIDTH = 32

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return noted(monkeypatch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that were looked at, as they were left."""
    graphs: list[fx.Graph] = []
    own = fusion_passes.join_kernels

    def noting(graph: fx.Graph) -> int:
        joined = own(graph)
        graphs.append(graph)
        return joined

    monkeypatch.setattr(fusion_passes, "join_kernels", noting)
    return graphs


@torch.no_grad()
def _logits(module: Any) -> torch.Tensor:
    with skinny_step(ROWS):
        logits: torch.Tensor = module(input_ids=torch.arange(ROWS)[None], use_cache=False).logits
    return logits


@pytest.mark.full(keep=1)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")  # of the library's experts
@pytest.mark.parametrize("name", LAYERS)
def test_layers_join_what_they_can_and_give_the_bits_of_before(tiny_models: Any, asked: list[Asked], name: str) -> None:
    """A residual changes none; the library's own attention is not looked at."""
    module = tiny_models.module(name, **EVERY_EXPERT.get(name, {})).to(torch.bfloat16)
    fuse_projections(module)
    use_skinny_linears(list(module.model.layers))
    before = _logits(module)
    asked.clear()
    compile_layers(module, [layer.self_attn for layer in module.model.layers], backend="aot_eager")
    assert torch.equal(_logits(module), before)
    assert asked == LAYERS[name] * 3


def _rotating(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is torch.ops.assay.attend_qk_norm_rope]


@pytest.mark.full(keep=1)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a:UserWarning")
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ROTATIONS)
def test_attention_of_few_rows_takes_what_it_rotates_and_other_steps_do_not(
    tiny_models: Any, made: list[fx.Graph], name: str
) -> None:
    d = tiny_models.driver(name, num_hidden_layers=3)
    attentions = d.model.probed.attentions
    skinny_linears_of_any_type(decoder_layers(d.model.module, attentions))
    compile_layers(d.model.module, attentions, backend="aot_eager")
    index = d.add(23)
    for few in (False, True):
        made.clear()
        with skinny_step(ROWS if few else 64):
            assert d.error(StepKind.PREFILL, [d.run(index, 0, 5)]) < 1e-4
            assert d.error(StepKind.PREFILL, [d.run(index, 5, 9)]) < 1e-4  # what was stored is what it sees
        normed = {node.args[5] is not None for graph in made for node in _rotating(graph)}
        assert normed == (set() if not few or ROTATIONS[name] is None else {ROTATIONS[name]})


class Norm(nn.Module):
    """RMSNorm as most models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.eps = 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * root).to(x.dtype)


class Layer(nn.Module):
    """r + linear(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x.sin())
        return out


class ReadTwice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        out: torch.Tensor = (x + product) * product
        return out


class AddedToItself(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        out: torch.Tensor = product + product
        return out


class AddedToARow(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x[:, :1] + self.linear(x)
        return out


class AddedToAWiderType(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x.float() + self.linear(x)
        return out


class Scaled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.linear(x), alpha=2)


class AddedLater(Layer):
    """Makes the addend after the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        return torch.add(product, x.sin() * 2)


class AddedInPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.view(-1, WIDTH)
        x += self.linear(x)
        return other * 2


class WrittenBetween(Layer):
    """Multiplies and adds other tensors where they would be read together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        product = self.linear(x)
        x.view(-1).mul_(3)
        total: torch.Tensor = x + product
        return total


class TwoSums(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x) + self.linear(x.sin())
        return out


SUMS: dict[str, tuple[type[Layer], list[Asked]]] = {
    "as models write it": (Layer, [SUM]),
    "added later": (AddedLater, [SUM]),
    "two sums": (TwoSums, [SUM, SUM]),
    "read twice": (ReadTwice, [PLAIN]),
    "added to itself": (AddedToItself, [PLAIN]),
    "added to one row": (AddedToARow, [PLAIN]),
    "added to a wider type": (AddedToAWiderType, [PLAIN]),
    "scaled": (Scaled, [PLAIN]),
    "added in place": (AddedInPlace, [PLAIN]),
    "written to between": (WrittenBetween, [PLAIN]),
}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("form", SUMS)
def test_sums(form: str, asked: list[Asked]) -> None:
    kind, expected = SUMS[form]
    torch.manual_seed(1)
    layer = kind().to(torch.bfloat16).requires_grad_(False)
    use_skinny_linears([layer])
    x = torch.randn((1, ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    compiled: Callable[..., Any] = torch.compile(
        layer, fullgraph=True, dynamic=True, backend=FusionBackend("aot_eager")
    )
    with skinny_step(ROWS):
        wanted = layer(x.clone())
        asked.clear()
        found = compiled(x.clone())
    assert torch.equal(found, wanted) and asked == expected


class Attending(nn.Module):
    """A layer's attention of two query heads and one key/value head, rotated as most models do it."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4 * WIDTH)
        self.q_norm, self.k_norm = (Norm() if normed else nn.Identity() for _ in range(2))
        self.keys, self.values = (nn.Buffer(torch.zeros((9, 1, 1, WIDTH))) for _ in range(2))

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return (x * cos.unsqueeze(1)) + (torch.cat((-high, low), dim=-1) * sin.unsqueeze(1))

    def heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).view(1, -1, 4, WIDTH).split([2, 1, 1], dim=2)
        q, k = self.heads(q, k)
        given = self.turned(q, cos, sin), self.turned(k, cos, sin), v.transpose(1, 2)
        out: torch.Tensor = torch.ops.assay.attend(*given, self.keys, self.values, 0.3, NO_WINDOW, NO_SOFTCAP, None)
        return out


class TurnedTheOtherWay(Attending):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return (x * cos.unsqueeze(1)) + (torch.cat((high, -low), dim=-1) * sin.unsqueeze(1))


class InPairs(Attending):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return (x * cos.unsqueeze(1)) + (turned * sin.unsqueeze(1))


class UnevenHalves(Attending):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return (x * cos.unsqueeze(1)) + (torch.cat((-x[..., 20:], x[..., :20]), dim=-1) * sin.unsqueeze(1))


class OfAnother(Attending):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        other = x + 1
        low, high = other[..., : WIDTH // 2], other[..., WIDTH // 2 :]
        return (x * cos.unsqueeze(1)) + (torch.cat((-high, low), dim=-1) * sin.unsqueeze(1))


class KeysAsTheyAre(Attending):
    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().turned(x, cos, sin) if x.shape[1] == 2 else x


class Centred(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CastBehind(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps))).type_as(x)


class OfAllHeads(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean((-1, -2), keepdim=True) + self.eps)).to(x.dtype)


class Cubed(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OnePlus(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


def _with_norms(norm: type[Norm], key_eps: float = 1e-3) -> Callable[[], Attending]:
    def layer() -> Attending:
        found = Attending()
        found.q_norm, found.k_norm = norm(), norm()
        found.k_norm.eps = key_eps
        return found

    return layer


class Form(NamedTuple):
    """Holds what an attention's rotation is joined with; None: it stays as it is."""

    layer: Callable[[], Attending]
    normed: bool | None


FORMS = {
    "as most models write it": Form(Attending, normed=False),
    "with norms": Form(lambda: Attending(normed=True), normed=True),
    "norms cast behind the weight": Form(_with_norms(CastBehind), normed=True),
    "norms of other epsilons": Form(_with_norms(Norm, 1.0), normed=False),
    "centred norms": Form(_with_norms(Centred), normed=False),
    "norms over all heads": Form(_with_norms(OfAllHeads), normed=False),
    "norms of cubes": Form(_with_norms(Cubed), normed=False),
    "norms of one more than the weight": Form(_with_norms(OnePlus), normed=True),
    "the other way": Form(TurnedTheOtherWay, normed=None),
    "in pairs": Form(InPairs, normed=None),
    "uneven halves": Form(UnevenHalves, normed=None),
    "of another tensor": Form(OfAnother, normed=None),
    "keys as they are": Form(KeysAsTheyAre, normed=None),
}


class _Noting:
    """A step that notes what it is given."""

    def __init__(self) -> None:
        self.given: tuple[torch.Tensor, ...] = ()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.given = (call.q_THD.clone(), call.k_TGD.clone(), call.v_TGE.clone())
        return call.q_THD.clone(memory_format=torch.contiguous_format)


@pytest.mark.full(keep=1)
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("form", FORMS)
def test_rotations(form: str, made: list[fx.Graph]) -> None:
    layer, normed = FORMS[form]
    torch.manual_seed(2)
    module = layer().to(torch.bfloat16).requires_grad_(False)
    use_skinny_linears([module])
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn((1, ROWS, WIDTH), generator=generator).to(torch.bfloat16) for _ in range(3))
    compiled: Callable[..., Any] = torch.compile(
        module, fullgraph=True, dynamic=True, backend=FusionBackend("aot_eager")
    )
    config: Any = torch._dynamo.config
    with skinny_step(ROWS), config.patch(specialize_float=True):
        plain, joined = _Noting(), _Noting()
        with forward_context(plain):
            module(x, cos, sin)
        with forward_context(joined):
            compiled(x, cos, sin)
    for found, wanted in zip(joined.given, plain.given, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=BF16, atol=BF16)
    nodes = [node for graph in made for node in _rotating(graph)]
    assert [node.args[5] is not None for node in nodes] == ([] if normed is None else [normed])


@pytest.mark.parametrize(
    ("kernels", "stored", "joined"), [(True, WIDTH, True), (False, WIDTH, False), (True, 64, False)]
)
def test_rotations_of_many_rows_are_joined_where_a_kernel_computes_them(
    made: list[fx.Graph], monkeypatch: pytest.MonkeyPatch, kernels: bool, stored: int, joined: bool
) -> None:
    monkeypatch.setattr(fusion_passes, "runs_kernels", lambda device: kernels)
    module = Attending(normed=True)
    module.keys, module.values = (nn.Buffer(torch.zeros((9, 1, 1, stored))) for _ in range(2))
    module.to(torch.bfloat16).requires_grad_(False)
    x, cos, sin = (torch.zeros((1, 40, WIDTH), dtype=torch.bfloat16) for _ in range(3))
    config: Any = torch._dynamo.config
    with config.patch(specialize_float=True), forward_context(_Noting()):
        torch.compile(module, fullgraph=True, dynamic=True, backend=FusionBackend("aot_eager"))(x, cos, sin)
    assert [len(_rotating(graph)) for graph in made] == [int(joined)]
