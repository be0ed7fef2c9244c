"""Python's interpreter beside a step loop: garbage collection between steps, and shorter turns of threads.

A full collection over a loaded model takes tens to hundreds of milliseconds, in the thread that allocates next. And
torch releases the interpreter's lock at every operation: while thousands of requests are submitted, the launch of a
step, some hundreds of operations, would wait the usual 5 ms for each.
"""

import gc
import sys
import threading
import time

FULL_EVERY_S = 10.0  # between collections of everything
SWITCH_S = 1e-4  # until a thread that wants the lock is given it
HELD_GENERATION = 2  # collected before objects are frozen: everything

_lock = threading.Lock()
_holders = 0
_last_full = 0.0
_switch_s = 0.0  # before the first holder


def hold() -> None:
    """Freezes all objects, stops automatic collection and shortens threads' turns until each holder calls `release`."""
    global _holders, _switch_s
    with _lock:
        _holders += 1
        if _holders == 1:
            _switch_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
            gc.collect(HELD_GENERATION)
            gc.freeze()
            gc.disable()


def release() -> None:
    """Undoes one `hold`; the last one restores the interpreter."""
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            sys.setswitchinterval(_switch_s)
            gc.enable()
            gc.unfreeze()


def sweep(*, idle: bool) -> None:
    """Collects young garbage; with `idle` all of it, at most every FULL_EVERY_S: a request may come meanwhile."""
    global _last_full
    now = time.monotonic()
    full = idle and now - _last_full >= FULL_EVERY_S
    gc.collect(2 if full else 0)
    if full:
        _last_full = now
