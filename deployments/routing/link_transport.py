"""Carries calls over links, one to each replica, and over Serve's handle where there is no link.

Serve stays the control plane: it says which replicas run, and each replica says over Serve where it listens for links.
A link that is lost is opened again, which also shows why it was lost: a replica that answers was cut off, and one whose
socket is closed has died. Meanwhile, and for whatever else a link does not carry, calls take the handle.
"""

import asyncio
import contextlib
import logging

from deployments.broadcast import Broadcast
from deployments.link.client import Link, Loss
from deployments.link.frames import FrameError
from deployments.link.handshake import LinkAddress
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.periodic import PeriodicTask
from deployments.protocol import AnyCall, GenerateCall, PendingReply, ReplicaTransport, ReplyStream, Route, RowsCall
from deployments.routing.load_tracker import LoadTracker

log = logging.getLogger("ray.serve")
PERIOD_S = 2.0  # between two looks for replicas without a link
FAST_PERIOD_S = 0.1  # while one has just joined, which may not answer yet
FAST_LOOKS = 20
ADDRESS_S = 2.0
PROBE_S = 1.0  # until a replica whose link was lost counts as unreachable
PROBE_WAIT_S = 0.01


class LinkTransport(PeriodicTask):
    """Implements `ReplicaTransport`. It belongs to the running event loop."""

    def __init__(
        self, handle: ReplicaTransport, replicas: Broadcast, loads: LoadTracker, metrics: IngressMetrics
    ) -> None:
        super().__init__()
        self._handle = handle
        self._replicas = replicas
        self._loads = loads
        self._metrics = metrics
        self._figures = metrics.links
        self._links: dict[str, Link] = {}  # by replica; open ones
        self._unreachable: set[str] = set()  # instances of servers that could not be reached
        self._probes: set[asyncio.Task[None]] = set()
        self._looks = FAST_LOOKS  # that follow each other fast
        self._loop = asyncio.get_running_loop()
        loads.listen(self._replicas_changed)

    @property
    def period_s(self) -> float:
        fast = self._looks > 0 and not self._links.keys() >= set(self._loads.replicas)
        return FAST_PERIOD_S if fast else PERIOD_S

    async def stop(self) -> None:
        """Closes all links."""
        await super().stop()
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        links, self._links = self._links, {}
        for link in links.values():
            link.lost = lambda lost: lost.fail("unreachable")
            link.close()

    # Calls.

    def call(self, call: AnyCall, route: Route, epoch: int = 0) -> PendingReply:
        link = self._link(route)
        if link is not None:
            with contextlib.suppress(FrameError):  # it does not fit a frame
                return link.call(call, epoch)
        self._metrics.sent_by_handle()
        return self._handle.call(call, route, epoch)

    def batch(self, requests: tuple[RowsCall, ...], route: Route) -> PendingReply:
        self._metrics.sent_by_handle()
        return self._handle.batch(requests, route)

    def stream(self, call: GenerateCall, route: Route, epoch: int) -> ReplyStream:
        link = self._link(route)
        if link is not None:
            with contextlib.suppress(FrameError):
                return link.stream(call, epoch)
        self._metrics.sent_by_handle()
        return self._handle.stream(call, route, epoch)

    def is_direct(self, replica: str) -> bool:
        return replica in self._links

    async def card(self) -> object:
        return await self._handle.card()

    def _link(self, route: Route) -> Link | None:
        """Returns the open link to the best replica of the route, if it has room."""
        link = self._links.get(route.replicas[0]) if route.replicas else None
        return link if link is not None and link.has_room else None

    # Links.

    def _replicas_changed(self, joined: frozenset[str], left: frozenset[str]) -> None:
        """Runs in the router's thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._look_soon)

    def _look_soon(self) -> None:
        self._looks = FAST_LOOKS
        self.wake()

    async def look(self) -> None:
        """Opens a link to each replica that has none, if there is one."""
        self._looks -= 1
        if self._links.keys() >= set(self._loads.replicas):
            return
        answers = await self._replicas("link_address", ADDRESS_S)
        addresses = [answer for answer in answers if isinstance(answer, LinkAddress)]
        self._unreachable &= {address.instance for address in addresses}
        missing = [address for address in addresses if address.replica not in self._links]
        await asyncio.gather(*map(self._open, missing))

    async def _open(self, address: LinkAddress) -> None:
        try:
            link = await Link.connect(address, self._figures)
        except (OSError, TimeoutError) as error:
            if address.instance not in self._unreachable:  # tried again, and logged once
                self._unreachable.add(address.instance)
                log.warning("Replica %s has no link, its calls take Serve's handle: %r", address.replica, error)
            return
        self._adopt(link)

    def _adopt(self, link: Link) -> None:
        name = link.address.replica
        if name in self._links or not link.is_open:
            link.close()
            return
        self._links[name] = link
        self._figures.links = len(self._links)
        link.lost = self._lost

    def _lost(self, link: Link) -> None:
        """Begins to find out why a link was lost. Its calls wait for the answer."""
        if self._links.get(link.address.replica) is link:
            del self._links[link.address.replica]
            self._figures.links = len(self._links)
        task = self._loop.create_task(self._probe(link))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, link: Link) -> None:
        cause: Loss = "unreachable"
        try:
            cause = await self._why(link.address)
        finally:
            self._figures.losses[cause] += 1
            log.warning("The link to replica %s was lost: %s.", link.address.replica, cause)
            if cause == "died":
                self._loads.died(link.address.replica)
            link.fail(cause)
            self._look_soon()

    async def _why(self, address: LinkAddress) -> Loss:
        """Connects again. A process that ends closes its sockets one after the other, so a reset is no answer yet."""
        end = self._loop.time() + PROBE_S
        while self._loop.time() < end:
            try:
                link = await Link.connect(address, self._figures, end - self._loop.time())
            except ConnectionRefusedError:
                return "died"
            except ConnectionResetError:
                await asyncio.sleep(PROBE_WAIT_S)
            except (OSError, TimeoutError):
                return "unreachable"
            else:
                self._adopt(link)
                return "cut"
        return "unreachable"
