"""Python's interpreter beside a step loop: garbage collection between steps, and the turns of threads.

A full collection over a loaded model takes tens to hundreds of milliseconds, in the thread that allocates next. And
torch releases the interpreter's lock at every operation: while thousands of requests are submitted, the launch of a
step, some hundreds of operations, would wait the usual 5 ms for each. So the step thread gets it back soon while it
launches a step or waits for one. Otherwise turns are longer: each change between threads that both have work costs both
of them what their cores' caches hold, a third of the time of a step of small requests with turns of 0.1 ms.
"""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Iterator

FULL_EVERY_S = 10.0  # between collections of everything
TURN_S = 1e-3  # until a thread that wants the lock is given it
SHORT_TURN_S = 1e-4  # the same, while a step thread launches a step or waits for one
HELD_GENERATION = 2  # collected before objects are frozen: everything

_lock = threading.Lock()
_holders = 0
_last_full = 0.0
_switch_s = 0.0  # before the first holder


def hold() -> None:
    """Freezes all objects, stops automatic collection and sets threads' turns until each holder calls `release`."""
    global _holders, _switch_s
    with _lock:
        _holders += 1
        if _holders == 1:
            _switch_s = sys.getswitchinterval()
            sys.setswitchinterval(TURN_S)
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


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Has the calling thread, a holder's, get the interpreter soon each time that it wants it back in a block."""
    sys.setswitchinterval(SHORT_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(TURN_S)


def sweep(*, idle: bool) -> None:
    """Collects young garbage; with `idle` all of it, at most every FULL_EVERY_S: a request may come meanwhile."""
    global _last_full
    now = time.monotonic()
    full = idle and now - _last_full >= FULL_EVERY_S
    gc.collect(2 if full else 0)
    if full:
        _last_full = now
