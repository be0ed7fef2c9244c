"""Continues generations that outlive the replicas they run on.

A stream whose replica dies continues on another one from the tokens that have come. So does one whose replica is being
stopped: Serve removes it from the set of replicas long before it ends it. A plain answer of some length is a stream
with long chunks.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import replace

import numpy as np

from deployments.errors import ApiError
from deployments.protocol import (
    GenerateCall,
    GenerateReply,
    PromptChunk,
    PromptScores,
    ReplicaTransport,
    ReplyStream,
    Route,
    common,
    with_fields,
)
from deployments.routing.admission import deadline_passed
from deployments.routing.replica_call import (
    GRACE_S,
    RETRY_AFTER_S,
    ReplicaCaller,
    RetryableError,
    check,
    cut_short,
    handed_off,
    left_behind,
    unexpected,
)
from deployments.routing.retry import RetryPolicy, RetryState
from deployments.stream_buffer import PendingChunks
from engine.requests import GenerateChunk, Int32s

Branch = tuple[int, int]  # prompt and branch, in the numbering of the client's call
CHECKPOINT = 256  # tokens of a branch of a plain answer that a lost replica can cost
SETTLE_S = 0.1  # the error of a stream whose replica died may come after the notice that the replica is missing


class StreamProgress:
    """Tracks what the client has of a generation, and builds the call for what is still missing.

    Random numbers depend on seed, branch and position alone, and penalties, bans and stops follow from the tokens:
    prompt and tokens are all that another replica needs to continue exactly. A chunk ends where a run of drafts ends,
    as the rules of speculative decoding need it.
    """

    def __init__(self, call: GenerateCall) -> None:
        self._call = call
        self._branches = range(call[0].params.n)
        self._tokens = {
            (q, b): bytearray(request.emitted[b].tobytes() if request.emitted else b"")
            for q, request in enumerate(call)
            for b in self._branches
        }
        self._open = set() if call[0].prompt_only else set(self._tokens)
        self._unscored = set() if call[0].prompt_logprobs is None else set(range(len(call)))
        self._cached: dict[int, int] = {}  # by prompt, as the first replica that worked on it found it
        self._sent = list(range(len(call)))  # prompts of the call as it was last sent
        self._sizes: dict[Branch, int] = {}  # bytes that a branch had when it was last sent
        self._scored = False
        self.epoch = 0  # of the call as it was last sent

    @property
    def over(self) -> bool:
        return not self._open and not self._unscored

    @property
    def begun(self) -> bool:
        """Whether the client has anything that the call did not come with."""
        return self.epoch > 0 or bool(self._cached) or self._scored

    def take(self, reply: GenerateReply) -> GenerateReply | None:
        """Returns what is new in the reply, in the client's numbering, or None. Must be called for every reply."""
        if reply.epoch != self.epoch:
            return None
        chunks = [found for item in reply.chunks if (found := self._take_chunk(item)) is not None]
        if not chunks and reply.chunks:
            return None
        return reply if not self.epoch else GenerateReply(tuple(chunks), 0, reply.load)

    def _take_chunk(self, item: PromptChunk) -> PromptChunk | None:
        prompt, chunk = self._sent[item.prompt], item.chunk
        if isinstance(chunk, GenerateChunk):
            branch = (prompt, chunk.branch)
            if branch not in self._open:
                return None
            self._tokens[branch].extend(chunk.tokens.tobytes())
            if chunk.finish is not None:
                self._open.discard(branch)
            first = self._cached.setdefault(prompt, chunk.cached)
            if self.epoch:  # tokens that were generated before are no part of the prompt
                chunk = chunk._replace(cached=first)
        elif isinstance(chunk, PromptScores):
            if prompt not in self._unscored:
                return None
            self._unscored.discard(prompt)
            self._scored = True
        return PromptChunk(prompt, chunk) if self.epoch else item

    def rest(self) -> GenerateCall:
        """Returns the call of the prompts and branches that have not ended, an epoch later."""
        self.epoch += 1
        self._sent = sorted({q for q, _ in self._open} | self._unscored)
        self._sizes = {branch: len(self._tokens[branch]) for branch in self._open}
        prompt_logprobs = self._call[0].prompt_logprobs if self._unscored else None
        return tuple(
            replace(
                self._call[q],
                emitted=tuple(self._emitted((q, b)) for b in self._branches),
                prompt_logprobs=prompt_logprobs,
            )
            for q in self._sent
        )

    def _emitted(self, branch: Branch) -> Int32s:
        return np.frombuffer(bytes(self._tokens[branch]), np.int32)

    def advanced(self, tokens: int) -> bool:
        """Returns whether all scores have come, and every branch has ended or has so many more tokens than when the
        call was last sent."""
        return not self._unscored and all(
            len(self._tokens[branch]) - self._sizes.get(branch, 0) >= 4 * tokens for branch in self._open
        )


class ResumableStreams:
    """Runs the generations of one process. It belongs to the event loop that makes it."""

    def __init__(self, transport: ReplicaTransport, caller: ReplicaCaller, retries: RetryPolicy) -> None:
        self._transport = transport
        self._caller = caller
        self._retries = retries
        self._open: set[_OpenStream] = set()
        self._cut = False
        self._loop = asyncio.get_running_loop()
        caller.loads.listen(self._replicas_changed)

    async def complete(self, call: GenerateCall) -> GenerateReply:
        """Returns one chunk a branch, in order of prompt and branch; a prompt's scores come before them."""
        short = call[0].params.max_tokens <= CHECKPOINT
        call = call if short else with_fields(call, stream_interval=CHECKPOINT)
        state = self._retries.begin(call)
        async with contextlib.aclosing(self._replies(call, state, plain=short)) as replies:
            found = [reply async for reply in replies]
        state.served()
        return found[0] if len(found) == 1 else _merged(found)

    def stream(self, call: GenerateCall) -> AsyncGenerator[GenerateReply, None]:
        """Yields replies as they come. Closing the generator cancels the call, and with it the work at the replica."""
        return self._replies(call, self._retries.begin(call), plain=False)

    def cut(self) -> None:
        """Ends all streams, present and future, with the error `draining`."""
        self._cut = True
        for stream in self._open:
            stream.give_up(self._loop.time())

    async def _replies(
        self, call: GenerateCall, state: RetryState, *, plain: bool
    ) -> AsyncGenerator[GenerateReply, None]:
        """Yields the replies of all attempts. `plain`: the first attempt is a call with one reply."""
        progress, given = StreamProgress(call), call
        while True:
            try:
                if not state.again:
                    self._caller.check_ready()
                ranked = self._caller.rank(call, state.tried)
                with self._caller.tracked(call, ranked, state.tried) as route:
                    attempt = self._complete_once if plain and not state.again else self._stream_once
                    async with contextlib.aclosing(
                        attempt(state.next_call(call), progress.epoch, route, state)
                    ) as replies:
                        async for reply in replies:
                            if not isinstance(reply, GenerateReply):
                                raise unexpected(reply)
                            new = progress.take(reply)
                            state.isolated = state.isolated and not progress.advanced(state.isolated_tokens)
                            if new is not None:
                                yield new
                if not progress.over:
                    raise cut_short()
                return
            except RetryableError as error:
                if progress.over:
                    return
                if not state.admitted:
                    self._caller.check_others(error, call, state.tried)
                await state.wait(error, given, resumed=progress.begun)
                call = progress.rest()

    async def _complete_once(
        self, call: GenerateCall, epoch: int, route: Route, state: RetryState
    ) -> AsyncGenerator[object, None]:
        yield await self._caller.call(self._transport, call, route, epoch)

    async def _stream_once(
        self, call: GenerateCall, epoch: int, route: Route, state: RetryState
    ) -> AsyncGenerator[object, None]:
        responses, errors = self._transport.stream(call, route, epoch), self._caller.errors(route)
        stream = _OpenStream(route.ticket, self._loop.time() + common(call).timeout_s + GRACE_S, state)
        self._open.add(stream)
        if self._cut:
            stream.give_up(self._loop.time())
        over = False
        try:
            while True:
                try:
                    with errors:
                        reply = await stream.read(responses)
                except StopAsyncIteration:
                    over = True
                    return
                self._caller.report_load(route, reply)
                check(reply, state.isolated)
                yield reply
        except TimeoutError:
            raise self._why(stream) from None
        finally:
            stream.close()
            self._open.discard(stream)
            if not over:
                responses.cancel()

    def _why(self, stream: "_OpenStream") -> Exception:
        if not stream.given_up:
            return deadline_passed()
        if stream.left_behind and not self._cut:
            return left_behind()
        return ended_by_drain() if self._cut else handed_off()

    def leave(self, replicas: Collection[str]) -> None:
        """Moves the streams of these replicas to others, but not one that runs isolated: see `ReplicaCaller.leave`."""
        for stream in self._open:
            if not stream.state.isolated and self._caller.loads.where(stream.ticket) in replicas:
                stream.left_behind = True
                stream.give_up(self._loop.time())

    def _replicas_changed(self, joined: frozenset[str], left: frozenset[str]) -> None:
        """Runs in the router's thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its streams with it
            self._loop.call_soon_threadsafe(self._leave, left)

    def _leave(self, replicas: frozenset[str]) -> None:
        for stream in self._open:
            if self._caller.loads.where(stream.ticket) in replicas:
                stream.give_up(self._loop.time() + SETTLE_S)


class _OpenStream:
    """Represents a stream that is being read, until its deadline or until its reader gives it up."""

    def __init__(self, ticket: int, until: float, state: RetryState) -> None:
        """`until`: the deadline, on the running loop's clock."""
        self.ticket = ticket
        self.state = state
        self.left_behind = False  # its replica answers no canary
        self.given_up = False
        self._until = until
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(until, self._expire)
        self._reader: asyncio.Task[object] | None = None  # while it waits

    async def read(self, replies: ReplyStream) -> object:
        """Returns the next reply.

        Raises:
            StopAsyncIteration: the stream has ended.
            TimeoutError: its time is over.
        """
        if self._over:
            raise TimeoutError
        task = self._reader = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("A stream is read by a task.")
        before = task.cancelling()
        try:
            return await replies.__anext__()
        except asyncio.CancelledError:
            if self._is_over() and task.uncancel() <= before:
                raise TimeoutError from None
            raise
        finally:
            self._reader = None

    def give_up(self, at: float) -> None:
        """Ends the stream at a time on the loop's clock, if it has not ended."""
        self._until = min(at, self._until)
        self.given_up = True
        self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._expire)

    def close(self) -> None:
        self._timer.cancel()

    def _is_over(self) -> bool:
        return self._over

    def _expire(self) -> None:
        self._over = True
        if self._reader is not None:
            self._reader.cancel()


def ended_by_drain() -> ApiError:
    return ApiError(
        "draining",
        "The server is shutting down. Go on with `seed` and `resume_token_ids`.",
        retry_after_s=RETRY_AFTER_S,
    )


def _merged(replies: Sequence[GenerateReply]) -> GenerateReply:
    """Returns all that the replies brought as one reply."""
    found = PendingChunks()
    for reply in replies:
        for item in reply.chunks:
            found.add(item)
    return GenerateReply(found.take_sorted(), replies[-1].epoch, replies[-1].load)
