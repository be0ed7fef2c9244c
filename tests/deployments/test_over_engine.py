"""The HTTP layer over a real engine with the toy model, in process: equal floats everywhere, nothing left behind."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.api.app import build_api
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.errors import as_api_error
from deployments.protocol import (
    Failure,
    GenerateCall,
    GenerateReply,
    LikelihoodReply,
    ModelCard,
    PromptChunk,
)
from engine.config import EngineConfig
from engine.engine import Engine
from engine.requests import (
    EngineError,
    GenerateRequest,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    ScoreRequest,
    ScoreResult,
)
from tests.support import toy_model
from tests.support.toy_model import ByteTokenizer

LOAD = Load(0, 1.0)
SLOTS = 2048
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


class EngineBackend:
    """Backend over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def card(self) -> ModelCard:
        ends = self.engine.model.eos_token_ids
        return ModelCard(
            "toy", "toy", None, toy_model.VOCAB_SIZE, self.engine.max_model_len, toy_model.BOS, ends, "raw_logprobs", {}
        )

    def check_open(self, timeout_s: float, tenant: str) -> None: ...

    def readiness(self) -> dict[str, object]:
        return {"status": "ready", "replicas_ready": 1, "replicas_total": 1, "canary_age_s": 0.0}

    async def metrics(self) -> Sequence[bytes]:
        return []

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        try:
            found = await self.engine.score(request)
        except EngineError as error:
            raise as_api_error(error) from error
        return ScoreResult(
            found.label_logprobs, found.status, found.cached, found.queue_s, found.compute_s, LOAD, found.head_s
        )

    async def pooling(self, request: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult:
        raise AssertionError("heads are tested over real models: see `test_heads.py`")

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        raise AssertionError("see `replica_client`")

    async def generate(self, call: GenerateCall) -> GenerateReply:
        async def one(q: int, request: GenerateRequest) -> list[PromptChunk]:
            try:
                return [PromptChunk(q, chunk) for chunk in await self.engine.complete(request)]
            except EngineError as error:
                return [PromptChunk(q, Failure(error.code, error.message, error.field))]

        found = await asyncio.gather(*(one(q, request) for q, request in enumerate(call)))
        return GenerateReply(tuple(chunk for chunks in found for chunk in chunks), 0, LOAD)

    async def stream(self, call: GenerateCall) -> AsyncIterator[GenerateReply]:
        for q, request in enumerate(call):
            source = self.engine.generate(request)
            try:
                async for chunk in source:
                    yield GenerateReply((PromptChunk(q, chunk),), 0, LOAD)
            except EngineError as error:
                raise as_api_error(error) from error
            finally:
                await source.aclose()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    monkeypatch.setenv("ASSAY_TEST_FAULTS", "1")
    model = toy_model.ToyModel(num_slots=SLOTS, max_model_len=200)
    engine = Engine(model, EngineConfig(max_running=32, token_budget=512))
    engine.start()
    yield engine
    for _ in range(2000):
        stats = engine.stats()
        # A request that the step thread has not taken in yet is in the queue's account alone.
        if not (stats.queued_tokens or stats.live_requests or stats.live_rows) and engine.core.kv_cache.settled:
            break
        await asyncio.sleep(0.002)
    stats = engine.stats()
    engine.stop()
    assert (stats.kv_slots_used, stats.queued_tokens, stats.live_rows, stats.live_requests) == (0, 0, 0, 0)
    engine.check()


@pytest.fixture
def app(engine: Engine) -> FastAPI:
    return build_api(EngineBackend(engine), ByteTokenizer(), ApiSettings(chat=ChatSettings(template=TEMPLATE)))


LABELS = [5, 250, 97, 257]


@pytest.mark.risk("D4", figure="equal bits")
async def test_scores_and_generation_give_the_same_float(client: Any) -> None:
    items = [[7, 8], [9], [10, 11, 12]]
    scored = (await client.score(query=[1, 2, 3], items=items, label_token_ids=LABELS))["data"]
    for item, row in zip(items, scored, strict=True):
        found = await client.complete(prompt=[1, 2, 3, *item], max_tokens=1, logprob_token_ids=LABELS, temperature=0)
        assert found["choices"][0]["logprobs"]["requested_logprobs"] == [row["logprobs"]]
        weights = [math.exp(value) for value in row["logprobs"]]
        assert row["label_mass"] == pytest.approx(math.fsum(weights), rel=1e-12)


async def test_a_score_depends_on_no_neighbour_and_no_cache(client: Any) -> None:
    items = [f" item {i}" * (1 + i % 3) for i in range(17)]
    together = (await client.score(query="which", items=items, label_token_ids=LABELS))["data"]
    for item, row in zip(items, together, strict=True):
        for salt in ("a", "b"):
            [alone] = (await client.score(query="which", items=[item], label_token_ids=LABELS, cache_salt=salt))["data"]
            assert alone["logprobs"] == row["logprobs"]
        assert row["cached_tokens"] <= row["prompt_tokens"]


async def test_the_shared_prefix_is_computed_once(client: Any) -> None:
    found = await client.score(query="q" * 50, items=["a", "b", "c"], label_token_ids=[1])
    usage = found["usage"]
    assert usage["prompt_tokens"] == 3 * 52 and usage["computed_tokens"] <= 52 + 3 + 3


async def test_a_seeded_request_is_the_same_alone_and_beside_others(client: Any) -> None:
    alone = [await client.complete(prompt=f"p{i}", seed=i, max_tokens=17, return_token_ids=True) for i in range(5)]
    again = await asyncio.gather(
        *(client.complete(prompt=f"p{i}", seed=i, max_tokens=17, return_token_ids=True) for i in range(5))
    )
    assert [one["choices"] for one in alone] == [one["choices"] for one in again]
    assert len({tuple(one["choices"][0]["token_ids"]) for one in alone}) == 5


async def test_a_stream_equals_the_plain_answer(client: Any) -> None:
    body = {"prompt": "abc", "seed": 4, "max_tokens": 33, "n": 3, "logprobs": 2, "return_token_ids": True}
    plain = await client.complete(**body)
    events = [event for event in await client.events(**body) if event != "[DONE]"]
    for choice in plain["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [x for part in parts for x in part["logprobs"]["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert len({tuple(choice["token_ids"]) for choice in plain["choices"]}) == 3


async def test_a_resumed_completion_continues_as_if_never_cut(client: Any) -> None:
    body = {"prompt": "abc", "seed": 4, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    whole = (await client.complete(**body))["choices"][0]
    for cut in (1, 7, 19):
        rest = (await client.complete(**body, resume_token_ids=whole["token_ids"][:cut]))["choices"][0]
        assert rest["token_ids"] == whole["token_ids"][cut:]


async def test_a_stop_string_frees_what_was_still_running(client: Any, engine: Engine) -> None:
    whole = (await client.complete(prompt="s", seed=1, max_tokens=60, return_token_ids=True, temperature=0))["choices"]
    ids = whole[0]["token_ids"]
    stop = next(chr(token) for token in ids[2:] if token < 128 and token != 0)
    found = (await client.complete(prompt="s", seed=1, max_tokens=60, stop=stop, temperature=0))["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop) and stop not in found["text"]


async def test_bad_requests_leave_their_neighbours_bit_identical(client: Any) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": [264]}, {"prompt": [toy_model.NAN]}, {"prompt": [toy_model.INF]}, {"prompt": [toy_model.EMPTY]},
        {"prompt": [-1]},
        {"prompt": "x" * 500}, {"prompt": "a", "top_p": 0}, {"prompt": "a", "logit_bias": {"264": 1}},
    ]  # fmt: skip
    body = {"prompt": "neighbour", "seed": 9, "max_tokens": 30, "logprobs": 3, "return_token_ids": True}
    clean = (await client.complete(**body))["choices"]
    answers = await asyncio.gather(
        client.complete(**body), *(client.post("/v1/completions", one) for one in bad), client.complete(**body)
    )
    assert answers[0]["choices"] == clean and answers[-1]["choices"] == clean
    codes = [answer.json()["error"]["code"] for answer in answers[1:-1]]
    assert codes == [
        "invalid_token_id", "nonfinite_logits", "nonfinite_logits", "nonfinite_logits", "invalid_token_id",
        "context_length_exceeded", "invalid_value", "invalid_token_id",
    ]  # fmt: skip
    assert all("NaN" not in answer.text for answer in answers[1:-1])


@pytest.mark.risk("Q6")
async def test_a_poisoned_item_fails_alone(client: Any) -> None:
    clean = (await client.score(query=[1], items=[[2], [3]], label_token_ids=[5]))["data"]
    rows = (await client.score(query=[1], items=[[2], [toy_model.NAN], [3], [toy_model.EMPTY]], label_token_ids=[5]))[
        "data"
    ]
    assert [rows[0]["logprobs"], rows[2]["logprobs"]] == [row["logprobs"] for row in clean]
    assert [row["error"] and row["error"]["code"] for row in rows] == [
        None, "nonfinite_logits", None, "nonfinite_logits"
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_rows(engine: Engine, app: FastAPI, wire_to: Any, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 190, "stream": stream, "ignore_eos": True, "n": 4}
    requests = [wire_to(app, "/v1/completions", body) for _ in range(3)]
    while engine.stats().live_rows < 4:
        await asyncio.sleep(0.001)
    for request in requests:
        request.leave()
        await request.task
    assert all(b"[DONE]" not in request.body for request in requests)


async def chat(client: Any, messages: Any, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", {"messages": messages, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_chat_is_the_completion_of_its_rendered_prompt(client: Any, temperature: float) -> None:
    talk = [{"role": "user", "content": "née <eos>"}, {"role": "assistant", "content": "x"}]
    prompt = (await client.post("/tokenize", {"messages": talk})).json()["tokens"]
    body = {"temperature": temperature, "seed": 5, "max_tokens": 25, "n": 2, "return_token_ids": True, "stop": "\x07"}
    body["logprob_token_ids"] = LABELS
    found = await chat(client, talk, logprobs=True, top_logprobs=3, **body)
    wanted = await client.complete(prompt=prompt, logprobs=3, **body)
    for one, other in zip(found["choices"], wanted["choices"], strict=True):
        same = ("index", "token_ids", "prompt_token_ids", "finish_reason", "stop_reason", "seed")
        assert [one[name] for name in same] == [other[name] for name in same]
        assert one["message"]["content"] == other["text"]
        assert [entry["logprob"] for entry in one["logprobs"]["content"]] == other["logprobs"]["token_logprobs"]
        assert [entry["token"] for entry in one["logprobs"]["content"]] == other["logprobs"]["tokens"]
        assert one["logprobs"]["requested_logprobs"] == other["logprobs"]["requested_logprobs"]
        for entry, others in zip(one["logprobs"]["content"], other["logprobs"]["top_logprobs"], strict=True):
            assert {item["logprob"] for item in entry["top_logprobs"]} <= set(others.values())
            assert len(entry["top_logprobs"]) == 3
    assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]


async def test_a_seeded_chat_is_the_same_beside_others_and_beside_bad_ones(client: Any) -> None:
    talks = [[{"role": "user", "content": "p" * (i + 1)}] for i in range(5)]
    body = {"max_tokens": 17, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    alone = [(await chat(client, talk, seed=i, **body))["choices"] for i, talk in enumerate(talks)]
    bad: list[dict[str, Any]] = [
        {"messages": []}, {"messages": talks[0], "logit_bias": {"264": 1}}, {"messages": talks[0], "max_tokens": 500},
        {"messages": [{"role": "user", "content": "x" * 500}]}, {"messages": talks[0], "tools": [1]},
    ]  # fmt: skip
    good = [chat(client, talk, seed=i, **body) for i, talk in enumerate(talks)]
    answers = await asyncio.gather(*good, *(client.post("/v1/chat/completions", one) for one in bad))
    assert [one["choices"] for one in answers[:5]] == alone
    codes = [answer.json()["error"]["code"] for answer in answers[5:]]
    assert codes == [
        "invalid_value", "invalid_token_id", "context_length_exceeded", "context_length_exceeded",
        "unsupported_parameter",
    ]  # fmt: skip
    assert len({tuple(choices[0]["token_ids"]) for choices in alone}) == 5


async def test_a_chat_goes_on_to_the_end_of_the_context(client: Any, engine: Engine) -> None:
    talk = [{"role": "user", "content": "abc"}]
    found = await chat(client, talk, ignore_eos=True, seed=1)
    assert found["usage"]["total_tokens"] == engine.max_model_len
    assert found["choices"][0]["finish_reason"] == "length"


async def test_a_resumed_chat_continues_as_if_never_cut(client: Any) -> None:
    talk = [{"role": "user", "content": "abc"}]
    body: dict[str, Any] = {"seed": 4, "return_token_ids": True, "ignore_eos": True}
    whole = (await chat(client, talk, **body))["choices"][0]["token_ids"]
    for cut in (1, 7, len(whole) - 1):
        rest = (await chat(client, talk, **body, resume_token_ids=whole[:cut]))["choices"][0]["token_ids"]
        assert rest == whole[cut:]


async def test_two_engines_answer_alike(engine: Engine, client: Any) -> None:
    os.environ["ASSAY_TEST_FAULTS"] = "1"
    other = Engine(toy_model.ToyModel(num_slots=SLOTS, max_model_len=200), EngineConfig(max_running=3))
    other.start()
    try:
        app = build_api(EngineBackend(other), ByteTokenizer(), ApiSettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api") as http:
            body = {"prompt": "abc", "seed": 4, "max_tokens": 20, "logprobs": 1}
            found = (await http.post("/v1/completions", json=body)).json()
            assert found["choices"] == (await client.complete(**body))["choices"]
    finally:
        other.stop()
