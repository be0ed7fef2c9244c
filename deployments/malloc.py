"""Makes the C library give memory back, in processes that hold large bodies and answers for a short time.

glibc maps blocks beyond a threshold on their own, and raises it up to 32 MiB while such blocks are freed. Later ones
come from heaps, which give back only what is free at their end, and there may be eight heaps a core: after an overload
an ingress keeps what it needed for seconds. Fixed values switch the adaptation off. Small blocks, such as the texts and
tokens of a large text, stay in a heap until it is trimmed.

In Serve's proxy each request ends as a cycle: its last task holds an exception, whose frames hold the task and the last
part of the answer. It stays until Python looks for garbage, which may be hundreds of requests later.
"""

import asyncio
import ctypes
import gc
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
MAPPED_BYTES = 256 << 10  # blocks from here on are mapped, and unmapped when they are freed
ARENAS = 2
LARGE_BYTES = 65_536  # of a body, or of a message of an answer: what is made for it may take a hundred times as much
TRIM_DELAY_S = 1.0


def give_back_memory() -> None:
    """Fixes glibc's thresholds in this process. Does nothing under another C library."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in ((M_MMAP_THRESHOLD, MAPPED_BYTES), (M_TRIM_THRESHOLD, MAPPED_BYTES), (M_ARENA_MAX, ARENAS)):
        if mallopt is not None:
            mallopt(option, value)


def trim() -> None:
    """Gives the free pages of every heap back to the system. Does nothing under another C library."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)


class TrimAfterLarge:
    """Trims the heaps a moment after a large request has ended, at most once in `delay_s`. For one event loop.

    A request is large if its body, or one message of its answer, has `LARGE_BYTES`.
    """

    def __init__(self, delay_s: float = TRIM_DELAY_S, *, collect: bool = False) -> None:
        """`collect`: look for garbage before, as in a process whose requests end as cycles."""
        self._delay_s = delay_s
        self._collect = collect
        self._planned = False

    def ended(self) -> None:
        """Notes the end of a large request."""
        if not self._planned:
            self._planned = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._delay_s, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._planned = False
        if self._collect:
            gc.collect()  # here, because what it frees belongs to this thread's loop
        loop.run_in_executor(None, trim)
