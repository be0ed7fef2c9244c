"""Kernels that come to the card before the one in front of them is done: programmatic dependent launch (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization"), on GPUs of compute capability 9.0 or newer.

What such a kernel reads before it waits was written before the kernel in front of it began. It waits for that one as a
whole, so a chain of them misses nothing either. Values are the same with and without.
"""

from functools import lru_cache
from typing import Any, Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

MIN_CAPABILITY: Final = 90  # the capability that has the instructions


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits until the kernel in front is done and its writes are seen."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the kernel behind come, once every program of this one has said so or ended; a launch that is not `pdl_options`
    comes in its turn all the same."""
    if PDL:
        gdc_launch_dependents()


def pdl_options() -> dict[str, Any]:
    """Options of a launch that comes early where the GPU can: the constant of these functions, and that it does."""
    if triton.knobs.runtime.interpret or _capability(driver.active) < MIN_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@lru_cache(maxsize=4)
def _capability(active: Any) -> int:
    return int(active.get_current_target().arch)
