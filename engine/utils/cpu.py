"""The processor's cores and memory: how many cores there are, how a step thread that computes on them gives way to
others, how work beside it leaves no threads behind, and how its steps find their memory again.

Linux takes the core from a SCHED_IDLE thread the moment any other wants it. A lower niceness is not enough: a thread
that wakes waits for the end of the running one's slice (up to 4 ms), and a request takes a dozen wakes.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.config import EngineConfig

log = logging.getLogger(__name__)
Result = TypeVar("Result")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 256 << 20  # that are free at the end of the heap
LARGEST_KEPT = 32 << 20  # a block: the C library takes no larger value


def cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def yields_cores(config: EngineConfig, device_type: str) -> bool:
    """Tells whether the step thread gives way: only one that computes on the cores, for a GPU must be fed in time."""
    return config.cpu_priority == "idle" and device_type == "cpu"


def yield_cores() -> None:
    """Makes the calling thread, and threads that it starts from now on, SCHED_IDLE.

    Where the system has no such class, or refuses it, nothing changes and the log says so.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:
        log.warning("`engine.cpu_priority` is idle, but this system does not do it: %s", error)


def run_apart(function: Callable[[], Result]) -> Result:
    """Runs a function in a thread of its own that ends with it, and returns its result.

    For work with torch beside a step thread. torch has helper threads for each thread that computes with it, and they
    end with that thread. While there are more of them than cores, those that wait sleep instead of spinning (libgomp's
    rule), though all but a few are idle: each operation wakes them, and the steps of a small model take twice as long.
    """
    with ThreadPoolExecutor(1, "apart") as thread:
        return thread.submit(function).result()


def keep_memory() -> None:
    """Lets the C library keep the memory that steps free, for the next operations. Elsewhere than on glibc it does
    nothing.

    Operations on a CPU take and free blocks of some MiB. The library would map such blocks each time, or give the end
    of its heap back, and the system clears every page anew: 32 rows of the built-in model decode in 14 ms, and in 5 so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
