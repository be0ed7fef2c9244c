"""Requests made up from the OpenAPI document, over the toy model: none fails, none is answered with what it lacks."""

import asyncio
import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.responses import Response
from starlette.testclient import TestClient

from deployments.api.app import build_api
from deployments.api.endpoints import tokenize
from deployments.api.schemas.info import TokenizeRequest
from deployments.config.app_args import AppArgs
from deployments.config.settings import ApiSettings, SamplingDefaults
from deployments.errors import ApiError
from deployments.replica.replica import ReplicaServer
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind
from engine.tokenizer.tokenizer import load_tokenizer
from tests.support import toy_model

pytestmark = pytest.mark.timeout(900)  # ten times the examples take a minute and a half a test
PLAIN_VOCABULARY = 258  # without the toy's magic tokens: one of them ends the process
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
SMALL = {
    "max_items": 6,
    "max_rows": 24,
    "max_prompts": 4,
    "max_n": 4,
    "max_labels": 8,
    "max_continuations": 4,
    "max_questions": 4,
    "max_choices": 6,
    "max_levels": 6,
    "max_request_tokens": 4096,
    "max_answer_cells": 600,
    "max_string_chars": 300,
    "max_json_depth": 12,
}
HEAD = HeadInfo(HeadKind.SEQUENCE, 3, ("bad", "so-so", "good"))
EMBEDDING = EmbeddingInfo(dimensions=(2,), prompts=(("query", "find: "),))
VECTORS = HeadInfo(HeadKind.POOLED, 4, (), whole_rows=True, embedding=EMBEDDING)
MESSAGES = [{"role": "user", "content": "a"}]
PARTS = [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"a": [1, None]}}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "output_text", "text": "b"}]}
PREDICATE = {"type": "predicate", "instructions": "b", "name": "n"}
CHOICE = {"type": "choice", "instructions": PARTS, "choices": [{"value": True}, {"value": "b", "description": "c"}]}
SCORE = {"type": "score", "instructions": "d", "levels": [{"label": "l"}, {"label": "h", "description": "e"}]}
DOCUMENTS = {"query": "q", "documents": ["a", {"text": "b", "title": "c"}]}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/tokenize": [{"prompt": "a", "return_token_strs": True}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [1, 257]}],
    "/generative_scoring": [
        {"query": "q", "items": ["a", "b"], "label_token_ids": [1, 2]},
        {"query": [1], "items": [[2], [3, 4]], "label_token_ids": [5], "item_first": True},
        {"query": "q", "items": ["a"], "labels": ["x"], "seam": "joint", "layout": "columns"},
        {"query": "q", "items": ["a"], "template": "ranker", "layout": "packed", "detail": "probabilities"},
        {"query": "q", "items": ["a"], "continuations": ["x", "yz"], "normalization": "bytes"},
        {"query": [1], "items": [[1], [2]], "continuations": [[[3]], [[4, 5], [6]]], "layout": "columns"},
    ],
    "/rerank": [DOCUMENTS, {"query": "q", "texts": ["a", "b"], "return_text": True}],
    "/v1/rerank": [DOCUMENTS | {"top_n": 1, "return_documents": True}, DOCUMENTS | {"top_k": 1, "truncation": True}],
    "/v1/reranking": [{"query": "q", "input": ["a", {"text": "b"}], "top_k": 1, "return_input": True}],
    "/v1/rerankings": [{"query": "q", "texts": ["a", "b"], "top_n": 1}],
    "/v2/rerank": [DOCUMENTS | {"rank_fields": ["title", "text"], "max_tokens_per_doc": 3, "raw_scores": True}],
    "/score": [{"text_1": ["q", "r"], "text_2": ["a", "b"]}, {"queries": "q", "documents": "a", "activation": False}],
    "/v1/score": [
        {"query": "q", "items": "a", "label_token_ids": [1]},
        {"query": [1], "items": [[2]], "label_token_ids": [3, 4], "apply_softmax": True},
        {"query": "q", "items": [], "label_token_ids": [3]},
    ],
    "/v1/decisions": [
        {"input": "a", "questions": [PREDICATE, CHOICE, SCORE]},
        {"input": [{"role": "user", "content": PARTS}, CALL, OUTPUT], "questions": [PREDICATE]},
    ],
    "/v1/completions": [
        {"prompt": "a", "max_tokens": 2, "logprobs": 2},
        {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 2, "seed": 5, "stop": ["x"], "logit_bias": {"7": 2.5}},
        {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 2},
        {"messages": MESSAGES, "max_tokens": 2, "stream": True, "min_tokens": 1, "return_token_ids": True},
    ],
}
TO_A_HEAD: dict[str, list[dict[str, Any]]] = {
    path: [
        {"input": "a"},
        {"input": [[1, 2], [3]], "use_activation": False, "truncate_prompt_tokens": -1},
        {"messages": MESSAGES, "add_generation_prompt": True},
    ]
    for path in ("/classify", "/v1/classify", "/pooling")
}
TO_A_HEAD["/predict"] = [{"inputs": [["a"], ["b"]], "raw_scores": True}, {"inputs": "a", "truncate": True}]
TO_VECTORS: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [{"input": ["a", "b"], "dimensions": 2}, {"input": [[1, 2]], "encoding_format": "base64"}],
    "/embed": [{"inputs": "a", "normalize": False}, {"inputs": ["a", "b"], "truncate": True, "prompt_name": "query"}],
}
GOOD |= TO_A_HEAD | TO_VECTORS
READ = ["/healthz", "/readyz", "/health", "/version", "/metrics", "/v1/models", "/v1/models/{model_id}"]
READ.append("/tokenizer_info")
RULES = positive_data_acceptance  # the document does not tell which fields go together
PROBE = ("/generative_scoring", {"query": "a neighbour", "items": ["one", "two"], "label_token_ids": [65, 66, 67]})
PROBE_OF_A_HEAD = ("/classify", {"input": ["one", "two"]})
PROBE_OF_VECTORS = ("/v1/embeddings", {"input": ["one", "two"]})
PATIENCE_S = 60  # a machine may be slower than the tool's own 10 s allow
Examples = settings  # by another name, since a world has settings of its own
FULL = 200  # bodies a route in the full tier
SEEK = 60  # bodies: which are made up depends on what else the process has loaded, and one of them must be odd
SEED = 20261123
RUN = settings(
    max_examples=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass(kw_only=True)
class World:
    """An app over an engine of its own, as the document describes it."""

    backend: Any
    settings: ApiSettings
    neighbour: tuple[str, dict[str, Any]]
    examples: Examples
    app: FastAPI = field(init=False)
    schema: Any = field(init=False)

    def __post_init__(self) -> None:
        self.app = build_api(self.backend, load_tokenizer("toy"), self.settings)
        self.schema = schemathesis.openapi.from_asgi("/openapi.json", self.app)

    def operation(self, path: str) -> Any:
        return self.schema[path]["GET" if path in READ else "POST"]

    def look(self, case: Any) -> Any:
        """The answer; raises for one that the document does not show, and for a refusal of nothing that was sent."""
        response = case.call(timeout=PATIENCE_S)
        case.validate_response(response, excluded_checks=[RULES])
        if 400 <= response.status_code < 500 and isinstance(case.body, dict):
            named = re.split(r"[.\[]", response.json()["error"]["param"] or "body")[0]
            assert named in {"body", *self.fields(case.path), *case.body}, (case.body, response.text)
        return response

    def fields(self, path: str) -> set[str]:
        """Names of the fields of a route's bodies."""
        document = self.app.openapi()
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return set(document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"])

    def post(self, path: str, body: bytes) -> Any:
        with TestClient(self.app) as client:
            return client.post(path, content=body, headers={"content-type": "application/json"})

    def probe(self) -> str:
        """A neighbour's answer, without what differs between any two."""
        path, body = self.neighbour
        answer = self.post(path, json.dumps(body).encode()).json()
        return json.dumps([{**row, "cached_tokens": 0} for row in answer["data"]])

    def made_up(self, path: str, mode: GenerationMode) -> Counter[int]:
        """Requests of the document alone; how often each status was answered."""
        seen: Counter[int] = Counter()

        @seed(SEED)
        @self.examples
        @given(case=self.operation(path).as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            seen[self.look(case).status_code] += 1

        run()
        return seen

    def altered(self, path: str) -> Counter[int]:
        """Good bodies, one to four of their fields in another form that the document allows."""
        seen: Counter[int] = Counter()

        @seed(SEED)
        @self.examples
        @given(case=self.operation(path).as_strategy(), good=st.sampled_from(GOOD[path]), data=st.data())
        def run(case: Any, good: dict[str, Any], data: st.DataObject) -> None:
            drawn = sorted(case.body) or sorted(good)
            names = data.draw(st.sets(st.sampled_from(drawn), min_size=1, max_size=4)) & {*case.body}
            case.body = good | {name: case.body[name] for name in names}
            seen[self.look(case).status_code] += 1

        run()
        return seen


@pytest.fixture(scope="module")
def world_of(
    pytestconfig: pytest.Config,
    toy_args: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    backend_of: Callable[[ReplicaServer], Any],
) -> Iterator[Callable[[str], World]]:
    """`world_of(path)`: a world whose model answers the route, with a language-model head, classes or vectors."""
    file = tmp_path_factory.mktemp("fuzz") / "chat.jinja"
    file.write_text(CHAT)
    ranker = {"prefix": "{{ query }}", "item": "|{{ item }}", "suffix": "?", "labels": ["y", "n"]}
    own = {
        "templates": {"plain": {"preset": "plain"}, "ranker": ranker},
        "rerank": {"template": "ranker"},
        "chat": {"template_file": str(file), "template_flags": ["flag"]},
        "limits": SMALL,
    }
    args = AppArgs.model_validate(toy_args | own)
    examples = RUN if pytestconfig.getoption("--fast") else settings(RUN, max_examples=FULL)
    worlds, servers = [], []
    for head, neighbour in ((None, PROBE), (HEAD, PROBE_OF_A_HEAD), (VECTORS, PROBE_OF_VECTORS)):
        server = ReplicaServer(args, "r1")
        model = toy_model.ToyModel(vocab_size=PLAIN_VOCABULARY, num_slots=8192)
        model.pooling_head = head
        asyncio.run(server.start(model))
        api = args.api_settings(SamplingDefaults(), {})
        worlds.append(World(backend=backend_of(server), settings=api, neighbour=neighbour, examples=examples))
        servers.append(server)
    yield lambda path: worlds[1 if path in TO_A_HEAD else 2 if path in TO_VECTORS else 0]
    for server in servers:
        stats = server.engine.stats()
        assert (stats.live_requests, stats.kv_slots_used, stats.queued_tokens, stats.tree_locks) == (0, 0, 0, 0)
        server.stop()
        server.engine.check()


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of("/v1/completions")


def test_every_route_is_here(world: World) -> None:
    assert {*GOOD, *READ} == set(world.schema.raw_schema["paths"])


@pytest.mark.parametrize("path", GOOD)
def test_what_the_others_start_from_is_answered(world_of: Callable[[str], World], path: str) -> None:
    world = world_of(path)
    for body in GOOD[path]:
        case = world.schema[path]["POST"].Case(body=body, media_type="application/json")
        assert world.look(case).status_code == 200, body


@pytest.mark.parametrize("path", READ)
def test_routes_without_a_body_answer_as_the_document_says(world_of: Callable[[str], World], path: str) -> None:
    world = world_of(path)
    assert world.made_up(path, GenerationMode.POSITIVE)


@pytest.mark.full(keep=1)
@pytest.mark.risk("F1")
@pytest.mark.parametrize("path", GOOD)
def test_good_bodies_with_other_fields_are_answered_or_refused_by_name(
    world_of: Callable[[str], World], path: str
) -> None:
    world = world_of(path)
    before = world.probe()
    seen = world.altered(path)
    assert world.probe() == before
    assert seen[200] and seen[422], seen


@pytest.mark.full(keep=1)
@pytest.mark.risk("F1", figure="0 failures")
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("mode", GenerationMode)
def test_bodies_made_up_from_nothing_are_answered_as_the_document_says(
    world_of: Callable[[str], World], path: str, mode: GenerationMode
) -> None:
    world = world_of(path)
    before = world.probe()
    assert world.made_up(path, mode)
    assert world.probe() == before


@pytest.mark.risk("F1")
@pytest.mark.parametrize("path", GOOD)
def test_bytes_that_are_no_request_are_refused(world_of: Callable[[str], World], path: str) -> None:
    """Good bodies with a piece replaced by any bytes."""

    world = world_of(path)

    @seed(SEED)
    @RUN
    @given(good=st.sampled_from(GOOD[path]), data=st.data(), junk=st.binary(max_size=8))
    def run(good: dict[str, Any], data: st.DataObject, junk: bytes) -> None:
        body = json.dumps(good).encode()
        start = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(start, len(body)))
        found = world.post(path, body[:start] + junk + body[end:])
        assert found.status_code in (200, 400, 404, 413, 422), found.text

    run()


# Planted faults: a route that does what none may do. The search must see it.


def odd(body: TokenizeRequest) -> bool:
    """Tells whether the planted fault shows: for about every fourth made-up body, and for no example."""
    return body.add_special_tokens is not None


def html() -> Response:
    return Response(b"<p>", media_type="text/html")


def other_shape() -> Response:
    return Response(b'{"count": "1"}', media_type="application/json")


def other_status() -> Response:
    return Response(b"{}", 418, media_type="application/json")


def nobody_foresaw() -> Response:
    raise ValueError("planted")


def wrong_name() -> Response:
    raise ApiError("invalid_value", "planted", "items")


@pytest.mark.full(keep=1)
@pytest.mark.risk("F1", planted=True)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (html, "Undocumented Content-Type"),
        (other_shape, "Response violates schema"),
        (other_status, "Undocumented status code"),
        (nobody_foresaw, "Server error"),
        (wrong_name, "planted"),
    ],
)
def test_a_fault_of_one_odd_body_would_be_seen(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], Response], words: str
) -> None:
    own = tokenize.tokenize

    async def spoiled_route(handler: Any, context: Any) -> Response:
        body = await handler.parse(context, TokenizeRequest, 60.0)
        return fault() if odd(body) else await own(handler, context)

    monkeypatch.setattr(tokenize, "tokenize", spoiled_route)
    spoiled = replace(world, examples=settings(RUN, max_examples=SEEK))
    with pytest.raises((FailureGroup, AssertionError)) as raised:
        spoiled.altered("/tokenize")
    assert words in "".join(traceback.format_exception(raised.value))
