"""Broadcast: one method called on every replica of a deployment, each answer bounded by itself."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ray.serve.exceptions import DeploymentUnavailableError

log = logging.getLogger("ray.serve")
Heard = Callable[[object], None]


class Broadcast(Protocol):
    """Calls a method on all replicas: one entry each, an exception in the place of an answer that did not come.
    `heard` is told every entry as it comes, so that nobody waits for the slowest."""

    async def __call__(
        self, method: str, timeout_s: float, *args: object, heard: Heard | None = None
    ) -> Sequence[object]: ...


class Collect(Protocol):
    """A broadcast of which only the whole counts."""

    async def __call__(self, method: str, timeout_s: float) -> Sequence[object]: ...


def broadcast_of(handle: Any) -> Broadcast:
    """Over a Serve handle. Serve's own collection gives up all answers when one replica is late."""

    async def call(method: str, timeout_s: float, *args: object, heard: Heard | None = None) -> Sequence[object]:
        try:
            async with asyncio.timeout(timeout_s):
                results = await handle.broadcast(method, *args)._fetch_replica_results_async()
        except DeploymentUnavailableError:  # none has started yet, or none is left: /readyz says so
            return []
        except TimeoutError as error:  # somebody is there who was not asked
            log.warning("%s of %s: not sent within %.1f s.", method, handle.deployment_name, timeout_s)
            return [error]
        return await asyncio.gather(*(_answer(result, timeout_s, heard) for result in results))

    return call


async def _answer(result: Any, timeout_s: float, heard: Heard | None) -> object:
    found: object
    try:
        async with asyncio.timeout(timeout_s):
            found = await result.get_async()
    except TimeoutError as error:
        result.cancel()
        found = error
    except Exception as error:  # whatever one replica raises is its own entry
        found = error
    if heard is not None:
        heard(found)
    return found
