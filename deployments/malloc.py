"""Makes the C library give memory back, in processes that hold large bodies and answers for a short time.

glibc maps blocks beyond a threshold on their own, and raises it up to 32 MiB while such blocks are freed. Later ones
come from heaps, which give back only what is free at their end, and there may be eight heaps a core: after an overload
an ingress keeps what it needed for seconds. Fixed values switch the adaptation off. Small blocks, such as the texts and
tokens of a large text, stay in a heap until it is trimmed.
"""

import asyncio
import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
MAPPED_BYTES = 256 << 10  # blocks from here on are mapped, and unmapped when they are freed
ARENAS = 2
LARGE_BYTES = 65_536  # of a body: what is made of it may take a hundred times as much
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
    """Trims the heaps a moment after a request with a body of `LARGE_BYTES` has ended, at most once in `delay_s`.

    For one event loop.
    """

    def __init__(self, delay_s: float = TRIM_DELAY_S) -> None:
        self._delay_s = delay_s
        self._planned = False

    def ended(self) -> None:
        """Notes the end of such a request."""
        if not self._planned:
            self._planned = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._delay_s, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._planned = False
        loop.run_in_executor(None, trim)
