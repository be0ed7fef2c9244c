"""A backend that answers from a script: what the routes are tested over where no model matters."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deployments.errors import ApiError
from deployments.protocol import GenerateCall, GenerateReply, LikelihoodReply, ModelCard, PromptChunk
from engine.model.heads.info import HeadInfo
from engine.requests import (
    FinishReason,
    GenerateChunk,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    ScoreRequest,
    ScoreResult,
)

V = 300
LOAD = Load(0, 1000.0)


def label_logprob(row: bytes, label: int) -> float:
    """A pure function of a row and a label, in float32."""
    return -float(np.float32(0.1 + (sum(row) * 31 + label * 17) % 97 / 10))


def _rows(task: ScoreRequest | PoolingRequest) -> list[bytes]:
    """The tokens of each row as bytes."""
    ends = zip(task.starts[:-1], task.starts[1:], strict=True)
    return [bytes(x % 251 for x in (*task.prefix, *task.ids[start:end])) for start, end in ends]


@dataclass
class ScriptedBackend:
    """Continues every prompt with `script`; log-probabilities are fixed functions of position and id."""

    script: bytes | list[int] = b" world"
    pieces: int = 1  # tokens a streamed reply
    eos: tuple[int, ...] = (257,)
    name: str = "toy"
    max_model_len: int = 4096
    fail: ApiError | None = None
    fail_after: int | None = None  # streamed replies before `fail`
    chunk_failure: Any = None
    gate: asyncio.Event | None = None  # generation waits for it
    nonfinite: frozenset[int] = frozenset()  # score rows
    tasks: list[GenerateCall] = field(default_factory=list)
    score_tasks: list[ScoreRequest] = field(default_factory=list)
    pooling_tasks: list[PoolingRequest] = field(default_factory=list)
    head: HeadInfo | None = None
    cancelled: int = 0
    sent: int = 0  # streamed replies
    status: str = "ready"
    vocab_size: int = V

    async def card(self) -> ModelCard:
        versions = {"torch": "2"}
        facts = (self.name, "toy", None, self.vocab_size, self.max_model_len, 256, self.eos, "raw_logprobs", versions)
        return ModelCard(*facts, self.head)

    def check_open(self, timeout_s: float, tenant: str) -> None: ...

    def readiness(self) -> dict[str, object]:
        return {"status": self.status, "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.5}

    async def metrics(self) -> Sequence[bytes]:
        return [b"assay_requests_total 1\n"]

    async def score(self, task: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        self.score_tasks.append(task)
        await self._wait()
        rows = _rows(task)
        count = len(rows)
        found = np.array([[label_logprob(row, label) for label in task.labels] for row in rows], np.float32)
        if not task.full:
            found -= np.log(np.exp(found).sum(1, keepdims=True))
        status = np.array([i in self.nonfinite for i in range(count)], np.uint8)
        cached = np.full(count, len(task.prefix), np.int32)
        cached[0] = 0
        return ScoreResult(found, status, cached, 0.001, 0.002, LOAD)

    async def pooling(self, task: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult:
        """The first number is that of `label_logprob` for label 0, and so on."""
        self.pooling_tasks.append(task)
        await self._wait()
        assert self.head is not None
        rows = answered = _rows(task)
        if len(task.positions):  # each answer is that of the row up to its token
            owners = np.searchsorted(task.starts, task.positions, "right") - 1
            ends = len(task.prefix) + task.positions - task.starts[owners] + 1
            answered = [rows[owner][:end] for owner, end in zip(owners, ends, strict=True)]
        values = np.array(
            [[label_logprob(row, label) for label in range(self.head.width)] for row in answered], np.float32
        )
        status = np.array([i in self.nonfinite for i in range(len(rows))], np.uint8)
        cached = np.full(len(rows), len(task.prefix), np.int32)
        cached[0] = 0
        return PoolingResult(values, status, cached, 0.001, 0.002, LOAD)

    async def likelihood(self, task: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        raise AssertionError("likelihoods are tested over a real engine: see `replica_client`")

    async def generate(self, task: GenerateCall) -> GenerateReply:
        self.tasks.append(task)
        await self._wait()
        if self.chunk_failure is not None:
            return GenerateReply((PromptChunk(0, self.chunk_failure),), 0, LOAD)
        return GenerateReply(tuple(self._chunks(task, 10**9)[0]), 0, LOAD)

    async def stream(self, task: GenerateCall) -> AsyncIterator[GenerateReply]:
        self.tasks.append(task)
        try:
            await self._wait(self.fail_after is None)
            for number, chunks in enumerate(self._chunks(task, self.pieces)):
                if self.fail is not None and number == self.fail_after:
                    raise self.fail
                self.sent += 1
                yield GenerateReply(tuple(chunks), 0, LOAD)
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def _wait(self, may_fail: bool = True) -> None:
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.fail is not None and may_fail:
            raise self.fail

    def _chunks(self, task: GenerateCall, size: int) -> list[list[PromptChunk]]:
        """By reply: the next `size` tokens of every branch."""
        params = task[0].params
        done = len(task[0].emitted[0]) if task[0].emitted else 0
        script = list(self.script)[done : params.max_tokens]
        stop = next((i for i, token in enumerate(script) if token in params.stop_token_ids), None)
        if stop is not None:
            script = script[: stop + 1]
        replies = []
        for start in range(0, len(script), size):
            tokens = script[start : start + size]
            last = start + size >= len(script)
            ended = stop is not None and last
            finish = (FinishReason.STOP if ended else FinishReason.LENGTH) if last else None
            chunk = self._chunk(task, done + start, tokens, finish, tokens[-1] if ended else None)
            count = len(task)
            replies.append([PromptChunk(q, chunk._replace(branch=b)) for q in range(count) for b in range(params.n)])
        return replies

    @staticmethod
    def _chunk(
        task: GenerateCall, at: int, tokens: list[int], finish: FinishReason | None, stop: int | None
    ) -> GenerateChunk:
        params, k = task[0].params, len(tokens)
        own = top_ids = top = chosen = ranks = None
        if params.logprobs is not None:
            own = np.array([-0.1 * (at + i + 1) for i in range(k)], np.float32)
            ranks = np.ones(k, np.int32)
            ids = [[(token + j) % 256 for j in range(params.logprobs)] for token in tokens]
            top_ids = np.array(ids, np.int32).reshape(k, params.logprobs)
            top = (own[:, None] - np.arange(params.logprobs, dtype=np.float32)[None]).astype(np.float32)
        if params.logprob_token_ids is not None:
            chosen = np.tile(-np.arange(1, 1 + len(params.logprob_token_ids), dtype=np.float32), (k, 1))
            chosen[:, -1] = -np.inf
        return GenerateChunk(
            0, np.array(tokens, np.int32), own, ranks, top_ids, top, chosen, finish, stop, 3, 0.001, 0.002
        )


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture(name="label_logprob")
def label_logprob_fixture() -> Callable[[bytes, int], float]:
    """Returns what the scripted backend answers for a row and a label."""
    return label_logprob
