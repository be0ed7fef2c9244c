"""python -m engine.warmup.precompile_kernels: compiles the sampler's Triton kernels before their first use, for an
image.

It needs no GPU and no compiler but Triton's own. A replica finds the kernels where TRITON_CACHE_DIR names the same
folder, and Triton, the kernels' source and the options are the same as here; others it compiles as it starts. A
start-up on a GPU runs this command beside its other work (`engine.warmup.background_compile`). Decoder layers are not
among them: torch compiles those with the model and its GPU.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

import torch

from engine.config import ARCHITECTURES, MAX_RUNNING_BOUND, EngineConfig
from engine.utils.cpu import cores
from engine.warmup.background_compile import MAX_PROCESSES
from gpu_sampler.spec_decode import MAX_DRAFTS, Rule, VerifyRules

if TYPE_CHECKING:
    from gpu_sampler.kernel_cache import Variant

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RULES = get_args(Rule)
ROWS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where the compiler refused a kernel, and 2 where Triton is missing or interprets."""
    parser = _parser()
    given = parser.parse_args(arguments)
    capabilities = given.capabilities or _named_capabilities(parser)
    torch.set_num_threads(1)  # the processes that compile are forked from this one
    try:
        from gpu_sampler.kernel_cache import check_compiles, compile_variants
        from gpu_sampler.precompile import Head, Served, variants_of

        check_compiles()
    except (ImportError, RuntimeError) as error:
        print(f"Nothing was compiled: {error}", file=sys.stderr)
        return 2
    head = Head(bias=given.head_bias, scaled=given.head_scaled, capped=given.head_capped)
    refused = 0
    for capability in capabilities:
        for size in given.vocab_sizes:
            started = time.perf_counter()
            served = Served(
                vocab_size=size,
                dtype=DTYPES[given.dtype],
                num_slots=given.max_running + 1,
                overlay_entries=given.overlay_entries,
                processed=given.processed,
                drafts=given.drafts,
                rules=VerifyRules(
                    rule=given.rule,
                    seeded=given.seeded_rule,
                    synthetic=(0.5,) * given.drafts if "synthetic" in (given.rule, given.seeded_rule) else (),
                ),
                head=None if given.no_head else head,
            )
            variants = [*variants_of(served, capability), *skinny_gemm_variants(served.dtype, capability)]
            done = compile_variants(variants, capability, given.processes)
            refused += len(done.refused)
            for name in done.refused:
                print(f"{name}: refused by the compiler", flush=True)
            seconds = time.perf_counter() - started
            counts = f"{done.compiled} kernels compiled, {done.found} were there: {seconds:.1f} s"
            print(f"{size} tokens, capability {capability / 10}: {counts}", flush=True)
    return 1 if refused else 0


def skinny_gemm_variants(dtype: torch.dtype, capability: int) -> list["Variant"]:
    """Returns the variants of the skinny GEMM that captured steps launch on a GPU of `capability` (90 for 9.0).

    They depend on the tile alone. Variants of weights that tiles do not divide, or that gate with a bias, are compiled
    as a model is checked. Steps in float32 are not captured and have none.
    """
    from engine import kernels
    from engine.kernels.skinny_gemm import skinny_gemm, tiles
    from gpu_sampler import kernels as sampler_kernels
    from gpu_sampler.kernel_cache import dry_run, fix_keys

    if dtype == torch.float32:
        return []
    fix_keys((sampler_kernels, kernels))
    with dry_run(capability) as found:
        for tile in tiles():
            columns, width = 16 * tile.columns, 16 * tile.depth * tile.warps
            x, bias = torch.zeros((ROWS, width), dtype=dtype), torch.zeros(columns, dtype=dtype)
            weight, residual = torch.zeros((2 * columns, width), dtype=dtype), torch.zeros((ROWS, columns), dtype=dtype)
            for added in (None, residual):
                skinny_gemm(x, weight[:columns], residual=added, tile=tile)
                skinny_gemm(x, weight[:columns], bias, residual=added, tile=tile)
            skinny_gemm(x, weight, gated=True, tile=tile)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.warmup.precompile_kernels", description="Compiles the sampler's kernels."
    )
    engine = EngineConfig()
    add = parser.add_argument
    help_ = f"of the GPUs, as 8.0 9.0a; by default what {ARCHITECTURES} names"
    add("--capabilities", nargs="+", type=_capability, required=not _named(), help=help_)
    add("--vocab-sizes", nargs="+", type=int, required=True, help="widths of the models' logits")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the logits")
    add("--max-running", type=within(1, MAX_RUNNING_BOUND), default=engine.max_running, help="as in `engine`")
    add("--overlay-entries", type=within(0, 1 << 31), default=engine.sampler.overlay_entries, help="as in `sampler`")
    add("--processed", action="store_true", help="for `sampler.logprobs_mode: processed_logprobs`")
    add("--drafts", type=within(0, MAX_DRAFTS), default=0, help="of a run with speculation; 0: without")
    add("--rule", choices=RULES, default="standard", help="rejection_sample_method")
    add("--seeded-rule", choices=RULES, default="strict", help="seeded_rejection_sample_method")
    add("--no-head", action="store_true", help="for models whose head is their own code")
    for name in ("bias", "scaled", "capped"):
        add(f"--head-{name}", action="store_true")
    add("--processes", type=within(1, 256), default=min(cores(), MAX_PROCESSES), help="that compile concurrently")
    return parser


def _named() -> list[str]:
    return os.environ.get(ARCHITECTURES, "").split()


def _named_capabilities(parser: argparse.ArgumentParser) -> list[int]:
    """Returns the capabilities that the environment names; ends the command where one is no capability."""
    try:
        return [_capability(one) for one in _named()]
    except argparse.ArgumentTypeError as error:
        parser.error(f"{ARCHITECTURES} {error}")


def _capability(text: str) -> int:
    """Returns 90 for 9.0 and 9.0a."""
    if not (found := re.fullmatch(r"(\d{1,2})\.(\d)[af]?", text)):
        raise argparse.ArgumentTypeError(f"must be as 8.0 or 9.0a. Given: {text}.")
    return 10 * int(found[1]) + int(found[2])


def within(low: int, high: int) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}]. Given: {text}.")
        return int(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())
