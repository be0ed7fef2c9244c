"""A traced base gives the bits of the model's modules, and a model that cannot be followed keeps them."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.batch.input_batch import StepKind
from engine.config import EngineConfig
from engine.model.hf_model import HFModel
from engine.model.optimize import onednn_linear, traced_base
from engine.model.optimize.traced_base import TracedBase
from tests.engine.model.conftest import CONFIGS, SLOTS

ENGINE = EngineConfig(kv_slots=SLOTS)
CHANGED_BITS = 1e-3


def made(tiny_driver: Any, module: Any, engine: EngineConfig = ENGINE) -> Any:
    """A driver whose model is warmed up."""
    driver = tiny_driver(module, engine=engine)
    driver.model.warm_up(lambda stage, seconds: None)
    return driver


def steps(driver: Any) -> list[tuple[StepKind, list[Any]]]:
    """Steps of prompts, of single tokens, of rows that share a context, and one that is too large to be traced."""
    prompts = [driver.add(length) for length in (5, 33, 12)]
    shared = [driver.add(40, shares=(1, 33)) for _ in range(3)]
    long = [driver.add(65) for _ in range(2)]
    return [
        (StepKind.PREFILL, [driver.run(prompts[0], 0, 3), driver.run(prompts[1], 0, 32, rows=[31])]),
        (StepKind.PREFILL, [driver.run(prompts[2], 0, 11)]),
        (StepKind.DECODE, [driver.run(prompts[1], 32, 33, from_table=True)]),
        (StepKind.DECODE, [driver.run(prompts[0], 3, 4, from_table=True), driver.run(prompts[2], 11, 12)]),
        (StepKind.SCORE, [driver.run(each, 33, 40, rows=[1, 6]) for each in shared]),
        (StepKind.PREFILL, [driver.run(each, 0, 65, rows=[0, 64]) for each in long]),
    ]


def answers(driver: Any) -> list[torch.Tensor]:
    return [driver.model.forward(kind, sequences, driver.table) for kind, sequences in steps(driver)]


@pytest.fixture
def traced_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each traced step."""
    tokens, rows = list[int](), TracedBase.rows

    def noting(self: TracedBase, step: Any, batch: Any) -> torch.Tensor:
        tokens.append(batch.num_tokens)
        return rows(self, step, batch)

    monkeypatch.setattr(TracedBase, "rows", noting)
    return tokens


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_have_the_bits_of_the_modules(
    tiny_models: Any, tiny_driver: Any, traced_steps: list[int], name: str
) -> None:
    plain = answers(made(tiny_driver, tiny_models.module(name), replace(ENGINE, trace_base=False)))
    assert not traced_steps
    driver = made(tiny_driver, tiny_models.module(name))
    traced_steps.clear()
    assert all(torch.equal(own, other) for own, other in zip(answers(driver), plain, strict=True))
    assert traced_steps == [35, 11, 2, 2, 21]


def test_scores_of_labels_have_them_too(tiny_models: Any, tiny_driver: Any, traced_steps: list[int]) -> None:
    found = []
    for engine in (ENGINE, replace(ENGINE, trace_base=False)):
        driver = made(tiny_driver, tiny_models.module("qwen3"), engine)
        traced_steps.clear()
        run = driver.run(driver.add(9), 0, 9, rows=[8])
        labels = torch.tensor([3, 4], dtype=torch.int32).numpy()
        found.append(driver.model.label_logits(StepKind.SCORE, [run], driver.table, labels))
        assert traced_steps == ([9] if engine.trace_base else [])
        assert driver.model.head_watch is not None
    assert torch.equal(*found)


def test_layers_of_onednn_are_traced(
    tiny_models: Any, tiny_driver: Any, traced_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 1)
    plain = answers(made(tiny_driver, tiny_models.module("llama"), replace(ENGINE, trace_base=False)))
    driver = made(tiny_driver, tiny_models.module("llama"))
    assert all(torch.equal(own, other) for own, other in zip(answers(driver), plain, strict=True))
    assert traced_steps


@pytest.mark.full
def test_all_models_of_a_process_are_traced(tiny_models: Any, tiny_driver: Any, traced_steps: list[int]) -> None:
    """Also those of other sizes, and more than the front end keeps variants of a function."""
    config: Any = torch._dynamo.config
    modules = [tiny_models.module("llama", intermediate_size=width, head_dim=width // 4) for width in (64, 96, 128)]
    with config.patch(recompile_limit=1):
        drivers = [made(tiny_driver, module) for module in modules]
    traced_steps.clear()
    for driver in drivers:
        assert driver.error(StepKind.PREFILL, [driver.run(driver.add(7), 0, 7)]) < CHANGED_BITS
    assert traced_steps == [7, 7, 7]


class _Looking(nn.Module):
    """A layer norm that looks at the numbers it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden if float(hidden.abs().max()) < 1e9 else hidden / 2)


def test_a_model_that_looks_at_numbers_keeps_its_modules(
    tiny_models: Any, tiny_driver: Any, traced_steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    module = tiny_models.module("llama")
    module.model.norm = _Looking(module.model.norm)
    with caplog.at_level(logging.INFO):
        driver = made(tiny_driver, module)
    assert "a step could not be followed" in caplog.text
    assert driver.error(StepKind.PREFILL, [driver.run(driver.add(7), 0, 7)]) < CHANGED_BITS
    assert not traced_steps


def test_a_trace_that_fails_when_it_is_tried_is_not_used(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TracedBase, "rows")
    driver = made(tiny_driver, tiny_models.module("llama"))
    assert driver.error(StepKind.PREFILL, [driver.run(driver.add(7), 0, 7)]) < CHANGED_BITS


class _ByLength(nn.Module):
    """A norm that does something else in long steps: the planted fault of a trace that holds for short ones alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) if hidden.shape[1] < 50 else 2 * self.inner(hidden)


def test_a_trace_with_other_bits_is_not_used(
    tiny_models: Any, tiny_driver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    driver = tiny_driver(tiny_models.module("llama"), engine=ENGINE)
    base = driver.model.module.model
    base.norm = _ByLength(base.norm)
    driver.model.warm_up(lambda stage, seconds: None)
    assert "traced steps of [2, 3] tokens differ" in caplog.text
    assert driver.model._traced is None


@pytest.mark.parametrize(
    ("engine", "expected"), [(ENGINE, ["trace"]), (replace(ENGINE, trace_base=False), [])], ids=["on", "off"]
)
def test_the_stage_is_reported(tiny_models: Any, engine: EngineConfig, expected: list[str]) -> None:
    reported = list[str]()
    model = HFModel(tiny_models.module("llama"), engine)
    for _ in range(2):
        model.warm_up(lambda stage, seconds: reported.append(stage))
    assert reported == expected


def test_a_model_of_one_token_is_not_traced(tiny_models: Any) -> None:
    model = HFModel(tiny_models.module("llama"), ENGINE)
    assert traced_base.trace_base(model.module, model._backend, longest=1, slots=SLOTS, vocab_size=9) is None
