"""Quarantine: requests that ended two replicas, and what keeps others from being their neighbours.

The death of a replica makes every task that it held a suspect: each is run again elsewhere, isolated, without
neighbours in
its steps. A replica takes one isolated task at a time, so that a second death convicts the one that did it.
"""

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from deployments.broadcast import Broadcast
from deployments.errors import ApiError
from deployments.protocol import AnyTask, GenerateTask, LikelihoodTask, PromptChunk, ScoreTask
from deployments.routing.load_tracker import Loads
from engine.requests import EngineError, ErrorCode, GenerateChunk, Int32s

log = logging.getLogger("ray.serve")
MOST = 4096  # entries; beyond them the one that ends first goes
Entries = tuple[tuple[bytes, float], ...]  # fingerprints and the seconds that are left: clocks differ
Tell = Callable[[Entries], Awaitable[None]]
PERIOD_S = 30.0
TELL_S = 5.0
MESSAGE = "This request ended two replicas of the server. It is refused for a while: send another."


def fingerprint(task: AnyTask) -> bytes:
    """BLAKE2b-128 of token ids and parameters. Not of the seed, nor of tokens that came before: a client that asks
    again draws another seed."""
    digest = hashlib.blake2b(digest_size=16, person=type(task).__name__.encode()[:16])
    arrays: tuple[Int32s, ...]
    match task:
        case GenerateTask():
            arrays, rest = (task.prompts, task.starts), repr((task.params, task.prompt_top, task.prompt_only))
        case ScoreTask():
            arrays, rest = (task.prefix, task.ids, task.starts, task.labels), repr(task.full)
        case LikelihoodTask():
            arrays, rest = (task.prefix, task.ids, task.starts, task.shared, task.wanted), ""
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    digest.update(rest.encode("utf-8", "surrogatepass"))
    return digest.digest()


class Quarantine:
    """The fingerprints that one process refuses, each until its time is over. `changed` is called for each new one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, changed: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self.changed = changed

    def add(self, entries: Entries) -> None:
        now = self._clock()
        before = len(self._until)
        for mark, seconds in entries:
            self._until[mark] = max(self._until.get(mark, 0.0), now + seconds)
        for mark in sorted(self._until, key=self._until.__getitem__)[: max(0, len(self._until) - MOST)]:
            del self._until[mark]
        if len(self._until) > before:
            self.changed()

    def entries(self) -> Entries:
        now = self._clock()
        self._until = {mark: until for mark, until in self._until.items() if until > now}
        return tuple((mark, until - now) for mark, until in self._until.items())

    def holds(self, task: AnyTask) -> bool:
        """Costs nothing while nobody is convicted."""
        return bool(self._until) and self._until.get(fingerprint(task), 0.0) > self._clock()

    def check(self, task: AnyTask) -> None:
        if self.holds(task):
            raise quarantined()


SOLO = "isolated"  # the field of an OVERLOADED that asks to wait for the one place


class Bulletin:
    """Tells all replicas what one ingress has convicted: at once, again whenever replicas join, and every PERIOD_S."""

    def __init__(self, quarantine: Quarantine, tell: Tell, loads: Loads, told: Callable[[int], None]) -> None:
        """`tell` calls every replica; `told` is given the number of entries. Belongs to the running event loop."""
        self._quarantine = quarantine
        self._tell = tell
        self._told = told
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def joined(names: frozenset[str], left: frozenset[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._news.set)

        loads.listen(joined)
        quarantine.changed = self._news.set
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()
            self._news.clear()
            entries = self._quarantine.entries()
            self._told(len(entries))
            if entries:
                await self._told_all(entries)

    async def _told_all(self, entries: Entries) -> None:
        try:
            await self._tell(entries)
        except Exception:  # the loop must outlive whatever one round meets; it is told again
            log.exception("The replicas were not told of what is in quarantine.")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Ward:
    """A replica's own: what it refuses, and its one place for a isolated task."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self._solo: Stay | None = None

    def admit(self, task: AnyTask) -> "Stay":
        """End it with `over`. EngineError QUARANTINED, or OVERLOADED while another isolated task has the place."""
        if self.quarantine.holds(task):
            raise EngineError(ErrorCode.QUARANTINED, MESSAGE)
        if not task.isolated:
            return Stay(self, task)
        if self._solo is not None:
            raise EngineError(ErrorCode.OVERLOADED, "Another request is being run alone.", SOLO)
        self._solo = Stay(self, task)
        return self._solo

    @contextlib.contextmanager
    def admitted(self, task: AnyTask) -> Iterator[None]:
        stay = self.admit(task)
        try:
            yield
        finally:
            stay.over()

    def leave(self, stay: "Stay") -> None:
        if self._solo is stay:
            self._solo = None


class Stay:
    """A task's time at a replica."""

    def __init__(self, ward: Ward, task: AnyTask) -> None:
        self._ward = ward
        self._lacking: dict[tuple[int, int], int] = {}  # by branch: tokens until it shares steps with others
        if task.isolated and isinstance(task, GenerateTask) and task.isolated_tokens:
            branches = itertools.product(range(len(task.starts) - 1), range(task.params.n))
            self._lacking = dict.fromkeys(branches, task.isolated_tokens)

    def heard(self, chunks: Sequence[PromptChunk]) -> None:
        """Gives the place back once the engine no longer runs the task alone."""
        if not self._lacking:
            return
        for item in chunks:
            if isinstance(item.chunk, GenerateChunk):
                place = (item.prompt, item.chunk.branch)
                lacking = self._lacking.pop(place, 0) - len(item.chunk.tokens)
                if lacking > 0 and item.chunk.finish is None:
                    self._lacking[place] = lacking
        if not self._lacking:
            self.over()

    def over(self) -> None:
        self._ward.leave(self)


def quarantined() -> ApiError:
    return ApiError("quarantined_request", MESSAGE)


def tell_of(replicas: Broadcast) -> Tell:
    """Whoever does not hear it is told again."""

    async def tell(entries: Entries) -> None:
        await replicas("quarantine", TELL_S, entries)

    return tell
