"""Chooses the code that draws, once at start-up from `sampler.backend`.

A backend that cannot run is an error at start-up that names it, and nothing falls back silently. `auto` takes our
kernels on CUDA and the reference elsewhere. FlashInfer draws only where it is named: no measurement on an H200 has it
faster (`python -m benchmarks.sampler.bench_sampler`).
"""

import importlib.util
import os
import re
from importlib import metadata
from typing import Final, Literal, get_args

import torch

Backend = Literal["auto", "triton", "flashinfer", "numpy"]
ChosenBackend = Literal["triton", "flashinfer", "numpy"]

PACKAGE: Final = "flashinfer-python"
VERSIONS: Final = ((0, 6, 14), (0, 7))  # from the first, below the second
MIN_CAPABILITY: Final = (8, 0)
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+.*)?")  # no release candidate, no development version
_ON: Final = frozenset({"1", "true", "on", "yes", "y"})


def choose(backend: Backend, device: torch.device) -> ChosenBackend:
    """Returns what `backend` means on `device`: with `flashinfer`, our kernels draw the rows that it may not.

    Raises:
        ValueError: the backend cannot run there, or there is none of this name.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"`sampler.backend` must be one of auto, triton, flashinfer, numpy. Given: {backend}.")
    if backend == "auto":
        backend = "numpy" if device.type == "cpu" else "triton"
    if backend == "flashinfer":
        check_installed(device)
    if backend != "numpy":
        check_triton(device)
    return backend


def runs_kernels(device: torch.device) -> bool:
    """Tells whether Triton's kernels run on a device: on CUDA, and on a CPU in a process that interprets them."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "").lower() in _ON)


def check_triton(device: torch.device) -> None:
    """Raises ValueError where our kernels cannot run: without Triton, or on a CPU without its interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("`sampler.backend: triton` needs the package triton. Given: not installed.")
    if not runs_kernels(device):
        raise ValueError(
            f"`sampler.backend: triton` needs device cuda (or cpu under TRITON_INTERPRET=1). Given: {device.type}."
        )


def check_installed(device: torch.device) -> str:
    """Returns FlashInfer's version; ValueError where it cannot run: no CUDA, an old GPU, absent, another version."""
    if device.type != "cuda":
        raise _impossible("device", device.type, "cuda")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        minimum = ".".join(map(str, MIN_CAPABILITY))
        raise _impossible("compute capability", ".".join(map(str, capability)), f"at least {minimum}")
    low, high = (".".join(map(str, version)) for version in VERSIONS)
    allowed = f">={low},<{high} (pip install 'assay-serve[gpu]')"
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise _impossible(PACKAGE, "not installed", allowed) from None
    release = _RELEASE.fullmatch(version)
    if release is None or not VERSIONS[0] <= tuple(map(int, release.group(1, 2, 3))) < VERSIONS[1]:
        raise _impossible(PACKAGE, version, allowed)
    return version


def _impossible(what: str, given: str, allowed: str) -> ValueError:
    return ValueError(f"`sampler.backend: flashinfer` needs {what} {allowed}. Given: {given}.")
