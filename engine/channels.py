"""Channels between the step thread and asyncio: calls go in, results leave as one call per step and event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from engine.requests import EngineError, GenerateChunk, LikelihoodResult, PoolingResult, ScoreResult, StepTokens

Result = ScoreResult | LikelihoodResult | PoolingResult | GenerateChunk | EngineError


class TokenSink(Protocol):
    """Receives single tokens of any number of streams, in the event loop that it belongs to."""

    loop: asyncio.AbstractEventLoop

    def put_tokens(self, tokens: StepTokens) -> None:
        """Takes what one step brought for all of its streams."""
        ...


class ResultSink(Protocol):
    """Receives the results of one request.

    Every method runs in the event loop that the sink belongs to; the step thread only names the sink.
    """

    loop: asyncio.AbstractEventLoop
    stream: tuple[int, int]  # names it for `token_sink`, in `StepTokens.streams`

    @property
    def token_sink(self) -> TokenSink:
        """Gets its single tokens, which end nothing."""
        ...

    def put(self, item: Result) -> None:
        """Takes a result. An EngineError is the last one."""
        ...


class ResultQueue:
    """Implements `ResultSink`: holds the results until the caller reads them. A slow reader makes only its own queue
    longer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.stream = 0, 0
        self._items: deque[Result] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Result) -> None:
        """Adds a result and wakes the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def token_sink(self) -> TokenSink:
        """Returns itself: it is no attribute, since a cycle would wait for the garbage collector."""
        return self

    def put_tokens(self, tokens: StepTokens) -> None:
        """Adds each token as a chunk of its own."""
        for chunk in tokens.chunks():
            self.put(chunk)

    async def get(self) -> Result:
        """Waits for the next result and returns it."""
        while not self._items:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class ResultCallback(ResultQueue):
    """Gives each result to a function on the event loop, which costs less than a task that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, token_sink: TokenSink | None, stream: tuple[int, int]) -> None:
        """`token_sink`: gets the single tokens; None: `deliver` gets each as a chunk."""
        super().__init__(loop)
        self.stream = stream
        self.deliver: Callable[[Result], None] = self._items.append
        self._token_sink = token_sink

    @property
    def token_sink(self) -> TokenSink:
        """Returns what gets the single tokens."""
        return self if self._token_sink is None else self._token_sink

    def put(self, item: Result) -> None:
        """Gives a result to `deliver`."""
        self.deliver(item)


class ResultDispatcher:
    """Collects the results of a step and delivers them with one call per event loop."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self.hand_overs = 0  # calls into asyncio since start-up

    def add(self, sink: ResultSink, item: Result) -> None:
        """Keeps a result until the next `flush`."""
        self._batches.setdefault(sink.loop, []).append(partial(sink.put, item))

    def add_tokens(self, sink: TokenSink, tokens: StepTokens) -> None:
        """Keeps the tokens of a sink's streams until the next `flush`."""
        self._batches.setdefault(sink.loop, []).append(partial(sink.put_tokens, tokens))

    def flush(self) -> None:
        """Delivers everything that was added."""
        for loop, batch in self._batches.items():
            if loop.is_closed():
                continue  # its readers are gone with it; their requests end by themselves
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # closed between the two lines
                continue
            self.hand_overs += 1
        self._batches = {}


class CallQueue:
    """Holds calls for the step thread, in order. Any thread may call `post`."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._ready = threading.Event()
        self._waker: asyncio.AbstractEventLoop | None = None  # wakes the step thread in its next round

    def post(self, call: Callable[[], None]) -> None:
        """Adds a call and wakes the step thread."""
        self._calls.append(call)
        if not self._ready.is_set():  # `take` clears it before it looks for calls
            self._ready.set()

    def post_with_others(self, call: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Adds a call from the thread of an event loop, and wakes the step thread in the loop's next round: calls that
        come together are in one step, and each costs no change of threads."""
        self._calls.append(call)
        if self._waker is not loop:
            self._waker = loop
            loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._waker = None
        if self._calls and not self._ready.is_set():
            self._ready.set()

    def take(self) -> list[Callable[[], None]]:
        """Removes and returns all calls."""
        self._ready.clear()
        calls = []
        while self._calls:
            calls.append(self._calls.popleft())
        return calls

    def wait(self, timeout: float) -> None:
        """Waits for a call, at most `timeout` seconds."""
        self._ready.wait(timeout)


def _deliver(batch: list[Callable[[], None]]) -> None:
    for deliver in batch:
        deliver()
