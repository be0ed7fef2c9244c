"""Streams whose replica is lost go on at one with a full queue; streams that no replica took do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deployments.errors import ApiError
from deployments.protocol import Failure, GenerateCall, GenerateReply, with_fields
from engine.requests import ErrorCode

FULL = {"max_queued_tokens": 300, "kv_slots": 2048}
Make = Callable[..., GenerateCall]


async def rest(first: GenerateReply, replies: AsyncIterator[GenerateReply]) -> AsyncIterator[GenerateReply]:
    yield first
    async for reply in replies:
        yield reply


@pytest.mark.full(keep=1)
@pytest.mark.risk("R7")
@pytest.mark.parametrize("how", ["died", "unavailable", "handoff"])
async def test_a_stream_goes_on_where_the_queue_is_full(
    fleet_of: Callable[..., Awaitable[Any]],
    generation: Make,
    told_of: Any,
    alone: Any,
    cut: Any,
    held: Any,
    how: str,
) -> None:
    fleet = await fleet_of(cut(how, 1), engine=FULL)
    task = generation(max_tokens=60)
    whole = await alone(fleet, task)
    replies = fleet.dispatch.stream(task)
    first = await anext(replies)
    (where, _) = fleet.sent[0]
    other = fleet.servers["r1" if where == "r0" else "r0"]
    async with held(other, 300):
        second = asyncio.create_task(told_of(rest(first, replies)))
        async with asyncio.timeout(10):
            while other.engine.queue().queued_tokens == 300:
                await asyncio.sleep(0.001)
        refused = await other.generate(generation())
        assert isinstance(refused, Failure) and refused.code is ErrorCode.OVERLOADED
    assert await second == whole
    assert fleet.count("assay_resumes_total", cause=how) == 1
    assert [sent[0].already_admitted for _, sent in fleet.sent] == [False, True]


@pytest.mark.full(keep=1)
@pytest.mark.risk("R7")
@pytest.mark.parametrize("code", [ErrorCode.NOT_READY, ErrorCode.DRAINING])
async def test_a_stream_waits_for_a_replica_that_takes_it(
    fleet_of: Callable[..., Awaitable[Any]],
    generation: Make,
    told_of: Any,
    alone: Any,
    cut: Any,
    monkeypatch: pytest.MonkeyPatch,
    code: ErrorCode,
) -> None:
    """Where all replicas hang, they answer that they are not ready until Serve has replaced them."""
    fleet = await fleet_of(cut("died", 1), retry={"max_backoff_s": 0, "max_attempts": 2})
    task = generation(max_tokens=60)
    whole = await alone(fleet, task)
    refusals = iter(range(8))

    def later(stream: Any) -> Any:
        async def replies(call: GenerateCall, epoch: int = 0) -> AsyncIterator[GenerateReply | Failure]:
            if call[0].already_admitted and next(refusals, None) is not None:
                yield Failure(code, "words", None)
                return
            async for reply in stream(call, epoch):
                yield reply

        return replies

    for server in fleet.servers.values():
        monkeypatch.setattr(server, "stream", later(server.stream))
    assert await told_of(fleet.dispatch.stream(task)) == whole
    assert len(fleet.sent) == 10 and fleet.count("assay_resumes_total", cause="died") == 1


@pytest.mark.parametrize("planted", [False, True])
async def test_a_stream_that_no_replica_took_is_let_in_nowhere(
    fleet_of: Callable[..., Awaitable[Any]],
    generation: Make,
    told_of: Any,
    held: Any,
    planted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal is no acceptance. Planted: a replica that takes every second attempt for work that was accepted."""
    fleet = await fleet_of(engine=FULL)
    servers = list(fleet.servers.values())
    attempts = []
    if planted:
        for server in servers:
            stream = server.stream

            def taken(call: GenerateCall, epoch: int = 0, stream: Any = stream) -> Any:
                attempts.append(call)
                return stream(with_fields(call, already_admitted=len(attempts) > 1), epoch)

            monkeypatch.setattr(server, "stream", taken)

    def most() -> int:
        return max(int(server.engine.queue().queued_tokens) for server in servers)

    async with held(servers[0], 300), held(servers[1], 300):
        answer = asyncio.create_task(told_of(fleet.dispatch.stream(generation())))
        async with asyncio.timeout(10):
            while not answer.done() and most() == 300:
                await asyncio.sleep(0.001)
        assert (most() > 300) == planted
    if planted:
        await answer
        return
    error = answer.exception()
    assert isinstance(error, ApiError)
    assert (error.code, len(fleet.sent)) == ("overloaded", 2)


async def test_what_was_accepted_waits_where_ray_is_full(
    fleet_of: Callable[..., Awaitable[Any]], generation: Make, told_of: Any, alone: Any, cut: Any
) -> None:
    """More often than there are attempts, on no budget; what is new is refused."""
    full = [cut("full", 0)] * 5
    retry = {"max_backoff_s": 0, "budget_fraction": 0, "budget_min_retries": 0}
    fleet = await fleet_of(cut("died", 1), *full, retry=retry)
    task = generation()
    assert await told_of(fleet.dispatch.stream(task)) == await alone(fleet, task)
    assert len(fleet.sent) == 7
    assert fleet.count("assay_resumes_total", cause="died") == 1
    assert fleet.count("assay_retries_total", cause="busy") == 0
    fleet = await fleet_of(*full, retry={"max_backoff_s": 0})
    with pytest.raises(ApiError) as raised:
        await told_of(fleet.dispatch.stream(task))
    assert (raised.value.code, len(fleet.sent)) == ("overloaded", 2)
