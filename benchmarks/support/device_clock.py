"""Measures a step on its device by CUDA-graph replays and by plain launches, and counts its kernels.

A step is measured over several buffers in turn. Each buffer is read once between two flushes of the L2 cache, so that
no step finds its input there; on a real server the product has just written it, so small steps are faster there.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.support.report import Row

Step = Callable[[torch.Tensor], object]
FLUSH_BYTES = 256 << 20  # several times the L2 of an H200; reading it also keeps the device busy while a step is queued
WARM_UP = 3
_profiler: Any = torch.profiler


class Timing(NamedTuple):
    """Holds the median microseconds of one step; None for a time that cannot be measured."""

    graph_us: float | None
    plain_us: float
    launches: int | None  # kernels of a plain step
    copies: int | None  # and copies or fills that are no kernel
    problem: str  # why there is no graph; "" where there is one

    @property
    def us(self) -> float:
        return self.plain_us if self.graph_us is None else self.graph_us

    def cells(self, floor_us: float | None, target_us: float | None) -> Row:
        """Returns the cells of a table's row: the times, and their ratio to the floor and the target."""
        return {
            "us": round(self.us, 2),
            "plain_us": round(self.plain_us, 2),
            "floor_us": None if floor_us is None else round(floor_us, 3),
            "ratio": None if floor_us is None else round(self.us / floor_us, 2),
            "target_us": target_us,
            "ok": None if target_us is None else "yes" if self.us <= target_us else "NO",
            "launches": self.launches,
            "copies": self.copies,
            "note": self.problem or None,
        }


class DeviceClock:
    """Measures on one device; on a CPU only plain steps, by wall time."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self._cuda = device.type == "cuda"
        self._flushed = torch.zeros(FLUSH_BYTES // 4 if self._cuda else 0, device=device)

    def time(self, step: Step, buffers: Sequence[torch.Tensor], restore: Callable[[], None]) -> Timing:
        """Measures a step over `buffers`; `restore` resets them, because a step may write to its buffer."""
        for i in range(WARM_UP):
            step(buffers[i % len(buffers)])
        self._wait()
        restore()
        plain = self._plain(step, buffers, restore)
        if not self._cuda:
            return Timing(None, plain, None, None, "no CUDA")
        launches, copies = self._count(step, buffers[0])
        restore()
        try:
            return Timing(self._graph(step, buffers, restore), plain, launches, copies, "")
        except RuntimeError as error:  # a step that waits for the device cannot be captured
            return Timing(None, plain, launches, copies, str(error).splitlines()[0][:80])

    def _plain(self, step: Step, buffers: Sequence[torch.Tensor], restore: Callable[[], None]) -> float:
        times = []
        for _ in range(self.repeats):
            restore()
            self._flush()
            self._wait()
            start = time.perf_counter()
            for buffer in buffers:
                step(buffer)
            self._wait()
            times.append((time.perf_counter() - start) / len(buffers))
        return 1e6 * statistics.median(times)

    def _graph(self, step: Step, buffers: Sequence[torch.Tensor], restore: Callable[[], None]) -> float:
        graph = torch.cuda.CUDAGraph()
        kept = []  # outputs: their memory is the graph's
        with torch.cuda.graph(graph):
            for buffer in buffers:
                kept.append(step(buffer))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times: list[float] = []
        for i in range(WARM_UP + self.repeats):
            restore()
            self._flush()
            start.record()
            graph.replay()
            end.record()
            self._wait()
            if i >= WARM_UP:
                times.append(start.elapsed_time(end) / len(buffers))
        return 1e3 * statistics.median(times)

    def _count(self, step: Step, buffer: torch.Tensor) -> tuple[int, int]:
        with _profiler.profile(activities=[_profiler.ProfilerActivity.CUDA]) as profile:
            step(buffer)
            self._wait()
        names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
        copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
        return len(names) - copies, copies

    def _flush(self) -> None:
        """Fills the L2 cache by reading, because written lines would be written back during the step."""
        self._flushed.sum()

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)
