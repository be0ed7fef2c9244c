"""Every field that clients of other servers send is honoured, harmless or refused, on every route."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from deployments.api.schemas.chat import ChatRequest
from deployments.api.schemas.classify import ClassifyRequest
from deployments.api.schemas.decisions import DecisionRequest
from deployments.api.schemas.embeddings import EmbeddingsRequest, EmbedRequest, PredictRequest
from deployments.api.schemas.fields import Body
from deployments.api.schemas.generation import CompletionRequest
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.schemas.info import DetokenizeRequest, TokenizeRequest
from deployments.api.schemas.known_fields import HARMLESS, MESSAGE_REFUSED, REFUSED, is_neutral
from deployments.api.schemas.pooling import PoolingBody
from deployments.api.schemas.rerank import RerankRequest
from deployments.api.schemas.rerank_dialects import IsaacusRequest, MixedbreadRequest
from deployments.api.schemas.score import ScoreBody
from deployments.config.settings import ApiSettings
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind
from tests.deployments.clients import settings_of_every_route

SCORE = {"query": "q", "items": ["a"], "label_token_ids": [1]}
RERANK = {"query": "q", "documents": ["a"]}
HELLO = {"messages": [{"role": "user", "content": "a"}], "seed": 1}
ROUTES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/generative_scoring": (ScoringRequest, SCORE),
    "/rerank": (RerankRequest, RERANK),
    "/v1/rerank": (RerankRequest, RERANK),
    "/v2/rerank": (RerankRequest, RERANK),
    "/v1/reranking": (MixedbreadRequest, {"query": "q", "input": ["a"]}),
    "/v1/rerankings": (IsaacusRequest, {"query": "q", "texts": ["a"]}),
    "/v1/score": (ScoreBody, SCORE),
    "/score": (ScoreBody, SCORE),
    "/pooling": (PoolingBody, {"input": "a"}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "a"}),
    "/embed": (EmbedRequest, {"inputs": "a"}),
    "/predict": (PredictRequest, {"inputs": "a"}),
    "/classify": (ClassifyRequest, {"input": "a"}),
    "/v1/classify": (ClassifyRequest, {"input": "a"}),
    "/v1/decisions": (DecisionRequest, {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "seed": 1}),
    "/v1/chat/completions": (ChatRequest, HELLO),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
REWARD = HeadInfo(HeadKind.SEQUENCE, 1, ("reward",))
VECTORS = HeadInfo(HeadKind.POOLED, 4, (), embedding=EmbeddingInfo())
HEADS = dict.fromkeys(("/classify", "/v1/classify", "/pooling", "/predict"), REWARD)
HEADS |= dict.fromkeys(("/v1/embeddings", "/embed"), VECTORS)
LAW = (  # each changes what is drawn, and was once ignored
    "min_new_tokens", "max_new_tokens", "no_repeat_ngram_size", "typical_p", "stop_regex", "logits_processors",
    "custom_logit_processor", "lora_path", "top_a", "mirostat", "mirostat_tau", "mirostat_eta", "xtc_probability",
    "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "functions", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema", "structured_outputs", "structural_tag",
    "grammar", "response_format", "reasoning", "reasoning_effort",
)  # fmt: skip
ODD: Any = {"s3cr3t": [7]}  # no value of this kind is neutral


@pytest.fixture
def settings() -> ApiSettings:
    return settings_of_every_route()


def undecided(routes: Mapping[str, tuple[type[Body], Any]], names: frozenset[str]) -> set[str]:
    """Declared fields that the table lacks, so that other routes would ignore them."""
    return {field for body, _ in routes.values() for field in body.model_fields} - names


def undeclared(path: str) -> Iterator[str]:
    return (name for name in REFUSED if name not in ROUTES[path][0].model_fields)


def test_these_are_all_routes_with_a_body(app: FastAPI) -> None:
    posts = {route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())}
    assert posts == set(ROUTES)


def test_no_field_is_in_both_lists_and_none_is_left_out() -> None:
    assert not HARMLESS & REFUSED.keys()
    known = HARMLESS | REFUSED.keys()
    assert undecided(ROUTES, known) == set()
    assert undecided(ROUTES, known - {"temperature"}) == {"temperature"}  # a planted fault


@pytest.mark.parametrize("path", ROUTES)
async def test_what_changes_an_answer_is_honoured_or_refused(client: Any, backend: Any, path: str) -> None:
    for name in undeclared(path):
        found = await client.post(path, ROUTES[path][1] | {name: ODD})
        error = found.json().get("error", {})
        assert (found.status_code, error.get("code"), error.get("param")) == (400, "unsupported_parameter", name)
        assert "s3cr3t" not in found.text
    assert not backend.tasks and not backend.score_tasks


@pytest.mark.parametrize("path", ROUTES)
async def test_values_without_effect_pass_and_change_nothing(client: Any, backend: Any, path: str) -> None:
    backend.head = HEADS.get(path)
    body = ROUTES[path][1]
    plain = await client.post(path, body)
    neutral = {name: REFUSED[name][-1] for name in undeclared(path) if REFUSED[name]}
    harmless = {name: ODD for name in HARMLESS if name not in ROUTES[path][0].model_fields}
    for more in (neutral, dict.fromkeys(undeclared(path)), harmless):
        assert more
        found = await client.post(path, body | more, x_assay_strict="1")
        assert found.status_code == 200, found.text
        assert "x-assay-ignored-fields" not in found.headers
        assert answer(found) == answer(plain)


def answer(found: Any) -> dict[str, Any]:
    """An answer without what differs from one request to the next."""
    body = found.json()
    if isinstance(body, list):
        return {"": body}
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("value", [3, 0.5, "x", {"type": "json_object"}])
async def test_names_that_change_the_distribution_are_refused(client: Any, path: str, value: Any) -> None:
    for name in LAW:
        found = await client.post(path, ROUTES[path][1] | {name: value})
        assert (found.status_code, found.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_do_sample_passes_only_where_it_says_what_happens(client: Any, path: str) -> None:
    for body, status in (
        ({"do_sample": False}, 400),
        ({"do_sample": True}, 400),
        ({"do_sample": True, "temperature": 0}, 400),
        ({"do_sample": False, "temperature": 1}, 400),
        ({"do_sample": False, "temperature": 0}, 200),
    ):
        assert (await client.post(path, ROUTES[path][1] | body)).status_code == status, body


@pytest.mark.parametrize("name", MESSAGE_REFUSED)
async def test_fields_of_a_message_are_refused_with_their_place(client: Any, name: str) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": "b"}
    body = {"messages": [*HELLO["messages"], message | {name: ODD}]}  # type: ignore[misc]
    found = await client.post("/v1/chat/completions", body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, f"messages[1].{name}")
    message |= {name: MESSAGE_REFUSED[name][0]} if MESSAGE_REFUSED[name] else {name: None}
    assert (await client.post("/v1/chat/completions", {"messages": [message]})).status_code == 200


@pytest.mark.parametrize(
    ("value", "neutral", "reported"),
    [(None, (), True), (1, (1,), True), (1.0, (1,), True), (True, (1,), False), (1, (True,), False),
     (0, (False,), False), ([], ([],), True), ({}, ({},), True), ("", (), False), (0, (), False)],
)  # fmt: skip
def test_neutral_values(value: object, neutral: tuple[Any, ...], reported: bool) -> None:
    assert is_neutral(value, neutral) is reported
