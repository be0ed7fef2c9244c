"""A stream's writer: nothing is lost between a connection that is full and one that takes all."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from deployments.api.request_context import RequestContext
from deployments.api.sse import KEEP_ALIVE, EventStream, _Writer
from deployments.config.sections import StreamArgs
from deployments.errors import ApiError


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


async def test_a_failure_that_is_written_slowly_gets_no_second_status_line() -> None:
    """The connection is full as the error comes, and the time until the first status line passes meanwhile."""
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0.05)

    async def produce(write: Callable[[bytes], None]) -> None:
        raise ApiError("overloaded", "Planted.")

    settings = StreamArgs(header_after_s=0.01)
    answer = EventStream(produce, context=RequestContext(request_id="r"), settings=settings, observer=Mock())
    await answer({"type": "http"}, receive, send)
    assert [message.get("status") for message in sent] == [429, None]


async def test_a_comment_that_is_due_while_the_connection_is_full_waits_a_whole_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer does not run again in each turn of the loop."""
    ticks: list[float] = []
    free = asyncio.Event()
    sent: list[bytes] = []
    tick = _Writer._tick

    def counted(writer: _Writer) -> None:
        ticks.append(asyncio.get_running_loop().time())
        tick(writer)

    async def send(message: Any) -> None:
        await free.wait()
        sent.append(message.get("body", b""))

    monkeypatch.setattr(_Writer, "_tick", counted)
    writer = _Writer(send, StreamArgs(keep_alive_s=60.0), Mock())
    writer.put(b"first")
    writer._wrote -= 3600.0
    writer._tick()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(ticks) == 1 and writer._timer.when() == pytest.approx(ticks[0] + 60.0, abs=1.0)
    free.set()
    while writer._task is not None:
        await asyncio.sleep(0)
    writer._tick()
    assert sent == [b"", b"first", KEEP_ALIVE]
    writer.close()
