"""Chooses the code that draws: once at start-up from `sampler.backend`, and per group of rows with FlashInfer at hand.

A backend that cannot run is an error at start-up that names it, and nothing falls back silently. `auto` takes our
kernels on CUDA and the reference elsewhere, and FlashInfer only for rows for which it was measured faster.
"""

import importlib.util
import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from importlib import metadata
from typing import Final, Literal, NamedTuple

import torch

Backend = Literal["auto", "triton", "flashinfer", "numpy"]
Drawer = Literal["triton", "flashinfer"]
Table = Mapping[str, tuple[Drawer, ...]]

ROW_BUCKETS: Final = (1, 8, 32, 64, 256, 1024)  # a group of rows counts as the first bucket that holds it, or the last
# The faster of the two by branch and bucket, as `python -m benchmarks.bench_sampler` prints it: one NVIDIA H200,
# FlashInfer 0.6.14. The FlashInfer side is timed with the gather that it needs.
MEASURED: Final[Table] = {
    "candidates": ("triton", "triton", "triton", "triton", "triton", "triton"),
    "nucleus": ("triton", "triton", "triton", "triton", "triton", "triton"),
}
PACKAGE: Final = "flashinfer-python"
VERSIONS: Final = ((0, 6, 14), (0, 7))  # from the first, below the second
MIN_CAPABILITY: Final = (8, 0)
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?(\+.*)?")  # no release candidate, no development version
_ON: Final = frozenset({"1", "true", "on", "yes", "y"})


class BackendChoice(NamedTuple):
    """Says which code a sampler draws with."""

    rows: Literal["numpy", "triton"]  # everything that FlashInfer does not
    flashinfer: Literal["never", "table", "always"]  # for the rows that `eligible` admits
    table: Table

    def drawer(self, branch: str, rows: int) -> Drawer:
        """Returns who draws a group of `rows` rows of one branch, all of them eligible for FlashInfer."""
        if self.flashinfer != "table":
            return "flashinfer" if self.flashinfer == "always" else "triton"
        by_bucket = self.table.get(branch)
        return by_bucket[min(bisect_left(ROW_BUCKETS, rows), len(ROW_BUCKETS) - 1)] if by_bucket else "triton"


def choose(backend: Backend, device: torch.device, table: Table = MEASURED) -> BackendChoice:
    """Returns the choice for a sampler on `device`; ValueError for a backend that cannot run there."""
    if backend == "numpy" or (backend == "auto" and device.type == "cpu"):
        return BackendChoice("numpy", "never", table)
    if backend == "triton":
        check_triton(device)
        return BackendChoice("triton", "never", table)
    if backend == "flashinfer":
        check_installed(device)
        check_triton(device)
        return BackendChoice("triton", "always", table)
    if backend != "auto":
        raise ValueError(f"`sampler.backend` must be one of auto, triton, flashinfer, numpy. Given: {backend}.")
    check_triton(device)
    return BackendChoice("triton", "table" if _ever_faster(table) and _is_installed(device) else "never", table)


def check_triton(device: torch.device) -> None:
    """Raises ValueError where our kernels cannot run: without Triton, or on a CPU without its interpreter."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("`sampler.backend: triton` needs the package triton. Given: not installed.")
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _ON
    if device.type != "cuda" and not (device.type == "cpu" and interpreted):
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


def _ever_faster(table: Table) -> bool:
    return any("flashinfer" in by_bucket for by_bucket in table.values())


def _is_installed(device: torch.device) -> bool:
    try:
        check_installed(device)
    except ValueError:
        return False
    return True


def _impossible(what: str, given: str, allowed: str) -> ValueError:
    return ValueError(f"`sampler.backend: flashinfer` needs {what} {allowed}. Given: {given}.")
