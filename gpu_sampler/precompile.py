"""Lists the variants of kernels that a replica launches, by a dry run of its start-up over small tensors on the CPU.

The code of the launchers says what is compiled, not a list beside it. It needs Triton, not interpreted, and no GPU.
"""

from dataclasses import dataclass
from typing import Final

import torch

from gpu_sampler.device_logprobs import report
from gpu_sampler.kernel_cache import Variant, dry_run
from gpu_sampler.kernels.lm_head_logprob import head_logprob
from gpu_sampler.kernels.rejection_sample import FEW_REQUESTS
from gpu_sampler.reference.lm_head_logprob import Rounding
from gpu_sampler.spec_decode import DEFAULT_RULES, VerifyRules
from gpu_sampler.startup_progress import silent
from gpu_sampler.state.host_state import SamplingState
from gpu_sampler.triton_sampler import TritonSampler

_ROWS: Final = 2
_WIDTH: Final = 64  # of a hidden row; of real ones it matters that 16 divides them
_ROUNDED: Final[dict[torch.dtype, Rounding]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Says what the code of the fused LM head depends on."""

    bias: bool = False
    scaled: bool = False
    capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Describes a model and how it is served. `drafts` 0: no speculation. `head` None: no fused LM head."""

    vocab_size: int
    dtype: torch.dtype = torch.bfloat16  # of the logits
    num_slots: int = 257
    overlay_entries: int = 1 << 20
    processed: bool = False
    drafts: int = 0
    rules: VerifyRules = DEFAULT_RULES
    head: Head | None = Head()


def variants_of(served: Served, capability: int) -> list[Variant]:
    """Returns the variants that a start-up on a GPU of `capability` (90 for 9.0) compiles, each once."""
    device = torch.device("cpu")
    with dry_run(capability) as found:
        state = SamplingState(
            num_slots=served.num_slots, vocab_size=served.vocab_size, overlay_entries=served.overlay_entries
        )
        sampler = TritonSampler(state, device, processed=served.processed)
        sampler.warm_up(_ROWS, served.dtype, silent)
        if served.drafts:
            requests = min(served.num_slots - 1, FEW_REQUESTS + 1)  # many, where there may be
            sampler.warm_up_verify(requests, served.dtype, served.drafts, served.rules, silent, dense=False)
        _report(served)
        if served.head is not None:
            _ask_head(served, served.head)
    return found


def _report(served: Served) -> None:
    """Launches the kernels for rows that nothing is drawn from."""
    logits = torch.zeros((_ROWS, served.vocab_size), dtype=served.dtype)
    targets = torch.zeros(_ROWS, dtype=torch.int64)
    report(logits, tokens_R=targets)
    report(logits, n_top=1)
    report(logits, ids_RC=targets[:, None])


def _ask_head(served: Served, head: Head) -> None:
    """Launches the kernels of the fused LM head."""
    hidden = torch.zeros((_ROWS, _WIDTH), dtype=served.dtype)
    weight = torch.zeros((served.vocab_size, _WIDTH), dtype=served.dtype)
    bias = torch.zeros(served.vocab_size, dtype=served.dtype) if head.bias else None
    scale, softcap = 0.5 if head.scaled else 1.0, 30.0 if head.capped else 0.0
    targets = torch.zeros(_ROWS, dtype=torch.int64)
    head_logprob(hidden, weight, targets, bias, scale, softcap, _ROUNDED.get(served.dtype))
