"""Reports the stages of a start-up, and how long each took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class StartupProgress(Protocol):
    """Receives each start-up stage as it ends."""

    def __call__(self, stage: str, seconds: float) -> None: ...


def silent(stage: str, seconds: float) -> None:
    """Reports nothing; a `StartupProgress`."""


@contextmanager
def timed(stage: str, progress: StartupProgress) -> Iterator[None]:
    """Reports the seconds inside to `progress` under `stage`, unless an exception leaves it."""
    start = time.perf_counter()
    yield
    progress(stage, time.perf_counter() - start)
