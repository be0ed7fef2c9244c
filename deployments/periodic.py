"""Runs the rounds of a background task on the event loop."""

import asyncio
import contextlib
import logging

log = logging.getLogger("ray.serve")


class PeriodicTask:
    """Calls `look` every `period_s` seconds from `start` to `stop`, and earlier after `wake`.

    A subclass defines both, or a `_run` of its own. A round that raises is logged, and the next one follows.
    """

    _task: asyncio.Task[None] | None = None

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    @property
    def period_s(self) -> float:
        """The time between two rounds."""
        raise NotImplementedError

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def wake(self) -> None:
        """Begins the next round when the present one has ended. Must be called on the event loop."""
        self._woken.set()

    async def look(self) -> None:
        """Runs one round."""
        raise NotImplementedError

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self.look()
            except Exception:  # the task must outlive whatever one round meets
                log.exception("A round of %s failed.", type(self).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.period_s):
                    await self._woken.wait()
