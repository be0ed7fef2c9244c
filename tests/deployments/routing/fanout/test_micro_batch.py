"""One micro-batch by itself, whose calls the test answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from deployments.protocol import Failure, Route
from deployments.routing.micro_batcher import MicroBatch
from engine.requests import ErrorCode, ScoreRequest


def request(number: int) -> ScoreRequest:
    ids, starts = np.array([1, 2], np.int32), np.array([0, 2], np.int32)
    return ScoreRequest(request_id=f"s{number}", prefix=ids[:0], ids=ids, starts=starts, labels=ids)


async def test_a_second_call_ends_once_all_that_wait_for_it_have_left() -> None:
    """The first call had room for one of the two, and refused the other."""
    calls: list[asyncio.Future[object]] = []

    def send(items: Sequence[Any]) -> Any:
        calls.append(asyncio.get_running_loop().create_future())
        return calls[-1]

    batch = MicroBatch(send)
    refused, second = (batch.add(request(number), Route(("a",), number)) for number in range(2))
    run = batch.start()
    assert run is not None
    await asyncio.sleep(0)
    calls[0].set_result((Failure(ErrorCode.OVERLOADED, "full", None), None))
    assert isinstance(await refused, Failure)
    while len(calls) < 2:
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([run])
    assert calls[1].cancelled() and second.reply.cancelled()
