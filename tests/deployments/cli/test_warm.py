"""`assay warm`: what a start-up compiles, on this machine and for one that has a GPU."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from deployments.cli import warm
from deployments.cli.launch.early_build import commands_of
from deployments.cli.main import main
from deployments.config.app_args import AppArgs
from engine.config import ARCHITECTURES
from engine.warmup import precompile_flashinfer, precompile_kernels
from engine.warmup.foreseen import foresee

CPU = Path(__file__).parents[3] / "deployments" / "configs" / "cpu.yaml"
QWEN = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "head_dim": 128, "torch_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def no_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ARCHITECTURES, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def file_of(folder: Path, **sections: dict[str, Any]) -> Path:
    config = yaml.safe_load(CPU.read_text())
    config["applications"][0]["args"] |= sections
    file = folder / "warm.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.full
def test_it_does_what_a_replica_does_before_it_serves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", str(file_of(tmp_path))]) == warm.WARM
    stages = [line.partition(" took ")[0] for line in capfd.readouterr().out.splitlines()]
    assert stages[0] == "builtin: load" and stages[-1] == "builtin: trace"


@pytest.mark.full
def test_a_model_that_is_not_served_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = {"path": "builtin", "device": "cpu"}
    assert main(["warm", str(file_of(tmp_path, model=model, engine={"numerics": "invariant"}))]) == warm.FAILED
    assert "assay warm: builtin is not served: `engine.numerics` must be fast on a CPU." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"path": "models/none", "device": "cpu"}}, "models/none"),
        ({"engine": {"kv_slot": 9}}, "Did you mean `kv_slots`?"),
        ({"model": {"path": "builtin", "device": "cuda"}}, "FLASHINFER_CUDA_ARCH_LIST must name architectures"),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, dict[str, Any]],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(warm, "_warm", lambda args: pytest.fail("something was compiled"))
    assert main(["warm", str(file_of(tmp_path, **sections))]) == warm.WRONG
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "applications: []"])
def test_a_file_that_holds_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "none.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["warm", str(file)]) == warm.WRONG
    assert "none.yaml must " in capsys.readouterr().err


@pytest.mark.parametrize(("device", "compiled"), [("cuda", True), ("auto", True), ("cpu", False)])
@pytest.mark.parametrize("status", [0, 1])
def test_an_image_is_built_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, compiled: bool, status: int
) -> None:
    ran = list[str]()

    def run(command: list[str]) -> SimpleNamespace:
        ran.append(command[3])
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: Started)
    monkeypatch.setenv(ARCHITECTURES, "8.0 9.0a")
    file = file_of(tmp_path, model={"path": "builtin", "device": device})
    assert main(["warm", str(file)]) == (warm.FAILED if compiled and status else warm.WARM)
    assert ran == (["engine.warmup.precompile_flashinfer", "engine.warmup.precompile_kernels"] if compiled else [])


class Started:
    """Stands for a context whose processes end well."""

    class Process:
        exitcode = 0

        def __init__(self, **given: Any) -> None: ...

        def start(self) -> None: ...

        def join(self) -> None: ...


def commands(model: dict[str, Any], **sections: dict[str, Any]) -> dict[str, list[str]]:
    args = AppArgs.model_validate({"model": model, **sections})
    return {command[0].rpartition(".")[2]: command[1:] for command in commands_of(args, ["8.0", "9.0a"])}


def test_commands_are_those_of_the_models_files(folder: Path) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    found = commands({"path": str(folder)}, engine={"max_running": 31}, speculation=speculation)
    assert found["precompile_flashinfer"] == ["--model", str(folder)]
    precompile_flashinfer._parser().parse_args(found["precompile_flashinfer"])
    asked = vars(precompile_kernels._parser().parse_args(found["precompile_kernels"]))
    expected = {"capabilities": [80, 90], "vocab_sizes": [151_936], "dtype": "bfloat16", "max_running": 31, "drafts": 3}
    assert expected.items() <= asked.items()


@pytest.mark.parametrize(
    ("model", "engine", "expected", "logits"),
    [
        ({"dtype": "float32"}, {}, {"precompile_kernels"}, "float32"),  # its attention is torch's
        ({}, {"numerics": "invariant"}, {"precompile_kernels"}, "float32"),  # its attention is our own
        ({"head": "pooled"}, {}, {"precompile_flashinfer"}, None),  # nothing is sampled
        ({"dtype": "float16"}, {}, {"precompile_flashinfer", "precompile_kernels"}, "float16"),
    ],
)
def test_only_what_is_used_is_compiled(
    folder: Path, model: dict[str, Any], engine: dict[str, Any], expected: set[str], logits: str | None
) -> None:
    found = commands({"path": str(folder), **model}, engine=engine)
    assert found.keys() == expected
    assert all(logits in arguments for name, arguments in found.items() if "kernels" in name)


@pytest.mark.parametrize(
    ("changes", "scale", "softcap"),
    [({}, 1.0, 0.0), ({"logit_scale": 0.25}, 0.25, 0.0), ({"logits_scaling": 8}, 0.125, 0.0),
     ({"final_logit_softcapping": 30.0}, 1.0, 30.0)],
)  # fmt: skip
def test_a_head_is_foreseen(folder: Path, changes: dict[str, Any], scale: float, softcap: float) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    found = foresee(folder, "auto")
    assert found is not None
    assert (found.head.scale, found.head.softcap, found.dtype) == (scale, softcap, "bfloat16")


@pytest.mark.parametrize(
    "changes", [{"architectures": ["Qwen3ForSequenceClassification"]}, {"architectures": None}, {"vocab_size": None}]
)
def test_what_samples_nothing_has_no_kernels(folder: Path, changes: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    assert foresee(folder, "auto") is None


@pytest.mark.full
def test_the_library_that_is_not_there_is_named(folder: Path) -> None:
    """In a process of its own, where importing FlashInfer fails."""
    code = "import sys; sys.modules['flashinfer'] = None; from engine.warmup import precompile_flashinfer as p; "
    code += "sys.exit(p.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", str(folder)], env={ARCHITECTURES: "9.0", "PATH": ""},
        cwd=CPU.parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.strip().startswith("Nothing was compiled: ")
