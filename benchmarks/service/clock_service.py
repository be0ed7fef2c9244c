"""The application of `deployments.app` on a clock in place of a device, for `benchmarks.service.bench_host_http`.

A step of the clock takes as long as a step of a 0.6B model on an H200, and costs the host nothing but its launch. All
other code is the service's own. Serve imports `build`. The module runs on the sources of earlier commits too, whose
modules have other names, so that two commits can be compared on the same cores.
"""

import os
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from ray.serve import Application

from benchmarks.support import h200
from benchmarks.support.earlier import first_of
from deployments import app
from gpu_sampler.output import SampleOutput
from gpu_sampler.sampler import Sampler

os.environ.setdefault("ASSAY_TEST_FAULTS", "1")  # the clock is one of the models for tests

SPEED = float(os.environ.get("ASSAY_CLOCK_SPEED", "1"))  # of the device, in H200s
DECODE_S, ROW_S, TOKEN_S = h200.DECODE_S / SPEED, h200.ROW_S / SPEED, h200.TOKEN_S / SPEED
LABELS = 16  # ids with a logit in a step of scores: a softmax over all would be the host's work, and is the device's
FIRST_ID = 300  # of what the clock samples; the built-in tokenizer's ids from here on are texts
SLOTS = 1 << 18


AppArgs: Any = first_of("deployments.config:AppArgs", "deployments.config.app_args:AppArgs")
Replica: Any = first_of("deployments.app:Replica", "deployments.replica.deployment:Replica")
Engine: Any = first_of("engine.loop:Engine", "engine.engine:Engine")
ToyModel: Any = first_of(
    "engine.builtin.toy:ToyModel", "engine.testing.toy_model:ToyModel", "tests.support.toy_model:ToyModel"
)


class SimulatedDevice:
    """Knows when the last step that was launched will have ended."""

    def __init__(self) -> None:
        self.end = 0.0
        self.busy_s = 0.0

    def launch(self, seconds: float) -> None:
        """Queues a step of so many seconds behind those before it."""
        self.end = max(time.perf_counter(), self.end) + seconds
        self.busy_s += seconds

    @staticmethod
    def wait(end: float) -> None:
        """Waits, without the interpreter's lock, until the device has come to `end`."""
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)


class ClockModel(ToyModel):  # type: ignore[misc]
    """Takes an H200's time for each step and computes nothing."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, num_slots=SLOTS, max_model_len=4096)
        self.clock = SimulatedDevice()
        self.eos_token_ids = ()

    def forget(self, slots: Any) -> None: ...

    def forward(self, kind: Any, sequences: Any, token_table: Any) -> torch.Tensor:
        rows = self._launch(kind, sequences)
        if str(kind) != "score":
            return torch.zeros(1, 1).expand(rows, self.vocab_size)
        self.clock.wait(self.clock.end)  # nothing else waits for a step of scores
        return torch.zeros(1, 1).expand(rows, LABELS)

    def label_logits(self, kind: Any, sequences: Any, token_table: Any, labels: Any) -> torch.Tensor:
        rows = self._launch(kind, sequences)
        self.clock.wait(self.clock.end)
        return torch.zeros(rows, len(labels))

    def _launch(self, kind: Any, sequences: Any) -> int:
        if str(kind) == "decode":
            rows = len(sequences)
            self.clock.launch(DECODE_S + ROW_S * rows)
            return rows
        runs: Sequence[Any] = list(sequences)
        self.clock.launch(DECODE_S + TOKEN_S * sum(len(run.write) for run in runs))
        return sum(len(run.rows) for run in runs)


class ClockSampler(Sampler):
    """Draws any tokens, and gives them to the host when the device's step has ended."""

    def __init__(self, model: ClockModel, config: Any) -> None:
        super().__init__(num_slots=config.max_running + 1, vocab_size=model.vocab_size)
        self._clock = model.clock
        self._draw = np.random.default_rng(1)

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        plan, rows = self.plan_rows(slots), len(slots)
        tokens = self._draw.integers(FIRST_ID, self.vocab_size, rows, dtype=np.int32)
        flags = np.zeros(rows, np.uint32)
        if plan.n_top is None:
            return SampleOutput(tokens, None, None, None, None, None, flags)
        top_ids = np.broadcast_to(np.arange(FIRST_ID, FIRST_ID + plan.n_top, dtype=np.int32), (rows, plan.n_top))
        top = np.full((rows, plan.n_top), -2.5, np.float32)
        chosen = np.full((rows, plan.n_chosen), -2.5, np.float32)
        return SampleOutput(
            tokens, np.full(rows, -1.5, np.float32), np.ones(rows, np.int32), top_ids, top, chosen, flags
        )

    def fetch(self, output: Any) -> Any:
        return _Fetched(self._clock, output)


class _Fetched:
    def __init__(self, clock: SimulatedDevice, output: SampleOutput) -> None:
        self._clock, self._end, self._output = clock, clock.end, output

    def result(self) -> SampleOutput:
        self._clock.wait(self._end)
        return self._output


class OnClock:
    """Gives a replica of the service an engine on a clock."""

    _args: Any

    async def start(self, model: Any = None) -> None:
        if hasattr(Replica, "_make_engine"):  # at earlier commits
            await super().start(model)  # type: ignore[misc]
        else:
            with mock.patch("deployments.replica.replica.make_engine", _warm_clock):
                await super().start(model)  # type: ignore[misc]

    def _make_engine(self, model: Any) -> Any:
        self._digest = ""  # a clock has no weights to compare
        return _clock_engine(self._args)


class ClockReplica(OnClock, Replica):  # type: ignore[misc]  # of either place
    """Runs the service's replica on a clock."""


def _warm_clock(args: AppArgs, progress: Any, model: Any = None) -> Any:
    return first_of("deployments.replica.make_engine:WarmEngine")(_clock_engine(args), weights_digest="")


def _clock_engine(args: AppArgs) -> Any:
    config: Any = args.engine_config()
    clock = ClockModel(vocab_size=int(os.environ["ASSAY_CLOCK_VOCAB"]))
    try:
        overlapped = {"options": first_of("engine.core:LoopOptions")(overlap=True)}
    except ImportError:
        overlapped = {"overlap": True}
    return Engine(clock, config, ClockSampler(clock, config), **overlapped)


def build(args: AppArgs) -> Application:
    """Builds the service's own application, whose replicas run on a clock."""
    with mock.patch.object(app, "Replica" if hasattr(app, "Replica") else "REPLICA", ClockReplica):
        return app.build(args)
