"""StepThread: the one thread that plans, launches and reads steps.

take calls -> plan step n + 1 -> launch it -> read step n -> hand its results over in one call. On CUDA a step is
launched before the one before it is read: sampled tokens stay on the device (`RequestTable.token_table`), and a row
that turns out to have ended has run once more, whose token is dropped. On the CPU each step is read at once. With
speculation it is on CUDA, too, and what it gave is handed over once the next step is launched.
"""

import asyncio
import logging
import threading
from collections.abc import Callable

import torch

from engine import interpreter
from engine.cores import yield_cores
from engine.flight import Flight
from engine.jobs import EngineError, ErrorCode, GenerateJob
from engine.mailbox import Inbox, Outbox
from engine.scheduler import Scheduler
from engine.stats import Counters
from engine.step import Step
from engine.works import Works

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
BLOCKED_WAIT_S = 0.005
STEPS_PER_SWEEP = 256


class StepThread:
    """`inbox` takes calls for it from any thread; `heartbeat` is when it last began a turn, which it does several times
    a second without work, too."""

    def __init__(
        self,
        device: torch.device,
        scheduler: Scheduler,
        works: Works,
        flight: Flight,
        outbox: Outbox,
        counters: Counters,
        clock: Callable[[], float],
        *,
        overlap: bool,
        waits: bool = False,
        yields: bool = False,
    ) -> None:
        """`overlap`: launches a step before it reads the one before. `waits`: the device waits for each launch, so that
        what can be done after it is. `yields`: computes on what cores others leave."""
        self._device = device
        self._scheduler = scheduler
        self._works = works
        self._flight = flight
        self._outbox = outbox
        self._counters = counters
        self._clock = clock
        self._overlap = overlap
        self._waits = waits
        self._yields = yields
        self.inbox = Inbox()
        self.heartbeat = clock()
        self.fault: str | None = None  # what ended it
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._since_sweep = 0

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("the engine was started twice")
        interpreter.hold()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Fails what is left and ends. RuntimeError if it does not end in time."""
        if self._thread is None:
            return
        self._stopping = True
        self.inbox.post(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the step thread did not end within {timeout_s} s")
        self._thread = None
        interpreter.release()

    @property
    def healthy(self) -> bool:
        """False for good after a device error or a fault of its own."""
        return self.fault is None and self._thread is not None and self._thread.is_alive()

    async def passed(self) -> None:
        """Until it has taken all that was posted before, or has ended."""
        done = threading.Event()
        self.inbox.post(done.set)
        while not done.is_set() and self.healthy:
            await asyncio.sleep(0.001)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if self._yields:
                yield_cores()
            with torch.no_grad():  # the mode belongs to the thread
                while not self._stopping:
                    self._turn()
        except Exception as error:
            log.exception("The step loop failed.")
            self.fault = type(error).__name__
        finally:
            self._last_words()

    def _last_words(self) -> None:
        """Everyone is answered, whatever state the thread ends in."""
        try:
            for call in self.inbox.take():
                call()
            if not self._stopping:
                self.fault = self.fault or "ended"  # by what no handler may keep, as SystemExit
            elif self.fault is None:
                self.abandon_all(EngineError(ErrorCode.NOT_READY, "The engine has stopped."))
        finally:
            self._works.give_up()
            self._outbox.flush()

    def _turn(self) -> None:
        """One round: calls, one launch, one read."""
        self.heartbeat = self._clock()
        for call in self.inbox.take():
            call()
        now = self._clock()
        self._works.expire(now)
        step = None if self.fault else self._plan(now)
        for work, error in self._scheduler.refused:
            self._works.fail(work, error)
        self._scheduler.refused.clear()
        if step is not None:
            self._flight.launch(step)
        if self._waits:  # the results of the step before, whose readers would compete for the interpreter
            self._hand_over()
        if self._flight and (step is None or len(self._flight) > int(self._overlap)):
            self._flight.read()
        if not self._waits:
            self._hand_over()
        if step is None and not self._flight:
            self._idle()
        else:
            self._since_sweep += 1
            if self._since_sweep >= STEPS_PER_SWEEP:
                interpreter.sweep(idle=False)
                self._since_sweep = 1

    def _plan(self, now: float) -> Step | None:
        step = self._scheduler.plan(now)
        if step is not None:
            self._counters.planned(self._clock() - now)
        return step

    def _idle(self) -> None:
        if not self._works.alive:
            self._counters.throughput.idle()
            if self._since_sweep:
                interpreter.sweep(idle=True)
                self._since_sweep = 0
            self.inbox.wait(IDLE_WAIT_S)
        else:
            self.inbox.wait(BLOCKED_WAIT_S)

    def abandon_all(self, error: EngineError) -> list[GenerateJob]:
        """Fails every job; generations are returned as jobs that another engine continues exactly."""
        self._flight.land()
        jobs = self._works.abandon(error)
        self._hand_over()
        return jobs

    def _hand_over(self) -> None:
        self._flight.count()
        self._outbox.flush()
