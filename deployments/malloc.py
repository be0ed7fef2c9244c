"""Makes the C library give memory back, in processes that hold large bodies and answers for a short time.

glibc maps blocks beyond a threshold on their own, and raises it up to 32 MiB while such blocks are freed. Later ones
come from heaps, which give back only what is free at their end, and there may be eight heaps a core: after an overload
an ingress keeps what it needed for seconds. Fixed values switch the adaptation off.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
MAPPED_BYTES = 256 << 10  # blocks from here on are mapped, and unmapped when they are freed
ARENAS = 2


def give_back_memory() -> None:
    """Fixes glibc's thresholds in this process. Does nothing under another C library."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for option, value in ((M_MMAP_THRESHOLD, MAPPED_BYTES), (M_TRIM_THRESHOLD, MAPPED_BYTES), (M_ARENA_MAX, ARENAS)):
        if mallopt is not None:
            mallopt(option, value)
