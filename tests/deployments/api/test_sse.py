"""A stream's writer: nothing is lost between a connection that is full and one that takes all."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.api.sse import EventStream
from deployments.config.sections import StreamArgs


@pytest.mark.parametrize("turns", range(6))
async def test_what_is_made_as_the_connection_takes_the_rest_is_sent(turns: int) -> None:
    """The last event comes some turns of the loop behind the client's reading, at the end of another task's writing
    among them."""
    free = asyncio.Event()
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        await free.wait()
        sent.append(message.get("body", b""))

    async def produce(write: Callable[[bytes], None]) -> None:
        write(b"first")
        await asyncio.sleep(0)  # the task that writes while the connection is full waits now
        free.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        write(b"last")

    answer = EventStream(produce, context=Mock(), settings=StreamArgs(), observer=Mock())
    await asyncio.wait_for(answer({"type": "http"}, receive, send), 10)
    assert b"".join(sent) == b"firstlast"
