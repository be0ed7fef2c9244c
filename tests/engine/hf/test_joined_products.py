"""Compiled layers let the products of few rows do the norms and sums beside them; what is of another form stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engine.graphs import compile_layers
from engine.joined_products import Joining
from engine.narrow_linear import few_rows, narrow_linears
from engine.projections import merge_projections
from tests.engine.hf.halves import BF16, EVERY_EXPERT
from tests.engine.hf.linears import Asked, noted

PLAIN = Asked(gated=False, normed=False, added=False)
NORM, SUM = PLAIN._replace(normed=True), PLAIN._replace(added=True)
GATED = PLAIN._replace(gated=True)
LLAMA = [NORM, SUM, GATED._replace(normed=True), SUM]
LAYERS = {  # what a layer asks of the kernel
    "llama": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "gpt_oss": [NORM, SUM],
    "qwen3_moe": [NORM, SUM],  # the experts' norm is the router's, too
    "granite": [NORM, PLAIN, GATED._replace(normed=True), PLAIN],  # multiplies what it adds
    "gemma2": [PLAIN] * 4,  # its norm multiplies by 1 + g, and stands behind products, too
}
ROWS = 5
WIDTH = 32

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    return noted(monkeypatch)


@torch.no_grad()
def _logits(module: Any) -> torch.Tensor:
    with few_rows(ROWS):
        logits: torch.Tensor = module(input_ids=torch.arange(ROWS)[None], use_cache=False).logits
    return logits


@pytest.mark.filterwarnings("default")  # the library's own, of its experts
@pytest.mark.parametrize("name", LAYERS)
def test_layers_join_what_they_can_and_give_the_numbers_of_before(
    tiny_models: Any, asked: list[Asked], name: str
) -> None:
    module = tiny_models.module(name, **EVERY_EXPERT.get(name, {})).to(torch.bfloat16)
    merge_projections(module)
    narrow_linears(list(module.model.layers))
    before = _logits(module)
    asked.clear()
    compile_layers(module, [layer.self_attn for layer in module.model.layers], backend="aot_eager")
    found = _logits(module)
    assert asked == LAYERS[name] * 3
    assert float((found - before).abs().max() / before.abs().max()) < BF16


def test_layers_whose_norms_differ_by_a_number_have_code_of_their_own(tiny_models: Any, asked: list[Asked]) -> None:
    module = tiny_models.module("llama").to(torch.bfloat16)
    merge_projections(module)
    narrow_linears(list(module.model.layers))
    module.model.layers[1].post_attention_layernorm.variance_epsilon = 100.0
    before = _logits(module)
    asked.clear()
    compile_layers(module, [layer.self_attn for layer in module.model.layers], backend="aot_eager")
    assert float((_logits(module) - before).abs().max() / before.abs().max()) < BF16
    assert asked == LLAMA * 3


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
    """r + linear(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(self.norm(x))
        return out


class RootBehind(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps))).type_as(x)


class Centred(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OfAll(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean() + self.eps)).to(x.dtype)


class Cubed(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class InHalves(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OfAnother(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, other = x.float(), x.float().roll(1, -1) + 1
        return self.weight * (wide * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class NormReadTwice(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        out: torch.Tensor = x + self.linear(normed) * normed
        return out


class ProductReadTwice(Layer):
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


class AddedLater(Layer):
    """What is added is made after the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(self.norm(x))
        return torch.add(product, x.sin() * 2)


class AddedInPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = x.view(-1, WIDTH)
        x += self.linear(x)
        return other * 2


class WrittenBetween(Layer):
    """What goes through the norm is another when the product reads it, and so is what is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        normed = self.norm(x)
        x.view(-1).mul_(3)
        product = self.linear(normed)
        total: torch.Tensor = x + product
        x.sub_(1)
        return total + x


class TwoSums(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x) + self.linear(self.norm(x))
        return out


def _with(norm: type[Norm]) -> Callable[[], Layer]:
    def made() -> Layer:
        layer = Layer()
        layer.norm = norm()
        return layer

    return made


BOTH = PLAIN._replace(normed=True, added=True)
FORMS: dict[str, tuple[Callable[[], nn.Module], list[Asked]]] = {
    "as most models write it": (Layer, [BOTH]),
    "cast behind the weight": (_with(RootBehind), [BOTH]),
    "added later": (AddedLater, [BOTH]),
    "two sums": (TwoSums, [SUM, BOTH]),
    "a norm read twice": (NormReadTwice, [PLAIN]),
    "a product read twice": (ProductReadTwice, [PLAIN]),
    "added to itself": (AddedToItself, [PLAIN]),
    "added to one row": (AddedToARow, [PLAIN]),
    "added to a wider type": (AddedToAWiderType, [PLAIN]),
    "added in place": (AddedInPlace, [PLAIN]),
    "written to between": (WrittenBetween, [PLAIN]),
    "centred": (_with(Centred), [SUM]),
    "of all rows": (_with(OfAll), [SUM]),
    "cubed": (_with(Cubed), [SUM]),
    "of another tensor": (_with(OfAnother), [SUM]),
    "in halves": (_with(InHalves), [SUM]),
}


def _compiled_and_not(layer: nn.Module, asked: list[Asked], dtype: torch.dtype) -> list[Asked]:
    """What the compiled layer asks of the kernel, having given what it gives uncompiled."""
    layer = layer.to(dtype).requires_grad_(False)
    narrow_linears([layer])
    x = torch.randn((1, ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).to(dtype)
    compiled: Callable[..., Any] = torch.compile(layer, fullgraph=True, dynamic=True, backend=Joining("aot_eager"))
    config: Any = torch._dynamo.config
    with few_rows(ROWS), config.patch(specialize_float=True):
        wanted = layer(x.clone())
        asked.clear()
        found = compiled(x.clone())
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=BF16, atol=BF16)
    return list(asked)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, asked: list[Asked]) -> None:
    layer, expected = FORMS[form]
    torch.manual_seed(1)
    assert _compiled_and_not(layer(), asked, torch.bfloat16) == expected


def test_a_norm_of_numbers_of_less_range_stays(asked: list[Asked]) -> None:
    """x times the weight could overflow, which x over its root cannot."""
    assert _compiled_and_not(Layer(), asked, torch.float16) == [SUM]
