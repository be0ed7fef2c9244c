"""Tests what is compiled ahead for FlashInfer, with a library that only writes down what it is asked for."""

import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine.attention import flashinfer_modules
from engine.attention.flashinfer_modules import BackgroundBuild, ModuleShape
from engine.config import ARCHITECTURES
from engine.warmup import precompile_flashinfer


class Spec:
    """A module, which is built once `awaited` says so."""

    broken: tuple[Any, ...] = ()  # parts of what cannot be built
    compiled: tuple[Any, ...] = ()  # parts of what is there
    awaited: threading.Barrier | None = None
    levels: ClassVar[list[tuple[Any, int]]] = []  # the niceness at which each was built

    def __init__(self, name: str, arguments: tuple[Any, ...], built: list[tuple[Any, ...]]) -> None:
        self._what = (name, *arguments)
        self.sources = [f"{number}.cu" for number in range(10 if "prefill" in name else 2)]
        self._built = built

    @property
    def is_compiled(self) -> bool:
        return any(part in self._what for part in self.compiled)

    def build(self, verbose: bool) -> None:
        if self.awaited is not None:
            self.awaited.wait(timeout=10)
        if any(part in self._what for part in self.broken):
            raise RuntimeError("Ninja build failed.")
        self._built.append(self._what)
        self.levels.append((self._what, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Spec, "levels", [])

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
    monkeypatch.setenv(ARCHITECTURES, "9.0a")
    monkeypatch.setenv("MAX_JOBS", "1")  # unset again afterwards, whatever a test does with it
    return found


NAMES = {
    "pages",
    "cascade",
    "prefill, bfloat16, head dim 128",
    "decode, bfloat16, head dim 128",
    "contexts, bfloat16, head dim 128",
}


def told(lines: str) -> list[str]:
    return [line.removeprefix("FlashInfer module ").partition(":")[0] for line in lines.splitlines()]


def test_what_the_engine_asks_for_is_compiled(built: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert precompile_flashinfer.main(["--head-dims", "128"]) == 0
    half, index = torch.bfloat16, torch.int32
    what = (half, half, half, index, 128, 128, 0, False, False)
    assert sorted(built, key=str) == sorted(
        [
            ("gen_page_module",),
            ("gen_cascade_module",),
            ("gen_batch_prefill_module", "fa2", *what, False),
            ("gen_batch_decode_module", *what),
            ("gen_batch_prefill_module", "fa3", *what, False),
        ],
        key=str,
    )
    names = told(capsys.readouterr().out)
    assert len(names) == len(NAMES) and set(names) == NAMES


def test_what_no_start_waits_for_is_started_last(built: list[tuple[Any, ...]]) -> None:
    assert precompile_flashinfer.main(["--head-dims", "64", "128", "--sampling", "--processes", "1"]) == 0
    # One process builds them in the order of their start. Lines of modules that end together have no order.
    *_, cascade, narrow, wide = built
    assert cascade == ("gen_cascade_module",)
    assert [one[:2] for one in (narrow, wide)] == [("gen_batch_prefill_module", "fa3")] * 2


def test_modules_are_built_beside_each_other(built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the five ends before all have begun; with fewer processes the barrier would break."""
    monkeypatch.setattr(Spec, "awaited", threading.Barrier(5))
    assert precompile_flashinfer.main(["--head-dims", "128", "--processes", "5"]) == 0
    assert len(built) == 5


def test_a_module_that_fails_is_named_after_the_others_are_built(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Spec, "broken", ("fa3",))
    assert precompile_flashinfer.main(["--head-dims", "128", "--processes", "1"]) == 1
    out, err = capsys.readouterr()
    assert set(told(out)) == NAMES - {"contexts, bfloat16, head dim 128"} and len(built) == 4
    assert told(err) == ["contexts, bfloat16, head dim 128"] and "Ninja build failed." in err


@pytest.mark.parametrize(
    ("cores", "processes", "jobs"),
    [(64, "5", "10"), (16, "16", "10"), (10, "5", "7"), (4, "2", "4"), (1, "1", "2"), (2, "5", "1")],
)
def test_compilers_of_all_modules_are_two_a_core_at_most(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, cores: int, processes: str, jobs: str
) -> None:
    monkeypatch.delenv("MAX_JOBS")
    monkeypatch.setattr(flashinfer_modules, "cores", lambda: cores)
    assert precompile_flashinfer.main(["--head-dims", "128", "--processes", processes]) == 0
    assert os.environ["MAX_JOBS"] == jobs


def test_an_operator_may_name_the_compilers_of_a_module(built: list[tuple[Any, ...]]) -> None:
    assert precompile_flashinfer.main(["--head-dims", "128"]) == 0
    assert os.environ["MAX_JOBS"] == "1"


def test_every_dtype_and_head_dim_has_its_own(built: list[tuple[Any, ...]]) -> None:
    given = ["--dtypes", "bfloat16", "float16", "--head-dims", "64", "256", "--window", "--softcap", "--sampling"]
    assert precompile_flashinfer.main(given) == 0
    prefills = [one for one in built if one[:2] == ("gen_batch_prefill_module", "fa2")]
    assert len(set(prefills)) == 4 and all(one[-3:] == (True, True, False) for one in prefills)
    assert ("gen_sampling_module",) in built


@pytest.mark.parametrize(
    ("config", "dtypes", "expected"),
    [
        ({"head_dim": 128, "torch_dtype": "float16"}, None, [("float16", 128, False, False)]),
        ({"hidden_size": 960, "num_attention_heads": 12, "dtype": "float32"}, None, [("bfloat16", 128, False, False)]),
        ({"head_dim": 64, "dtype": "float16"}, ["bfloat16"], [("bfloat16", 64, False, False)]),
        ({"head_dim": 64, "sliding_window": 4096}, None, [("bfloat16", 64, True, False)]),
        ({"head_dim": 64, "sliding_window": 4096, "use_sliding_window": False}, None, [("bfloat16", 64, False, False)]),
        (
            {
                "text_config": {
                    "head_dim": 256,
                    "attn_logit_softcapping": 50.0,
                    "layer_types": ["sliding_attention", "full"],
                }
            },
            None,
            [("bfloat16", 256, False, True), ("bfloat16", 256, True, True)],
        ),
        ({"head_dim": 512}, None, []),
        ({"dim": 768, "n_heads": 12}, None, []),
    ],
)
def test_shapes_are_foreseen_from_a_configuration(
    config: dict[str, Any], dtypes: list[str] | None, expected: list[tuple[Any, ...]]
) -> None:
    assert precompile_flashinfer.shapes_of(config, dtypes) == [ModuleShape(*one) for one in expected]


def test_a_folder_names_what_is_compiled(
    built: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Spec, "compiled", ("gen_page_module",))  # which stays as it is
    (tmp_path / "config.json").write_text('{"head_dim": 128, "dtype": "bfloat16"}')
    assert precompile_flashinfer.main(["--model", str(tmp_path)]) == 0
    assert set(told(capsys.readouterr().out)) == NAMES - {"pages"}


def test_folders_name_what_is_compiled_once(
    built: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, dim in (("target", 128), ("draft", 64), ("another", 128)):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(f'{{"head_dim": {dim}, "dtype": "bfloat16"}}')
        folders.append(str(folder))
    assert precompile_flashinfer.main(["--model", *folders]) == 0
    names = told(capsys.readouterr().out)
    assert sorted(names) == sorted(NAMES | {name.replace("128", "64") for name in NAMES})


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("{", "must be JSON")])
def test_a_folder_that_cannot_be_read_is_named(
    built: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert precompile_flashinfer.main(["--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and str(tmp_path) in said and not built


@pytest.mark.parametrize("urgent", [False, True])
def test_compilers_of_what_no_start_waits_for_give_way_to_the_others(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    monkeypatch.setattr(Spec, "awaited", threading.Barrier(5))  # each in a thread of its own
    assert precompile_flashinfer.main(["--head-dims", "128", "--processes", "5", *["--urgent"] * urgent]) == 0
    own = os.getpriority(os.PRIO_PROCESS, 0)
    levels = {module[1] if "prefill" in module[0] else module[0]: level for module, level in Spec.levels}
    later = {levels.pop(name) for name in ("fa3", "gen_cascade_module")}
    given = flashinfer_modules.NICENESS if urgent else flashinfer_modules.LATER_NICENESS
    assert later == {max(own, given)} and len(levels) == 3
    assert set(levels.values()) == {max(own, flashinfer_modules.NICENESS)}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["precompile_flashinfer", "precompile_kernels"])
def test_the_commands_do_without_the_library_of_models(name: str) -> None:
    """It takes longer to import than all else of them, while a service waits for what they compile."""
    code = f"import sys, engine.warmup.{name}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_only_hopper_gathers_contexts(built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARCHITECTURES, "8.0 10.0a")
    assert precompile_flashinfer.main([]) == 0
    assert built and not any("fa3" in one for one in built)


def test_without_an_architecture_nothing_is_compiled(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ARCHITECTURES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precompile_flashinfer.main([]) == 2
    assert not built and ARCHITECTURES in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--head-dims", "96"], ["--dtypes", "float32"], ["--heads", "1"], ["--processes", "0"]]
)
def test_what_the_kernels_do_not_take_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        precompile_flashinfer.main(given)


# Beside a start-up.

SHAPE = ModuleShape("bfloat16", 128, window=False, softcap=False)


def test_a_start_up_compiles_what_is_missing_alone(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spec, "compiled", ("gen_page_module", "fa2"))
    assert BackgroundBuild([SHAPE, SHAPE]).ended.result(10) == []
    kinds = sorted(one[:2] for one in built)
    assert [kind[0] for kind in kinds] == ["gen_batch_decode_module", "gen_batch_prefill_module", "gen_cascade_module"]
    assert kinds[1][1] == "fa3"


def test_a_start_up_goes_on_while_modules_are_compiled(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier is passed once the five modules and this test have come to it."""
    barrier = threading.Barrier(6)
    monkeypatch.setattr(Spec, "awaited", barrier)
    monkeypatch.setattr(flashinfer_modules, "cores", lambda: 8)
    started = BackgroundBuild([SHAPE])
    assert not built
    barrier.wait(timeout=10)
    assert started.ended.result(10) == []
    assert len(built) == 5


@pytest.mark.parametrize(
    ("there", "delays"),
    [((), True), (("fa2",), True), (("gen_page_module", "gen_batch_decode_module", "fa2"), False)],
)
def test_a_start_knows_whether_it_will_wait(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], delays: bool
) -> None:
    monkeypatch.setattr(Spec, "compiled", there)
    assert BackgroundBuild([SHAPE]).delays_start is delays


@pytest.mark.parametrize("broken", ["a module", "the library"])
def test_what_fails_is_left_to_its_first_use(
    built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    if broken == "a module":
        monkeypatch.setattr(Spec, "broken", ("fa3",))
    else:
        monkeypatch.setitem(sys.modules, "flashinfer.jit.page", None)
    ended = BackgroundBuild([SHAPE]).ended
    if broken == "a module":
        assert [name.partition(",")[0] for name in ended.result(10)] == ["contexts"]
    else:
        assert isinstance(ended.exception(10), ImportError)
        assert not BackgroundBuild([SHAPE]).delays_start
    assert len(built) == (4 if broken == "a module" else 0)
    assert ("at their first use" in caplog.text) is (broken == "the library")


def test_a_model_on_a_gpu_asks_for_what_its_layers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention.flashinfer_backend import FlashInferAttention
    from engine.model.hf_model import HFModel

    asked: list[ModuleShape] = []
    monkeypatch.setattr(flashinfer_modules, "BackgroundBuild", asked.extend)
    backend = FlashInferAttention.__new__(FlashInferAttention)
    backend.dtype = torch.bfloat16
    layers = [types.SimpleNamespace(window=window, softcap=softcap) for window, softcap in ((-1, 0.0), (512, 50.0))]
    model: Any = types.SimpleNamespace(
        device=torch.device("cuda"),
        _backend=backend,
        probed=types.SimpleNamespace(calls=layers, shapes=[types.SimpleNamespace(key_dim=dim) for dim in (64, 256)]),
    )
    HFModel._build_attention(model)
    assert asked == [ModuleShape("bfloat16", 64, False, False), ModuleShape("bfloat16", 256, True, True)]
    model.device = torch.device("cpu")
    assert HFModel._build_attention(model) is None and len(asked) == 2
