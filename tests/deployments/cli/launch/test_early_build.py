"""What `assay serve` compiles for the GPU while Ray starts, with commands that stand in for the compilers'."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.launch import early_build, local_serve
from deployments.cli.launch.early_build import ATTENTION, commands_for, compiling
from engine.config import ARCHITECTURES
from engine.model.model_folder import BUILTIN_DRAFT
from engine.warmup.background_compile import KERNELS, RUN

CPU = Path(__file__).parents[4] / "deployments" / "configs" / "cpu.yaml"
Config = dict[str, Any]
# Starts a process as a compiler would be, writes what it is given and both ids, and never ends.
ENDLESS = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
names = "FLASHINFER_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES"
told = json.dumps([sys.argv[3:], [os.environ[name] for name in names], [os.getpid(), child.pid]])
open(sys.argv[1] + sys.argv[2] + "-", "w").write(told)
os.rename(sys.argv[1] + sys.argv[2] + "-", sys.argv[1] + sys.argv[2])
time.sleep(600)
"""
BRIEF = """
import os, sys
open(sys.argv[1] + sys.argv[2] + "-", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + sys.argv[2] + "-", sys.argv[1] + sys.argv[2])
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration of a model on a GPU, on a machine that has one and FlashInfer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 311}')
    gpus(monkeypatch, "9.0\n9.0\n")
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    monkeypatch.setattr(early_build, "find_spec", lambda name: name)
    monkeypatch.setattr(early_build, "cores", lambda: 16)
    found: Config = local_serve.read(CPU)
    found["applications"][0]["args"]["model"] = {"path": str(folder), "device": "cuda"}
    return found


def gpus(monkeypatch: pytest.MonkeyPatch, capabilities: str) -> None:
    command = (sys.executable, "-c", f"print({capabilities!r}, end='')")
    monkeypatch.setattr(early_build, "CAPABILITIES", command)


def model_of(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]["model"]
    return found


def compiled(config: Config) -> dict[str, list[str]]:
    """Returns the arguments of each command."""
    found, _ = commands_for(config)
    assert all(tuple(command[: len(RUN)]) == RUN for command in found)
    return {command[len(RUN)]: command[len(RUN) + 1 :] for command in found}


def test_what_the_model_needs_is_compiled_for_the_gpu(config: Config) -> None:
    found, (_, environment) = compiled(config), commands_for(config)
    assert list(found) == [ATTENTION, KERNELS] and environment == {ARCHITECTURES: "9.0"}
    assert found[ATTENTION] == ["--model", model_of(config)["path"]]
    assert found[KERNELS][:4] == ["--capabilities", "9.0", "--vocab-sizes", "311"]
    model_of(config)["dtype"] = "float16"
    found = compiled(config)
    assert found[ATTENTION][-2:] == ["--dtypes", "float16"]
    assert found[KERNELS][found[KERNELS].index("--dtype") + 1] == "float16"


def test_modules_of_a_draft_model_are_compiled_too(config: Config, tmp_path: Path) -> None:
    target, speculation = model_of(config)["path"], {"method": "draft_model", "draft": "builtin"}
    config["applications"][0]["args"]["speculation"] = speculation
    assert compiled(config)[ATTENTION] == ["--model", target, str(BUILTIN_DRAFT)]
    own = tmp_path / "draft"
    speculation["draft"] = str(own)
    assert compiled(config)[ATTENTION] == ["--model", target], "the check of the model says why"
    own.mkdir()
    assert compiled(config)[ATTENTION] == ["--model", target]
    (own / "config.json").write_text("{}")
    assert compiled(config)[ATTENTION] == ["--model", target, str(own)]


def test_architectures_that_the_operator_names_are_those_of_the_replicas_too(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARCHITECTURES, "8.0 9.0a")
    monkeypatch.setattr(early_build, "CAPABILITIES", ("no-such-command",))
    assert commands_for(config)[1] == {ARCHITECTURES: "8.0 9.0a"}
    assert compiled(config)[KERNELS][:3] == ["--capabilities", "8.0", "9.0a"]


@pytest.mark.parametrize("without", ["the library", "halves", "fast", "cores", "kernels", "a language model"])
def test_what_the_model_does_without_is_not_compiled(
    config: Config, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    model, args = model_of(config), config["applications"][0]["args"]
    match without:
        case "the library":
            monkeypatch.setattr(early_build, "find_spec", lambda name: None)
        case "halves":
            model["dtype"] = "float32"
        case "fast":
            args["engine"] = {"numerics": "invariant"}
        case "cores":
            monkeypatch.setattr(early_build, "cores", lambda: 3)
        case "kernels":
            args["sampler"] = {"backend": "numpy"}
        case "a language model":
            (Path(model["path"]) / "config.json").write_text("{}")
    assert list(compiled(config)) == ([KERNELS] if without in ("the library", "halves", "fast") else [ATTENTION])


@pytest.mark.parametrize(
    "without",
    ["a GPU", "an answer", "one kind of GPU", "a folder", "config.json", "a sound config.json", "a model"],
)
def test_nothing_is_compiled_without(config: Config, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    model = model_of(config)
    match without:
        case "a GPU":
            monkeypatch.setattr(early_build, "CAPABILITIES", ("no-such-command",))
        case "an answer":
            monkeypatch.setattr(early_build, "CAPABILITIES", (sys.executable, "-c", "raise SystemExit(9)"))
        case "one kind of GPU":
            gpus(monkeypatch, "8.0\n9.0\n")
        case "a folder":
            model["path"] = "models/none"
        case "config.json":
            (Path(model["path"]) / "config.json").unlink()
        case "a sound config.json":
            (Path(model["path"]) / "config.json").write_text("{")
        case "a model":
            config["applications"] = []
    assert commands_for(config) == ([], {})
    with compiling(config):
        pass


def test_a_cpu_is_not_asked_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: pytest.fail("a command ran"))
    model_of(config)["device"] = "cpu"
    assert commands_for(config) == ([], {})


def told_by_each(folder: Path) -> list[str]:
    """Waits for what the processes of both modules write, and returns it."""
    files = [folder / module for module in (ATTENTION, KERNELS)]
    wait_until(lambda: all(file.exists() for file in files))
    return [file.read_text() for file in files]


def test_compilers_end_with_the_service(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_build, "RUN", (sys.executable, "-c", ENDLESS, f"{tmp_path}/"))
    with compiling(config):
        told = [json.loads(text) for text in told_by_each(tmp_path)]
        processes: list[int] = [process for _, _, both in told for process in both]
        assert all(map(runs, processes))
        lower = max(os.getpriority(os.PRIO_PROCESS, 0), early_build.NICENESS)
        wait_until(lambda: {os.getpriority(os.PRIO_PROCESS, process) for process in processes[::2]} == {lower})
    assert [arguments[0] for arguments, _, _ in told] == ["--model", "--capabilities"]
    assert [variables for _, variables, _ in told] == [["9.0", ""]] * 2
    wait_until(lambda: not any(map(runs, processes)))


def test_compilers_that_are_done_need_no_end(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_build, "RUN", (sys.executable, "-c", BRIEF, f"{tmp_path}/"))
    with compiling(config):
        processes = told_by_each(tmp_path)
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))  # nor left to be read


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs(process: int) -> bool:
    """Whether a process runs. One that ended is not read by anyone where this machine's first process reads none."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
