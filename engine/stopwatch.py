"""Stopwatch: seconds of a stretch of work, on CUDA those of the device."""

import time
from typing import Any

import torch


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
