"""Ends work of the event loop when its time is over."""

import asyncio
from types import TracebackType


class TimeLimit:
    """Cancels the task that runs a `with` block when its time is over, and raises TimeoutError at the block's end.

    It is `asyncio.timeout` for blocks that every request and every token of a stream runs, at a part of its cost.
    """

    __slots__ = ("_before", "_expired", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("A time limit needs a task.")
        self._task = task
        self._before = task.cancelling()
        self._timer = loop.call_later(self._seconds, self.expire)

    def expire(self) -> None:
        """Ends the block as if its time were over. Nothing happens the second time."""
        if not self._expired:
            self._expired = True
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error
