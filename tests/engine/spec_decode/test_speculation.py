"""Verify steps over the toy give what plain decoding gives, or follow its distribution, whatever else happens."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind, size_of
from engine.config import SpeculationConfig
from engine.requests import EngineError, ErrorCode, GenerateChunk, GenerateRequest, LikelihoodRequest, ScoreRequest
from engine.spec_decode.draft_model import DraftModel
from gpu_sampler.output import VerifyOutput
from gpu_sampler.sampler import Sampler
from gpu_sampler.spec_decode import Rule
from tests.support.toy_model import EOS, NAN, ToyModel

MakeJob = Callable[..., GenerateRequest]
MakeScore = Callable[..., ScoreRequest]
RULES: Final[tuple[Rule, ...]] = ("strict", "standard", "block")


def by_draft(rule: Rule = "standard", seeded: Rule = "strict", **more: Any) -> dict[str, Any]:
    """Options of a rig with a draft model."""
    config = SpeculationConfig(
        method="draft_model", draft="toy", rejection_sample_method=rule, seeded_rejection_sample_method=seeded, **more
    )
    return {"real_sampler": True, "draft_blur": 0.3, "speculation": config}


def by_ngram(seeded: Rule = "strict", **more: Any) -> dict[str, Any]:
    config = SpeculationConfig(method="ngram", ngram_tokens=1, seeded_rejection_sample_method=seeded, **more)
    return {"real_sampler": True, "speculation": config}


def requests(generate_job: MakeJob, count: int = 12, **fields: Any) -> list[GenerateRequest]:
    """Prompts that share beginnings and differ in length."""
    return [
        generate_job(
            [*range(5, 9 + i % 5), *range(50, 53 + i)],
            **{"max_tokens": 5 + 3 * i, "stop_token_ids": (EOS, 17), "logprobs": 2, **fields, "seed": 100 + i},
        )
        for i in range(count)
    ]


async def test_a_draft_model_catches_up_in_steps_of_the_budget(make_rig: Any, generate_job: MakeJob) -> None:
    """Rows that went on without drafts have much that it has not read."""
    jobs = [generate_job([n, 3], max_tokens=180, logit_bias=((EOS, -100.0),)) for n in range(10, 18)]
    rig = make_rig(**by_draft(adaptive=True), max_running=8, token_budget=64)
    policy, sizes = rig.engine.core.scheduler.policy, list[int]()
    ended = policy.decode_ended
    policy.decode_ended = lambda drafted, rows, tokens, _: ended(drafted, rows, tokens, 100.0 if drafted else 1.0)
    fill = rig.draft.fill

    def counted(kind: StepKind, sequences: Any, table: Any) -> None:
        sizes.append(size_of(sequences).tokens)
        fill(kind, sequences, table)

    rig.draft.fill = counted
    rig.draft.on_forward = lambda kind, sequences: sizes.append(size_of(sequences).tokens)
    assert [len(one.tokens) for one in await rig.together(*jobs)] == [180] * 8
    assert 64 <= max(sizes) <= 64 + 2 * 8


def seeded(made: list[GenerateRequest]) -> list[GenerateRequest]:
    """The same, with the seeds as their clients' own."""
    return [replace(job, params=replace(job.params, seed=job.seed)) for job in made]


@pytest.mark.full(keep=3)
@pytest.mark.risk("D1")
@pytest.mark.parametrize("options", [by_draft(), by_draft(draft_sample_method="greedy"), by_ngram()])
@pytest.mark.parametrize("k", [1, 3, 8])
async def test_a_seeded_row_under_strict_and_a_greedy_row_are_those_of_plain_decoding_bit_for_bit(
    make_rig: Any, generate_job: MakeJob, options: dict[str, Any], k: int
) -> None:
    options = options | {"speculation": replace(options["speculation"], num_speculative_tokens=k)}
    few = {"allowed_token_ids": (30, 31, 32)}  # n-grams come again
    asked = [*seeded(requests(generate_job)), *requests(generate_job, 6, temperature=0.0)]
    asked += [*seeded(requests(generate_job, 4, **few)), *requests(generate_job, 4, temperature=0.0, **few)]
    plain = await make_rig(real_sampler=True).together(*asked)
    rig = make_rig(**options)
    assert await rig.together(*asked) == plain
    assert sum(rig.engine.stats().drafts_accepted) > 0
    assert len({reported.finish for reported in plain}) == 2  # rows that a stop id ends are among them


async def test_results_are_handed_over_behind_the_next_launch_where_the_device_waits_for_it(
    make_rig: Any, generate_job: MakeJob
) -> None:
    """The order of CUDA: the same tokens, each hand-over one launch later, and the last one immediately."""
    asked = requests(generate_job, 5)
    at_once = await make_rig(**by_draft()).together(*asked)
    rig, order = make_rig(**by_draft(), start=False), list[str]()
    launch, flush, read = rig.engine.core._launch, rig.engine.core.results.flush, rig.engine.core._read

    def noted(name: str, honest: Callable[..., None]) -> Callable[..., None]:
        def note(*given: Any) -> None:
            if name != "flush" or rig.engine.core.results._batches:
                order.append(name)
            honest(*given)

        return note

    rig.engine.core._launches_before_hand_over = True
    rig.engine.core._launch, rig.engine.core._read = noted("launch", launch), noted("read", read)
    rig.engine.core.results.flush = noted("flush", flush)
    rig.engine.start()
    assert await rig.together(*asked) == at_once
    steps = "".join(name[0] for name in order)
    assert "lfr" in steps and "rf" not in steps[:-2] and steps.endswith("rf")


class OffByOne(Sampler):
    """The planted fault: each row of a request is judged by the one behind it."""

    def verify(self, logits: Any, slots: Any, *rest: Any) -> VerifyOutput:
        rows = logits.reshape(len(slots), -1, logits.shape[-1])
        return super().verify(torch.roll(rows, 1, dims=1).reshape(logits.shape), slots, *rest)


@pytest.mark.risk("S3", planted=True)
async def test_rows_judged_by_their_neighbour_are_caught(make_rig: Any, generate_job: MakeJob) -> None:
    asked = requests(generate_job, temperature=0.0)
    plain = await make_rig(real_sampler=True).together(*asked)
    rig = make_rig(**by_draft())
    rig.engine.sampler.__class__ = OffByOne
    assert await rig.together(*asked) != plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_model_that_is_the_target_is_always_believed(
    make_rig: Any, generate_job: MakeJob, temperature: float
) -> None:
    """So nothing that it reads is stale, missing or another row's: prompts that are shared, chunked and found again,
    runs that end early, rows that are thrown out."""
    rig = make_rig(**by_draft("strict") | {"draft_blur": 0.0}, num_slots=100, token_budget=11, admission_tokens=1)
    await rig.together(*requests(generate_job, temperature=temperature))
    first = rig.engine.stats()
    assert first.preemptions > 0
    reported = await rig.run(generate_job([5, 6, 7], max_tokens=15, temperature=temperature))
    await rig.run(generate_job([5, 6, 7, *reported.tokens, 9], max_tokens=9, temperature=temperature))
    stats = rig.engine.stats()
    assert stats.cached_tokens > first.cached_tokens
    assert stats.drafts_reached == stats.drafts_accepted
    assert stats.drafted_tokens == sum(stats.drafts_reached) > 100


async def test_a_draft_model_that_did_not_see_the_prompt_is_caught(
    make_rig: Any, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(**by_draft("strict") | {"draft_blur": 0.0})

    def blind(self: DraftModel, runs: Sequence[ScheduledSequence]) -> None:
        for run in runs:
            self._model._pool[run.write] = 0  # type: ignore[attr-defined]
            self._seen[run.slot] = len(run.context) + len(run.write)

    monkeypatch.setattr(DraftModel, "prefill", blind)
    await rig.together(*requests(generate_job, 4))
    stats = rig.engine.stats()
    assert sum(stats.drafts_accepted) < sum(stats.drafts_reached)


async def test_what_was_scored_for_a_prompt_s_echo_is_the_draft_model_s_too(
    make_rig: Any, generate_job: MakeJob
) -> None:
    rig = make_rig(**by_draft("strict") | {"draft_blur": 0.0})
    prompt = np.arange(7, 29, dtype=np.int32)
    starts, none = np.array([0, len(prompt)], np.int32), np.zeros(1, np.int32)
    wanted = np.array([len(prompt) - 1], np.int32)
    job = LikelihoodRequest(
        request_id="l", prefix=prompt[:0], ids=prompt, starts=starts, shared=none, wanted=wanted, keep=True
    )
    await rig.engine.likelihood(job)
    await rig.run(generate_job(prompt.tolist(), max_tokens=13))
    stats = rig.engine.stats()
    assert stats.cached_tokens >= len(prompt) - 1
    assert stats.drafts_reached == stats.drafts_accepted
    assert sum(stats.drafts_accepted) > 0


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("rule", RULES)
async def test_a_row_preempted_or_moved_at_a_run_s_end_goes_on_as_if_nothing_had_happened(
    make_rig: Any, generate_job: MakeJob, rule: Rule
) -> None:
    asked = seeded(requests(generate_job, 6, max_tokens=18, stop_token_ids=(EOS,)))
    options = by_draft(seeded=rule)
    rig = make_rig(**options)
    runs = [[chunk async for chunk in rig.engine.generate(job)] for job in asked]
    wanted = [[int(token) for chunk in chunks for token in chunk.tokens] for chunks in runs]
    tight = make_rig(**options, num_slots=75, admission_tokens=1)
    assert [list(reported.tokens) for reported in await tight.together(*asked)] == wanted
    assert tight.engine.stats().preemptions > 0
    other = make_rig(**options)
    for job, chunks, tokens in zip(asked, runs, wanted, strict=True):
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])[:-1].tolist()
        assert len(ends) < len(tokens) - 1  # runs, not tokens
        for end in range(1, len(tokens)) if rule == "strict" else ends:
            moved = replace(job, emitted=(np.array(tokens[:end], np.int32),))
            assert list((await other.run(moved)).tokens) == tokens[end:], (rule, end)


@pytest.mark.parametrize("options", [by_draft(), by_ngram()])
async def test_a_row_ends_inside_a_run_at_its_first_stop_its_limit_and_not_before_its_least(
    make_rig: Any, generate_job: MakeJob, options: dict[str, Any]
) -> None:
    rig = make_rig(**options)
    free = await rig.run(generate_job([3, 4, 5], max_tokens=40, temperature=0.0))
    for place in (0, 1, 2, 5, 17):
        stop = free.tokens[place]
        first = free.tokens.index(stop)
        reported = await rig.run(generate_job([3, 4, 5], max_tokens=40, temperature=0.0, stop_token_ids=(stop,)))
        assert reported.tokens == free.tokens[: first + 1]
        assert (reported.finish, reported.stop_token) == ("stop", stop)
    for most in range(1, 12):
        reported = await rig.run(generate_job([3, 4, 5], max_tokens=most, temperature=0.0))
        assert reported.tokens == free.tokens[:most]
        assert reported.finish == "length"
    stop = free.tokens[1]
    reported = await rig.run(
        generate_job([3, 4, 5], max_tokens=40, min_tokens=7, temperature=0.0, stop_token_ids=(stop,))
    )
    assert stop not in reported.tokens[:7]
    assert len(reported.tokens) >= 7


async def test_a_request_fills_the_whole_context_without_a_token_beyond(make_rig: Any, generate_job: MakeJob) -> None:
    rig = make_rig(**by_draft(), max_model_len=24)
    reported = await rig.run(generate_job([3, 4, 5], max_tokens=21, temperature=0.0))
    assert len(reported.tokens) == 21


async def test_a_chunk_is_a_run_and_tells_what_was_drafted_for_it(make_rig: Any, generate_job: MakeJob) -> None:
    rig = make_rig(**by_draft())
    job = generate_job([3, 4, 5], max_tokens=30, temperature=0.0)
    chunks = [chunk async for chunk in rig.engine.generate(job)]
    assert chunks[0].drafted == 0  # the prompt's own token
    left = 29
    for chunk in chunks[1:]:
        assert chunk.drafted == min(4, left - 1)
        assert len(chunk.tokens) == chunk.accepted + 1
        left -= len(chunk.tokens)
    whole = (await rig.engine.complete(job))[0]
    assert whole.drafted == sum(chunk.drafted for chunk in chunks)
    assert whole.accepted == sum(chunk.accepted for chunk in chunks) > 0
    stats = rig.engine.stats()
    assert stats.drafted_tokens == 2 * whole.drafted
    assert sum(stats.drafts_accepted) == 2 * whole.accepted
    assert stats.drafts_missing_q == 0


async def test_a_row_whose_logits_are_not_finite_fails_alone(make_rig: Any, generate_job: MakeJob) -> None:
    rig = make_rig(**by_ngram())
    good = [generate_job([3, 4, 3, 4, 3], max_tokens=20, temperature=0.0) for _ in range(3)]
    alone = await rig.run(good[0])
    bad = generate_job([9, NAN, 9], max_tokens=20, temperature=0.0)
    answers = await asyncio.gather(*(rig.run(job) for job in (good[0], bad, *good[1:])), return_exceptions=True)
    assert isinstance(answers[1], EngineError)
    assert answers[1].code is ErrorCode.NONFINITE_LOGITS
    assert [answers[0], *answers[2:]] == [alone] * 3


async def test_a_failed_draft_costs_the_step_s_requests_and_no_others(make_rig: Any, generate_job: MakeJob) -> None:
    rig = make_rig(**by_draft())
    steps = itertools.count()

    def fail(kind: StepKind, runs: Sequence[ScheduledSequence]) -> None:
        if next(steps) == 3:
            raise RuntimeError("planted")

    rig.draft.on_forward = fail
    with pytest.raises(EngineError) as failed:
        await rig.run(generate_job([3, 4, 5], max_tokens=20))
    assert failed.value.code is ErrorCode.STEP_FAILED
    reported = await rig.run(generate_job([3, 4, 5], max_tokens=20))
    assert len(reported.tokens) == 20


async def test_plain_steps_follow_where_no_row_finds_a_draft(make_rig: Any, generate_job: MakeJob) -> None:
    rig = make_rig(**by_ngram())
    await rig.run(generate_job(list(range(3, 40)), max_tokens=4, temperature=0.0))
    stats = rig.engine.stats()
    assert stats.steps["decode"] + stats.steps["verify"] == 3
    assert stats.steps["decode"] > 0


async def test_a_drained_row_is_handed_over_at_a_run_s_end(make_rig: Any, generate_job: MakeJob) -> None:
    asked = seeded(requests(generate_job, 4, max_tokens=60, stop_token_ids=()))
    options = by_draft(seeded="standard")
    wanted = [list(reported.tokens) for reported in await make_rig(**options).together(*asked)]
    rig, other = make_rig(**options), make_rig(**options)
    rig.model.step_seconds = 0.01
    running = [asyncio.ensure_future(rig.run(job)) for job in asked]
    while rig.engine.stats().generated_tokens < 30:
        await asyncio.sleep(0.001)
    left = {job.request_id: job for job in await rig.engine.drain(0.0)}
    await asyncio.gather(*running, return_exceptions=True)
    assert len(left) == 4
    for job, tokens in zip(asked, wanted, strict=True):
        (emitted,) = left[job.request_id].emitted
        assert 0 < len(emitted) < 60
        assert [*emitted.tolist(), *(await other.run(left[job.request_id])).tokens] == tokens


# Every two features together, by every drafter and rule.

FEATURES: Final[dict[str, dict[str, Any]]] = {
    "seed": {"seeded": True},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "bias": {"logit_bias": ((30, 4.0), (31, -9.0))},
    "filters": {"top_k": 40, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "allowed": {"allowed_token_ids": tuple(range(20, 90))},
    "bad_words": {"bad_words_ids": ((40,), (41, 42), (50, 51, 52))},
    "min_tokens": {"min_tokens": 4},
    "stop": {"stop_token_ids": tuple(range(60, 75))},
    "n": {"n": 2},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprob_token_ids": (5, 250, 5)},
    "greedy": {"temperature": 0.0},
    "stream": {"stream": True},
    "cancel": {"cancel": True},
}
DRAFTERS: Final[dict[str, dict[str, Any]]] = {
    "off": {"real_sampler": True},
    "ngram": by_ngram("standard"),
    "ngram-strict": by_ngram(),
    "draft-standard": by_draft("standard", "standard"),
    "draft-block": by_draft("block", "block"),
    "draft-strict": by_draft("strict", "strict"),
    "draft-greedy": by_draft("standard", draft_sample_method="greedy"),
    "draft-synthetic": by_draft("synthetic", synthetic_acceptance_rates=(0.9, 0.8, 0.7, 0.6)),
}


def true_logprobs(model: ToyModel, prompt: Sequence[int], output: Sequence[int]) -> npt.NDArray[np.float64]:
    """[k, V] of plain decoding: the model's own rows after the prompt and after each token."""
    ids = np.array([*prompt, *output], np.int32)
    at = np.arange(1, len(ids) + 1, dtype=np.int32)
    rows = np.arange(len(prompt) - 1, len(ids) - 1, dtype=np.int32)
    run = ScheduledSequence(0, at[:0], at, ids, rows)
    logits = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).double()
    found: npt.NDArray[np.float64] = logits.log_softmax(-1).numpy()
    return found


class Cell:
    """One pair of features: its request, and what must hold of the answer."""

    def __init__(self, generate_job: MakeJob, number: int, names: Sequence[str]) -> None:
        fields: dict[str, Any] = {"max_tokens": 9}
        for name in names:
            fields |= FEATURES[name]
        self.stream, self.cancel = fields.pop("stream", False), fields.pop("cancel", False)
        own = fields.pop("seeded", False)
        self.prompt = [30 + number % 3, 31, 32, 30, 31, 40, 30 + number % 7]
        self.job = generate_job(self.prompt, seed=number, **fields)
        if own:
            (self.job,) = seeded([self.job])

    async def run(self, engine: Any, truth: ToyModel) -> int:
        """Tokens that were checked."""
        if not self.stream and not self.cancel:
            chunks = await engine.complete(self.job)
        else:
            chunks = []
            async with aclosing(engine.generate(self.job)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
                    if self.cancel and len(chunks) == 2:
                        break
        return sum(self._check(truth, [c for c in chunks if c.branch == b]) for b in range(self.job.params.n))

    def _check(self, truth: ToyModel, chunks: list[GenerateChunk]) -> int:
        params = self.job.params
        tokens = [int(token) for chunk in chunks for token in chunk.tokens]
        assert all(0 <= token < 258 for token in tokens)
        assert len(tokens) <= params.max_tokens
        if not self.cancel:
            assert sum(chunk.finish is not None for chunk in chunks) == 1
            assert chunks[-1].finish == ("stop" if tokens[-1] in params.stop_token_ids else "length")
        assert not {*tokens[:-1]} & {*params.stop_token_ids}
        assert not {*tokens[: params.min_tokens]} & {*params.stop_token_ids}
        if params.allowed_token_ids is not None:
            assert {*tokens} <= {*params.allowed_token_ids}
        text = "".join(chr(token) for token in tokens)
        assert not any("".join(map(chr, word)) in text for word in params.bad_words_ids)
        self._check_logprobs(truth, chunks, tokens)
        return len(tokens)

    def _check_logprobs(self, truth: ToyModel, chunks: list[GenerateChunk], tokens: list[int]) -> None:
        params, reported = self.job.params, [chunk for chunk in chunks if len(chunk.tokens)]
        if not reported or (params.logprobs is None and params.logprob_token_ids is None):
            assert all(chunk.logprobs is None for chunk in chunks)
            return
        rows = true_logprobs(truth, self.prompt, tokens)
        own = np.concatenate([chunk.logprobs for chunk in reported])
        assert np.abs(own - rows[np.arange(len(tokens)), tokens]).max() < 2e-5
        ranks = np.concatenate([chunk.ranks for chunk in reported])
        assert ranks.shape == (len(tokens),) and ranks.min() >= 1
        if params.logprobs is not None:
            top = np.concatenate([chunk.top_ids for chunk in reported])
            values = np.concatenate([chunk.top_logprobs for chunk in reported])
            assert top.shape == values.shape == (len(tokens), params.logprobs)
            assert np.abs(values - np.take_along_axis(rows, top.astype(np.int64), 1)).max() < 2e-5
        if params.logprob_token_ids is not None:
            chosen = np.concatenate([chunk.chosen_logprobs for chunk in reported])
            assert np.abs(chosen - rows[:, list(params.logprob_token_ids)]).max() < 2e-5


@pytest.mark.full(keep=1)
@pytest.mark.risk("S3", figure="every pair")
@pytest.mark.risk("Q8", figure="0 mismatches")
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_every_two_features_go_together_beside_scores_and_preemption(
    make_rig: Any, generate_job: MakeJob, score_job: MakeScore, drafter: str
) -> None:
    pairs = [*itertools.combinations(FEATURES, 2)]
    cells = [Cell(generate_job, number, names) for number, names in enumerate(pairs)]
    rig = make_rig(**DRAFTERS[drafter], num_slots=190, max_running=32, admission_tokens=1)
    truth = ToyModel(num_slots=64, max_model_len=64)
    scores = [score_job([9, 8, 7], [[i], [i, 2]]) for i in range(20)]
    alone = await rig.engine.score(scores[0])
    answers = await asyncio.gather(
        *(cell.run(rig.engine, truth) for cell in cells), *(rig.engine.score(job) for job in scores)
    )
    assert sum(answers[: len(cells)]) > 6 * len(cells)
    np.testing.assert_array_equal(answers[len(cells)].label_logprobs, alone.label_logprobs)
    stats = rig.engine.stats()
    assert stats.preemptions > 0
    assert (stats.drafted_tokens > 0) == (drafter != "off")


@pytest.mark.parametrize(("options", "drafts"), [(by_draft(num_speculative_tokens=3), 3), ({"real_sampler": True}, 0)])
def test_start_up_prepares_the_sampler_for_verify_steps(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], drafts: int
) -> None:
    """Else the first request of a GPU waits for their kernels to be compiled."""
    engine = make_rig(start=False, **options).engine
    asked: list[Any] = []
    monkeypatch.setattr(engine.model, "device", torch.device("cuda"))
    monkeypatch.setattr(engine.sampler, "warm_up", lambda rows, progress, **named: asked.append((rows, named)))
    engine.warm_up(lambda stage, seconds: None)
    speculation = engine.config.speculation
    assert asked == [
        (engine.config.max_running, {"drafts": drafts, "rules": speculation.rules, "dtype": engine.model.dtype})
    ]


def test_start_up_captures_drafts_after_the_sampler_was_prepared(
    make_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of drafts holds the sampler's launches: nothing may be compiled or grown inside it."""
    engine = make_rig(start=False, **by_draft(num_speculative_tokens=3)).engine
    order: list[str] = []
    monkeypatch.setattr(engine.model, "device", torch.device("cuda"))
    monkeypatch.setattr(engine.model, "warm_up", lambda progress: order.append("model"))
    monkeypatch.setattr(engine.sampler, "warm_up", lambda *_, **__: order.append("sampler"))
    monkeypatch.setattr(engine.core.runner.proposer, "warm_up", lambda progress: order.append("drafts"))
    engine.warm_up(lambda stage, seconds: None)
    assert order == ["model", "sampler", "drafts"]
