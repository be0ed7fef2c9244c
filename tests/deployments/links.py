"""Links between an ingress and replicas in process."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from deployments.link.messages import ABSENT
from deployments.link.server import LinkServer
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.observability.link_figures import LinkFigures
from deployments.protocol import (
    FAULT,
    Failure,
    GenerateReply,
    PromptChunk,
    ReplicaService,
    ReplicaTransport,
    RunningCall,
    StreamReceiver,
)
from deployments.routing.link_transport import LinkTransport
from deployments.routing.load_tracker import LoadTracker

LOOKS = 10
PATHS = ("link", pytest.param("handle", marks=pytest.mark.full))
over_the_handle = pytest.mark.parametrize("path", ["handle"])


class Links:
    """The link servers of replicas, by name, and an ingress's end of them."""

    def __init__(
        self,
        services: Mapping[str, ReplicaService],
        handle: ReplicaTransport,
        loads: LoadTracker,
        metrics: IngressMetrics,
    ) -> None:
        self._services = services
        self.loads = loads
        self.servers: dict[str, LinkServer] = {}
        self.transport = LinkTransport(handle, self._addresses, loads, metrics)

    async def _addresses(self, method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
        assert method == "link_address"
        return [server.address for server in self.servers.values()]

    async def start(self, *names: str) -> None:
        """Starts the servers of these replicas, or of all, and opens the links."""
        for name in names or self._services:
            self.servers[name] = LinkServer(name, self._services[name], LinkFigures())
            await self.servers[name].start()
        for _ in range(LOOKS):  # a loop that comes late, as on a busy machine, misses a handshake's deadline
            await self.transport.look()
            if all(self.transport.is_direct(name) for name in names or self._services):
                return
        raise TimeoutError("A link did not open.")

    def kill(self, name: str) -> None:
        """Ends a replica as far as its links see: its sockets close."""
        self.servers.pop(name).stop()

    def cut(self, name: str) -> None:
        """Cuts the connections of a replica, which listens still."""
        for link in list(self.servers[name]._links):
            link.close()

    async def stop(self) -> None:
        await self.transport.stop()
        for server in self.servers.values():
            server.stop()
        await asyncio.sleep(0)


def begun(replies: AsyncGenerator[GenerateReply | Failure, None], receiver: StreamReceiver) -> RunningCall:
    """Gives a receiver what a generator of replies yields, as `ReplicaService.begin_stream` does."""

    async def run() -> None:
        async with contextlib.aclosing(replies):
            async for reply in replies:
                whole = (PromptChunk(ABSENT, reply),) if isinstance(reply, Failure) else reply.chunks
                for item in whole:
                    receiver.add(item)
        receiver.end()

    return asyncio.create_task(run())


def replied(work: Coroutine[Any, Any, Any], deliver: Callable[[Any], None]) -> RunningCall:
    """Gives what a coroutine returns to `deliver`, as `ReplicaService.begin_rows` does."""

    async def run() -> None:
        try:
            reply = await work
        except Exception:
            reply = FAULT
        deliver(reply)

    return asyncio.create_task(run())


@contextlib.asynccontextmanager
async def linked(
    services: Mapping[str, ReplicaService], handle: ReplicaTransport, loads: LoadTracker, metrics: IngressMetrics
) -> AsyncIterator[Links]:
    """Opens a link to each replica, and closes them."""
    links = Links(services, handle, loads, metrics)
    await links.start()
    try:
        yield links
    finally:
        await links.stop()
