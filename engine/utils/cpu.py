"""The processor's cores: how many there are, and what a step thread that computes on them leaves to others.

Linux's class SCHED_IDLE is given up the moment anyone else wants the core. A lower niceness is not enough: a thread
that wakes waits for the end of the running one's slice (up to 4 ms), and a request takes a dozen wakes.
"""

import logging
import os

from engine.config import EngineConfig

log = logging.getLogger(__name__)


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def yields(config: EngineConfig, device_type: str) -> bool:
    """Only what computes on the cores: a thread that feeds a GPU must not be late."""
    return config.cpu_priority == "idle" and device_type == "cpu"


def yield_cores() -> None:
    """For the calling thread, and whatever threads it starts from now on. Where the system has no such class, or
    refuses it, everything stays as it was and the log says so."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as error:
        log.warning("`engine.cpu_priority` is idle, but this system does not do it: %s", error)
