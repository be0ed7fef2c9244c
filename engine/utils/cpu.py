"""The processor's cores: how many there are, how a step thread that computes on them gives way to others, and how work
beside it leaves no threads behind.

Linux takes the core from a SCHED_IDLE thread the moment any other wants it. A lower niceness is not enough: a thread
that wakes waits for the end of the running one's slice (up to 4 ms), and a request takes a dozen wakes.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.config import EngineConfig

log = logging.getLogger(__name__)
Result = TypeVar("Result")


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
