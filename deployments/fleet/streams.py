"""Streams: generations that outlive the replicas they run on.

A stream whose replica dies goes on elsewhere from the tokens that have come. So does one whose replica is told to
stop: Serve says so by leaving it out of the set of replicas, long before it ends it. A plain answer of some length is a
stream with long chunks.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from deployments.chunks import joined
from deployments.fleet.attempts import (
    RETRY_AFTER_S,
    Again,
    check,
    cut_short,
    deadline_passed,
    handed_off,
    unexpected,
)
from deployments.fleet.calls import GRACE_S, Calls, due
from deployments.fleet.progress import Progress
from deployments.fleet.retries import Course, Retries
from deployments.messages import GenerateReply, GenerateTask, PromptChunk, Route
from deployments.wire.errors import ApiError
from engine.jobs import GenerateChunk

CHECKPOINT = 256  # tokens of a branch of a plain answer that a lost replica can cost
SETTLE_S = 0.1  # the error of a stream whose replica died may come after the word that the replica is missing


class Streams:
    """Belongs to the event loop that makes it."""

    def __init__(self, handle: Any, calls: Calls, retries: Retries) -> None:
        self._generate = handle.generate
        self._stream = handle.options(stream=True).stream
        self._calls = calls
        self._retries = retries
        self._open: set[_Open] = set()
        self._cut = False
        self._loop = asyncio.get_running_loop()
        calls.loads.listen(self._replicas_changed)

    async def whole(self, task: GenerateTask) -> GenerateReply:
        """One chunk a branch, in order of prompt and branch; a prompt's scores before them."""
        short = task.params.max_tokens <= CHECKPOINT
        course = self._retries.course(task if short else replace(task, every=CHECKPOINT))
        async with contextlib.aclosing(self._replies(course, plain=short)) as replies:
            found = [reply async for reply in replies]
        course.served()
        return found[0] if len(found) == 1 else _merged(found)

    async def stream(self, task: GenerateTask) -> AsyncGenerator[GenerateReply, None]:
        """Closing it cancels the call, and with it the work at the replica."""
        course = self._retries.course(task)
        async with contextlib.aclosing(self._replies(course, plain=False)) as replies:
            async for reply in replies:
                yield reply

    def cut(self) -> None:
        """Ends all streams, those to come too, with the error `draining`."""
        self._cut = True
        for stream in self._open:
            stream.give_up(self._loop.time())

    async def _replies(self, course: Course[GenerateTask], *, plain: bool) -> AsyncGenerator[GenerateReply, None]:
        """`plain`: the first attempt is a call with one reply."""
        task, progress = course.task, Progress(course.task)
        while True:
            try:
                call = self._called if plain and not course.again else self._read
                async with contextlib.aclosing(self._sent(call, task, course)) as replies:
                    async for reply in replies:
                        new = progress.take(reply)
                        course.solo = course.solo and not progress.advanced(course.solo_tokens)
                        if new is not None:
                            yield new
                if not progress.over:
                    raise cut_short()
                return
            except Again as again:
                if progress.over:
                    return
                if not course.accepted:
                    self._calls.check_others(again, task, course.tried)
                await course.next(again, resumed=progress.begun)
                task = progress.rest()

    async def _sent(self, call: Any, task: GenerateTask, course: Course[GenerateTask]) -> AsyncGenerator[Any, None]:
        """One attempt."""
        if not course.again:
            self._calls.check_ready()
        ranked = self._calls.rank(task, course.tried)
        with self._calls.sent(course.marked(due(task, course.end)), ranked, course.tried) as sent:
            async with contextlib.aclosing(call(sent, course)) as replies:
                async for reply in replies:
                    if not isinstance(reply, GenerateReply):
                        raise unexpected(reply)
                    yield reply

    async def _called(self, sent: GenerateTask, course: Course[GenerateTask]) -> AsyncGenerator[object, None]:
        yield await self._calls.once(self._generate, sent)

    async def _read(self, sent: GenerateTask, course: Course[GenerateTask]) -> AsyncGenerator[object, None]:
        responses = self._stream.remote(sent)
        stream = _Open(sent.route)
        self._open.add(stream)
        if self._cut:
            stream.give_up(self._loop.time())
        end = self._loop.time() + sent.remaining_s + GRACE_S
        over = False
        try:
            while stream.until is None or self._loop.time() < stream.until:
                try:
                    with self._calls.errors(sent):
                        async with asyncio.timeout_at(min(end, stream.until or end)) as stream.alarm:
                            reply = await anext(responses)
                except StopAsyncIteration:
                    over = True
                    return
                self._calls.heard(sent, reply)
                check(reply, course.solo)
                yield reply
            raise TimeoutError
        except TimeoutError:
            raise self._why(stream) from None
        finally:
            self._open.discard(stream)
            if not over:
                responses.cancel()

    def _why(self, stream: "_Open") -> Exception:
        if stream.until is None:
            return deadline_passed()
        return ended_by_drain() if self._cut else handed_off()

    # The set of replicas.

    def _replicas_changed(self, joined: frozenset[str], left: frozenset[str]) -> None:
        """In the router's thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its streams with it
            self._loop.call_soon_threadsafe(self._leave, left)

    def _leave(self, replicas: frozenset[str]) -> None:
        for stream in self._open:
            if self._calls.loads.where(stream.ticket) in replicas:
                stream.give_up(self._loop.time() + SETTLE_S)


class _Open:
    """A stream that is being read. `until`: when its reader gives it up, on the loop's clock."""

    def __init__(self, route: Route | None) -> None:
        self.ticket = 0 if route is None else route.ticket
        self.until: float | None = None
        self.alarm: asyncio.Timeout | None = None

    def give_up(self, at: float) -> None:
        self.until = at if self.until is None else min(at, self.until)
        if self.alarm is not None and not self.alarm.expired():
            with contextlib.suppress(RuntimeError):  # nobody waits: the reader looks before it does again
                self.alarm.reschedule(self.until)


def ended_by_drain() -> ApiError:
    return ApiError(
        "draining",
        "The server is shutting down. Go on with `seed` and `resume_token_ids`.",
        retry_after_s=RETRY_AFTER_S,
    )


def _merged(replies: Sequence[GenerateReply]) -> GenerateReply:
    """Everything that came, as one reply."""
    found: dict[tuple[int, int], PromptChunk] = {}
    for item in (item for reply in replies for item in reply.chunks):
        key = (item.prompt, item.chunk.branch if isinstance(item.chunk, GenerateChunk) else -1)
        before = found.get(key)
        if before is not None and isinstance(before.chunk, GenerateChunk) and isinstance(item.chunk, GenerateChunk):
            item = PromptChunk(item.prompt, joined(before.chunk, item.chunk))
        found[key] = item
    return GenerateReply(tuple(found[key] for key in sorted(found)), replies[-1].epoch, replies[-1].load)
