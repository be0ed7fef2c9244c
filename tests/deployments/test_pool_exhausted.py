"""R12: far more is admitted than the pool holds; all of it finishes, with the bits of a run that has room."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deployments.config.app_args import AppArgs
from deployments.protocol import GenerateCall
from deployments.replica.replica import ReplicaServer
from engine.metrics import EngineStats
from engine.requests import GenerateRequest, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model

SMALL, LARGE = 160, 8192
ROWS = 16


def generation(number: int) -> GenerateCall:
    prompt = np.arange(number, number + 10 + number % 7, dtype=np.int32)
    params = SamplingParams(max_tokens=40, temperature=0.9, logprobs=2, repetition_penalty=1.1)
    salt = str(number % 3)
    return (GenerateRequest(request_id=f"g{number}", prompt=prompt, params=params, seed=number, cache_salt=salt),)


def scoring(number: int) -> ScoreRequest:
    ids = (np.arange(90, dtype=np.int32) * (number + 3)) % 250
    starts = np.arange(0, 91, 9, dtype=np.int32)
    prefix = np.arange(30, dtype=np.int32)
    return ScoreRequest(request_id=f"s{number}", prefix=prefix, ids=ids, starts=starts, labels=prefix[:3])


async def answers(
    slots: int, args: dict[str, Any], plant: Callable[[Any], None] | None = None
) -> tuple[list[bytes], EngineStats]:
    """The bytes of every answer in order of request, and the engine's figures after them."""
    server = ReplicaServer(AppArgs.model_validate(args | {"engine": {"max_running": 16, "admission_tokens": 1}}), "r1")
    await server.start(toy_model.ToyModel(num_slots=slots, max_model_len=128))
    if plant is not None:
        plant(server.engine)
    try:
        calls = [server.generate(generation(number)) for number in range(ROWS)]
        found = await asyncio.gather(*calls, *(server.score(scoring(number)) for number in range(ROWS // 4)))
        stats = server.engine.stats()
    finally:
        server.stop()
    server.engine.check()
    return [_bytes(reply) for reply in found], stats


def _bytes(reply: Any) -> bytes:
    if hasattr(reply, "label_logprobs"):
        return bytes(reply.label_logprobs.tobytes())
    chunk = reply.chunks[0].chunk
    return bytes(chunk.tokens.tobytes() + chunk.logprobs.tobytes() + chunk.top_logprobs.tobytes())


@pytest.mark.risk("R12", figure="0 mismatches of 20 answers, 19 preemptions, 160 slots")
async def test_all_finish_with_the_answers_of_a_large_pool(toy_args: dict[str, Any]) -> None:
    expected, easy = await answers(LARGE, toy_args)
    found, hard = await answers(SMALL, toy_args)
    mismatches = sum(one != other for one, other in zip(found, expected, strict=True))
    print(f"R12: {mismatches} mismatches of {len(found)} answers, {hard.preemptions} preemptions, {SMALL} slots")
    assert easy.preemptions == 0 and hard.preemptions > 0 and hard.evictions > 0
    assert mismatches == 0
    assert (hard.kv_slots_used, hard.queued_tokens, hard.live_rows, hard.tree_locks) == (0, 0, 0, 0)


@pytest.mark.risk("R12", planted=True)
async def test_rows_that_come_back_without_their_history_would_be_seen(toy_args: dict[str, Any]) -> None:
    expected, _ = await answers(LARGE, toy_args)

    def forgetful(engine: Any) -> None:
        admit = engine.sampler.admit
        engine.sampler.admit = lambda *given, **named: admit(*given, **named | {"output_ids": ()})

    found, _ = await answers(SMALL, toy_args, forgetful)
    assert found != expected


@pytest.mark.risk("R12")
async def test_what_could_never_fit_is_refused_immediately(toy_args: dict[str, Any]) -> None:
    server = ReplicaServer(AppArgs.model_validate(toy_args), "r1")
    await server.start(toy_model.ToyModel(num_slots=32, max_model_len=128))
    try:
        reply: Any = await server.score(scoring(1))
    finally:
        server.stop()
    assert reply.code in ("context_length_exceeded", "request_too_large") and reply.message
