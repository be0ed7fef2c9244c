"""Callers: who waits for the step thread, so that they can be answered without it."""

import contextlib

from engine.jobs import EngineError, ErrorCode
from engine.requests import Work


class Callers:
    """Entered and left on callers' event loops; `answer` may be called from any thread."""

    def __init__(self) -> None:
        self._works: dict[int, Work] = {}  # by arrival

    def __len__(self) -> int:
        return len(self._works)

    def enter(self, work: Work) -> None:
        self._works[work.arrival] = work

    def leave(self, work: Work) -> None:
        del self._works[work.arrival]

    def answer(self) -> int:
        """Tells everyone that the engine is lost; how many. A job whose step thread turns again after all ends as if
        its caller had left."""
        works = list(self._works.values())
        for work in works:
            with contextlib.suppress(RuntimeError):  # a loop that is closed: its readers are gone with it
                work.receiver.loop.call_soon_threadsafe(work.receiver.put, lost(work))
        return len(works)


def lost(work: Work) -> EngineError:
    """What a job hears of an engine that will not go on: LOST if steps were made of it, for it may be the reason."""
    if work.started is None:
        return EngineError(ErrorCode.NOT_READY, "The engine has stopped.")
    return EngineError(ErrorCode.LOST, "The engine was lost while it worked on this request.")
