"""Small loads are cut into small steps, and only where each of their steps would be one."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import StepKind, StepSize
from engine.config import EngineConfig
from engine.requests import GenerateRequest, ScoreRequest
from engine.scheduler.policy import StepPolicy
from engine.scheduler.request_state import Phase

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
LARGEST = StepSize(tokens=128, sequences=16, attended=4_096)
MOST = 16_384
ITEM = 16


def scores(tokens: int, rows: int = 1, prefix: int = 0) -> Any:
    request = SimpleNamespace(prefix=range(prefix))
    return SimpleNamespace(queued=tokens, items=rows + 3, next_item=3, request=request, part_slots=())


def prompt(tokens: int, *rows: Any) -> Any:
    return SimpleNamespace(request=SimpleNamespace(prompt=range(tokens)), branches=rows)


def row(phase: Phase, to_compute: int = 0, computed: int = 0) -> Any:
    return SimpleNamespace(phase=phase, to_compute=to_compute, computed=computed)


WAITS = row(Phase.WAITING)


@pytest.mark.parametrize(
    ("prompts", "waiting", "cut"),
    [
        ([], [scores(128, 8)] * 4, True),
        ([], [scores(128, 8)] * 4 + [scores(1)], False),  # too much for four of them
        ([], [scores(512, 64)], True),
        ([], [scores(512, 65)], False),  # too many rows for each to take its part
        ([], [scores(100, 16)], True),
        ([], [scores(100, 17)], False),
        ([], [scores(384, 8, 1_920)], False),  # contexts too long
        ([], [scores(384, 8, 1_480)], True),
        ([], [scores(256, 8, 1_500)], 64),  # too long for two steps, and not for four of half the tokens
        ([], [scores(257, 8, 1_500)], False),
        ([], [scores(256, 32, 250)], 64),
        ([], [scores(256, 33, 250)], False),  # half the tokens have room for half the rows
        ([prompt(256, WAITS, WAITS, WAITS)], [scores(256, 8)], True),  # one prompt, for all that wait for it
        ([prompt(257, WAITS)], [scores(256, 8)], False),
        ([prompt(900, row(Phase.PREFILL, 300, 600), row(Phase.DECODE))], [], True),
        ([prompt(900, row(Phase.PREFILL, 300, 600), WAITS)], [], False),
        ([prompt(9_000, row(Phase.PREFILL, 300, 12_000))], [], False),
        ([prompt(9_000, row(Phase.PREFILL, 0, 9_000), row(Phase.CLOSED))], [], True),
    ],
)
def test_few_tokens_are_cut_where_all_their_steps_are_small(prompts: Any, waiting: Any, cut: int | bool) -> None:
    policy = StepPolicy(EngineConfig(), torch.device("cpu"))
    policy.largest_graphed = LARGEST
    assert policy.graphed_tokens(MOST, prompts, waiting) == (LARGEST.tokens if cut is True else cut or None)


def test_steps_that_are_as_small_anyway_or_cost_as_much_are_not_cut() -> None:
    policy = StepPolicy(EngineConfig(), torch.device("cpu"))
    assert policy.graphed_tokens(MOST, [], [scores(200)]) is None
    policy.largest_graphed = LARGEST
    assert policy.graphed_tokens(LARGEST.tokens, [], [scores(200)]) is None
    assert policy.graphed_tokens(LARGEST.tokens + 1, [], [scores(200)]) == LARGEST.tokens
    long = scores(256, 8, 1_500)  # contexts for which steps of half the tokens have room
    assert policy.graphed_tokens(LARGEST.tokens, [], [long]) == LARGEST.tokens // 2
    assert policy.graphed_tokens(LARGEST.tokens // 2, [], [long]) is None


async def together(
    make_rig: MakeRig, score_job: MakeScore, requests: int, largest: StepSize | None, **config: Any
) -> tuple[list[Any], list[tuple[int, bool]]]:
    """Returns the answers to requests of one item each that come in the first step, and the later steps: tokens, and
    whether there was more work than steps hold."""
    steps: list[tuple[int, bool]] = []
    began, come = threading.Event(), threading.Event()
    rig = make_rig(start=False, before_step=lambda step: steps.append((step.tokens, step.waiting)), **config)
    rig.model.prefill_graph_limit = largest

    def forward(kind: StepKind, sequences: Any) -> None:
        began.set()
        come.wait(30)

    rig.model.on_forward = forward
    rig.engine.start()
    first = asyncio.create_task(rig.engine.score(score_job([], [[7] * ITEM])))
    await asyncio.to_thread(began.wait, 30)
    tasks = [asyncio.create_task(rig.engine.score(score_job([], [[n % 250] * ITEM]))) for n in range(requests)]
    while rig.engine.core.tracker.queued_tokens < (requests + 1) * ITEM:
        await asyncio.sleep(0)
    come.set()
    found = await asyncio.gather(first, *tasks)
    return [one.label_logprobs.tobytes() for one in found], steps[1:]


async def test_jobs_that_came_together_come_apart(make_rig: MakeRig, score_job: MakeScore) -> None:
    small, steps = await together(make_rig, score_job, 32, LARGEST)
    assert steps == [(LARGEST.tokens, False)] * 4
    large, planted = await together(make_rig, score_job, 32, None)
    assert planted == [(32 * ITEM, False)]  # and they would come again together
    assert small == large


async def test_more_than_few_steps_hold_is_computed_as_before(make_rig: MakeRig, score_job: MakeScore) -> None:
    """And only those steps tell how fast a queue is worked off."""
    _, steps = await together(make_rig, score_job, 64, LARGEST, token_budget=256)
    assert steps == [(256, True)] * 2 + [(LARGEST.tokens, False)] * 4


async def test_prompts_are_read_in_small_steps(make_rig: MakeRig, generate_job: MakeJob) -> None:
    sizes: list[int] = []
    rig = make_rig(
        start=False,
        max_model_len=400,
        before_step=lambda step: sizes.append(step.tokens) if step.kind is StepKind.PREFILL else None,
    )
    rig.model.prefill_graph_limit = LARGEST
    rig.engine.start()
    prompt = np.arange(300) % 250
    found = await rig.run(generate_job(prompt, max_tokens=3))
    assert sizes == [128, 128, 44]
    plain = make_rig(max_model_len=400)
    assert found == await plain.run(generate_job(prompt, max_tokens=3))


async def test_beside_running_rows_steps_stay_as_short_as_they_may_wait(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore
) -> None:
    """Steps take 0.1 ms a token, so that a gap of 4 ms holds 40."""
    now, sizes = [0.0], list[int]()
    rig = make_rig(start=False, max_model_len=1_000, decode_gap_s=0.004, clock=lambda: now[0])

    def forward(kind: StepKind, sequences: Any) -> None:
        tokens = sum(len(run.write) for run in sequences)
        now[0] += 0.0001 * tokens
        if kind is StepKind.SCORE:
            sizes.append(tokens)

    rig.model.on_forward, rig.model.prefill_graph_limit = forward, LARGEST
    rig.engine.start()
    stream = asyncio.create_task(rig.run(generate_job([1, 2], max_tokens=900)))
    while rig.model.steps < 3:
        await asyncio.sleep(0)
    await rig.engine.score(score_job([], [[n] * 10 for n in range(40)]))
    stream.cancel()
    assert sizes[0] == 120  # before any rate is known, the small step's
    assert max(sizes[1:]) == 40
