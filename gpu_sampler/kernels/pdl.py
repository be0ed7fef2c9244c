"""Starts kernels before the previous one ends: programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic
Dependent Launch and Synchronization"), on GPUs of compute capability 9.0 or newer.

Data that such a kernel reads before it waits is from before the previous kernel began. It waits for that one to end, so
a chain of them misses nothing either. Values are the same with and without.
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
    """Waits until the previous kernel is done and its writes are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel start, once every program of this one has called this or ended.

    A next kernel that is not launched with `pdl_options` waits as usual.
    """
    if PDL:
        gdc_launch_dependents()


def pdl_options() -> dict[str, Any]:
    """Returns launch options that start a kernel early where the GPU can: the constant PDL, and `launch_pdl`."""
    if triton.knobs.runtime.interpret or _capability(driver.active) < MIN_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@lru_cache(maxsize=4)
def _capability(active: Any) -> int:
    return int(active.get_current_target().arch)
