"""Calls one method on every replica of a deployment, each with its own time limit."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ray.serve.exceptions import DeploymentUnavailableError

log = logging.getLogger("ray.serve")
OnAnswer = Callable[[object], None]


class Broadcast(Protocol):
    """Calls a method on all replicas and returns one entry each: an exception where no answer came.

    `on_answer` is called with every entry when it comes, so that a slow replica delays no other's answer.
    """

    async def __call__(
        self, method: str, timeout_s: float, *args: object, on_answer: OnAnswer | None = None
    ) -> Sequence[object]: ...


def broadcast_of(handle: Any) -> Broadcast:
    """Returns the broadcast of a Serve handle. Serve's own collection drops all answers when one replica is late."""

    async def call(method: str, timeout_s: float, *args: object, on_answer: OnAnswer | None = None) -> Sequence[object]:
        try:
            async with asyncio.timeout(timeout_s):
                results = await handle.broadcast(method, *args)._fetch_replica_results_async()
        except DeploymentUnavailableError:  # none has started yet, or none is left: /readyz says so
            return []
        except TimeoutError as error:  # a replica exists that the call did not reach
            log.warning("%s of %s: not sent within %.1f s.", method, handle.deployment_name, timeout_s)
            return [error]
        return await asyncio.gather(*(_answer(result, timeout_s, on_answer) for result in results))

    return call


async def _answer(result: Any, timeout_s: float, on_answer: OnAnswer | None) -> object:
    found: object
    try:
        async with asyncio.timeout(timeout_s):
            found = await result.get_async()
    except TimeoutError as error:
        result.cancel()
        found = error
    except asyncio.CancelledError as error:
        own = asyncio.current_task()
        if own is not None and own.cancelling():
            raise
        found = error  # it was the call that was cancelled, by a replica that ends
    except Exception as error:  # what one replica raises is its own entry
        found = error
    if on_answer is not None:
        on_answer(found)
    return found
