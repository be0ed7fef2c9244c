"""Stopwatch: seconds of a stretch of work, on CUDA those of the device.

Whether a device still works after something on it raised.
"""

import time
from typing import Any

import torch


class DeviceLost(RuntimeError):
    """The device fails whatever is asked of it from now on. A model that knows may raise it itself."""


def is_lost(device: torch.device, error: Exception) -> bool:
    """A CUDA error is sticky if the next call meets it again: asking is exact, where its words are not."""
    if isinstance(error, DeviceLost):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever it is called: the device did not answer
        return True
    return False


class Stopwatch:
    """Runs from its making to `stop`; on CUDA both are marks on the stream, told once the work has ended."""

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None
        self._start = time.perf_counter()
        self._seconds = 0.0
        if device.type == "cuda":
            cuda: Any = torch.cuda
            self._events = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """After something behind `stop` on the same stream was waited for."""
        if self._events is None:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
