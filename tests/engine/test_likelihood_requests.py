"""Log-probabilities of given tokens: the same floats however rows are cut, shared, cached or accompanied."""

import asyncio
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.malloc import trim
from engine.batch.input_batch import ScheduledSequence, StepKind, size_of
from engine.kv_cache.manager import PrefixCache, TreeNode
from engine.requests import (
    EngineError,
    ErrorCode,
    GenerateRequest,
    Int32s,
    LikelihoodRequest,
    LikelihoodResult,
    RowStatus,
    ScoreRequest,
)
from engine.scheduler import request_state, score_batcher
from tests.support import toy_model

MakeRig = Callable[..., Any]
MakeScore = Callable[..., ScoreRequest]
MakeJob = Callable[..., GenerateRequest]
both = pytest.mark.parametrize("overlap", [False, True])

PREFIX = list(range(100, 123))
LEAST = 100_000 * toy_model.VOCAB_SIZE * 4  # bytes of a float32 logit for each token of prompt and vocabulary
BOUND = 0.9 * LEAST
CHOSEN = (5, 250)
TOP = 3
FIELDS = ("logprobs", "ranks", "greedy", "top_ids", "top_logprobs", "chosen_logprobs")


def likelihood_job(
    prefix: Sequence[int], rows: Sequence[tuple[Sequence[int], int]], **fields: Any
) -> LikelihoodRequest:
    """Rows are (own tokens, how many of the last are wanted); what a row may share with the one before it shares."""
    shared = [0]
    for (before, _), (own, wanted) in itertools.pairwise(rows):
        same = next(
            (i for i, (a, b) in enumerate(zip(before, own, strict=False)) if a != b), min(map(len, (before, own)))
        )
        shared.append(min(same, len(before) - 1, len(own) - wanted - 1))
    ids = [list(own[share:]) for (own, _), share in zip(rows, shared, strict=True)]
    given: dict[str, Any] = {
        "request_id": "l",
        "prefix": np.array(prefix, np.int32),
        "ids": np.array([*itertools.chain(*ids)], np.int32),
        "starts": np.cumsum([0, *map(len, ids)]).astype(np.int32),
        "shared": np.array(shared, np.int32),
        "wanted": np.array([wanted for _, wanted in rows], np.int32),
        "top": TOP,
        "chosen": np.array(CHOSEN, np.int32),
    }
    return LikelihoodRequest(**given | fields)


def some_rows(count: int, seed: int = 1, longest: int = 40) -> list[tuple[list[int], int]]:
    """Contexts of two to four continuations each, as a request with labels of several tokens has them."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[list[int], int]] = []
    while len(rows) < count:
        context = rng.integers(0, 250, rng.integers(1, longest)).tolist()
        for _ in range(int(rng.integers(2, 5))):
            tail = rng.integers(0, 250, rng.integers(1, 9)).tolist()
            rows.append((context + tail, len(tail)))
    return rows[:count]


def plain(values: LikelihoodResult) -> list[bytes]:
    return [getattr(values, name).tobytes() for name in FIELDS]


def reference(make_rig: MakeRig, prefix: Sequence[int], rows: Sequence[tuple[Sequence[int], int]]) -> list[bytes]:
    """From the model itself, a row at a time over fresh slots, in float64 and by a sort."""
    model = make_rig(start=False).model
    found: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for own, wanted in rows:
        ids = np.array([*prefix, *own], np.int32)
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, ids, np.arange(len(ids), dtype=np.int32))
        logits = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).double().numpy()
        for at in range(len(ids) - wanted, len(ids)):
            z, target = logits[at - 1], int(ids[at])
            logprobs = (z - z.max() - np.log(np.exp(z - z.max()).sum())).astype(np.float32)
            order = np.argsort(-z, kind="stable")
            values = (
                logprobs[target], np.int32(1 + int(np.flatnonzero(order == target)[0])), z[target] == z.max(),
                order[:TOP].astype(np.int32), logprobs[order[:TOP]], logprobs[list(CHOSEN)],
            )  # fmt: skip
            for name, value in zip(FIELDS, values, strict=True):
                found[name].append(value)
    return [np.array(found[name]).tobytes() for name in FIELDS]


@pytest.mark.full(keep=1)
@both
async def test_tokens_are_the_same_together_alone_in_chunks_and_cached(make_rig: MakeRig, overlap: bool) -> None:
    rows = some_rows(23)
    expected = reference(make_rig, PREFIX, rows)
    settings: list[dict[str, Any]] = [{}, {"prefix_cache": False}, {"num_slots": 75}]
    settings += [{"token_budget": n} for n in (2, 7, 64)] + [{"max_targets": n} for n in (1, 5)]
    for fields in settings:
        rig = make_rig(overlap=overlap, **fields)
        for _ in range(2):  # computed, then with the prefix cached
            found = await asyncio.wait_for(rig.engine.likelihood(likelihood_job(PREFIX, rows)), 30)
            assert plain(found) == expected
            assert not found.status.any()
        alone = [await rig.engine.likelihood(likelihood_job(PREFIX, [row])) for row in rows]
        assert [b"".join(parts) for parts in zip(*map(plain, alone), strict=True)] == expected
        halves = await asyncio.gather(
            rig.engine.likelihood(likelihood_job(PREFIX, rows[:9])),
            rig.engine.likelihood(likelihood_job(PREFIX, rows[9:])),
            rig.engine.likelihood(likelihood_job(PREFIX[:3], rows[:4], top=0, chosen=np.empty(0, np.int32))),
        )
        assert [a + b for a, b in zip(plain(halves[0]), plain(halves[1]), strict=True)] == expected


@both
async def test_every_token_of_a_prompt_also_where_the_cache_holds_it(
    make_rig: MakeRig, generate_job: MakeJob, score_job: MakeScore, overlap: bool
) -> None:
    prompt = some_rows(1, 5, 200)[0][0]
    expected = reference(make_rig, [], [(prompt, len(prompt) - 1)])
    for budget in (2, 7, 64, 512):
        rig = make_rig(overlap=overlap, token_budget=budget)
        await rig.run(generate_job(prompt))  # both caches know the prompt
        await rig.engine.score(score_job(prompt, [[1]]))
        for keep in (False, True, True):
            found = await rig.engine.likelihood(likelihood_job([], [(prompt, len(prompt) - 1)], keep=keep))
            assert plain(found) == expected
            assert found.cached.tolist() == [0]


async def test_a_kept_prompt_is_what_a_generation_finds(make_rig: MakeRig, generate_job: MakeJob) -> None:
    prompt = [7, *PREFIX, 9, 11]
    expected = await make_rig().run(generate_job(prompt, logprobs=2))
    rig = make_rig()
    await rig.engine.likelihood(likelihood_job([], [(prompt, len(prompt) - 1)], keep=True))
    computed = rig.engine.stats().computed_tokens
    assert computed == len(prompt) - 1
    assert await rig.run(generate_job(prompt, logprobs=2)) == expected
    assert rig.engine.stats().step_tokens["prefill"] == 1


async def test_prefix_and_contexts_are_computed_once(make_rig: MakeRig) -> None:
    context = [1, 2, 3, 4]
    rows = [([*context, 5], 1), ([*context, 6, 7], 2), ([*context, 8], 1), ([9, 9], 1)]
    rig = make_rig()
    found = await rig.engine.likelihood(likelihood_job(PREFIX, rows))
    assert rig.engine.stats().step_tokens["score"] == len(PREFIX) + 4 + 2 + 1 + 1
    assert found.cached.tolist() == [0, *(len(PREFIX) + n for n in (3, 3, 0))]
    again = await rig.engine.likelihood(likelihood_job(PREFIX, rows))
    assert again.cached.tolist() == [len(PREFIX) + n for n in (0, 3, 3, 0)]


async def test_label_scores_and_generation_tell_the_same_floats(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob
) -> None:
    rig = make_rig(real_sampler=True)
    for prompt in ([1, 2, 3], [*PREFIX, 8]):
        for label in (5, 200):
            [value] = (await rig.engine.likelihood(likelihood_job([], [([*prompt, label], 1)]))).logprobs
            scored = await rig.engine.score(score_job(prompt, [[]], labels=[label]))
            chunks = await rig.engine.complete(generate_job(prompt, max_tokens=1, logprob_token_ids=(label,)))
            assert value == scored.label_logprobs[0, 0] == chunks[0].chosen_logprobs[0, 0]


@both
async def test_jobs_of_all_kinds_do_not_touch_each_other(
    make_rig: MakeRig, score_job: MakeScore, generate_job: MakeJob, overlap: bool
) -> None:
    """In little room: prefixes and unfinished rows are thrown out and computed again."""
    rows = some_rows(30, 4)
    expected = reference(make_rig, PREFIX, rows)
    requests = [generate_job(PREFIX[:n], seed=n, max_tokens=25, logprobs=1) for n in range(1, 9)]
    items = [own for own, _ in rows]
    alone = await make_rig().together(*requests)
    scored = (await make_rig().engine.score(score_job(PREFIX, items))).label_logprobs.tobytes()
    for fields in (
        {},
        {"token_budget": 17},
        {"num_slots": 130, "admission_tokens": 4},
        {"num_slots": 90, "token_budget": 9},
    ):
        rig = make_rig(overlap=overlap, **fields)
        many = [rig.engine.likelihood(likelihood_job(PREFIX, rows, cache_salt=str(i % 2))) for i in range(4)]
        heard, score, *found = await asyncio.wait_for(
            asyncio.gather(rig.together(*requests), rig.engine.score(score_job(PREFIX, items)), *many), 60
        )
        assert heard == alone
        assert score.label_logprobs.tobytes() == scored
        assert all(plain(one) == expected for one in found)


async def test_steps_are_bounded_by_what_they_attend_to(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a long prefix each name all of it."""
    sizes: list[int] = []
    jobs = [likelihood_job(range(100), [([n, n + 1], 1) for n in range(count)]) for count in (40, 30)]
    wanted = [await make_rig(token_budget=4_096).engine.likelihood(job) for job in jobs]
    monkeypatch.setattr(score_batcher, "MAX_STEP_ATTENDED", 1_000)
    rig = make_rig(token_budget=4_096)
    rig.model.on_forward = lambda kind, sequences: sizes.append(size_of(sequences).attended)
    found = await asyncio.gather(*(rig.engine.likelihood(job) for job in jobs))
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert max(sizes) < 1_000 + 250 and len(sizes) > 5


async def test_two_jobs_that_do_not_fit_together_both_end(make_rig: MakeRig) -> None:
    """Each needs most of the pool and holds a part of it between steps."""
    prompts = [np.random.default_rng(seed).integers(0, 250, 180).tolist() for seed in range(3)]
    rig = make_rig(num_slots=200, token_budget=8)
    requests = [rig.engine.likelihood(likelihood_job([], [(prompt, 179)])) for prompt in prompts]
    found = await asyncio.wait_for(asyncio.gather(*requests), 60)
    for prompt, one in zip(prompts, found, strict=True):
        assert plain(one) == reference(make_rig, [], [(prompt, 179)])
    assert rig.engine.stats().step_tokens["score"] < 3 * 179 * 3


async def test_a_nonfinite_row_sets_its_own_status_only(make_rig: MakeRig) -> None:
    rows = some_rows(6, 2)
    good = await make_rig().engine.likelihood(likelihood_job(PREFIX, rows))
    for token in (toy_model.NAN, toy_model.INF, toy_model.EMPTY):
        rig = make_rig()
        found = await rig.engine.likelihood(likelihood_job(PREFIX, [*rows, ([3, token, 4, 5], 3)]))
        assert found.status.tolist() == [0] * 6 + [RowStatus.NONFINITE]
        assert found.logprobs[: len(good.logprobs)].tobytes() == good.logprobs.tobytes()
        assert np.isnan(found.logprobs[-2:]).all()  # the first of the three was computed before the poison
        kept = await rig.engine.likelihood(likelihood_job([], [([3, token, 4], 2)], keep=True))
        assert kept.status.tolist() == [RowStatus.NONFINITE]
        assert rig.engine.stats().kv_slots_cached == len(PREFIX)  # nothing of it was kept


async def test_a_raising_row_fails_its_job_and_frees_what_it_held(make_rig: MakeRig) -> None:
    rig = make_rig(token_budget=7)
    with pytest.raises(EngineError) as error:
        await rig.engine.likelihood(likelihood_job(PREFIX, [*some_rows(5), ([*range(30), toy_model.RAISE, 1], 20)]))
    assert error.value.code is ErrorCode.STEP_FAILED


@pytest.mark.parametrize("tokens", [0, 5, 19, 60, 200])
async def test_a_cancelled_job_frees_what_it_held(make_rig: MakeRig, tokens: int) -> None:
    rig = make_rig(token_budget=6)
    task = asyncio.create_task(rig.engine.likelihood(likelihood_job(PREFIX, some_rows(40))))
    while rig.engine.stats().computed_tokens < tokens:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("fields", "code", "name"),
    [
        ({"prefix": [264]}, ErrorCode.INVALID_TOKEN_ID, "prefix"),
        ({"ids": [-1, 1, 1, 1, 1]}, ErrorCode.INVALID_TOKEN_ID, "ids"),
        ({"chosen": [264]}, ErrorCode.INVALID_TOKEN_ID, "chosen"),
        ({"chosen": [1] * 129}, ErrorCode.INVALID_VALUE, "chosen"),
        ({"top": 257}, ErrorCode.INVALID_VALUE, "top"),
        ({"top": True}, ErrorCode.INVALID_VALUE, "top"),
        ({"starts": [0, 4]}, ErrorCode.INVALID_VALUE, "starts"),
        ({"starts": [0, 4, 3, 5]}, ErrorCode.INVALID_VALUE, "starts"),
        ({"starts": [0]}, ErrorCode.INVALID_VALUE, "starts"),
        ({"shared": [1, 0]}, ErrorCode.INVALID_VALUE, "shared"),
        ({"shared": [0, -1]}, ErrorCode.INVALID_VALUE, "shared"),
        ({"shared": [0]}, ErrorCode.INVALID_VALUE, "shared"),
        ({"shared": [0, 3]}, ErrorCode.INVALID_VALUE, "shared"),
        ({"wanted": [1, 0]}, ErrorCode.INVALID_VALUE, "shared"),
        ({"wanted": [3, 1]}, ErrorCode.INVALID_VALUE, "wanted"),
        ({"wanted": [1, 2]}, ErrorCode.INVALID_VALUE, "wanted"),
        ({"keep": True}, ErrorCode.INVALID_VALUE, "keep"),
        ({"prefix": [1] * 255}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "ids"),
    ],
)
async def test_a_bad_job_is_refused_by_field(
    make_rig: MakeRig, fields: dict[str, Any], code: ErrorCode, name: str
) -> None:
    good = {"prefix": [1, 2], "ids": [3, 4, 5, 6, 7], "starts": [0, 3, 5], "shared": [0, 2], "wanted": [1, 1]}
    values: dict[str, Any] = good | fields
    values = {key: np.array(value, np.int32) if isinstance(value, list) else value for key, value in values.items()}
    rig = make_rig()
    with pytest.raises(EngineError) as error:
        await rig.engine.likelihood(LikelihoodRequest(request_id="l", **values))
    assert (error.value.code, error.value.field) == (code, name)
    await rig.engine.likelihood(likelihood_job([1, 2], [([3, 4, 5], 1), ([3, 4, 7], 1)]))


def own_bytes() -> int:
    """Memory of this process that is no file's, swapped out or not: a machine short of memory takes pages back."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


async def growth(make_rig: MakeRig, prompt: list[int], budget: int) -> tuple[int, LikelihoodResult]:
    """Returns the peak of bytes while a long prompt is scored, and its result."""
    seen: list[int] = []

    def watch(step: Any) -> None:
        seen.append(own_bytes())

    size = len(prompt)
    rig = make_rig(num_slots=size + 100, max_model_len=size + 10, max_running=2, token_budget=budget, before_step=watch)
    gc.collect()  # what earlier tests left would go while this one is watched,
    trim()  # and what it has freed would be used again unseen
    model, start = rig.model, own_bytes()
    true_forward = model.forward

    def forward(*given: Any) -> torch.Tensor:
        logits: torch.Tensor = true_forward(*given)
        seen.append(own_bytes())
        return logits

    model.forward = forward
    found = await rig.engine.likelihood(likelihood_job([], [(prompt, size - 1)]))
    return max(seen) - start, found


async def least_growth(make_rig: MakeRig, prompt: list[int], budget: int) -> tuple[int, LikelihoodResult]:
    """Returns the least of three peaks, and the last result: what other tests have left in the process, and its threads
    do meanwhile, can only add to one."""
    found = [await growth(make_rig, prompt, budget) for _ in range(3)]
    return min(grown for grown, _ in found), found[-1][1]


@pytest.mark.full
async def test_a_prompt_of_100_000_tokens_takes_the_memory_of_a_step(make_rig: MakeRig) -> None:
    prompt = np.random.default_rng(8).integers(0, 250, 100_000).tolist()
    grown, found = await least_growth(make_rig, prompt, 4_096)
    assert grown < BOUND, grown
    model = make_rig(start=False, num_slots=len(prompt) + 100).model
    slots, places = np.arange(1, len(prompt) + 1, dtype=np.int32), np.arange(5, len(prompt) - 1, 997, dtype=np.int32)
    run = ScheduledSequence(0, slots[:0], slots, np.array(prompt, np.int32), places)
    z = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).double().numpy()
    z -= z.max(1, keepdims=True)
    rows = (z - np.log(np.exp(z).sum(1, keepdims=True))).astype(np.float32)
    own = rows[np.arange(len(places)), np.array(prompt)[places + 1]]
    assert found.logprobs[places].tobytes() == own.tobytes()
    assert found.top_logprobs[places].tobytes() == np.sort(rows, 1)[:, : -TOP - 1 : -1].tobytes()


@pytest.mark.full
async def test_the_memory_test_would_see_all_logits_together(make_rig: MakeRig) -> None:
    prompt = np.random.default_rng(8).integers(0, 250, 100_000).tolist()
    grown, _ = await least_growth(make_rig, prompt, 1 << 20)
    assert grown > BOUND, grown


# Planted faults: what the tests above compare must be seen to differ.


async def test_positions_off_by_one_are_seen(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(5)
    expected = reference(make_rig, PREFIX, rows)
    true_targets = request_state._targets
    monkeypatch.setattr(request_state, "_targets", lambda request: np.roll(true_targets(request), 1))
    assert plain(await make_rig().engine.likelihood(likelihood_job(PREFIX, rows))) != expected


async def test_a_stale_cache_is_seen(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix served with the slots of another one."""
    rows = some_rows(5)
    expected = reference(make_rig, PREFIX, rows)
    rig = make_rig()
    await rig.engine.likelihood(likelihood_job(PREFIX, rows))
    assert plain(await rig.engine.likelihood(likelihood_job(PREFIX, rows))) == expected
    true_match = PrefixCache.match

    def stale(self: PrefixCache, key: Any, ids: Int32s) -> tuple[TreeNode, Int32s]:
        node, slots = true_match(self, key, ids)
        return node, slots[::-1]

    monkeypatch.setattr(PrefixCache, "match", stale)
    assert plain(await rig.engine.likelihood(likelihood_job(PREFIX, rows))) != expected
