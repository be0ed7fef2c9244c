"""What a link and each of its open streams hold in memory, at both ends together."""

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from deployments.link.client import Link
from deployments.link.server import LinkServer
from deployments.observability.link_figures import LinkFigures
from tests.deployments.link.test_link import Service, generation, until

STREAMS, LINKS = 2000, 40
STREAM_BYTES, LINK_BYTES = 16 << 10, 64 << 10  # at most; docs/internals/routing.md says so
WAVES, LEFT_BYTES = 5, 64 << 10  # what the last wave may leave


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def opened(server: LinkServer) -> Link:
    assert server.address is not None
    link = await Link.connect(server.address, LinkFigures())
    link.lost = lambda lost: lost.fail("cut")
    return link


def traced(measure: Callable[[], Coroutine[None, None, None]]) -> None:
    tracemalloc.start()
    asyncio.run(measure())


def alone(measure: Callable[[], Coroutine[None, None, None]]) -> None:
    """Measures in a fresh process, where no other test's garbage comes or goes."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        processes.submit(traced, measure).result()


@pytest.mark.full
def test_two_thousand_open_streams_hold_so_much_each() -> None:
    alone(two_thousand_open_streams)


def test_a_link_without_calls_holds_so_much() -> None:
    alone(links_without_calls)


async def two_thousand_open_streams() -> None:
    service = Service()
    server = LinkServer("r0", service, LinkFigures())
    await server.start()
    link = await opened(server)
    warm = link.stream(generation(), 0)
    while (await anext_or_none(warm)) is not None:
        pass
    left = []
    for _ in range(WAVES):  # the first ones fill what the interpreter and the loop keep for the next
        before = held()
        service.gate.clear()
        service.began.clear()
        streams = [link.stream(generation(), 0) for _ in range(STREAMS)]
        readers = [asyncio.ensure_future(anext_or_none(stream)) for stream in streams]
        await until(lambda: len(service.began) == STREAMS)
        each = (held() - before) / STREAMS
        service.gate.set()
        assert all(reply is not None for reply in await asyncio.gather(*readers))
        for stream in streams:
            while await anext_or_none(stream) is not None:
                pass
        await until(lambda: not any(one.calls for one in server._links))
        del streams, readers, stream
        left.append(held())
    print(f"\n{each:,.0f} bytes a stream at both ends of a link, with {STREAMS:,} open")
    assert each < STREAM_BYTES
    assert left[-1] - left[-2] < LEFT_BYTES
    link.close()
    server.stop()
    await asyncio.sleep(0)


async def links_without_calls() -> None:
    server = LinkServer("r0", Service(), LinkFigures())
    await server.start()
    warm = await opened(server)
    before = held()
    links = [await opened(server) for _ in range(LINKS)]
    each = (held() - before) / LINKS
    print(f"\n{each:,.0f} bytes a link at both ends, without calls")
    assert each < LINK_BYTES
    for link in (*links, warm):
        link.close()
    await until(lambda: not server._links)
    await until(lambda: not any(link.is_open for link in (*links, warm)))
    server.stop()
    await asyncio.sleep(0)


async def anext_or_none(stream: Any) -> object:
    try:
        found: object = await stream.__anext__()
    except StopAsyncIteration:
        return None
    return found
