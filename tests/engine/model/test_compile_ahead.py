"""Compiling ahead: the compiler sees of a small copy what it sees of the model later, and the model stays as it was."""

import gc
import logging
import weakref
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.model import hf_model
from engine.model.hf_model import HFModel
from engine.model.lm_head import WantedRows
from engine.model.optimize import compile, compile_ahead
from tests.engine.model.conftest import CONFIGS, SIX

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ENGINE = EngineConfig(kv_slots=331, token_budget=64, max_running=4, fuse_projections=True, onednn_linear=False)


class Compiler:
    """Keeps the graphs that it is asked to compile, and runs them as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = list[str]()

        def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Any:
            self.graphs.append(module.print_readable(print_output=False))
            return module.forward

        for name in ("compile_layers", "compile_outer_modules"):
            monkeypatch.setattr(hf_model, name, partial(getattr(compile, name), backend=compile_graph))


def waits_for_attention(monkeypatch: pytest.MonkeyPatch, delays_start: bool = True) -> None:
    """Makes models that find attention modules missing, which are there once their first check needs them."""
    gc.collect()  # modules of other tests' models, which have numbers
    build = SimpleNamespace(ended=Future[list[str]](), delays_start=delays_start)
    monkeypatch.setattr(HFModel, "_build_attention", lambda model: build)


def numbers(model: HFModel) -> list[int]:
    return [one.number for one in model.module.modules() if isinstance(one, WantedRows)]


def compiled_later(tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> set[str]:
    """Returns what the compiler is given of the model alone and not of its copy."""
    compiler = Compiler(monkeypatch)
    waits_for_attention(monkeypatch)
    d = tiny_driver(tiny_models.module(name), engine=ENGINE)
    ahead = set(compiler.graphs)
    torch.compiler.reset()  # the code of the process: what is left is found by what the compiler is given
    compiler.graphs.clear()
    d.model._compile(d.model.probed, d.model._run_idle)
    assert ahead and compiler.graphs
    return set(compiler.graphs) - ahead


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_compiles_nothing_that_its_copy_did_not(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert not compiled_later(tiny_models, tiny_driver, monkeypatch, name)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["projections", "slots"])
def test_a_copy_that_differs_would_be_seen(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The planted faults: projections of the copy that are not fused, and slots that the compiler takes for a width."""
    if fault == "slots":
        monkeypatch.setattr(compile_ahead, "SLOTS", 64)
    else:
        own = HFModel._optimize
        monkeypatch.setattr(HFModel, "_optimize", lambda model, part: own(model, part) if part is model.probed else 0)
    assert compiled_later(tiny_models, tiny_driver, monkeypatch, "llama")


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", SIX)
def test_the_model_is_as_without(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = tiny_driver(tiny_models.module(name), engine=ENGINE)
    wanted = numbers(plain.model)
    names, head = list(plain.model.module.state_dict()), plain.alone(plain.add(13))
    del plain
    compiler = Compiler(monkeypatch)
    waits_for_attention(monkeypatch)
    copies = list[weakref.ref[Any]]()

    def noted(model: Any) -> Any:
        copy = compile_ahead.small_copy(model)
        copies.append(weakref.ref(copy.module))
        return copy

    monkeypatch.setattr(hf_model, "small_copy", noted)
    d = tiny_driver(tiny_models.module(name), engine=ENGINE)
    assert compiler.graphs and [copy() for copy in copies] == [None]
    assert list(d.model.module.state_dict()) == names and len(numbers(d.model)) == len(wanted)
    assert torch.equal(d.alone(d.add(13)), head)


def test_a_copy_has_a_layer_of_each_kind_and_the_models_weights(tiny_models: Any, tiny_driver: Any) -> None:
    d = tiny_driver(tiny_models.module("gemma2", num_hidden_layers=6), engine=EngineConfig(kv_slots=331))
    model = d.model.probed
    copy = compile_ahead.small_copy(model)
    assert len(model.calls) == 6 and len(copy.calls) == 3
    assert [call.window for call in copy.calls] == [model.calls[place].window for place in (0, 1, 5)]
    own = {id(parameter) for parameter in model.module.parameters()}
    assert {id(parameter) for parameter in copy.module.parameters()} <= own
    assert len(model.module.base_model.layers) == 6


def test_nothing_is_compiled_ahead_where_no_module_delays_the_start(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    waits_for_attention(monkeypatch, delays_start=False)
    tiny_driver(tiny_models.module("llama"), engine=ENGINE)
    assert not compiler.graphs


def test_a_copy_that_fails_costs_nothing_else(
    tiny_models: Any, tiny_driver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no copy")

    Compiler(monkeypatch)
    waits_for_attention(monkeypatch)
    monkeypatch.setattr(hf_model, "runner_without_attention", fails)
    with caplog.at_level(logging.WARNING):
        d = tiny_driver(tiny_models.module("llama"), engine=ENGINE)
    assert "no copy" in caplog.text
    d.alone(d.add(5))
