"""Streams: generations that outlive the replicas they run on.

A stream whose replica dies goes on elsewhere from the tokens that have come. So does one whose replica is told to
stop: Serve says so by leaving it out of the set of replicas, long before it ends it. A plain answer of some length is a
stream with long chunks.

Progress: what a client has of a generation, and the task of what is still missing.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deployments.errors import ApiError
from deployments.protocol import Failure, GenerateReply, GenerateTask, PromptChunk, PromptScores, Route, UInt64s
from deployments.routing.errors import RETRY_AFTER_S, Again, check, cut_short, deadline_passed, handed_off, unexpected
from deployments.routing.replica_call import GRACE_S, Calls, due
from deployments.routing.retry import Course, Retries
from deployments.stream_buffer import joined
from engine.requests import GenerateChunk, Int32s

Place = tuple[int, int]  # prompt and branch, in the numbering of the client's task


class Progress:
    """Random numbers depend on seed, branch and position alone, and penalties, bans and stops follow from the tokens:
    prompt and tokens are all that another replica needs to go on exactly. A chunk ends where a run of drafts ends, as
    the speculative rules need it."""

    def __init__(self, task: GenerateTask) -> None:
        self._task = task
        self._branches = task.params.n
        self._tokens = {
            (q, b): bytearray(task.emitted[q][b].tobytes() if task.emitted else b"")
            for q in range(len(task.starts) - 1)
            for b in range(self._branches)
        }
        self._open = set(self._tokens)
        self._unscored = set() if task.prompt_top is None else set(range(len(task.starts) - 1))
        self._cached: dict[int, int] = {}  # by prompt, as the first replica that worked on it found it
        self._asked = list(range(len(task.starts) - 1))  # prompts of the task as it was last sent
        self._sizes: dict[Place, int] = {}  # bytes that a branch had when it was last sent
        self._epoch = task.epoch
        if task.prompt_only:
            self._open = set()

    @property
    def over(self) -> bool:
        return not self._open and not self._unscored

    @property
    def begun(self) -> bool:
        """Whether the client has anything that the task did not come with."""
        return self._epoch > self._task.epoch or bool(self._cached) or self._any_scored()

    def _any_scored(self) -> bool:
        return self._task.prompt_top is not None and len(self._unscored) < len(self._task.starts) - 1

    def take(self, reply: GenerateReply) -> GenerateReply | None:
        """What of the reply is new, in the client's numbering; None if nothing is. Called for every reply."""
        if reply.epoch != self._epoch:
            return None
        chunks = [found for item in reply.chunks if (found := self._chunk(item)) is not None]
        if not chunks and reply.chunks:
            return None
        return reply if self._epoch == self._task.epoch else GenerateReply(tuple(chunks), self._task.epoch, reply.load)

    def _chunk(self, item: PromptChunk) -> PromptChunk | None:
        prompt, chunk = self._asked[item.prompt], item.chunk
        if isinstance(chunk, PromptScores):
            if prompt not in self._unscored:
                return None
            self._unscored.discard(prompt)
        elif not isinstance(chunk, Failure):
            place = (prompt, chunk.branch)
            if place not in self._open:
                return None
            self._tokens[place] += chunk.tokens.tobytes()
            if chunk.finish is not None:
                self._open.discard(place)
            first = self._cached.setdefault(prompt, chunk.cached)
            if self._epoch > self._task.epoch:
                chunk = self._as_if_unbroken(chunk, first)
        return PromptChunk(prompt, chunk)

    @staticmethod
    def _as_if_unbroken(chunk: GenerateChunk, cached: int) -> GenerateChunk:
        """What was generated before is no part of the prompt, wherever the next replica found it."""
        return chunk._replace(cached=cached)

    def rest(self) -> GenerateTask:
        """The task of the prompts and branches that have not ended, an epoch later."""
        task = self._task
        self._epoch += 1
        self._asked = sorted({q for q, _ in self._open} | self._unscored)
        self._sizes = {place: len(self._tokens[place]) for place in self._open}
        parts = [task.prompts[task.starts[q] : task.starts[q + 1]] for q in self._asked]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum([len(part) for part in parts])))
        seeds: UInt64s = task.seeds[self._asked]
        return replace(
            task,
            prompts=np.concatenate(parts),
            starts=starts.astype(np.int32),
            seeds=seeds,
            emitted=tuple(tuple(self._so_far((q, b)) for b in range(self._branches)) for q in self._asked),
            prompt_top=task.prompt_top if self._unscored else None,
            epoch=self._epoch,
        )

    def _so_far(self, place: Place) -> Int32s:
        return np.frombuffer(bytes(self._tokens[place]), np.int32)

    def advanced(self, tokens: int) -> bool:
        """Whether every branch has ended or has so many more tokens than when the task was last sent."""
        return all(len(self._tokens[place]) - self._sizes.get(place, 0) >= 4 * tokens for place in self._open)


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
                        course.isolated = course.isolated and not progress.advanced(course.isolated_tokens)
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
                check(reply, course.isolated)
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
