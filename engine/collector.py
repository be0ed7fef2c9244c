"""Python's cyclic collector beside a step loop: what start-up made is frozen, and collections happen between steps.

A full collection over a loaded model takes tens to hundreds of milliseconds, in whichever thread allocates next.
"""

import gc
import threading
import time

FULL_EVERY_S = 10.0  # between collections of everything

_lock = threading.Lock()
_holders = 0
_last_full = 0.0


def hold() -> None:
    """Freezes what exists and stops automatic collection until every holder has called `release`."""
    global _holders
    with _lock:
        _holders += 1
        if _holders == 1:
            gc.collect()
            gc.freeze()
            gc.disable()


def release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
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
