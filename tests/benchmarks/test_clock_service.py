"""The clock in place of a device: a replica of the service runs on it, and its steps take the device's time."""

import time

import numpy as np
import pytest

from benchmarks.support.h200 import DECODE_S, TOKEN_S
from deployments.config.app_args import AppArgs
from deployments.protocol import GenerateReply
from deployments.replica.replica import ReplicaServer
from engine.requests import GenerateRequest, ScoreRequest, ScoreResult
from gpu_sampler.sampling_params import SamplingParams

NEW = 30


async def test_a_replica_runs_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_TEST_FAULTS", "1")
    monkeypatch.setenv("ASSAY_CLOCK_VOCAB", "2048")
    from benchmarks.service import clock_service  # which would set ASSAY_TEST_FAULTS for other tests

    class ClockServer(clock_service.OnClock, ReplicaServer):
        """Represents the deployment, without Serve."""

    replica = ClockServer(AppArgs.model_validate({"engine": {"kv_slots": 4096}}), "r0")
    await replica.start()
    try:
        model = replica.engine.core._model
        assert isinstance(model, clock_service.ClockModel), type(model)
        prompt = np.arange(10, 20, dtype=np.int32)
        params = SamplingParams(max_tokens=NEW)
        busy_s, began = model.clock.busy_s, time.perf_counter()
        reply = await replica.generate((GenerateRequest(request_id="g", prompt=prompt, params=params, seed=1),))
        seconds = time.perf_counter() - began
        assert isinstance(reply, GenerateReply), reply
        busy_s = model.clock.busy_s - busy_s
        assert min(busy_s, seconds) > (NEW - 1) * DECODE_S
        ids = np.tile(prompt, 200)
        starts = np.array([0, len(ids)], np.int32)
        busy_s, began = model.clock.busy_s, time.perf_counter()
        for number in range(5):
            request = ScoreRequest(request_id=f"s{number}", prefix=ids[:0], ids=ids, starts=starts, labels=ids[:2])
            assert isinstance(await replica.score(request), ScoreResult)
        seconds = time.perf_counter() - began
        assert min(model.clock.busy_s - busy_s, seconds) > 5 * (DECODE_S + TOKEN_S * (len(ids) - len(prompt)))
    finally:
        replica.stop()
