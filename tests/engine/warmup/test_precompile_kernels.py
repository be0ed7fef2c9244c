"""Kernels are compiled beside a start-up: what is asked for, and what its failures cost (nothing but speed)."""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ARCHITECTURES, EngineConfig, SamplerConfig, SpeculationConfig
from engine.model.lm_head import HeadSpec
from engine.warmup import background_compile, precompile_kernels
from engine.warmup.background_compile import STAGE, BackgroundCompile, arguments_for, background_compile_for
from tests.gpu_sampler.compiler import needs_compiler, warns_of_fusion

GPU = torch.device("cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Holds what is looked at of a model."""

    vocab_size: int = 2048
    dtype: torch.dtype = torch.float16
    device: torch.device = GPU
    head: HeadSpec | None = None


@dataclass(slots=True, kw_only=True)
class Told:
    stages: list[str] = field(default_factory=list)

    def __call__(self, stage: str, seconds: float) -> None:
        assert seconds >= 0
        self.stages.append(stage)


def run(code: str, timeout_s: float = 60.0) -> Told:
    told = Told()
    with BackgroundCompile([], (sys.executable, "-c", code), timeout_s) as started:
        started.wait(told)
    return told


def test_the_command_understands_what_a_start_up_asks_of_it() -> None:
    speculation = SpeculationConfig(
        method="ngram",
        num_speculative_tokens=3,
        rejection_sample_method="synthetic",
        seeded_rejection_sample_method="block",
        synthetic_acceptance_rates=(0.9, 0.8, 0.7),
    )
    config = EngineConfig(
        max_running=15,
        sampler=SamplerConfig(overlay_entries=64, logprobs_mode="processed_logprobs"),
        speculation=speculation,
    )
    head = HeadSpec(weight=torch.zeros(1), bias=torch.zeros(1), scale=1.0, softcap=30.0)
    model: Any = Model(head=head)
    asked = vars(precompile_kernels._parser().parse_args(arguments_for(model, config, ["9.0"])))
    asked.pop("processes")  # of the machine
    assert asked == {
        "capabilities": [90],
        "vocab_sizes": [2048],
        "dtype": "float16",
        "max_running": 15,
        "overlay_entries": 64,
        "processed": True,
        "drafts": 3,
        "rule": "synthetic",
        "seeded_rule": "block",
        "no_head": False,
        "head_bias": True,
        "head_scaled": False,
        "head_capped": True,
    }
    asked = vars(precompile_kernels._parser().parse_args(arguments_for(model_without_head(), EngineConfig(), ["8.9"])))
    assert (asked["drafts"], asked["processed"], asked["no_head"]) == (0, False, True)


def model_without_head() -> Any:
    return Model()


@needs_compiler
@warns_of_fusion
def test_the_command_compiles_for_all_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_sampler import kernel_cache

    asked: list[tuple[int, int, int]] = []

    def compiled(found: list[Any], capability: int, processes: int) -> kernel_cache.Compiled:
        asked.append((len(found), capability, processes))
        return kernel_cache.Compiled(len(found), 0, () if capability == 80 else ("_tiles_kernel",))

    monkeypatch.setattr(kernel_cache, "compile_variants", compiled)
    given = ["--capabilities", "8.0", "9.0a", "--vocab-sizes", "111", "300", "--drafts", "2", "--processes", "5"]
    assert precompile_kernels.main(given) == 1  # some were refused
    assert [ask[1:] for ask in asked] == [(80, 5), (80, 5), (90, 5), (90, 5)]
    assert all(ask[0] > 40 for ask in asked)
    assert "_tiles_kernel: refused" in capsys.readouterr().out


@needs_compiler
def test_the_command_does_nothing_where_kernels_are_interpreted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(ARCHITECTURES, "9.0a")
    assert precompile_kernels.main(["--vocab-sizes", "111"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--drafts", "9"], ["--max-running", "0"], ["--rule", "gumbel"], ["--capabilities", "90"], []]
)
def test_the_command_names_what_it_does_not_take(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        precompile_kernels.main([*given, *(["--vocab-sizes", "9"] if given else ["--capabilities", "9.0"])])
    assert (given[0] if given else "--vocab-sizes") in capsys.readouterr().err


def test_an_environment_without_capabilities_is_refused_by_name_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ARCHITECTURES, "8.0;9.0")
    with pytest.raises(SystemExit):
        precompile_kernels.main(["--vocab-sizes", "9"])
    assert "FLASHINFER_CUDA_ARCH_LIST must be as 8.0 or 9.0a. Given: 8.0;9.0." in capsys.readouterr().err
    given = precompile_kernels._parser().parse_args(["--vocab-sizes", "9", "--capabilities", "9.0"])
    assert given.capabilities == [90]


def test_a_start_up_waits_for_the_process_and_tells_the_stage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert run("print('first'); print('9 kernels')").stages == [STAGE]
    assert "9 kernels" in caplog.text and not [one for one in caplog.records if one.levelno > logging.INFO]


@pytest.mark.full
def test_the_process_sees_our_modules_and_no_gpu(tmp_path: Path) -> None:
    said = tmp_path / "said"
    write = f"open({str(said)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + '.')"
    code = f"import engine.warmup.background_compile, os; {write}"
    run(code)
    assert said.read_text() == "."


@pytest.mark.parametrize(
    ("code", "timeout_s", "why"),
    [
        ("import sys; print('no compiler'); sys.exit(1)", 60.0, "no compiler"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "-9"),
        ("import threading; threading.Event().wait()", 0.05, "not done after"),
    ],
    ids=["fails", "is killed", "hangs"],
)
def test_a_failure_is_a_warning_and_nothing_else(
    code: str, timeout_s: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(run(code, timeout_s).stages) <= 1
    (warned,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert why in warned.getMessage()


def test_a_command_that_is_not_there_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    told = Told()
    with BackgroundCompile([], (str(tmp_path / "none"),)) as started:
        started.wait(told)
    assert not told.stages and "were not compiled in the background" in caplog.text


def test_a_start_up_that_fails_ends_the_process() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        BackgroundCompile([], (sys.executable, "-c", "import threading; threading.Event().wait()")) as started,
    ):
        process = started._process
        raise ZeroDivisionError
    assert process is not None and process.returncode == -9


def test_a_process_is_started_on_a_gpu_with_cores_to_spare_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def arguments(cores: int, model: Any = model, **options: Any) -> tuple[str, ...] | None:
        monkeypatch.setattr(background_compile, "cores", lambda: cores)
        return background_compile_for(model, EngineConfig(**options))._command

    found = arguments(8)
    assert found is not None and found[: len(background_compile.COMMAND)] == background_compile.COMMAND
    given = precompile_kernels._parser().parse_args(found[len(background_compile.COMMAND) :])
    assert (given.capabilities, given.processes) == ([90], 6)
    assert arguments(3) is None
    assert arguments(8, Model(device=torch.device("cpu"))) is None
    assert arguments(8, sampler=SamplerConfig(backend="numpy")) is None
