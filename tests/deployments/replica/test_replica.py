"""ReplicaServer in process, over the toy model: hostile tasks, streams, cancellation, the canary and health."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from deployments.config.app_args import AppArgs
from deployments.protocol import Failure, GenerateCall, GenerateReply, LikelihoodReply, PromptScores
from deployments.replica import replica as replica_module
from deployments.replica.make_engine import WarmEngine, make_engine
from deployments.replica.replica import ReplicaServer
from engine.requests import ErrorCode, GenerateChunk, GenerateRequest, LikelihoodRequest, ScoreRequest, ScoreResult
from gpu_sampler.sampling_params import SamplingParams
from tests.deployments.replicas import settled
from tests.support import toy_model

Server = Any
PROMPT = np.arange(40, 57, dtype=np.int32)
ANYTHING: Any = "greedy"


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def score_task(**fields: Any) -> ScoreRequest:
    given: dict[str, Any] = {
        "request_id": "s",
        "prefix": ints(1, 2, 3),
        "ids": ints(4, 5, 6, 7),
        "starts": ints(0, 1, 4),
        "labels": ints(10, 11, 12),
    }
    return ScoreRequest(**given | fields)


def likelihood_task(**fields: Any) -> LikelihoodRequest:
    """Two continuations of one context, the second with another end."""
    given: dict[str, Any] = {
        "request_id": "l",
        "prefix": ints(1, 2, 3),
        "ids": ints(4, 5, 6, 5, 7, 8),
        "starts": ints(0, 3, 6),
        "shared": ints(0, 1),
        "wanted": ints(1, 2),
    }
    return LikelihoodRequest(**given | fields)


def generate_task(*prompts: Any, **fields: Any) -> GenerateCall:
    params = SamplingParams(**{"max_tokens": 7} | fields.pop("params", {}))
    given: dict[str, Any] = {"request_id": "g", "params": params}
    return tuple(
        GenerateRequest(**given | {"prompt": prompt, "seed": 17 + q} | fields)
        for q, prompt in enumerate(prompts or (PROMPT,))
    )


@pytest.fixture
async def make_server(toy_args: dict[str, Any]) -> AsyncIterator[Callable[..., Any]]:
    made: list[tuple[ReplicaServer, toy_model.ToyModel]] = []

    async def make(**sections: Any) -> tuple[ReplicaServer, toy_model.ToyModel]:
        model = toy_model.ToyModel(num_slots=2048)
        server = ReplicaServer(AppArgs.model_validate(toy_args | sections), "r1")
        await server.start(model)
        made.append((server, model))
        return made[-1]

    yield make
    for server, model in made:
        model.released.set()
        server.stop()


@pytest.fixture
async def server(make_server: Callable[..., Any]) -> Server:
    return (await make_server())[0]


HOSTILE_SCORES: dict[str, tuple[Any, str]] = {
    "257 labels": (score_task(labels=np.arange(257, dtype=np.int32)), "labels"),
    "no label": (score_task(labels=ints()), "labels"),
    "a label twice": (score_task(labels=ints(5, 5)), "labels"),
    "a label of -1": (score_task(labels=ints(5, -1)), "labels"),
    "a label of V": (score_task(labels=ints(toy_model.VOCAB_SIZE)), "labels"),
    "an id of -1": (score_task(ids=ints(4, -1, 6, 7)), "ids"),
    "an id of V": (score_task(prefix=ints(toy_model.VOCAB_SIZE)), "prefix"),
    "floats": (score_task(ids=np.ones(4, np.float32)), "ids"),
    "int64": (score_task(starts=np.array([0, 1, 4])), "starts"),
    "two dimensions": (score_task(ids=np.ones((2, 2), np.int32)), "ids"),
    "a list": (score_task(ids=[4, 5, 6, 7]), "ids"),
    "falling offsets": (score_task(starts=ints(0, 3, 1, 4)), "starts"),
    "offsets that start late": (score_task(starts=ints(1, 4)), "starts"),
    "offsets that end early": (score_task(starts=ints(0, 1, 3)), "starts"),
    "no rows": (score_task(starts=ints(0), ids=ints()), "starts"),
    "an empty row": (score_task(prefix=ints(), starts=ints(0, 0, 4)), "ids"),
    "a NaN deadline": (score_task(timeout_s=float("nan")), "timeout_s"),
    "too long": (score_task(prefix=np.ones(1500, np.int32)), "ids"),
    "a number for a salt": (score_task(cache_salt=5), "cache_salt"),
    "a string for a priority": (score_task(priority="1"), "priority"),
    "another object": ({"labels": [1]}, "request"),
}
HOSTILE_LIKELIHOODS: dict[str, tuple[Any, str]] = {
    "an id of -1": (likelihood_task(ids=ints(4, -1, 6, 5, 7, 8)), "ids"),
    "floats": (likelihood_task(prefix=np.ones(3, np.float32)), "prefix"),
    "a list": (likelihood_task(wanted=[1, 2]), "wanted"),
    "falling offsets": (likelihood_task(starts=ints(0, 5, 3, 6), shared=ints(0, 0, 0), wanted=ints(1, 1, 1)), "starts"),
    "no rows": (likelihood_task(starts=ints(0), ids=ints(), shared=ints(), wanted=ints()), "starts"),
    "fewer counts than rows": (likelihood_task(wanted=ints(1)), "shared"),
    "negative sharing": (likelihood_task(shared=ints(0, -1)), "shared"),
    "sharing with no other": (likelihood_task(shared=ints(1, 1)), "shared"),
    "sharing what was not computed": (likelihood_task(shared=ints(0, 3)), "shared"),
    "nothing wanted": (likelihood_task(wanted=ints(1, 0)), "shared"),
    "the whole row wanted": (likelihood_task(wanted=ints(3, 2)), "wanted"),
    "a shared token before the wanted ones": (likelihood_task(wanted=ints(1, 3)), "wanted"),
    "too much wanted": (likelihood_task(wanted=ints(1, 1025)), "wanted"),
    "a huge count": (likelihood_task(wanted=ints(2**31 - 1, 2**31 - 1)), "wanted"),
    "too long": (likelihood_task(prefix=np.ones(1500, np.int32)), "ids"),
    "a NaN deadline": (likelihood_task(timeout_s=float("nan")), "timeout_s"),
    "another object": (score_task(), "request"),
}
HOSTILE_GENERATES: dict[str, tuple[Any, str]] = {
    "a negative number of alternatives": (generate_task(prompt_logprobs=-1), "prompt_logprobs"),
    "21 alternatives": (generate_task(prompt_logprobs=21), "prompt_logprobs"),
    "true alternatives": (generate_task(prompt_logprobs=True), "prompt_logprobs"),
    "a prompt alone without a question": (generate_task(prompt_only=True), "prompt_only"),
    "a number for alone": (generate_task(prompt_logprobs=1, prompt_only=1), "prompt_only"),
    "a prompt far too long": (generate_task(np.ones(50_001, np.int32), prompt_logprobs=20), "prompt"),
    "129 chosen ids": (generate_task(params={"logprob_token_ids": tuple(range(129))}), "logprob_token_ids"),
    "a chosen id of -1": (generate_task(params={"logprob_token_ids": (-1,)}), "logprob_token_ids"),
    "an allowed id of V": (generate_task(params={"allowed_token_ids": (toy_model.VOCAB_SIZE,)}), "allowed_token_ids"),
    "a NaN temperature": (generate_task(params={"temperature": float("nan")}), "temperature"),
    "n of 129": (generate_task(params={"n": 129}), "n"),
    "a string for params": ((dataclasses.replace(generate_task()[0], params=ANYTHING),), "params"),
    "a list of bad words": (generate_task(params={"bad_words_ids": 7}), "bad_words"),
    "an id of -1": (generate_task(ints(5, -1)), "prompt"),
    "an id of V": (generate_task(ints(5, toy_model.VOCAB_SIZE)), "prompt"),
    "floats": (generate_task(np.ones(3, np.float32)), "prompt"),
    "an empty prompt": (generate_task(PROMPT, ints()), "prompt"),
    "no prompt": ((), "request"),
    "a list of requests": ([*generate_task()], "request"),
    "a request among others that is none": ((*generate_task(), 5), "request"),
    "a negative seed": (generate_task(seed=-1), "seed"),
    "emitted for another number": (generate_task(emitted=(ints(1), ints(1))), "emitted"),
    "emitted that are no arrays": (generate_task(emitted=("words",)), "emitted"),
    "too long": (generate_task(np.ones(1500, np.int32)), "prompt"),
    "another object": (None, "request"),
}


@pytest.mark.risk("S2", figure="0 crashes")
@pytest.mark.parametrize("name", HOSTILE_SCORES)
async def test_a_hostile_score_task_is_refused_by_name(server: Server, name: str) -> None:
    task, field = HOSTILE_SCORES[name]
    reply = await server.score(task)
    assert isinstance(reply, Failure)
    assert reply.field == field
    assert isinstance(await server.score(score_task()), ScoreResult)  # the replica lives


@pytest.mark.risk("S2")
@pytest.mark.parametrize("name", HOSTILE_LIKELIHOODS)
async def test_a_hostile_likelihood_task_is_refused_by_name(server: Server, name: str) -> None:
    task, field = HOSTILE_LIKELIHOODS[name]
    reply = await server.likelihood(task)
    assert isinstance(reply, Failure)
    assert reply.field == field
    assert isinstance(await server.likelihood(likelihood_task()), LikelihoodReply)


async def test_likelihoods_have_the_shape_of_the_task(server: Server) -> None:
    task = likelihood_task()
    for array in (task.prefix, task.ids, task.starts, task.shared, task.wanted):
        array.flags.writeable = False  # as Ray hands them over
    reply = await server.likelihood(task)
    assert (reply.logprobs.shape, reply.greedy.shape, reply.status.tolist()) == ((3,), (3,), [0, 0])
    assert reply.logprobs.dtype == np.float32 and (reply.logprobs < 0).all()


@pytest.mark.parametrize("alone", [False, True])
async def test_prompt_scores_come_first(server: Server, alone: bool) -> None:
    task = generate_task(PROMPT, PROMPT[:1], params={"n": 2}, prompt_logprobs=3, prompt_only=alone)
    reply = await server.generate(task)
    kinds = [(item.prompt, isinstance(item.chunk, PromptScores)) for item in reply.chunks]
    rest = [] if alone else [False] * 2
    assert kinds == [(q, reported) for q in (0, 1) for reported in (True, *rest)]
    sizes = [item.chunk.logprobs.shape for item in reply.chunks if isinstance(item.chunk, PromptScores)]
    assert sizes == [(len(PROMPT) - 1,), (0,)]
    reported = [item for reply in [reply async for reply in server.stream(task)] for item in reply.chunks]
    first = [next(isinstance(item.chunk, PromptScores) for item in reported if item.prompt == q) for q in (0, 1)]
    assert first == [True, True] and (not alone or len(reported) == 2)


@pytest.mark.risk("S2")
@pytest.mark.parametrize("name", HOSTILE_GENERATES)
async def test_a_hostile_generate_task_is_refused_by_name(server: Server, name: str) -> None:
    task, field = HOSTILE_GENERATES[name]
    reply = await server.generate(task)
    assert isinstance(reply, Failure)
    assert reply.field == field
    streamed = [reply async for reply in server.stream(task)]
    found = streamed[0]
    if isinstance(found, GenerateReply):
        found = found.chunks[0].chunk
    assert found == reply
    assert isinstance(await server.generate(generate_task()), GenerateReply)


@pytest.mark.risk("S2", planted=True)
async def test_a_task_with_257_labels_passes_where_only_the_engine_checks_it_fails(server: Server) -> None:
    """The bound is the configuration's: at it passes, one more does not."""
    assert isinstance(await server.score(score_task(labels=np.arange(256, dtype=np.int32))), ScoreResult)


async def test_arrays_that_cannot_be_written_to_are_taken(server: Server) -> None:
    """Ray hands over views of its messages; torch would warn, and here a warning is an error."""
    score, generate = score_task(), generate_task(emitted=(ints(1, 2),))
    for array in (score.prefix, score.ids, score.starts, score.labels, generate[0].prompt, generate[0].emitted[0]):
        array.flags.writeable = False
    assert isinstance(await server.score(score), ScoreResult)
    assert isinstance(await server.generate(generate), GenerateReply)


async def test_scores_come_back_in_the_shape_of_the_task(server: Server) -> None:
    reply = await server.score(score_task())
    assert reply.label_logprobs.shape == (2, 3)
    assert reply.label_logprobs.dtype == np.float32
    assert (reply.label_logprobs < 0).all()
    assert reply.status.tolist() == [0, 0]


async def test_generation_gives_one_chunk_a_branch_in_order(server: Server) -> None:
    reply = await server.generate(generate_task(PROMPT, PROMPT[:3], params={"n": 3, "logprobs": 2}), 5)
    assert [(item.prompt, item.chunk.branch) for item in reply.chunks] == [(q, b) for q in (0, 1) for b in (0, 1, 2)]
    assert all(len(item.chunk.tokens) == 7 or item.chunk.finish == "stop" for item in reply.chunks)
    assert reply.epoch == 5


async def gathered(stream: AsyncIterator[Any]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    async for reply in stream:
        for item in reply.chunks:
            found.setdefault((item.prompt, item.chunk.branch), []).extend(item.chunk.tokens.tolist())
    return found


async def test_a_stream_brings_what_the_unary_call_brings(server: Server) -> None:
    task = generate_task(PROMPT, PROMPT[:3], params={"n": 2, "max_tokens": 17, "logprobs": 1})
    whole = await server.generate(task)
    expected = {(item.prompt, item.chunk.branch): item.chunk.tokens.tolist() for item in whole.chunks}
    assert await gathered(server.stream(task)) == expected


async def test_what_comes_while_the_consumer_is_busy_is_one_message(make_server: Callable[..., Any]) -> None:
    server, _ = await make_server()
    stream = server.stream(generate_task(params={"max_tokens": 40, "logprobs": 1}))
    first = await anext(stream)
    async with asyncio.timeout(10):
        while server.engine.stats().live_requests:  # the consumer does something else until the end
            await asyncio.sleep(0.002)
    rest = [reply async for reply in stream]
    tokens = len(first.chunks[0].chunk.tokens) + sum(len(reply.chunks[0].chunk.tokens) for reply in rest)
    assert len(rest) <= 2
    chunk = rest[-1].chunks[0].chunk
    assert isinstance(chunk, GenerateChunk)
    assert chunk.logprobs is not None and len(chunk.logprobs) == len(chunk.tokens)
    assert tokens == 40 or chunk.finish == "stop"


async def test_closing_a_stream_frees_everything(make_server: Callable[..., Any]) -> None:
    server, model = await make_server()
    model.step_seconds = 0.002
    stream = server.stream(generate_task(PROMPT, PROMPT[:5], params={"n": 2, "max_tokens": 900}))
    await anext(stream)
    await stream.aclose()
    stats = await settled(server)
    assert stats.generated_tokens < 400


@pytest.mark.parametrize("method", ["score", "generate"])
async def test_cancelling_a_call_frees_everything(make_server: Callable[..., Any], method: str) -> None:
    server, model = await make_server()
    model.step_seconds = 0.002
    if method == "score":
        rows = 400
        ids = np.arange(3 * rows, dtype=np.int32) % 200
        task: Any = score_task(ids=ids, starts=np.arange(0, 3 * rows + 1, 3, dtype=np.int32))
        task = dataclasses.replace(task, prefix=ints(toy_model.HANG, 1))
    else:
        task = generate_task(params={"max_tokens": 900})
    call = asyncio.create_task(getattr(server, method)(task))
    async with asyncio.timeout(10):
        while not server.engine.stats().live_requests:
            await asyncio.sleep(0.001)
    call.cancel()
    model.released.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await settled(server)


async def test_a_step_that_raises_fails_its_task_and_the_replica_lives(server: Server) -> None:
    before = await server.generate(generate_task())
    reply = await server.generate(generate_task(ints(5, toy_model.RAISE)))
    assert reply == Failure(ErrorCode.STEP_FAILED, reply.message, None, admitted=True)
    after = await server.generate(generate_task())
    assert before.chunks[0].chunk.tokens.tolist() == after.chunks[0].chunk.tokens.tolist()


async def test_one_failed_prompt_of_a_stream_leaves_the_others_whole(server: Server) -> None:
    alone = await gathered(server.stream(generate_task()))
    replies = [reply async for reply in server.stream(generate_task(PROMPT, ints(5, toy_model.NAN)))]
    chunks = [item for reply in replies for item in reply.chunks]
    failed = [item for item in chunks if isinstance(item.chunk, Failure)]
    assert [(item.prompt, item.chunk.code) for item in failed] == [(1, ErrorCode.NONFINITE_LOGITS)]
    tokens = [token for item in chunks if item.prompt == 0 for token in item.chunk.tokens.tolist()]
    assert tokens == alone[0, 0]


async def test_a_full_queue_refuses_and_an_empty_one_takes_anything(make_server: Callable[..., Any]) -> None:
    server, model = await make_server(engine={"max_queued_tokens": 20, "kv_slots": 2048})
    hanging = asyncio.create_task(server.generate(generate_task(ints(*range(30), toy_model.HANG))))
    await asyncio.to_thread(model.hanging.wait, 10)
    refused = await server.generate(generate_task())
    assert isinstance(refused, Failure)
    assert refused.code == ErrorCode.OVERLOADED
    model.released.set()
    assert isinstance(await hanging, GenerateReply)
    assert isinstance(await server.generate(generate_task(np.ones(100, np.int32))), GenerateReply)


async def test_the_canary_passes_and_is_quiet_about_load(make_server: Callable[..., Any]) -> None:
    server, model = await make_server(engine={"max_queued_tokens": 1, "kv_slots": 2048})
    assert (await server.canary()).failure is None
    model.step_seconds = 0.002
    busy = asyncio.create_task(server.generate(generate_task(params={"max_tokens": 300})))
    reply = await server.canary()
    busy.cancel()
    assert (reply.replica, reply.failure) == ("r1", None)


async def test_the_canary_passes_a_queue_that_is_fuller_than_it_may_be(make_server: Callable[..., Any]) -> None:
    """Repeats the state after the loss of another replica: what moved here is beyond the bound for a while."""
    server, model = await make_server(engine={"max_queued_tokens": 1, "kv_slots": 2048, "token_budget": 32})
    model.step_seconds = 0.02
    busy = asyncio.create_task(server.generate(generate_task(np.ones(900, np.int32))))
    while not server.engine.queue().queued_tokens:
        await asyncio.sleep(0)
    assert (await server.canary()).failure is None
    assert not busy.done()
    model.step_seconds = 0
    await busy


async def test_the_canary_notices_changed_logits(make_server: Callable[..., Any]) -> None:
    server, model = await make_server()
    model._scale = np.float32(model._scale * np.float32(1.1))
    assert (await server.canary()).failure == "mismatch"


async def test_the_canary_notices_a_hanging_step_and_so_does_check_health(make_server: Callable[..., Any]) -> None:
    server, model = await make_server(health={"timeout_s": 0.2, "step_timeout_s": 0.3})
    server.check_health()
    hanging = asyncio.create_task(server.generate(generate_task(ints(5, toy_model.HANG))))
    await asyncio.to_thread(model.hanging.wait, 10)
    assert (await server.canary()).failure == "timeout"
    async with asyncio.timeout(10):
        while server.engine.stats().heartbeat_age_s <= 0.3:
            await asyncio.sleep(0.02)
    with pytest.raises(RuntimeError, match="has not turned"):
        server.check_health()
    assert (await hanging).code is ErrorCode.LOST
    model.released.set()
    async with asyncio.timeout(10):
        while server.engine.stats().heartbeat_age_s > 0.3:
            await asyncio.sleep(0.001)
    assert (await server.canary()).failure is None
    server.check_health()


@pytest.mark.parametrize("planted", [False, True])
async def test_what_loads_the_model_ends_before_it_serves(
    toy_args: dict[str, Any], planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its idle threads steps would be slow: `engine.utils.cpu`. Planted: it runs in a thread that stays."""
    if planted:
        monkeypatch.setattr(replica_module, "run_apart", lambda function: function())
    server = ReplicaServer(AppArgs.model_validate(toy_args), "r1")
    loaders = list[threading.Thread]()

    def noted(*given: Any) -> WarmEngine:
        loaders.append(threading.current_thread())
        return make_engine(*given)

    monkeypatch.setattr(replica_module, "make_engine", noted)
    await server.start(toy_model.ToyModel(num_slots=512))
    server.stop()
    assert [loader.is_alive() for loader in loaders] == [planted]


async def test_a_replica_whose_first_canary_fails_does_not_start(toy_args: dict[str, Any]) -> None:
    class Broken(toy_model.ToyModel):
        def _logits(self, *args: Any) -> Any:
            return super()._logits(*args) * np.float32("nan")

    server = ReplicaServer(AppArgs.model_validate(toy_args), "r1")
    with pytest.raises(RuntimeError, match="first canary"):
        await server.start(Broken(num_slots=512))
    server.stop()


async def test_the_card_tells_what_an_ingress_must_know(server: Server) -> None:
    card = await server.card()
    assert (card.name, card.root, card.vocab_size) == ("toy", "toy", toy_model.VOCAB_SIZE)
    assert (card.bos_token_id, card.eos_token_ids) == (toy_model.BOS, (toy_model.EOS,))
    assert "torch" in card.versions
