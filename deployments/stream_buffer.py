"""Buffers the chunks of many producers for one consumer, which takes all that there are in one go."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from deployments.protocol import PromptChunk
from engine.requests import GenerateChunk


def add_chunk(chunks: dict[tuple[int, int], PromptChunk], item: PromptChunk) -> None:
    """Joins a chunk to that of its branch. Keys are prompt and branch; the prompt itself has branch -1."""
    key = (item.prompt, item.chunk.branch if isinstance(item.chunk, GenerateChunk) else -1)
    before = chunks.get(key)
    if before is not None and isinstance(before.chunk, GenerateChunk) and isinstance(item.chunk, GenerateChunk):
        item = PromptChunk(item.prompt, joined(before.chunk, item.chunk))
    chunks[key] = item


class StreamBuffer:
    """Gives what came since the last time, one chunk a branch, in order of first arrival.

    The iteration ends when `producers` have called `close_one`. The object belongs to one event loop.
    """

    def __init__(self, producers: int) -> None:
        self._open = producers
        self.single = False  # there is one producer, of one branch
        self._chunks: dict[tuple[int, int], PromptChunk] = {}
        self._news = asyncio.Event()

    def add(self, item: PromptChunk) -> None:
        add_chunk(self._chunks, item)
        self._news.set()

    def close_one(self) -> None:
        self._open -= 1
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[tuple[PromptChunk, ...]]:
        while self._open or self._chunks:
            await self._news.wait()
            if not self.single:
                await asyncio.sleep(0)  # the other branches' chunks of the same step are in the loop's hands already
            self._news.clear()
            if self._chunks:
                found = tuple(self._chunks.values())
                self._chunks = {}
                yield found


def joined(first: GenerateChunk, then: GenerateChunk) -> GenerateChunk:
    """Returns two consecutive chunks of a branch as one."""

    def both(name: str) -> Any:
        left, right = getattr(first, name), getattr(then, name)
        return None if left is None or right is None else np.concatenate((left, right))

    return then._replace(
        tokens=both("tokens"),
        logprobs=both("logprobs"),
        ranks=both("ranks"),
        top_ids=both("top_ids"),
        top_logprobs=both("top_logprobs"),
        chosen_logprobs=both("chosen_logprobs"),
        drafted=first.drafted + then.drafted,
        accepted=first.accepted + then.accepted,
    )
