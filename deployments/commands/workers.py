"""Workers: a call for each of many jobs in threads, results in order, never more than a window in memory."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")
AHEAD = 4  # jobs a thread: one slow answer does not idle the others


def in_order(call: Callable[[J], R], jobs: Iterable[J], threads: int) -> Iterator[R]:
    """Results in the order of their jobs; the first exception is raised in its place. Closing it, or an exception,
    leaves what is running to end by itself: the threads do not keep the process alive."""
    todo: queue.SimpleQueue[tuple[Future[R], J] | None] = queue.SimpleQueue()
    for number in range(threads):
        threading.Thread(target=_work, args=(call, todo), name=f"ask-{number}", daemon=True).start()
    waiting: deque[Future[R]] = deque()
    try:
        for job in jobs:
            waiting.append(Future())
            todo.put((waiting[-1], job))
            while waiting and (len(waiting) >= AHEAD * threads or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            todo.put(None)


def _work(call: Callable[[J], R], todo: "queue.SimpleQueue[tuple[Future[R], J] | None]") -> None:
    while (entry := todo.get()) is not None:
        future, job = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(job))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)
