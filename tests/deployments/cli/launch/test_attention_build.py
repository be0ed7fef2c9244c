"""What `assay serve` compiles for FlashInfer while Ray starts, with commands that stand in for the compiler's."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.launch import attention_build, local_serve
from deployments.cli.launch.attention_build import command_for, compiling
from engine.config import ARCHITECTURES

CPU = Path(__file__).parents[4] / "deployments" / "configs" / "cpu.yaml"
Config = dict[str, Any]
# Starts a process as a compiler would be, writes what it is given and both ids, and never ends.
ENDLESS = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
names = "FLASHINFER_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES"
told = json.dumps([sys.argv[2:], [os.environ[name] for name in names], [os.getpid(), child.pid]])
open(sys.argv[1] + "-", "w").write(told)
os.rename(sys.argv[1] + "-", sys.argv[1])
time.sleep(600)
"""
BRIEF = """
import os, sys
open(sys.argv[1] + "-", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + "-", sys.argv[1])
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration of a model on a GPU, on a machine that has one and FlashInfer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    gpus(monkeypatch, "9.0\n9.0\n")
    monkeypatch.delenv(ARCHITECTURES, raising=False)
    monkeypatch.setattr(attention_build, "find_spec", lambda name: name)
    found: Config = local_serve.read(CPU)
    found["applications"][0]["args"]["model"] = {"path": str(folder), "device": "cuda"}
    return found


def gpus(monkeypatch: pytest.MonkeyPatch, capabilities: str) -> None:
    command = (sys.executable, "-c", f"print({capabilities!r}, end='')")
    monkeypatch.setattr(attention_build, "CAPABILITIES", command)


def model_of(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]["model"]
    return found


def test_modules_of_the_model_are_compiled_for_the_gpu(config: Config) -> None:
    command, environment = command_for(config) or pytest.fail("nothing is compiled")
    assert command[-2:] == ["--model", model_of(config)["path"]]
    assert environment == {"FLASHINFER_CUDA_ARCH_LIST": "9.0"}
    model_of(config)["dtype"] = "float16"
    command, _ = command_for(config) or pytest.fail("nothing is compiled")
    assert command[-2:] == ["--dtypes", "float16"]


def test_architectures_that_the_operator_names_are_those_of_the_replicas_too(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARCHITECTURES, "8.0 9.0a")
    monkeypatch.setattr(attention_build, "CAPABILITIES", ("no-such-command",))
    _, environment = command_for(config) or pytest.fail("nothing is compiled")
    assert environment == {ARCHITECTURES: "8.0 9.0a"}


@pytest.mark.parametrize(
    "without",
    ["a GPU", "an answer", "one kind of GPU", "the library", "halves", "a folder", "config.json", "a model", "fast"],
)
def test_nothing_is_compiled_without(config: Config, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    model = model_of(config)
    match without:
        case "a GPU":
            monkeypatch.setattr(attention_build, "CAPABILITIES", ("no-such-command",))
        case "an answer":
            monkeypatch.setattr(attention_build, "CAPABILITIES", (sys.executable, "-c", "raise SystemExit(9)"))
        case "one kind of GPU":
            gpus(monkeypatch, "8.0\n9.0\n")
        case "the library":
            monkeypatch.setattr(attention_build, "find_spec", lambda name: None)
        case "halves":
            model["dtype"] = "float32"
        case "a folder":
            model["path"] = "models/none"
        case "config.json":
            (Path(model["path"]) / "config.json").unlink()
        case "a model":
            config["applications"] = []
        case "fast":
            config["applications"][0]["args"]["engine"] = {"numerics": "invariant"}
    assert command_for(config) is None
    with compiling(config):
        pass


def test_a_cpu_is_not_asked_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: pytest.fail("a command ran"))
    model_of(config)["device"] = "cpu"
    assert command_for(config) is None


def test_compilers_end_with_the_service(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(attention_build, "COMMAND", (sys.executable, "-c", ENDLESS, str(told)))
    with compiling(config):
        wait_until(told.exists)
        arguments, variables, processes = json.loads(told.read_text())
        assert all(map(runs, processes))
    assert arguments == ["--model", model_of(config)["path"]] and variables == ["9.0", ""]
    wait_until(lambda: not any(map(runs, processes)))


def test_compilers_that_are_done_need_no_end(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(attention_build, "COMMAND", (sys.executable, "-c", BRIEF, str(told)))
    with compiling(config):
        wait_until(told.exists)
        process = int(told.read_text())
        wait_until(lambda: not Path(f"/proc/{process}").exists())  # nor is it left to be read


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
