"""LoopLag: how late an event loop runs what is due. Whatever blocks it shows here, whoever did it."""

import asyncio
from collections.abc import Callable

PERIOD_S = 0.05


class LoopLag:
    """Tells `observe` seconds of delay, `1 / period_s` times a second while the loop is free."""

    def __init__(self, observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
        self._observe = observe
        self._period = period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + self._period
            await asyncio.sleep(self._period)
            self._observe(max(0.0, clock() - due))
