"""Python's interpreter beside a step loop: what start-up made is frozen, collections happen between steps, and the step
thread gets its turn.

A full collection over a loaded model takes tens to hundreds of milliseconds, in whichever thread allocates next. And
torch lets go of the interpreter's lock at every operation: while thousands of jobs are submitted a step's launch, some
hundreds of operations, would wait the usual 5 ms for each.
"""

import gc
import sys
import threading
import time

FULL_EVERY_S = 10.0  # between collections of everything
SWITCH_S = 1e-4  # until a thread that wants the lock is given it

_lock = threading.Lock()
_holders = 0
_last_full = 0.0
_switch_s = 0.0  # before the first holder


def hold() -> None:
    """Freezes what exists, stops automatic collection and shortens threads' turns until every holder has called
    `release`."""
    global _holders, _switch_s
    with _lock:
        _holders += 1
        if _holders == 1:
            _switch_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
            gc.collect()
            gc.freeze()
            gc.disable()


def release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            sys.setswitchinterval(_switch_s)
            gc.enable()
            gc.unfreeze()


def sweep(*, idle: bool) -> None:
    """Collects young garbage; all of it while nothing waits, but not after every request of a quiet hour: the next one
    may come while it lasts."""
    global _last_full
    now = time.monotonic()
    full = idle and now - _last_full >= FULL_EVERY_S
    gc.collect(2 if full else 0)
    if full:
        _last_full = now
