"""Stopwatch: seconds of a stretch of work; on CUDA, seconds of the device. And whether a device still works."""

import time
from typing import Any

import torch


class DeviceLost(RuntimeError):
    """Means that the device fails every call from now on. A model may raise it itself."""


def is_lost(device: torch.device, error: Exception) -> bool:
    """Tells whether the device is lost after `error`: a CUDA error is sticky if the next call meets it again."""
    if isinstance(error, DeviceLost):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:  # of any type: the device did not answer
        return True
    return False


class Stopwatch:
    """Measures from its making to `stop`; on CUDA both are events on the stream."""

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None
        self._start = time.perf_counter()
        self._seconds = 0.0
        if device.type == "cuda":
            cuda: Any = torch.cuda
            self._events = (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            self._events[0].record()

    def stop(self) -> None:
        """Ends the measurement."""
        self._seconds = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the seconds. On CUDA, wait first for something behind `stop` on the same stream."""
        if self._events is None:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
