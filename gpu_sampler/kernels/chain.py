"""Launching the kernels of a step without a gap between them: programmatic dependent launch (CUDA programming guide,
"Programmatic Dependent Launch and Synchronization"), on cards of compute capability 9.0 or newer.

A chained kernel may be put on the card while the kernel before it still runs. It says at once that its own successor
may come too, and waits until everything before it is done and written; only then does it read or write anything. Since
each waits for its predecessor as a whole, nothing of an earlier kernel is missed either.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAINED_SINCE = (9, 0)


@triton.jit
def begin(CHAINED: tl.constexpr):
    """The first statement of a chained kernel, before its first access to memory."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()


def chained(tensor: torch.Tensor) -> dict[str, Any]:
    """The options of a launch: empty where a kernel has to wait for its turn as usual."""
    return {"CHAINED": True, "launch_pdl": True} if tensor.is_cuda and _may(tensor.device) else {}


@lru_cache(maxsize=16)
def _may(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= CHAINED_SINCE
