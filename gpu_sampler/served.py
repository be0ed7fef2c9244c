"""Served: what the launches of a replica depend on, and the variants of kernels that they are.

A dry run of what a start-up launches, over small tensors on the CPU: the code of the launchers says what is compiled,
not a list beside it. Needs Triton, not interpreted, and no GPU.
"""

from dataclasses import dataclass
from typing import Final

import torch

from gpu_sampler.backends import MEASURED, Choice
from gpu_sampler.device_logprobs import report
from gpu_sampler.device_sampler import DeviceSampler
from gpu_sampler.kernels.accept import FEW_REQUESTS
from gpu_sampler.kernels.head_logprob import head_logprob
from gpu_sampler.kernels.narrow_linear import narrow_linear, tiles
from gpu_sampler.proposal import DEFAULT_RULES, VerifyRules
from gpu_sampler.reference.head_logprob import Rounding
from gpu_sampler.state import SamplingState
from gpu_sampler.variants import Variant, dry_run

_ROWS: Final = 2
_WIDTH: Final = 64  # of a hidden row; of real ones it matters that 16 divides them
_ROUNDED: Final[dict[torch.dtype, Rounding]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the code of the fused head depends on."""

    bias: bool = False
    scaled: bool = False
    capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model and how it is served. `drafts` 0: without speculation. `head` None: no fused head answers."""

    vocab_size: int
    dtype: torch.dtype = torch.bfloat16  # of the logits
    num_slots: int = 257
    overlay_entries: int = 1 << 20
    processed: bool = False
    drafts: int = 0
    rules: VerifyRules = DEFAULT_RULES
    head: Head | None = Head()


def variants_of(served: Served, capability: int) -> list[Variant]:
    """All that a start-up on a GPU of `capability` (90 for 9.0) compiles of ours, each once."""
    device = torch.device("cpu")
    with dry_run(capability) as found:
        state = SamplingState(
            num_slots=served.num_slots, vocab_size=served.vocab_size, overlay_entries=served.overlay_entries
        )
        ours = Choice("triton", "never", MEASURED)
        sampler = DeviceSampler(state, device, choice=ours, processed=served.processed)
        sampler.warm_up(_ROWS, served.dtype, _silent)
        if served.drafts:
            requests = min(served.num_slots - 1, FEW_REQUESTS + 1)  # many, where there may be
            sampler.warm_up_verify(requests, served.dtype, served.drafts, served.rules, _silent, dense=False)
        _report(served)
        if served.head is not None:
            _ask_head(served, served.head)
        if served.dtype != torch.float32:  # whose steps are not captured
            _multiply(served.dtype)
    return found


def _silent(line: str) -> None:
    """A start-up says what it does; this is none."""


def _report(served: Served) -> None:
    """Log-probabilities of rows that nothing is drawn from."""
    logits = torch.zeros((_ROWS, served.vocab_size), dtype=served.dtype)
    targets = torch.zeros(_ROWS, dtype=torch.int64)
    report(logits, tokens_R=targets)
    report(logits, n_top=1)
    report(logits, ids_RC=targets[:, None])


def _ask_head(served: Served, head: Head) -> None:
    hidden = torch.zeros((_ROWS, _WIDTH), dtype=served.dtype)
    weight = torch.zeros((served.vocab_size, _WIDTH), dtype=served.dtype)
    bias = torch.zeros(served.vocab_size, dtype=served.dtype) if head.bias else None
    scale, softcap = 0.5 if head.scaled else 1.0, 30.0 if head.capped else 0.0
    targets = torch.zeros(_ROWS, dtype=torch.int64)
    head_logprob(hidden, weight, targets, bias, scale, softcap, _ROUNDED.get(served.dtype))


def _multiply(dtype: torch.dtype) -> None:
    """Products of few rows by weights that tiles fit into, of which only their cut matters. What has other sizes, or
    gates with a bias, is compiled as a model is checked."""
    for tile in tiles():
        columns, width = 16 * tile.columns, 16 * tile.depth * tile.warps
        x, bias = torch.zeros((_ROWS, width), dtype=dtype), torch.zeros(columns, dtype=dtype)
        weight, residual = torch.zeros((2 * columns, width), dtype=dtype), torch.zeros((_ROWS, columns), dtype=dtype)
        for added in (None, residual):
            narrow_linear(x, weight[:columns], residual=added, tile=tile)
            narrow_linear(x, weight[:columns], bias, residual=added, tile=tile)
        narrow_linear(x, weight, gated=True, tile=tile)
