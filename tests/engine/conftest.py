"""A rig around one engine with the toy model, and a sampler small enough to be obviously a function of its row."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

os.environ["ASSAY_TEST_FAULTS"] = "1"

from engine.config import EngineConfig
from engine.core import LoopOptions
from engine.engine import Engine
from engine.model.heads.info import HeadInfo
from engine.requests import (
    GenerateChunk,
    GenerateRequest,
    Int32s,
    PoolingRequest,
    PoolingTask,
    ScoreRequest,
    ScoreResult,
)
from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.sampling_params import SamplingParams
from tests.support.toy_model import ToyModel, _mix

VOCAB = 264


class _State(NamedTuple):
    params: SamplingParams
    seed: int
    branch: int


class Ready(NamedTuple):
    output: SampleOutput

    def result(self) -> SampleOutput:
        return self.output


class RowwiseSampler:
    """Temperature and greedy by Gumbel noise keyed by (seed, branch, position, token), log-probabilities in float64.

    `by_row` plants a fault: the noise also depends on the row of the batch.
    """

    def __init__(self, by_row: bool = False) -> None:
        self.by_row = by_row
        self.states: dict[int, _State] = {}
        self.position: dict[int, int] = {}
        self.max_admitted = 0

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Int32s,
        *,
        seed: int,
        branch: int = 0,
        output_ids: Sequence[int] | Int32s = (),
    ) -> None:
        assert slot not in self.states, "a slot was admitted twice"
        self.states[slot] = _State(params, seed, branch)
        self.position[slot] = len(output_ids)
        self.max_admitted = max(self.max_admitted, len(self.states))

    def release(self, slot: int) -> None:
        del self.states[slot]
        del self.position[slot]

    def sample(self, logits: Any, slots: Any) -> SampleOutput:
        rows = np.asarray(logits, np.float64)
        count = len(rows)
        states = [self.states[int(slot)] for slot in slots]
        n_top = max((s.params.logprobs or 0 for s in states), default=0)
        n_chosen = max((len(s.params.logprob_token_ids or ()) for s in states), default=0)
        out = SampleOutput(
            np.full(count, -1, np.int32),
            np.full(count, -np.inf, np.float32),
            np.zeros(count, np.int32),
            np.full((count, n_top), -1, np.int32),
            np.full((count, n_top), -np.inf, np.float32),
            np.full((count, n_chosen), -np.inf, np.float32),
            np.zeros(count, np.uint32),
        )
        for row, (slot, state) in enumerate(zip(slots, states, strict=True)):
            self._row(out, row, int(slot), state, rows[row])
        return out

    def _row(self, out: SampleOutput, row: int, slot: int, state: _State, logits: npt.NDArray[np.float64]) -> None:
        if np.isnan(logits).any() or np.isposinf(logits).any():
            out.flags[row] |= RowFlag.BAD_VALUE
        logits = np.where(np.isnan(logits) | np.isposinf(logits), -np.inf, logits)
        if not np.isfinite(logits).any():
            out.flags[row] |= RowFlag.NO_TOKEN
            return
        position = self.position[slot]
        self.position[slot] += 1
        scores = logits
        if state.params.temperature > 0:
            key = np.array([state.seed ^ (state.branch << 40) ^ (position << 20), row if self.by_row else 0], np.uint64)
            words = _mix(_mix(key).sum(dtype=np.uint64) + np.arange(len(logits), dtype=np.uint64))
            u = ((words >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
            scores = logits / state.params.temperature - np.log(-np.log(u))
        token = int(scores.argmax())
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        order = np.argsort(-logits, kind="stable")
        out.tokens[row] = token
        assert out.logprobs is not None and out.ranks is not None
        assert out.top_ids is not None and out.top_logprobs is not None and out.chosen_logprobs is not None
        out.logprobs[row] = logprobs[token]
        out.ranks[row] = 1 + int(np.flatnonzero(order == token)[0])
        top = order[: state.params.logprobs or 0]
        out.top_ids[row, : len(top)] = top
        out.top_logprobs[row, : len(top)] = logprobs[top]
        chosen = list(state.params.logprob_token_ids or ())
        out.chosen_logprobs[row, : len(chosen)] = logprobs[chosen]

    def fetch(self, output: SampleOutput) -> Ready:
        return Ready(output)

    def stats(self) -> dict[str, int]:
        return {"admitted": len(self.states)}


class BranchResult(NamedTuple):
    """Holds everything that a caller received for one branch."""

    tokens: tuple[int, ...]
    logprobs: bytes
    top: bytes
    finish: str | None
    stop_token: int | None


def branch_result(chunks: Sequence[GenerateChunk], branch: int = 0) -> BranchResult:
    mine = [chunk for chunk in chunks if chunk.branch == branch]
    tokens = tuple(int(token) for chunk in mine for token in chunk.tokens)
    logprobs = b"".join(chunk.logprobs.tobytes() for chunk in mine if chunk.logprobs is not None)
    top = b"".join(chunk.top_ids.tobytes() for chunk in mine if chunk.top_ids is not None)
    finishes = [chunk.finish for chunk in mine if chunk.finish is not None]
    stops = [chunk.stop_token for chunk in mine if chunk.stop_token is not None]
    assert len(finishes) <= 1
    return BranchResult(tokens, logprobs, top, finishes[0] if finishes else None, stops[0] if stops else None)


class Rig:
    """An engine, its model and sampler. Leaving it demands that everything was returned."""

    def __init__(self, engine: Engine, model: ToyModel, sampler: Any, draft: ToyModel | None = None) -> None:
        self.engine, self.model, self.sampler, self.draft = engine, model, sampler, draft
        self.closed = False

    async def run(self, request: GenerateRequest) -> BranchResult:
        """The only branch of a request."""
        return branch_result([chunk async for chunk in self.engine.generate(request)])

    async def together(self, *requests: GenerateRequest) -> list[BranchResult]:
        return list(await asyncio.gather(*(self.run(request) for request in requests)))

    async def queued(self) -> None:
        """All that tasks ask for is in the queue of an engine that has not been started, for its first step to see."""
        self.engine.core._running = True
        await asyncio.sleep(0)
        self.engine.core._running = False

    async def score_queued(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """All of them wait before the first step. The rig was not started."""
        tasks = [asyncio.create_task(self.engine.score(request)) for request in requests]
        await self.queued()
        self.engine.start()
        return list(await asyncio.gather(*tasks))

    async def idle(self) -> None:
        """Until the engine has nothing left to do."""
        for _ in range(2_000):
            stats = self.engine.stats()
            if not (stats.queued_tokens or stats.live_requests) and self.engine.core.kv_cache.settled:
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"the engine did not come to rest: {self.engine.stats()}")

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.model.released.set()
        if self.engine.healthy:
            await self.idle()
        self.engine.stop()
        if self.engine.core.fault is not None:
            return
        stats = self.engine.stats()
        zero = (stats.kv_slots_used, stats.tree_locks, stats.queued_tokens, stats.live_rows, stats.live_requests)
        assert zero == (0, 0, 0, 0, 0), stats
        self.engine.check()
        if self.sampler is not None:
            assert self.sampler.states == {}
        assert self.engine.core.table.free == self.engine.config.max_running
        if not self.engine.config.prefix_cache:
            assert stats.kv_slots_cached == 0


MakeRig = Callable[..., Rig]


@pytest.fixture
async def make_rig() -> AsyncIterator[MakeRig]:
    """`make_rig(num_slots=..., max_model_len=..., overlap=..., by_row=..., draft_blur=..., **EngineConfig fields)`,
    started. With `head` the model has a pooling head. With `draft_blur` another toy, so blurred, is the draft model.
    """
    rigs: list[Rig] = []

    def make(
        *,
        num_slots: int = 2_048,
        max_model_len: int = 256,
        max_targets: int | None = None,
        overlap: bool = False,
        by_row: bool = False,
        real_sampler: bool = False,
        draft_blur: float | None = None,
        clock: Callable[[], float] | None = None,
        before_step: Callable[[Any], None] | None = None,
        start: bool = True,
        head: HeadInfo | None = None,
        **config: Any,
    ) -> Rig:
        model = ToyModel(num_slots=num_slots, max_model_len=max_model_len)
        model.max_targets, model.pooling_head = max_targets, head
        sampler: Any = None if real_sampler else RowwiseSampler(by_row)
        more: dict[str, Any] = {} if clock is None else {"clock": clock}
        draft = None
        if draft_blur is not None:
            draft = ToyModel(num_slots=num_slots, max_model_len=max_model_len, blur=draft_blur)
        options = EngineConfig(**config)
        loop = LoopOptions(overlap=overlap, before_step=before_step, **more)
        engine = Engine(model, options, sampler, draft=draft, options=loop)
        if start:
            engine.start()
        rigs.append(Rig(engine, model, sampler, draft))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


def _tokens(values: Sequence[int]) -> Int32s:
    return np.array(values, np.int32)


@pytest.fixture
def generate_job() -> Callable[..., GenerateRequest]:
    """`generate_job(prompt, seed=..., emitted=..., isolated=..., **SamplingParams fields)`."""
    count = iter(range(10**9))

    def make(
        prompt: Sequence[int], *, seed: int = 7, emitted: Sequence[Sequence[int]] = (), **fields: Any
    ) -> GenerateRequest:
        names = ("cache_salt", "priority", "tenant", "timeout_s", "isolated", "isolated_tokens", "stream_interval")
        job_fields = {name: fields.pop(name) for name in names if name in fields}
        return GenerateRequest(
            request_id=f"g{next(count)}",
            prompt=_tokens(prompt),
            params=SamplingParams(**{"max_tokens": 8, **fields}),
            seed=seed,
            emitted=tuple(_tokens(branch) for branch in emitted),
            **job_fields,
        )

    return make


@pytest.fixture
def score_job() -> Callable[..., ScoreRequest]:
    """`score_job(prefix, items, labels=..., full=..., **ScoreRequest fields)`."""
    count = iter(range(10**9))

    def make(
        prefix: Sequence[int], items: Sequence[Sequence[int]], labels: Sequence[int] = (65, 66, 200), **fields: Any
    ) -> ScoreRequest:
        starts = np.concatenate(([0], np.cumsum([len(item) for item in items]))).astype(np.int32)
        ids = [token for item in items for token in item]
        return ScoreRequest(
            request_id=f"s{next(count)}",
            prefix=_tokens(prefix),
            ids=_tokens(ids),
            starts=starts,
            labels=_tokens(labels),
            **fields,
        )

    return make


@pytest.fixture
def pooling_job() -> Callable[..., PoolingRequest]:
    """`pooling_job(prefix, rows, **PoolingRequest fields)`."""
    count = iter(range(10**9))

    def make(prefix: Sequence[int], rows: Sequence[Sequence[int]], **fields: Any) -> PoolingRequest:
        return PoolingRequest(
            request_id=f"p{next(count)}",
            prefix=_tokens(prefix),
            ids=_tokens([token for row in rows for token in row]),
            starts=np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int32),
            **{"task": PoolingTask.CLASSIFY, **fields},
        )

    return make
