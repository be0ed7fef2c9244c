"""The choice of backend: what `auto` means where, and what refuses to start."""

import importlib.util
from typing import Any

import pytest
import torch

from gpu_sampler import backend as backends
from gpu_sampler.backend import choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter, whatever the process was started with."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "check_installed", lambda device: "0.6.14")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> str:
        raise ValueError("flashinfer-python: not installed")

    monkeypatch.setattr(backends, "check_installed", missing)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_auto_is_the_reference_on_a_cpu_with_and_without_triton(monkeypatch: pytest.MonkeyPatch, absent: None) -> None:
    assert choose("auto", CPU) == "numpy"
    without_triton(monkeypatch)
    assert choose("auto", CPU) == "numpy"


def test_auto_is_our_kernels_on_cuda_whether_flashinfer_is_there_or_not(absent: None) -> None:
    assert choose("auto", CUDA) == "triton"


def test_numpy_is_taken_anywhere(absent: None) -> None:
    for device in (CPU, CUDA):
        assert choose("numpy", device) == "numpy"


def test_flashinfer_and_triton_are_taken_by_name_alone(installed: None) -> None:
    assert [choose(name, CUDA) for name in ("auto", "flashinfer", "triton")] == ["triton", "flashinfer", "triton"]


def test_flashinfer_asked_for_and_absent_refuses_to_start(absent: None) -> None:
    with pytest.raises(ValueError, match="not installed"):
        choose("flashinfer", CUDA)


def test_flashinfer_on_a_cpu_refuses_to_start() -> None:
    with pytest.raises(ValueError, match=r"needs device cuda\. Given: cpu"):
        choose("flashinfer", CPU)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1.*Given: cpu"):
        choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", CPU) == "triton"


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer"])
def test_cuda_without_triton_refuses_to_start(backend: Any, monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ValueError, match="needs the package triton"):
        choose(backend, CUDA)


@pytest.mark.parametrize("backend", ["torch", "", "AUTO"])
def test_other_names_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="must be one of auto, triton, flashinfer, numpy"):
        choose(backend, CUDA)
