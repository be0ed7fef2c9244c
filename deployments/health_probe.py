"""Canary: a fixed scoring row and a fixed 2-token generation through queue, scheduler, forward, sampler and reply."""

import asyncio
import time
from typing import Literal, NamedTuple

import numpy as np

from engine.engine import Engine
from engine.requests import EngineError, ErrorCode, Float32s, GenerateRequest, RowStatus, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams

PRIORITY = -(2**31)  # before everything that clients ask for
Failure = Literal["timeout", "mismatch", "error"]


class CanaryReply(NamedTuple):
    """What one replica answers."""

    replica: str
    failure: Failure | None
    seconds: float


class Canary:
    """Remembers the answer at start-up and compares."""

    def __init__(self, engine: Engine, tolerance_nats: float) -> None:
        self._engine = engine
        self._tolerance = tolerance_nats
        self._first: Float32s | None = None
        ids = np.arange(1, 9, dtype=np.int32) % engine.model.vocab_size
        self._ids, self._labels = ids[:5], np.unique(ids[5:])

    async def run(self, timeout_s: float) -> tuple[Failure | None, float]:
        """Why it failed, if it did, and how long it took. Never raises but for cancellation."""
        started = time.perf_counter()
        steps = sum(self._engine.stats().steps.values())
        failure: Failure | None
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

    async def _compare(self, timeout_s: float) -> Failure | None:
        score = ScoreRequest(
            request_id="canary",
            prefix=np.empty(0, np.int32),
            ids=self._ids,
            starts=np.array([0, len(self._ids)], np.int32),
            labels=self._labels,
            salt="canary",
            tenant="canary",
            priority=PRIORITY,
            remaining_s=timeout_s,
            already_admitted=True,  # a full queue is no fault either
        )
        found = await self._engine.score(score)
        params = SamplingParams(temperature=0, max_tokens=2)
        generate = GenerateRequest(
            request_id="canary",
            prompt=self._ids,
            params=params,
            seed=0,
            salt="canary",
            tenant="canary",
            priority=PRIORITY,
            remaining_s=timeout_s,
            already_admitted=True,
        )
        chunks = await self._engine.complete(generate)
        if len(chunks[0].tokens) != 2 or found.status[0] != RowStatus.OK:
            return "error"
        if self._first is None:
            self._first = found.label_logprobs.copy()
        same = np.abs(found.label_logprobs - self._first).max() <= self._tolerance  # False for NaN
        return None if same else "mismatch"
