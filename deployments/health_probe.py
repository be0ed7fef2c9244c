"""Probes a replica with a canary, through the whole engine: a fixed scoring row and a fixed 2-token generation, or a
fixed row for a pooling head."""

import asyncio
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from engine.requests import (
    EngineError,
    ErrorCode,
    Float32s,
    GenerateRequest,
    PoolingRequest,
    PoolingTask,
    RowStatus,
    ScoreRequest,
)
from gpu_sampler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

PRIORITY = -(2**31)  # before all requests of clients
CanaryFailure = Literal["timeout", "mismatch", "error"]


class CanaryReply(NamedTuple):
    """Holds the result of one replica's canary."""

    replica: str
    failure: CanaryFailure | None
    seconds: float


class Canary:
    """Compares the canary's answer with the one at start-up."""

    def __init__(self, engine: "Engine", tolerance_nats: float) -> None:
        self._engine = engine
        self._tolerance = tolerance_nats
        self._first: Float32s | None = None
        self._running: asyncio.Task[tuple[CanaryFailure | None, float]] | None = None
        self._passed: float | None = None  # seconds that the latest canary took, if it passed
        self._passed_at = 0.0
        ids = np.arange(1, 9, dtype=np.int32) % engine.model.vocab_size
        self._ids, self._labels = ids[:5], np.unique(ids[5:])

    async def run(self, timeout_s: float) -> tuple[CanaryFailure | None, float]:
        """Returns why the canary failed, or None, and the seconds it took. Raises nothing but cancellation."""
        started = time.perf_counter()
        steps = sum(self._engine.stats().steps.values())
        failure: CanaryFailure | None
        try:
            async with asyncio.timeout(timeout_s):
                failure = await self._compare(timeout_s)
        except TimeoutError:
            failure = "timeout"
        except EngineError as error:
            failure = "timeout" if error.code is ErrorCode.DEADLINE_EXCEEDED else "error"
        # A late answer is load and not a fault, as long as steps are made.
        if failure == "timeout" and sum(self._engine.stats().steps.values()) > steps:
            failure = None
        return failure, time.perf_counter() - started

    async def shared(self, timeout_s: float, max_age_s: float) -> tuple[CanaryFailure | None, float]:
        """Returns the result of a canary that all callers share.

        Those that ask while one runs wait for its result, and a pass is given again for `max_age_s`. So the canaries of
        a replica do not grow with the number of ingresses that send them.
        """
        clock = time.perf_counter
        if self._running is None and (self._passed is None or clock() - self._passed_at > max_age_s):
            self._running = asyncio.create_task(self.run(timeout_s))
            self._running.add_done_callback(self._ended)
        if self._running is not None:
            return await asyncio.shield(self._running)
        return None, self._passed or 0.0

    def _ended(self, task: "asyncio.Task[tuple[CanaryFailure | None, float]]") -> None:
        self._running = self._passed = None
        if not task.cancelled() and task.exception() is None and task.result()[0] is None:
            self._passed, self._passed_at = task.result()[1], time.perf_counter()

    async def _compare(self, timeout_s: float) -> CanaryFailure | None:
        common: dict[str, Any] = {
            "request_id": "canary",
            "cache_salt": "canary",
            "tenant": "canary",
            "priority": PRIORITY,
            "timeout_s": timeout_s,
            "already_admitted": True,  # a full queue is not a fault
        }
        rows: dict[str, Any] = {
            "prefix": self._ids[:0],
            "ids": self._ids,
            "starts": np.array([0, len(self._ids)], np.int32),
            **common,
        }
        if (head := self._engine.model.pooling_head) is not None:
            wanted = np.arange(len(self._ids) if head.task is PoolingTask.TOKEN_CLASSIFY else 0, dtype=np.int32)
            pooled = await self._engine.pooling(PoolingRequest(task=head.task, positions=wanted, **rows))
            return self._verdict(pooled.values) if pooled.status[0] == RowStatus.OK else "error"
        found = await self._engine.score(ScoreRequest(labels=self._labels, **rows))
        params = SamplingParams(temperature=0, max_tokens=2)
        generate = GenerateRequest(prompt=self._ids, params=params, seed=0, **common)
        chunks = await self._engine.complete(generate)
        if len(chunks[0].tokens) != 2 or found.status[0] != RowStatus.OK:
            return "error"
        return self._verdict(found.label_logprobs)

    def _verdict(self, values: Float32s) -> CanaryFailure | None:
        """Compares the answer with the first one."""
        if self._first is None:
            self._first = values.copy()
        same = np.abs(values - self._first).max() <= self._tolerance  # False for NaN
        return None if same else "mismatch"
