"""Buffers the chunks of many producers for one consumer, which takes all that there are in one go."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from deployments.protocol import PromptChunk
from engine.requests import GenerateChunk

MAX_PARTS = 32  # chunks of a branch that wait apart: each may keep the arrays of its whole step


class PendingChunks:
    """Holds chunks until they are taken, when those of a branch become one.

    A prompt's own scores, or its failure, are one part of which the last counts.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], list[PromptChunk]] = {}  # by prompt and branch; the prompt has branch -1

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, item: PromptChunk) -> None:
        """Takes a chunk behind those of its branch."""
        key = item.prompt, item.chunk.branch if isinstance(item.chunk, GenerateChunk) else -1
        parts = self._parts.get(key)
        if parts is None:
            self._parts[key] = [item]
            return
        parts.append(item)
        if len(parts) >= MAX_PARTS:
            parts[:] = [_one(parts)]

    def take(self) -> tuple[PromptChunk, ...]:
        """Removes and returns all chunks, one a branch, in order of first arrival."""
        parts, self._parts = self._parts, {}
        return tuple(map(_one, parts.values()))

    def take_sorted(self) -> tuple[PromptChunk, ...]:
        """Does the same in order of prompt and branch, a prompt's own part first."""
        parts, self._parts = self._parts, {}
        return tuple(_one(parts[key]) for key in sorted(parts))


class StreamBuffer:
    """Gives what came since the last time, one chunk a branch, in order of first arrival.

    The iteration ends when `producers` have called `close_one`. The object belongs to one event loop.
    """

    def __init__(self, producers: int) -> None:
        self._open = producers
        self.single = False  # there is one producer, of one branch
        self._chunks = PendingChunks()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def add(self, item: PromptChunk) -> None:
        self._chunks.add(item)
        self._wake()

    def close_one(self) -> None:
        self._open -= 1
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[tuple[PromptChunk, ...]]:
        while self._open or self._chunks:
            if not self._chunks:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if not self.single:
                await asyncio.sleep(0)  # the other branches' chunks of the same step are in the loop's hands already
            if self._chunks:
                yield self._chunks.take()


def _one(parts: Sequence[PromptChunk]) -> PromptChunk:
    """Returns consecutive chunks of a branch as one; of a prompt's own parts the last."""
    last = parts[-1]
    if len(parts) == 1 or not isinstance(last.chunk, GenerateChunk):
        return last
    chunks = [item.chunk for item in parts if isinstance(item.chunk, GenerateChunk)]
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    columns = {
        name: None if any(part is None for part in found) else np.concatenate(found)
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs", "chosen_logprobs")
        if (found := [getattr(chunk, name) for chunk in chunks])[-1] is not None
    }
    counts = {name: sum(getattr(chunk, name) for chunk in chunks) for name in ("drafted", "accepted")}
    return PromptChunk(last.prompt, last.chunk._replace(tokens=tokens, **columns, **counts))
