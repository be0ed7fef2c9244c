"""Python's cyclic collector beside a step loop: what start-up made is frozen, and collections happen between steps.

A full collection over a loaded model takes tens to hundreds of milliseconds, in whichever thread allocates next.
"""

import gc
import threading

_lock = threading.Lock()
_holders = 0


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
    """Collects young garbage, or all of it while nothing waits."""
    gc.collect(2 if idle else 0)
