"""Between the step thread and asyncio: work goes in through a mailbox, results leave as one call per step and loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from engine.requests import EngineError, GenerateChunk, LikelihoodResult, ScoreResult

Result = ScoreResult | LikelihoodResult | GenerateChunk | EngineError


class Receiver:
    """Where one job's results arrive. The step thread only ever names it; every method runs in the event loop that
    made it. A reader who is slow makes only this queue longer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: deque[Result] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Result) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Result:
        while not self._items:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class Outbox:
    """Collects what a step has for asyncio and hands it over at once."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[Receiver, Result]]] = {}
        self.hand_overs = 0

    def add(self, receiver: Receiver, item: Result) -> None:
        self._batches.setdefault(receiver.loop, []).append((receiver, item))

    def flush(self) -> None:
        for loop, batch in self._batches.items():
            if loop.is_closed():
                continue  # its readers are gone with it; their jobs end by themselves
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # closed between the two lines
                continue
            self.hand_overs += 1
        self._batches = {}


class Inbox:
    """Calls for the step thread, in order. `post` may be called from any thread."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._ready = threading.Event()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._ready.is_set():  # who clears it looks for calls after that
            self._ready.set()

    def take(self) -> list[Callable[[], None]]:
        self._ready.clear()
        calls = []
        while self._calls:
            calls.append(self._calls.popleft())
        return calls

    def wait(self, timeout: float) -> None:
        self._ready.wait(timeout)


def _deliver(batch: list[tuple[Receiver, Result]]) -> None:
    for receiver, item in batch:
        receiver.put(item)
