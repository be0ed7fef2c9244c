"""Buffers the chunks of many producers for one consumer, which takes all that there are in one go."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from deployments.protocol import Failure, PromptChunk, PromptScores
from engine.channels import TokenSink
from engine.requests import GenerateChunk, StepTokens

COLUMNS = ("logprobs", "ranks", "top_ids", "top_logprobs", "chosen_logprobs")
MAX_PARTS = 32  # chunks of a branch that wait apart: each may keep the arrays of its whole step


class TokenRow(NamedTuple):
    """Names a token of a step by its row."""

    tokens: StepTokens
    row: int


Part = GenerateChunk | PromptScores | Failure | TokenRow


class PendingChunks:
    """Holds chunks, and tokens of steps, until they are taken, when those of a branch become one chunk.

    A prompt's own scores, or its failure, replace what was there of the prompt itself.
    """

    def __init__(self) -> None:
        self._only: PromptChunk | None = None  # the first chunk, until another part comes
        self._parts: dict[tuple[int, int], list[Part]] = {}  # by prompt and branch; the prompt has branch -1

    def __bool__(self) -> bool:
        return self._only is not None or bool(self._parts)

    def add(self, item: PromptChunk) -> None:
        """Takes a chunk behind those of its branch."""
        if self._only is None and not self._parts:
            self._only = item
            return
        self._spread()
        self._add_chunk(item)

    def add_token(self, tokens: StepTokens, row: int) -> None:
        """Takes a token of a step. The second number of its stream is the prompt."""
        self._spread()
        self._add((int(tokens.streams[row, 1]), int(tokens.branches[row])), TokenRow(tokens, row))

    def _spread(self) -> None:
        """Puts the only chunk where other parts can join it."""
        only, self._only = self._only, None
        if only is not None:
            self._add_chunk(only)

    def _add_chunk(self, item: PromptChunk) -> None:
        branch = item.chunk.branch if isinstance(item.chunk, GenerateChunk) else -1
        self._add((item.prompt, branch), item.chunk)

    def _add(self, key: tuple[int, int], part: Part) -> None:
        parts = self._parts.get(key)
        if parts is None:
            self._parts[key] = [part]
            return
        parts.append(part)
        if len(parts) >= MAX_PARTS:
            parts[:] = [_joined(parts)]

    def take(self) -> tuple[PromptChunk, ...]:
        """Removes and returns all chunks, one a branch, in order of first arrival."""
        if self._only is not None:
            only, self._only = self._only, None
            return (only,)
        taken, self._parts = self._parts, {}
        return tuple(PromptChunk(prompt, _joined(parts)) for (prompt, _), parts in taken.items())

    def take_sorted(self) -> tuple[PromptChunk, ...]:
        """Does the same in order of prompt and branch, a prompt's own part first."""
        self._spread()
        self._parts = {key: self._parts[key] for key in sorted(self._parts)}
        return self.take()


class StreamBuffer:
    """Implements `StreamReceiver`: gives what came since the last time, one chunk a branch, in order of first arrival.

    The object belongs to one event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.number = 0
        self._ended = False
        self._chunks = PendingChunks()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def token_sink(self) -> TokenSink:
        return self

    def add(self, item: PromptChunk) -> None:
        self._chunks.add(item)
        self._wake()

    def put_tokens(self, tokens: StepTokens) -> None:
        for row in range(len(tokens.tokens)):
            self._chunks.add_token(tokens, row)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[tuple[PromptChunk, ...]]:
        while self._chunks or not self._ended:
            if not self._chunks:
                self._waiter = self.loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if self._chunks:
                yield self._chunks.take()


def _joined(parts: Sequence[Part]) -> GenerateChunk | PromptScores | Failure:
    """Returns consecutive parts of a branch as one chunk; of a prompt's own parts the last."""
    last = _chunk(parts[-1])
    if len(parts) == 1 or not isinstance(last, GenerateChunk):
        return last
    if last.logprobs is None:
        tokens = np.array([token for part in parts for token in _tokens(part)], np.int32)
        chunks = [part for part in parts if isinstance(part, GenerateChunk)]  # a step's token has no draft
        columns: dict[str, Any] = {}
    else:
        chunks = [chunk for part in parts if isinstance(chunk := _chunk(part), GenerateChunk)]
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        columns = {name: _column([getattr(chunk, name) for chunk in chunks]) for name in COLUMNS}
    drafted, accepted = (sum(getattr(chunk, name) for chunk in chunks) for name in ("drafted", "accepted"))
    return last._replace(tokens=tokens, drafted=drafted, accepted=accepted, **columns)


def _chunk(part: Part) -> GenerateChunk | PromptScores | Failure:
    return part.tokens.chunk(part.row) if isinstance(part, TokenRow) else part


def _tokens(part: Part) -> Sequence[int]:
    if isinstance(part, TokenRow):
        return (part.tokens.tokens[part.row],)
    found: list[int] = part.tokens.tolist() if isinstance(part, GenerateChunk) else []
    return found


def _column(parts: Sequence[Any]) -> Any:
    return None if any(part is None for part in parts) else np.concatenate(parts)
