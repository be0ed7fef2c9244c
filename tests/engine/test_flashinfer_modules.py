"""What is compiled ahead for FlashInfer, with a library that only writes down what it is asked for."""

import sys
import types
from typing import Any

import pytest
import torch

from engine import flashinfer_modules


class Spec:
    def __init__(self, name: str, arguments: tuple[Any, ...], built: list[tuple[Any, ...]]) -> None:
        self._what = (name, *arguments)
        self._built = built

    def build(self, verbose: bool) -> None:
        self._built.append(self._what)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def module(path: str, *names: str) -> None:
        made = types.ModuleType(path)
        for name in names:
            made.__dict__[name] = lambda *arguments, name=name: Spec(name, arguments, found)
        monkeypatch.setitem(sys.modules, path, made)
        if "." in path:
            parent, _, last = path.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], last, made, raising=False)

    module("flashinfer")
    module("flashinfer.jit", "gen_batch_prefill_module", "gen_batch_decode_module")
    module("flashinfer.jit.page", "gen_page_module")
    module("flashinfer.jit.cascade", "gen_cascade_module")
    module("flashinfer.jit.sampling", "gen_sampling_module")
    monkeypatch.setenv(flashinfer_modules.ARCHITECTURES, "9.0a")
    return found


def test_what_the_engine_asks_for_is_compiled(built: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert flashinfer_modules.main(["--head-dims", "128"]) == 0
    half, index = torch.bfloat16, torch.int32
    what = (half, half, half, index, 128, 128, 0, False, False)
    assert built == [
        ("gen_page_module",),
        ("gen_cascade_module",),
        ("gen_batch_prefill_module", "fa2", *what, False),
        ("gen_batch_decode_module", *what),
        ("gen_batch_prefill_module", "fa3", *what, False),
    ]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "pages",
        "cascade",
        "prefill, bfloat16, head dim 128",
        "decode, bfloat16, head dim 128",
        "contexts, bfloat16, head dim 128",
    ]


def test_every_dtype_and_head_dim_has_its_own(built: list[tuple[Any, ...]]) -> None:
    given = ["--dtypes", "bfloat16", "float16", "--head-dims", "64", "256", "--window", "--softcap", "--sampling"]
    assert flashinfer_modules.main(given) == 0
    prefills = [one for one in built if one[:2] == ("gen_batch_prefill_module", "fa2")]
    assert len(set(prefills)) == 4 and all(one[-3:] == (True, True, False) for one in prefills)
    assert built[-1] == ("gen_sampling_module",)


def test_only_hopper_gathers_contexts(built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flashinfer_modules.ARCHITECTURES, "8.0 10.0a")
    assert flashinfer_modules.main([]) == 0
    assert built and not any("fa3" in one for one in built)


def test_without_an_architecture_nothing_is_compiled(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(flashinfer_modules.ARCHITECTURES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flashinfer_modules.main([]) == 2
    assert not built and flashinfer_modules.ARCHITECTURES in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--head-dims", "96"], ["--dtypes", "float32"], ["--heads", "1"]])
def test_what_the_kernels_do_not_take_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        flashinfer_modules.main(given)
