"""How many tokens a chunk holds, and for how long a request runs alone."""

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.channels import ResultQueue
from engine.request_validation import MAX_INTERVAL
from engine.requests import EngineError, ErrorCode, GenerateChunk, GenerateRequest, StepTokens
from gpu_sampler.output import RowFlag

MakeRig = Callable[..., Any]
MakeJob = Callable[..., GenerateRequest]


@pytest.mark.parametrize("draft_blur", [None, 0.3])
@pytest.mark.parametrize("every", [2, 7, 1000])
async def test_longer_chunks_hold_the_same(
    make_rig: MakeRig, generate_job: MakeJob, every: int, draft_blur: float | None
) -> None:
    speculation = {} if draft_blur is None else {"speculation": speculating()}
    rig = make_rig(draft_blur=draft_blur, real_sampler=draft_blur is not None, **speculation)
    request = generate_job(range(20), max_tokens=23, logprobs=2)
    step_by_step = await rig.run(request)
    chunks = [chunk async for chunk in rig.engine.generate(replace(request, stream_interval=every))]
    assert [len(chunk.tokens) >= every for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert sum(len(chunk.tokens) for chunk in chunks) == len(step_by_step.tokens) == 23
    assert tuple(np.concatenate([chunk.tokens for chunk in chunks]).tolist()) == step_by_step.tokens
    assert b"".join(chunk.logprobs.tobytes() for chunk in chunks) == step_by_step.logprobs
    assert b"".join(chunk.top_ids.tobytes() for chunk in chunks) == step_by_step.top


def speculating() -> Any:
    from engine.config import SpeculationConfig

    return SpeculationConfig(method="draft_model", draft="toy", num_speculative_tokens=3)


async def test_a_preempted_row_goes_on_with_its_chunk(make_rig: MakeRig, generate_job: MakeJob) -> None:
    """A pool too small for all: rows are thrown out in the middle of a chunk, and nothing of it is lost."""
    request = generate_job([1, 3, 4], max_tokens=60, logprobs=1, n=4)
    expected = joined([chunk async for chunk in make_rig().engine.generate(request)])
    rig = make_rig(num_slots=100, max_model_len=96, admission_tokens=4)
    assert joined([chunk async for chunk in rig.engine.generate(replace(request, stream_interval=11))]) == expected
    assert rig.engine.stats().preemptions > 0


async def test_rows_that_ask_for_different_things_get_the_same_as_alone(
    make_rig: MakeRig, generate_job: MakeJob
) -> None:
    """Chunks of several sizes, log-probabilities of several widths or none, ends by stop ids and by length, in one
    batch, against each request by itself and token by token."""
    widths: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprob_token_ids": (5, 6)}]
    requests = [
        replace(
            generate_job([9, n, 4], max_tokens=70 + n, stop_token_ids=tuple(range(2 * n)), **widths[n % 4]),
            stream_interval=e,
        )
        for n, e in enumerate((1, 2, 5, 70, MAX_INTERVAL, 3, 11, MAX_INTERVAL, 64))
    ]
    rig = make_rig(overlap=True)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(_chunks(rig, request) for request in requests))
        for request, chunks in zip(requests, found, strict=True):
            alone = await _chunks(make_rig(), replace(request, stream_interval=1))
            assert _columns(chunks) == _columns(alone)
            assert all(len(chunk.tokens) == request.stream_interval for chunk in chunks[:-1])


@pytest.mark.parametrize("every", [1, 5, MAX_INTERVAL])
async def test_a_row_that_fails_between_two_chunks_ends_its_job_immediately(
    make_rig: MakeRig, generate_job: MakeJob, every: int
) -> None:
    """The second of three branches fails with its fourth token. The third runs no further; a neighbour is unchanged."""
    rig = make_rig()
    sample, steps = rig.sampler.sample, 0
    request = generate_job([1, 2, 3], max_tokens=30, n=3, stream_interval=every, seed=1)
    other = generate_job([4, 5], max_tokens=30, stream_interval=every, logprobs=1)

    def spoil(logits: Any, slots: Any) -> Any:
        nonlocal steps
        out = sample(logits, slots)
        rows = [rig.engine.core.table.sequences[slot] for slot in slots]
        mine = [row for row, sequence in enumerate(rows) if sequence.parent.request is request and sequence.branch == 1]
        steps += len(mine)
        if mine and steps == 4:
            out.flags[mine] = int(RowFlag.BAD_VALUE)
        return out

    rig.sampler.sample = spoil
    failed, chunks = await asyncio.gather(_chunks(rig, request), _chunks(rig, other), return_exceptions=True)
    assert isinstance(failed, EngineError) and failed.code == ErrorCode.NONFINITE_LOGITS
    assert not isinstance(chunks, BaseException)
    assert steps == 4
    assert rig.engine.stats().nonfinite_rows == 1
    assert _columns(chunks) == _columns(await _chunks(make_rig(), other))


async def _chunks(rig: Any, request: GenerateRequest) -> list[GenerateChunk]:
    return [chunk async for chunk in rig.engine.generate(request)]


def _columns(chunks: Sequence[GenerateChunk]) -> list[Any]:
    """Joins the chunks of one branch: each column behind each other, and how it ended."""
    columns = []
    for values in zip(*(chunk[1:7] for chunk in chunks), strict=True):
        columns.append(None if values[0] is None else np.concatenate(values).tolist())
    return [*columns, chunks[-1].finish, chunks[-1].stop_token]


def joined(chunks: Sequence[GenerateChunk]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        assert chunk.logprobs is not None
        found.setdefault(chunk.branch, []).extend(zip(chunk.tokens.tolist(), chunk.logprobs.tolist(), strict=True))
    return found


async def shared_from(make_rig: MakeRig, first: GenerateRequest, other: GenerateRequest) -> int | None:
    """How many tokens the first request had when it first shared a decode step with the other; None if it never did."""
    found: list[int] = []
    ticks = itertools.count()
    rig = make_rig(clock=lambda: next(ticks) * 1e-3)  # steps of equal length, whatever else the machine does

    def note(kind: StepKind, runs: Sequence[ScheduledSequence]) -> None:
        lengths = [len(run.context) for run in runs]
        if kind is StepKind.DECODE and len(runs) > 1:
            found.append(min(lengths) + 1 - len(first.prompt))

    rig.model.on_forward = note
    await asyncio.gather(rig.run(first), rig.run(other))
    return found[0] if found else None


@pytest.mark.parametrize(("isolated", "tokens", "expected"), [(True, 0, None), (True, 5, 5), (False, 0, 1)])
async def test_a_job_is_solo_until_it_has_so_many_new_tokens(
    make_rig: MakeRig, generate_job: MakeJob, isolated: bool, tokens: int, expected: int | None
) -> None:
    """To its end without a number."""
    first = generate_job([1, 2, 3], max_tokens=20, isolated=isolated, isolated_tokens=tokens)
    found = await shared_from(make_rig, first, generate_job(range(60), max_tokens=60))
    assert (found is None) == (expected is None)
    if expected is not None and found is not None:
        assert expected <= found <= expected + 2


async def test_tokens_that_it_came_with_are_not_new(make_rig: MakeRig, generate_job: MakeJob) -> None:
    whole = await make_rig().run(generate_job([1, 2, 3], max_tokens=20))
    first = generate_job([1, 2, 3], max_tokens=20, isolated=True, isolated_tokens=5, emitted=[whole.tokens[:9]])
    found = await shared_from(make_rig, first, generate_job(range(60), max_tokens=60))
    assert found is not None and 14 <= found <= 16


@pytest.mark.parametrize(
    "fields", [{"stream_interval": 0}, {"stream_interval": True}, {"isolated_tokens": -1}, {"isolated_tokens": 1.5}]
)
async def test_other_numbers_are_refused_by_name(
    make_rig: MakeRig, generate_job: MakeJob, fields: dict[str, Any]
) -> None:
    with pytest.raises(EngineError) as caught:
        await make_rig().run(generate_job([1, 2], **fields))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_VALUE, *fields)


class CountedSink:
    """A sink of several streams, which keeps what each call brought."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.calls: list[list[tuple[int, int]]] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}

    def put_tokens(self, tokens: StepTokens) -> None:
        names = [(call, prompt) for call, prompt in tokens.streams.tolist()]
        self.calls.append(names)
        for row, name in enumerate(names):
            self.tokens.setdefault(name, []).extend(tokens.chunk(row).tokens.tolist())


async def test_a_step_is_one_call_for_all_streams_of_a_sink(make_rig: MakeRig, generate_job: MakeJob) -> None:
    """Three streams each of two sinks get the tokens that they get alone, and a sink is called once for a step."""
    rig = make_rig()
    sinks = [CountedSink(asyncio.get_running_loop()) for _ in range(2)]
    requests = [generate_job(range(20 + number), max_tokens=30, seed=number) for number in range(6)]
    expected = [(await rig.run(request)).tokens for request in requests]
    heard: dict[int, list[int]] = {}
    ended, begun = asyncio.Semaphore(0), threading.Event()
    rig.model.on_forward = lambda kind, sequences: begun.wait()  # no step runs before all requests have come

    def started(number: int) -> None:
        def deliver(result: GenerateChunk | EngineError) -> None:
            assert isinstance(result, GenerateChunk)
            heard.setdefault(number, []).extend(result.tokens.tolist())
            if result.finish is not None:
                ended.release()

        rig.engine.begin(requests[number], deliver, sinks[number % 2], (number, 7))

    for number in range(6):
        started(number)
    begun.set()
    for _ in range(6):
        await ended.acquire()
    for number, tokens in enumerate(expected):
        first, *rest = heard[number]
        assert (first, *sinks[number % 2].tokens[number, 7], *rest) == tokens
        assert len(rest) == 1  # the last token, which ends the stream
    for sink in sinks:
        assert len(sink.calls) <= 30 < sum(map(len, sink.calls))
        assert all(len(set(names)) == len(names) for names in sink.calls)


async def test_a_queue_is_freed_without_the_garbage_collector() -> None:
    """An engine collects rarely. Planted: a queue that refers to itself."""
    gc.disable()
    try:
        freed, planted = (ResultQueue(asyncio.get_running_loop()) for _ in range(2))
        planted.itself = planted  # type: ignore[attr-defined]
        seen = [weakref.ref(freed), weakref.ref(planted)]
        assert freed.token_sink is freed
        del freed, planted
        assert [one() is None for one in seen] == [True, False]
    finally:
        gc.enable()
