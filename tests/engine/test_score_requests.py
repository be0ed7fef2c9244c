"""Scoring through the engine: the same floats however the items are cut, shared, cached or accompanied."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.channels import CallQueue
from engine.model_runner import scored_rows
from engine.requests import EngineError, ErrorCode, GenerateRequest, RowStatus, ScoreRequest, ScoreResult
from engine.scheduler.score_batcher import MAX_PASSED
from tests.support import toy_model

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
both = pytest.mark.parametrize("overlap", [False, True])

PREFIX = list(range(100, 131))
LABELS = (65, 66, 200)


def some_items(count: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, rng.integers(0, 23)).tolist() for _ in range(count)]


async def expected_rows(make_rig: MakeRig, score_job: MakeScore, items: list[list[int]], full: bool) -> bytes:
    """Each row alone, from the model itself: no engine, one sequence over fresh slots."""
    model = make_rig(start=False).model
    rows = []
    for item in items:
        ids = np.array([*PREFIX, *item], np.int32)
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, ids, np.array([len(ids) - 1], np.int32))
        logits = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32))
        scores = scored_rows(logits, np.array(LABELS)) if full else scored_rows(logits[:, list(LABELS)], None)
        rows.append(scores.numpy())
    return np.concatenate(rows).tobytes()


@pytest.mark.full(keep=1)
@both
@pytest.mark.parametrize("full", [True, False])
async def test_rows_are_the_same_together_alone_split_and_cached(
    make_rig: MakeRig, score_job: MakeScore, overlap: bool, full: bool
) -> None:
    items = some_items(41)
    expected = await expected_rows(make_rig, score_job, items, full)
    for fields in ({}, {"prefix_cache": False}, {"token_budget": 5}, {"token_budget": 37}, {"num_slots": 57}):
        rig = make_rig(overlap=overlap, **fields)
        for _ in range(2):  # computed, then cached
            result: ScoreResult = await asyncio.wait_for(rig.engine.score(score_job(PREFIX, items, full=full)), 30)
            assert result.label_logprobs.tobytes() == expected
            assert not result.status.any()
        alone = [await rig.engine.score(score_job(PREFIX, [item], full=full)) for item in items]
        assert b"".join(one.label_logprobs.tobytes() for one in alone) == expected
        halves = await asyncio.gather(
            rig.engine.score(score_job(PREFIX, items[:17], full=full)),
            rig.engine.score(score_job(PREFIX, items[17:], full=full)),
            rig.engine.score(score_job(PREFIX[:9], items[:3], labels=(1, 2), full=not full)),
        )
        assert b"".join(half.label_logprobs.tobytes() for half in halves[:2]) == expected


async def test_the_prefix_is_computed_once_and_rows_say_what_was_cached(
    make_rig: MakeRig, score_job: MakeScore
) -> None:
    items = [[1, 2, 3], [4], [], [5, 6]]
    rig = make_rig()
    first = await rig.engine.score(score_job(PREFIX, items))
    computed = rig.engine.stats().step_tokens["score"]
    assert computed == len(PREFIX) + 3 + 1 + 1 + 2
    assert first.cached.tolist() == [0, 31, 30, 31]
    second = await rig.engine.score(score_job(PREFIX, items))
    assert rig.engine.stats().step_tokens["score"] == computed + 7
    assert second.cached.tolist() == [31, 31, 30, 31]


@both
async def test_scoring_and_generation_do_not_touch_each_other(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob, overlap: bool
) -> None:
    items = some_items(60, 4)
    expected = await expected_rows(make_rig, score_job, items, True)
    requests = [generate_job(PREFIX[:n], seed=n, max_tokens=25, logprobs=1) for n in range(1, 9)]
    alone = await make_rig().together(*requests)
    for fields in ({}, {"token_budget": 33}, {"num_slots": 130, "admission_tokens": 4}):
        rig = make_rig(overlap=overlap, **fields)
        heard, *scores = await asyncio.wait_for(
            asyncio.gather(rig.together(*requests), *(rig.engine.score(score_job(PREFIX, items)) for _ in range(3))), 30
        )
        assert heard == alone
        assert {score.label_logprobs.tobytes() for score in scores} == {expected}


async def test_raw_logits_are_the_models_own_beside_any_neighbour(make_rig: MakeRig, score_job: MakeScore) -> None:
    items, labels = some_items(9), (65,)
    model = make_rig(start=False).model
    expected = []
    for item in items:
        ids = np.array([*PREFIX, *item], np.int32)
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, ids, np.array([len(ids) - 1], np.int32))
        expected.append(model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32))[:, list(labels)])
    engine = make_rig().engine
    raw = {"labels": labels, "full": False, "raw_logits": True}
    requests = [score_job(PREFIX, items[:5], **raw), score_job(PREFIX, items, labels=labels, full=False)]
    first, other, last = await asyncio.gather(*map(engine.score, [*requests, score_job(PREFIX, items[5:], **raw)]))
    found = np.concatenate((first.label_logprobs, last.label_logprobs))
    assert found.tobytes() == torch.cat(expected).numpy().tobytes() and len(np.unique(found)) > 1
    assert not other.label_logprobs.any()  # the softmax of one label: what a neighbour's head would give


@pytest.mark.parametrize("fields", [{"full": True}, {"full": False}, {"full": False, "raw_logits": True}])
async def test_a_nonfinite_row_sets_its_own_status_only(
    make_rig: MakeRig, score_job: MakeScore, fields: dict[str, bool]
) -> None:
    items = some_items(9, 2)
    good = await make_rig().engine.score(score_job(PREFIX, items, labels=(0, 7), **fields))
    for token in (toy_model.NAN, toy_model.INF, toy_model.EMPTY):
        poisoned = [*items[:4], [3, token], *items[4:]]
        result = await make_rig().engine.score(score_job(PREFIX, poisoned, labels=(0, 7), **fields))
        assert result.status.tolist() == [0] * 4 + [RowStatus.NONFINITE] + [0] * 5
        assert np.delete(result.label_logprobs, 4, 0).tobytes() == good.label_logprobs.tobytes()


async def test_a_raising_item_fails_its_job_and_solo_spares_the_neighbour(
    make_rig: MakeRig, score_job: MakeScore
) -> None:
    rig = make_rig()
    bad = score_job(PREFIX, [[1], [toy_model.RAISE]], isolated=True)
    answers = await asyncio.gather(
        rig.engine.score(bad), rig.engine.score(score_job(PREFIX, [[1], [2]])), return_exceptions=True
    )
    assert isinstance(answers[0], EngineError)
    assert answers[0].code is ErrorCode.STEP_FAILED
    assert isinstance(answers[1], ScoreResult)
    assert rig.engine.stats().failed_steps == 1


def names(step: Any) -> list[str]:
    return [state.request.request_id for state in step.requests()]


async def test_a_small_job_is_not_held_up_by_a_huge_one(make_rig: MakeRig, score_job: MakeScore) -> None:
    """Counted steps: beside 20,000 rows, a one-row request is in the first or second step planned after it came."""
    steps: list[set[str]] = []
    entered: dict[str, int] = {}
    rig = make_rig(
        token_budget=128,
        max_queued_tokens=1 << 20,  # however slow the machine
        start=False,
        before_step=lambda step: steps.append(set(names(step))),
    )
    enter = rig.engine.core.tracker.add

    def note(state: Any) -> None:
        entered[state.request.request_id] = len(steps)
        enter(state)

    rig.engine.core.tracker.add = note
    rig.engine.start()
    huge = score_job(PREFIX, [[n % 250, n // 250] for n in range(20_000)], tenant="t")
    running = asyncio.create_task(rig.engine.score(huge))
    while len(steps) < 3:
        await asyncio.sleep(0)
    for n in range(20):
        request = score_job([n], [[n]], tenant="t" if n % 2 else "")
        await rig.engine.score(request)
        first = next(at for at, names in enumerate(steps) if request.request_id in names)
        assert first - entered[request.request_id] <= 1
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_jobs_of_one_tenant_share_one_deficit(make_rig: MakeRig, score_job: MakeScore) -> None:
    """Nine requests of one tenant against one of another: the other gets about half of the tokens while both wait."""
    tokens = {"many": 0, "one": 0}

    def count(step: Any) -> None:
        if min(left.values()) > 0:
            for state, n in step.charges:
                tokens[state.tenant] += n
                left[state.tenant] -= n

    items = [[n % 250, n // 250, 7, 8] for n in range(500)]
    left = {"many": 9 * 2_000, "one": 2_000}
    rig = make_rig(token_budget=512, before_step=count, start=False)
    requests = [score_job([n], items, tenant="one" if n == 0 else "many") for n in range(10)]
    await rig.score_queued(requests)
    assert 0.3 < tokens["one"] / sum(tokens.values()) < 0.7


@pytest.mark.parametrize("most", [MAX_PASSED, 10_000])
async def test_the_rest_of_a_step_is_offered_to_so_many_jobs_and_not_to_all(
    make_rig: MakeRig, score_job: MakeScore, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """200 rows of seven tokens, in steps of 20. Planted beside it: no bound, where every step asks all that wait."""
    monkeypatch.setattr("engine.scheduler.score_batcher.MAX_PASSED", most)
    asked: list[int] = []
    rig = make_rig(token_budget=20, start=False, before_step=lambda step: asked.append(0))
    fitting = rig.engine.core.scheduler.score_batcher._fitting

    def count(*given: Any) -> int:
        asked[-1:] = [asked[-1] + 1] if asked else [1]
        return int(fitting(*given))

    rig.engine.core.scheduler.score_batcher._fitting = count
    requests = [score_job([], [[n, *range(6)]]) for n in range(200)]
    together = await rig.score_queued(requests)
    assert (max(asked) <= MAX_PASSED + 2) == (most == MAX_PASSED)
    for request, found in zip(requests[::40], together[::40], strict=True):
        assert found.label_logprobs.tobytes() == (await rig.engine.score(request)).label_logprobs.tobytes()


async def test_jobs_with_different_labels_share_a_step(make_rig: MakeRig, score_job: MakeScore) -> None:
    """Each gets its own columns, whatever the longest list of the step is."""
    lists = ((65,), (66, 200, 7), (200, 65))
    steps: list[int] = []
    rig = make_rig(before_step=lambda step: steps.append(len(step.parts)))
    requests = [score_job([1, 2, 3, index], [[4], [5, 6]], labels=labels) for index, labels in enumerate(lists)]
    together = await asyncio.gather(*(rig.engine.score(request) for request in requests))
    assert max(steps) > 1
    for index, (labels, found) in enumerate(zip(lists, together, strict=True)):
        alone = await rig.engine.score(score_job([1, 2, 3, index], [[4], [5, 6]], labels=labels))
        assert found.label_logprobs.shape == (2, len(labels))
        assert found.label_logprobs.tobytes() == alone.label_logprobs.tobytes()


@pytest.mark.parametrize("honest", [True, False])
async def test_requests_that_begin_in_one_round_of_the_loop_are_in_one_step(
    make_rig: MakeRig, score_job: MakeScore, monkeypatch: pytest.MonkeyPatch, honest: bool
) -> None:
    """However long the loop takes to begin them. Planted beside it: each wakes the step thread."""
    if not honest:
        monkeypatch.setattr(CallQueue, "post_with_others", lambda queue, call, loop: queue.post(call))
    steps: list[int] = []
    rig = make_rig(before_step=lambda step: steps.append(len(step.requests())))

    async def score(number: int) -> ScoreResult:
        time.sleep(0.002)  # the step thread could begin meanwhile
        found: ScoreResult = await rig.engine.score(score_job([], [[number, 4, 5]]))
        return found

    await rig.engine.core.passed()  # the thread waits from here on
    await asyncio.gather(*map(score, range(8)))
    assert (steps == [8]) is honest


def seen_sequences(rig: Any) -> list[ScheduledSequence]:
    """The sequences of all steps, as they are computed."""
    seen: list[ScheduledSequence] = []

    def forward(kind: StepKind, runs: list[ScheduledSequence]) -> None:
        seen.extend(runs)

    rig.model.on_forward = forward
    return seen


async def test_items_of_a_query_name_one_context(make_rig: MakeRig, score_job: MakeScore) -> None:
    """Checks the key by which attention groups them (`engine.batch.shared_prefix`). The first one is computed with the
    prefix."""
    rig = make_rig(start=False)
    seen = seen_sequences(rig)
    rig.engine.start()
    await rig.engine.score(score_job(PREFIX, [[7], [1, 2], [3], [4, 5, 6]]))
    assert [len(one.context) for one in seen] == [0, len(PREFIX), len(PREFIX), len(PREFIX)]
    assert all(one.context is seen[1].context for one in seen[1:])


async def test_the_prefix_and_the_first_item_are_one_sequence(make_rig: MakeRig, score_job: MakeScore) -> None:
    rig = make_rig(start=False)
    seen = seen_sequences(rig)
    rig.engine.start()
    first = await rig.engine.score(score_job(PREFIX, [[1, 2, 3]]))
    again = await rig.engine.score(score_job(PREFIX, [[1, 2, 3]]))
    longer = await rig.engine.score(score_job([*PREFIX, 9], [[1, 2, 3]]))
    empty = await rig.engine.score(score_job([*PREFIX, 8], [[]]))  # its row is the prefix's last token
    found = [(len(one.context), len(one.write), one.rows.tolist()) for one in seen]
    size = len(PREFIX)
    assert found == [
        (0, size + 3, [size + 2]),
        (size, 3, [2]),  # the prefix is cached, the item is not
        (size, 4, [3]),
        (size, 1, []),
        (size, 1, [0]),
    ]
    assert [one.cached.tolist() for one in (first, again, longer, empty)] == [[0], [size], [size], [size]]


async def test_an_item_that_does_not_fit_behind_the_prefix_has_a_step_of_its_own(
    make_rig: MakeRig, score_job: MakeScore
) -> None:
    rig = make_rig(start=False, token_budget=len(PREFIX) + 2)
    seen = seen_sequences(rig)
    rig.engine.start()
    await rig.engine.score(score_job(PREFIX, [[1, 2, 3]]))
    assert [(len(one.context), len(one.write)) for one in seen] == [(0, len(PREFIX)), (len(PREFIX), 3)]
