"""Reports the stages of a start-up, and how long each took."""

import time
from typing import Protocol


class StartupProgress(Protocol):
    """Receives each start-up stage as it ends."""

    def __call__(self, stage: str, seconds: float) -> None: ...


def silent(stage: str, seconds: float) -> None:
    """Reports nothing; a `StartupProgress`."""


class timed:
    """Reports the seconds inside to `progress` under `stage`, unless an exception leaves it."""

    def __init__(self, stage: str, progress: StartupProgress) -> None:
        self._stage, self._progress = stage, progress

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._progress(self._stage, time.perf_counter() - self._start)
