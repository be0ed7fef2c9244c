"""EngineCore: the step loop of one engine, on a thread of its own."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.batch.input_batch import StepKind
from engine.channels import CallQueue, ResultDispatcher
from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import EngineStats, StepRecorder, Throughput
from engine.model.interface import CausalLM
from engine.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.requests import EngineError, ErrorCode, GenerateRequest, Int32s, Int64s
from engine.scheduler.request_state import Phase, RequestTable, ScoringState
from engine.scheduler.request_tracker import RequestTracker, lost
from engine.scheduler.scheduler import Scheduler, Step
from engine.scheduler.token_stream import TokenStream
from engine.spec_decode.verify import make_proposer
from engine.utils import garbage_collection
from engine.utils.cpu import keep_memory, yield_cores, yields_cores
from engine.utils.cuda import is_lost
from gpu_sampler.output import VerifyOutput
from gpu_sampler.sampler import Sampler

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
BLOCKED_WAIT_S = 0.005
STEPS_PER_COLLECTION = 256
CAPTURE_PERIOD_S = 1.0  # between two captures while there is work, which waits a tenth of a second for each


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Changes how the step loop runs. A service takes the defaults; tests and benchmarks set the fields."""

    overlap: bool | None = None  # launch a step before the one before it is read; None: on CUDA; never with speculation
    clock: Callable[[], float] = time.monotonic
    before_step: Callable[[Step], None] | None = None  # the step thread calls it before each launch


# Which thread owns what:
#
#   event loops of callers               step thread: `EngineCore._round`              device
#   -----------------------              ---------------------------------             ------
#   RequestTracker.admit (lock)
#   CallQueue.post  ----- calls ----->   take calls: RequestTracker.add, close
#                                        plan:       Scheduler, RunningBatch, ScoreBatcher, KVCacheManager, RequestTable
#                                        launch:     ModelRunner, Sampler, Proposer -> forward, sample, verify, score
#                                        read:       Step.result          <----------- pinned copies of the results
#                                                    OutputProcessor, TokenStream, StepRecorder
#   ResultQueue.get  <--- results ----   hand over:  ResultDispatcher.flush, one call per event loop and step
#
# A thread touches nothing of another column. Any thread reads the numbers of `StepRecorder`, `heartbeat` and `fault`.
class EngineCore:
    """Takes calls, plans a step, launches it, reads the one before and hands its results over, again and again.

    On CUDA a step is launched before the one before it is read: sampled tokens stay on the device
    (`RequestTable.token_table`), and a row that turns out to have ended has run once more, whose token is dropped. On
    the CPU, and with speculation, each step is read before the next is planned, because what a verify step accepts
    decides the next one. With speculation on CUDA the results of a step are handed over once the next is launched.

    An exception in a step ends the requests of that step alone. Only the loss of the device ends the thread. In
    whatever way the thread ends, every request is answered.
    """

    def __init__(
        self, model: CausalLM, config: EngineConfig, sampler: Sampler, draft: CausalLM | None, options: LoopOptions
    ) -> None:
        """Makes the parts that the step thread owns.

        Args:
            model: the target model.
            config: the engine's configuration.
            sampler: a sampler with a slot for each running sequence and the dummy.
            draft: the draft model of speculation, if there is one.
            options: how the loop runs.
        """
        self._model = model
        self._sampler = sampler
        self._clock = clock = options.clock
        self._before_step = options.before_step
        speculates, on_cuda = config.speculation.method != "none", model.device.type == "cuda"
        self._overlap = not speculates and (on_cuda if options.overlap is None else options.overlap)
        self._launches_before_hand_over = speculates and on_cuda  # readers would compete for the interpreter
        self._yields_cores = yields_cores(config, model.device.type)

        max_len = min(model.max_model_len, model.num_slots - 1)
        self.table = RequestTable(
            config.max_running, max_len, model.vocab_size, model.device, draft_model=draft is not None
        )
        proposer = make_proposer(config.speculation, draft, self.table, sampler, config.token_budget)
        self.kv_cache = KVCacheManager(model.num_slots, _on_free(model, draft))
        whole = model.pooling_head is not None and model.pooling_head.whole_rows
        self.scheduler = Scheduler(config, self.kv_cache, self.table, sampler, model.max_targets, whole_rows=whole)
        self.recorder = StepRecorder(Throughput(config.costs.decode_token_cost))
        self.results = ResultDispatcher()
        stream = TokenStream(self.table, self.results)
        self.tracker = RequestTracker(config, self.scheduler, stream, self.results, self.recorder, clock)
        self.runner = ModelRunner(model, sampler, self.table, config, proposer)
        self._outputs = OutputProcessor(self.scheduler, self.tracker, stream, self.recorder)

        if model.device.type == "cpu":
            keep_memory()
        self.calls = CallQueue()
        self.heartbeat = clock()  # when the last round began; several a second, without work too
        self.fault: str | None = None  # what ended the thread
        self._in_flight: deque[Step] = deque()  # launched and not yet read, oldest first
        self._unrecorded: deque[Callable[[], None]] = deque()
        self._last_read = 0.0
        self._thread: threading.Thread | None = None
        self._running = False  # the thread has started and takes calls
        self._stopping = False
        self._since_collection = 0
        self._lacks_graphs = True  # the start-up may have left CUDA graphs for later
        self._later_captures = 0
        self._last_capture = clock()

    # The life of the thread.

    def start(self) -> None:
        """Starts the step thread, also again after `stop`."""
        if self._thread is not None:
            raise RuntimeError("the engine was started twice")
        self._stopping = False
        self.scheduler.policy.largest_graphed = self._model.prefill_graph_limit  # known once the model was warmed up
        garbage_collection.hold()
        if self._model.contexts_built is not None:
            self._model.contexts_built.add_done_callback(lambda _: self.calls.post(self._share_contexts))
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._running = True
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Fails what is left and ends the thread.

        Raises:
            RuntimeError: the thread does not end in time.
        """
        if self._thread is None:
            return
        self._stopping = True
        self.calls.post(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the step thread did not end within {timeout_s} s")
        self._thread = None
        garbage_collection.release()

    @property
    def healthy(self) -> bool:
        """Tells whether the thread runs. It is false for ever after a device error or a fault of the loop."""
        return self.fault is None and self._running

    async def passed(self) -> None:
        """Waits until the thread has taken every call that was posted before, or has ended."""
        done = threading.Event()
        self.calls.post(done.set)
        while not done.is_set() and self.healthy:
            await asyncio.sleep(0.001)

    def abandon_all(self, error: EngineError) -> list[GenerateRequest]:
        """Fails every request; returns the generations as requests that another engine continues exactly."""
        self._read_all()
        requests = self.tracker.abandon(error)
        self._hand_over()
        return requests

    def _run(self) -> None:
        try:
            if self._model.device.type == "cuda":
                torch.cuda.set_device(self._model.device)
            if self._yields_cores:
                yield_cores()
            # Modes belong to the thread. In inference mode an operation costs the host less, and a step on a CPU is
            # hundreds of small ones. Layers for CUDA were compiled and captured without it.
            with torch.inference_mode(self._model.device.type == "cpu"), torch.no_grad():
                while not self._stopping:
                    self._round()
        except Exception as error:
            log.exception("The step loop failed.")
            self.fault = type(error).__name__
        finally:
            self._running = False
            self._answer_all()

    def _answer_all(self) -> None:
        """Answers every request, whatever state the thread ends in."""
        try:
            self._take_calls()
            if not self._stopping:
                self.fault = self.fault or "ended"  # by what no handler may keep, such as SystemExit
            elif self.fault is None:
                self.abandon_all(EngineError(ErrorCode.NOT_READY, "The engine has stopped."))
        finally:
            self.tracker.answer_lost()
            self.results.flush()

    # The loop.

    def _round(self) -> None:
        """Runs one round: take calls, plan, launch, read, hand over."""
        self.heartbeat = self._clock()
        self._take_calls()
        step = self._plan()
        if step is not None:
            self._launch(step)
        if self._launches_before_hand_over:
            self._hand_over()
        if self._in_flight and (step is None or len(self._in_flight) > int(self._overlap)):
            self._read()
        if not self._launches_before_hand_over:
            self._hand_over()
        if step is None and not self._in_flight:
            self._wait_for_calls()
            return
        self._collect_garbage()
        if self._lacks_graphs and self._clock() - self._last_capture >= CAPTURE_PERIOD_S:
            self._read_all()
            self._hand_over()
            self._capture()

    def _take_calls(self) -> None:
        for call in self.calls.take():
            call()

    def _plan(self) -> Step | None:
        now = self._clock()
        self.tracker.expire(now)
        step = None if self.fault else self.scheduler.plan(now)
        if step is not None:
            self.recorder.plan(self._clock() - now)
        for state, error in self.scheduler.refused:
            self.tracker.fail(state, error)
        self.scheduler.refused.clear()
        return step

    def _launch(self, step: Step) -> None:
        step.launched = self._clock()
        step.begin()
        self.kv_cache.launch()
        try:
            if self._before_step is not None:
                self._before_step(step)
            with garbage_collection.short_turns():
                self.runner.launch(step)
            self._in_flight.append(step)
        except Exception as error:
            self._read_all()  # slots are released in the order of the steps
            self._fail_step(step, error)

    def _read_all(self) -> None:
        while self._in_flight:
            self._read()

    def _read(self) -> None:
        """Waits for the oldest step in flight and applies its output."""
        step = self._in_flight.popleft()
        try:
            with garbage_collection.short_turns():
                output = None if step.result is None else step.result()
        except Exception as error:
            self._fail_step(step, error)
            return
        now = self._clock()
        seconds = now - max(step.launched, self._last_read)
        self._last_read = now
        if step.head_watch is not None:
            self._charge_head(step, step.head_watch.seconds())
        self.scheduler.policy.step_ended(step.kind, step.tokens, seconds)
        tokens, accepted = step.tokens, None
        if step.kind in (StepKind.DECODE, StepKind.VERIFY):
            tokens = len(step.slots)
            if isinstance(output, VerifyOutput):
                accepted = np.minimum(output.counts - 1, step.drafts)
                tokens = int(output.counts.sum())
            self.scheduler.policy.decode_ended(step.drafting, len(step.slots), tokens, seconds)
        self._unrecorded.append(partial(self._record, step, tokens, accepted, seconds, now))
        self.tracker.computed(step)
        self._outputs.process(step, output, now)
        self._finish(step)

    def _hand_over(self) -> None:
        """Delivers results, after the figures of their steps: a caller that has its answer sees itself counted."""
        while self._unrecorded:
            self._unrecorded.popleft()()
        self.results.flush()

    def _wait_for_calls(self) -> None:
        if self.tracker.live:
            self.calls.wait(BLOCKED_WAIT_S)
            return
        if self._lacks_graphs:
            self._capture()
            return
        self.recorder.throughput.idle()
        if self._since_collection:
            garbage_collection.sweep(idle=True)
            self._since_collection = 0
        self.calls.wait(IDLE_WAIT_S)

    def _capture(self) -> None:
        """Captures one CUDA graph that the start-up has left for later. After a failure none is tried: steps are padded
        to the sizes there are."""
        try:
            self._lacks_graphs = self.runner.capture_next()
        except Exception as error:
            log.warning("CUDA graphs of further sizes are not captured.", exc_info=error)
            self._lacks_graphs = False
            if is_lost(self._model.device, error):
                raise
        self._later_captures += self._lacks_graphs
        if self._later_captures and not self._lacks_graphs:
            log.info("CUDA graphs of %d further sizes are captured.", self._later_captures)
        self._last_capture = self._clock()

    def _share_contexts(self) -> None:
        """Has steps attend to shared contexts once. Where that fails, each sequence goes on attending to its own."""
        try:
            self._model.share_contexts()
        except Exception as error:
            log.warning("Contexts that sequences have in common are not attended to once for all.", exc_info=error)
            if is_lost(self._model.device, error):
                raise

    def _collect_garbage(self) -> None:
        self._since_collection += 1
        if self._since_collection >= STEPS_PER_COLLECTION:
            garbage_collection.sweep(idle=False)
            self._since_collection = 1

    # The end of a step.

    def _finish(self, step: Step) -> None:
        self.kv_cache.finish()
        if step.scratch:
            self.kv_cache.free(np.concatenate(step.scratch))

    def _fail_step(self, step: Step, error: Exception) -> None:
        """Fails the requests of a step. The loss of the device is raised on, and ends the thread."""
        log.error("A %s step failed: %s", step.kind, type(error).__name__, exc_info=error)
        self.recorder.failed_steps += 1
        device_lost = is_lost(self._model.device, error)
        for state in step.requests():
            failed = EngineError(ErrorCode.STEP_FAILED, "The step that computed this request failed.")
            self.tracker.fail(state, lost(state) if device_lost else failed)
        for row in step.prefilled or step.sampled:
            if row.phase is Phase.CLOSED:  # perhaps before, by a caller that left: what it computed here is not sound
                self.scheduler.running.distrust(row)
        if device_lost:
            raise error
        self._finish(step)
        if self.kv_cache.settled:
            self.check()

    def _charge_head(self, step: Step, seconds: float) -> None:
        """Adds the time behind the last layer to each request of a score step: each waited for all of it."""
        self.recorder.head_seconds += seconds
        for state in step.requests():
            if isinstance(state, ScoringState):
                state.head_s += seconds

    def _record(self, step: Step, tokens: int, accepted: Int64s | None, seconds: float, now: float) -> None:
        """Counts a step that computed or sampled `tokens`; `accepted` [B]: drafts accepted in a verify step."""
        recorder = self.recorder
        recorder.step(step.kind, len(step.sequences), step.tokens, seconds)
        if step.drafting_watch is not None:
            recorder.drafting(step.drafting_watch.seconds(), 0.0 if accepted is None else seconds)
        if accepted is not None:
            recorder.verified(step.drafts, accepted, step.missing_q)
        decoded = step.kind in (StepKind.DECODE, StepKind.VERIFY)
        recorder.throughput.step(tokens, now - seconds, now, decoded=decoded, waiting=step.waiting)

    # Read by other classes.

    def check(self) -> None:
        """Raises RuntimeError unless the account of pool slots adds up; on the step thread, or after `stop`."""
        self.kv_cache.check(self.tracker.slots_owned())

    def stats(self, *, draining: bool) -> EngineStats:
        """Returns the engine's figures. The step thread goes on meanwhile, so they need not add up."""
        live = list(self.tracker.live.values())
        return EngineStats(
            **self.recorder.totals(),
            graph_replays=self._model.graph_replays,
            hand_overs=self.results.hand_overs,
            padding_tokens=self._model.padded_tokens,
            queued_tokens=self.tracker.queued_tokens,
            queued_requests=sum(state.started is None for state in live),
            live_requests=len(live),
            live_rows=self.table.live,
            kv_slots_used=self.kv_cache.used,
            kv_slots_cached=self.kv_cache.prefix_cache.size,
            kv_slots_free=self.kv_cache.allocator.num_free,
            tree_locks=self.kv_cache.prefix_cache.locks,
            evictions=self.kv_cache.prefix_cache.evicted,
            preemptions=self.scheduler.running.preemptions,
            heartbeat_age_s=self._clock() - self.heartbeat,
            drain_per_s=self.recorder.throughput.tokens_per_s,
            sampler=self._sampler.stats(),
            healthy=self.healthy,
            draining=draining,
        )


def _on_free(*models: Any) -> Callable[[Int32s], None] | None:
    """Returns a call for pool slots that became free, if a model has a `forget`: the toy model poisons them."""
    listeners = [model.forget for model in models if hasattr(model, "forget")]

    def forget(slots: Int32s) -> None:
        for listener in listeners:
            listener(slots)

    return forget if listeners else None
