"""The choice of backend: what `auto` means where, and what refuses to start."""

import importlib.util
from typing import Any

import pytest
import torch

from gpu_sampler import backend as backends
from gpu_sampler.backend import MEASURED, ROW_BUCKETS, Table, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUCLEUS: Table = {"nucleus": ("triton", "triton", "triton", "triton", "flashinfer", "flashinfer")}


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
    assert choose("auto", CPU).rows == "numpy"
    without_triton(monkeypatch)
    assert choose("auto", CPU).rows == "numpy"


def test_auto_is_our_kernels_on_cuda_whether_flashinfer_is_there_or_not(absent: None) -> None:
    choice = choose("auto", CUDA, NUCLEUS)
    assert (choice.rows, choice.flashinfer) == ("triton", "never")
    assert choice.drawer("nucleus", 1024) == "triton"


def test_numpy_is_taken_anywhere(absent: None) -> None:
    for device in (CPU, CUDA):
        assert choose("numpy", device)[:2] == ("numpy", "never")


def test_auto_takes_flashinfer_where_it_was_measured_faster(installed: None) -> None:
    choice = choose("auto", CUDA, NUCLEUS)
    drawers = [choice.drawer("nucleus", rows) for rows in (1, 64, 65, 256, 257, 1024, 4096)]
    assert drawers == ["triton"] * 2 + ["flashinfer"] * 5
    assert choice.drawer("candidates", 4096) == "triton"


def test_flashinfer_asked_for_draws_every_eligible_row(installed: None) -> None:
    choice = choose("flashinfer", CUDA)
    assert choice.drawer("candidates", 1) == choice.drawer("nucleus", 1024) == "flashinfer"


def test_triton_asked_for_draws_every_row(installed: None) -> None:
    choice = choose("triton", CUDA, NUCLEUS)
    assert choice.drawer("nucleus", 1024) == "triton"


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
    assert choose("triton", CPU).rows == "triton"


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer"])
def test_cuda_without_triton_refuses_to_start(backend: Any, monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    without_triton(monkeypatch)
    with pytest.raises(ValueError, match="needs the package triton"):
        choose(backend, CUDA)


@pytest.mark.parametrize("backend", ["torch", "", "AUTO"])
def test_other_names_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="must be one of auto, triton, flashinfer, numpy"):
        choose(backend, CUDA)


def test_measured_table_has_a_place_for_every_bucket_of_the_filtered_branches() -> None:
    assert set(MEASURED) == {"candidates", "nucleus"}
    for by_bucket in MEASURED.values():
        assert len(by_bucket) == len(ROW_BUCKETS) and set(by_bucket) <= {"triton", "flashinfer"}
