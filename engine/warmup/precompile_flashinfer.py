"""python -m engine.warmup.precompile_flashinfer: compiles FlashInfer's modules ahead of their first use, as for an
image.

Needs nvcc and a C++ compiler, and no GPU: FLASHINFER_CUDA_ARCH_LIST names what to compile for ("8.0 9.0a"). They are
found again where FLASHINFER_WORKSPACE_BASE and FLASHINFER_CUDA_ARCH_LIST are the same as here. Each has a folder, a
ninja and a lock of FlashInfer's to itself: they are compiled beside each other, and who asks for one meanwhile waits
for that one alone. MAX_JOBS names the compilers that each ninja may start. Triton's kernels and the compiled decoder
layers are not among them: those need the GPU that they are for, and are compiled as a replica starts.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, NamedTuple

import torch

from engine.attention.flashinfer_backend import HEAD_DIMS, HOPPER
from engine.attention.flashinfer_wrappers import BACKEND, HOPPER_BACKEND
from engine.utils.cpu import cores
from engine.warmup.precompile_kernels import within

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = torch.int32
NO_POSITIONS = 0  # the model has rotated keys and queries by the time that attention sees them
ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"
MAX_CONCURRENT_BUILDS: Final = 16
COMPILERS_A_CORE: Final = 2  # in all: they take a GB or more each, and one alone would leave cores idle at the end
LONGEST: Final = ("contexts", "sampling")  # to compile, the longest first; started last, they would end alone


class ModuleShape(NamedTuple):
    """What the code of an attention module depends on."""

    dtype: str
    dim: int
    window: bool
    softcap: bool

    @property
    def name(self) -> str:
        extras = f"{', window' if self.window else ''}{', soft cap' if self.softcap else ''}"
        return f"{self.dtype}, head dim {self.dim}{extras}"


def modules(shapes: Sequence[ModuleShape], sampling: bool) -> Iterator[tuple[str, Any]]:
    """(what it is, FlashInfer's specification), of all that the engine may ask for on the way through these shapes."""
    from flashinfer import jit
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.page import gen_page_module

    yield "pages", gen_page_module()
    yield "cascade", gen_cascade_module()
    for shape in shapes:
        dtype = DTYPES[shape.dtype]
        what = (dtype, dtype, dtype, INDEX, shape.dim, shape.dim, NO_POSITIONS, shape.window, shape.softcap)
        yield f"prefill, {shape.name}", jit.gen_batch_prefill_module(BACKEND, *what, False)
        yield f"decode, {shape.name}", jit.gen_batch_decode_module(*what)
        if _for_hopper():
            no_window = (*what[:7], False, shape.softcap)
            yield f"contexts, {shape.name}", jit.gen_batch_prefill_module(HOPPER_BACKEND, *no_window, False)
    if sampling:
        from flashinfer.jit.sampling import gen_sampling_module

        yield "sampling", gen_sampling_module()


def _for_hopper() -> bool:
    """Whether the modules are for GPUs that gather the contexts of a step."""
    named = os.environ.get(ARCHITECTURES)
    if named:
        return any(one.partition(".")[0] == str(HOPPER) for one in named.split())
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER


class Built(NamedTuple):
    """What became of a module."""

    seconds: float
    error: Exception | None


def _build(module: Any) -> Built:
    started = time.perf_counter()
    error = None
    try:
        module.build(verbose=False)
    except Exception as raised:  # whatever it is, the others go on
        error = raised
    return Built(time.perf_counter() - started, error)


def _place(named: tuple[str, Any]) -> int:
    """In the order of their start."""
    return next((place for place, kind in enumerate(LONGEST) if named[0].startswith(kind)), len(LONGEST))


def build(named: Sequence[tuple[str, Any]], processes: int) -> list[str]:
    """Builds modules, so many at once, and tells of each as it ends. The names of those that failed."""
    at_once = max(1, min(processes, len(named)))
    os.environ.setdefault("MAX_JOBS", str(-(-COMPILERS_A_CORE * cores() // at_once)))
    failed = []
    with ThreadPoolExecutor(at_once) as threads:
        names = {threads.submit(_build, module): name for name, module in sorted(named, key=_place)}
        for done in as_completed(names):
            name, built = names[done], done.result()
            if built.error is None:
                print(f"{name}: {built.seconds:.1f} s", flush=True)
            else:
                failed.append(name)
                print(f"{name}: failed after {built.seconds:.1f} s: {built.error}", file=sys.stderr, flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a module could not be compiled, and 2 where there is nothing to compile for."""
    given = _parser().parse_args(arguments)
    if not (os.environ.get(ARCHITECTURES) or torch.cuda.is_available()):
        print(
            f"{ARCHITECTURES} must name architectures, as 8.0 9.0a, where there is no GPU. Given: none.",
            file=sys.stderr,
        )
        return 2
    shapes = [ModuleShape(dtype, dim, given.window, given.softcap) for dtype in given.dtypes for dim in given.head_dims]
    return 1 if build(list(modules(shapes, given.sampling)), given.processes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.warmup.precompile_flashinfer", description="Compiles ahead."
    )
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bfloat16"])
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=[64, 128])
    parser.add_argument("--window", action="store_true", help="for models with sliding windows")
    parser.add_argument("--softcap", action="store_true", help="for models that cap their attention logits")
    parser.add_argument("--sampling", action="store_true", help="for `sampler.backend: flashinfer`")
    most = min(cores(), MAX_CONCURRENT_BUILDS)
    parser.add_argument("--processes", type=within(1, 256), default=most, help="modules that compile at once")
    return parser


if __name__ == "__main__":
    sys.exit(main())
