"""python -m engine.warmup.precompile_flashinfer: compiles FlashInfer's modules before their first use, for an
image.

It needs nvcc and a C++ compiler, and no GPU: FLASHINFER_CUDA_ARCH_LIST names the architectures ("8.0 9.0a"). A replica
finds the modules where FLASHINFER_WORKSPACE_BASE and FLASHINFER_CUDA_ARCH_LIST are the same as here. MAX_JOBS bounds
the compilers of each ninja. A module that is there already stays as it is. Triton's kernels and the compiled decoder
layers are compiled as a replica starts, on its GPU. `assay serve` runs this command while Ray starts.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from engine.attention.flashinfer_backend import HEAD_DIMS
from engine.attention.flashinfer_modules import (
    DTYPES,
    MAX_CONCURRENT_BUILDS,
    ModuleShape,
    build,
    missing,
)
from engine.config import ARCHITECTURES
from engine.model.model_folder import BadCheckpoint, read_json
from engine.utils.cpu import cores
from engine.warmup.foreseen import own_half, text_part
from engine.warmup.precompile_kernels import within

DTYPE: Final = "bfloat16"
SLIDING: Final = "sliding_attention"  # in `layer_types` of transformers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a module did not compile, and 2 where no architecture is named, a model's
    config.json cannot be read, or FlashInfer is not installed."""
    given = _parser().parse_args(arguments)
    if not (os.environ.get(ARCHITECTURES) or torch.cuda.is_available()):
        print(
            f"{ARCHITECTURES} must name architectures, as 8.0 9.0a, where there is no GPU. Given: none.",
            file=sys.stderr,
        )
        return 2
    if given.model is None:
        pairs = itertools.product(given.dtypes or [DTYPE], given.head_dims)
        shapes = [ModuleShape(dtype, dim, given.window, given.softcap) for dtype, dim in pairs]
    else:
        try:
            configs = [read_json(folder / "config.json") for folder in given.model]
            shapes = list(dict.fromkeys(shape for config in configs for shape in shapes_of(config, given.dtypes)))
        except (OSError, BadCheckpoint) as error:
            print(error, file=sys.stderr)
            return 2
    try:
        lacking = missing(shapes, given.sampling)
    except ModuleNotFoundError as error:
        print(f"Nothing was compiled: {error}.", file=sys.stderr)
        return 2
    return 1 if build(lacking, given.processes, all_urgent=given.urgent) else 0


def shapes_of(config: Mapping[str, Any], dtypes: Sequence[str] | None) -> list[ModuleShape]:
    """Returns the shapes that the layers of a model probably have, by its config.json: a start-up asks the layers.

    `dtypes`: None for the model's own.
    """
    text = text_part(config)
    dtypes = dtypes or [own_half(text)]
    width = text.get("head_dim") or text.get("hidden_size", 0) // text.get("num_attention_heads", 1)
    dims = [dim for dim in HEAD_DIMS if 0 < width <= dim][:1]
    slides = bool(text.get("sliding_window")) and text.get("use_sliding_window", True)
    kinds = text.get("layer_types") or [SLIDING if slides else "full_attention"]
    windows, softcap = sorted({kind == SLIDING for kind in kinds}), bool(text.get("attn_logit_softcapping"))
    return [ModuleShape(*shape, softcap) for shape in itertools.product(dtypes, dims, windows)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.warmup.precompile_flashinfer", description="Compiles FlashInfer's modules."
    )
    help_ = "folders: head dims, windows and soft caps as their config.json say"
    parser.add_argument("--model", type=Path, nargs="+", help=help_)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), help=f"by default the model's, else {DTYPE}")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=[64, 128])
    parser.add_argument("--window", action="store_true", help="for models with sliding windows")
    parser.add_argument("--softcap", action="store_true", help="for models that cap their attention logits")
    parser.add_argument("--sampling", action="store_true", help="for `sampler.backend: flashinfer`")
    parser.add_argument("--urgent", action="store_true", help="do not give way to others, as tests that wait for all")
    processes = min(cores(), MAX_CONCURRENT_BUILDS)
    parser.add_argument("--processes", type=within(1, 256), default=processes, help="modules that compile concurrently")
    return parser


if __name__ == "__main__":
    sys.exit(main())
