"""Ends the work of a request when its client leaves."""

import asyncio
from types import TracebackType

from starlette.types import Receive

from deployments.api.request_context import ClientGone


class ClientWatch:
    """Cancels the task that runs a `with` block when the client leaves, and raises ClientGone at the block's end.

    The work runs in the task of the request itself: the watch costs one task, and none for the work.
    """

    def __init__(self, receive: Receive) -> None:
        """Takes the `receive` of the request, whose body has been read."""
        self._receive = receive
        self._over = False
        self._left = False

    def __enter__(self) -> "ClientWatch":
        """Begins to watch. Raises RuntimeError outside of a task."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A client is watched for a task.")
        self._task = task
        self._watcher = asyncio.ensure_future(_client_gone(self._receive))
        self._watcher.add_done_callback(self._noticed)
        return self

    def stop(self) -> None:
        """Ends the block as if the client had left. Does nothing once it has ended."""
        if not self._over and not self._left:
            self._left = True
            self._task.cancel()

    def _noticed(self, watcher: "asyncio.Future[None]") -> None:
        if not watcher.cancelled():
            watcher.exception()  # a connection that cannot be read has no client either
            self.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watcher.cancel()
        if self._left and (not self._task.uncancel() or kind is not asyncio.CancelledError):
            raise ClientGone from None


async def _client_gone(receive: Receive) -> None:
    """Waits until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
