"""Finds which variants of the kernels a dry run of launches would compile, and compiles them, without a GPU.

A variant is a kernel with the types of its arguments, what is known of them (that a pointer is aligned, that a number
divides by 16), its constants and options. Triton finds compiled code again by exactly that, by the kernel's source and
by its own build, wherever TRITON_CACHE_DIR names the same folder.
"""

import importlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Final, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gpu_sampler import kernels

log = logging.getLogger(__name__)

# Longest first: the end of a pool waits for its slowest. All others take less than 3 s.
SLOWEST: Final = ("_rejection_sample_kernel", "_sample_kernel", "_nucleus_fallback_kernel", "_tiles_kernel")


class Variant(NamedTuple):
    """Names one variant to compile. Equal ones are one entry of the cache."""

    module: str
    kernel: str
    specialization: str  # as `triton.JITFunction.preload` takes it, JSON

    @property
    def size(self) -> tuple[int, int]:
        """Returns a size that is larger for what compiles longer: by kernel, then by how many features are on."""
        place = SLOWEST.index(self.kernel) if self.kernel in SLOWEST else len(SLOWEST)
        constants = json.loads(self.specialization)["constant_vals"]
        return -place, sum(one is True for one in constants)


class _NoDevice:
    """Stands for Triton's driver: a GPU of some capability that nothing can be launched on.

    Each is a device of its own, so that only the cache on disk keeps what is compiled for it.
    """

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> "_NoDevice":
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def fix_keys(packages: Sequence[ModuleType] = (kernels,)) -> None:
    """Makes launches find what was compiled ahead for `packages`; call it before the first launch, and before torch
    compiles anything.

    It computes the key of every kernel's source in one order, and names Triton's folder and its assembler in
    TRITON_CACHE_DIR and TRITON_PTXAS_PATH: torch's compiler sets the variables, where they are not set, to a folder and
    an assembler of its own at its first use, in the middle of a start-up. All kernels that are launched after that, or
    compiled in processes that are started after that, would be compiled again.

    Triton 3.6 leaves the constants of a function that a kernel calls out of the kernel's key, unless the function's own
    key was made before: what was compiled ahead would be found again only by a process that launches kernels in the
    order in which another compiled them.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
    with suppress(RuntimeError):  # there is none
        os.environ.setdefault("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)
    for package in packages:
        for name in sorted(found.name for found in iter_modules(package.__path__)):
            module = importlib.import_module(f"{package.__name__}.{name}")
            for one in vars(module).values():
                if isinstance(one, JITFunction) and one.module == module.__name__:
                    hash(one)  # which is its key, and is remembered


def check_compiles() -> None:
    """Raises RuntimeError where this process interprets kernels, which makes other functions of them."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton interprets (TRITON_INTERPRET=1)")


@contextmanager
def dry_run(capability: int) -> Iterator[list[Variant]]:
    """Collects the variants that launches inside ask for, each once; the launches do nothing.

    Args:
        capability: that of the GPU that they are for, 90 for 9.0.
    """
    found: dict[Variant, None] = {}
    variants: list[Variant] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        variant = Variant(fn.module, fn.name.rpartition(".")[2], compile["specialization_data"])
        if variant not in found:
            found[variant] = None
            variants.append(variant)
        return True

    runtime, before = triton.knobs.runtime, triton.knobs.runtime.jit_cache_hook
    with _driver(_NoDevice(capability)):
        runtime.jit_cache_hook = note
        try:
            yield variants
        finally:
            runtime.jit_cache_hook = before


@contextmanager
def _driver(stand_in: _NoDevice) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active  # its public name would look for a GPU
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(before)


def compile_variant(variant: Variant, capability: int) -> bool:
    """Compiles a variant; returns whether the cache lacked it. Raises what the compiler raises."""
    with compiled_inside() as compiled, _driver(_NoDevice(capability)):
        kernel = getattr(importlib.import_module(variant.module), variant.kernel).preload(variant.specialization)
        _build_launcher(kernel)
    return bool(compiled)


def _build_launcher(kernel: Any) -> None:
    """Compiles the host's function that launches a kernel, which Triton 3.6 has one of for each signature.

    The first launch would: a few tenths of a second. Nothing happens with another Triton, or where no library of CUDA
    is there to link it with, as in the build of an image.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


@contextmanager
def compiled_inside() -> Iterator[list[str]]:
    """Collects the names of the kernels that are compiled inside, because the cache on disk lacks them."""
    names: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    knobs, before = triton.knobs.compilation, triton.knobs.compilation.listener
    knobs.listener = note
    try:
        yield names
    finally:
        knobs.listener = before


class Compiled(NamedTuple):
    """Counts what a compilation of variants found and did."""

    compiled: int
    found: int  # in the cache before
    refused: tuple[str, ...]  # kernels that the compiler fails on: their launch will raise


def compile_variants(variants: Sequence[Variant], capability: int, processes: int) -> Compiled:
    """Compiles variants in forked processes: the caller has one thread, and no CUDA."""
    ordered = sorted(variants, key=lambda one: one.size, reverse=True)
    jobs = [(one, capability) for one in ordered]
    if processes == 1:
        done = list(map(_tried, jobs))
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
            done = list(pool.map(_tried, jobs))
    refused = tuple(one.kernel for one, compiled in zip(ordered, done, strict=True) if compiled is None)
    return Compiled(done.count(True), done.count(False), refused)


def _tried(job: tuple[Variant, int]) -> bool | None:
    """Returns `compile_variant`, or None where the compiler refuses the variant."""
    variant, capability = job
    try:
        return compile_variant(variant, capability)
    except Exception as error:  # a compiler has errors of its own, and the others are to be compiled all the same
        log.warning("%s: %s: %s", variant.kernel, type(error).__name__, error)
        return None
