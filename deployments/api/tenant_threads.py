"""Runs work beside the event loop, tenants in turn: a tenant's many large texts do not hold up another's small one."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TENANT: ContextVar[str] = ContextVar("assay.tenant", default="")
"""The name of the key whose request the running task answers."""


class _Work(Future[T]):
    """Holds a call until it has run, or nothing of it once it is cancelled."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call: Callable[[], T] | None = call

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._call = None
        return cancelled

    def run(self) -> None:
        """Runs the call and keeps what it returns or raises. Does nothing if it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        call, self._call = self._call, None
        try:
            result = call()  # type: ignore[misc]
        except BaseException as error:
            self.set_exception(error)
            del self  # the error holds this frame and its caller's, which would hold the error
        else:
            self.set_result(result)
        finally:
            del call


class TenantThreads:
    """Runs calls in a few threads. A thread that is free takes the next tenant's first call."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="assay-text")
        self._lock = threading.Lock()
        self._queues: OrderedDict[Hashable, deque[_Work[Any]]] = OrderedDict()  # the next tenant first

    def submit(self, tenant: Hashable, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues a call of a tenant. Returns its future: a call that is cancelled does not begin, nor is it kept."""
        work = _Work(partial(call, *args, **kwargs))
        with self._lock:
            self._queues.setdefault(tenant, deque()).append(work)
        self._pool.submit(self._run_next)  # the pool has as many of these as there are calls here
        return work

    def _run_next(self) -> None:
        with self._lock:
            tenant, queue = self._queues.popitem(last=False)
            work = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind all others
        work.run()
        del work
