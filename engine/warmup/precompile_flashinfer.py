"""python -m engine.warmup.precompile_flashinfer: compiles FlashInfer's modules before their first use, for an
image.

It needs nvcc and a C++ compiler, and no GPU: FLASHINFER_CUDA_ARCH_LIST names the architectures ("8.0 9.0a"). A replica
finds the modules where FLASHINFER_WORKSPACE_BASE and FLASHINFER_CUDA_ARCH_LIST are the same as here. MAX_JOBS bounds
the compilers of each ninja. Triton's kernels and the compiled decoder layers are compiled as a replica starts, on its
GPU.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from engine.attention.flashinfer_backend import HEAD_DIMS
from engine.attention.flashinfer_modules import (
    ARCHITECTURES,
    DTYPES,
    MAX_CONCURRENT_BUILDS,
    ModuleShape,
    build,
    modules,
)
from engine.utils.cpu import cores
from engine.warmup.precompile_kernels import within


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a module did not compile, and 2 where no architecture is named."""
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
        prog="python -m engine.warmup.precompile_flashinfer", description="Compiles FlashInfer's modules."
    )
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bfloat16"])
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=[64, 128])
    parser.add_argument("--window", action="store_true", help="for models with sliding windows")
    parser.add_argument("--softcap", action="store_true", help="for models that cap their attention logits")
    parser.add_argument("--sampling", action="store_true", help="for `sampler.backend: flashinfer`")
    processes = min(cores(), MAX_CONCURRENT_BUILDS)
    parser.add_argument("--processes", type=within(1, 256), default=processes, help="modules that compile concurrently")
    return parser


if __name__ == "__main__":
    sys.exit(main())
