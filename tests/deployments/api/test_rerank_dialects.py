"""The rerank dialects of Voyage, Mixedbread, Pinecone and Isaacus: one ranking, each in its client's own form."""

import json
from typing import Any

import pytest

from deployments.api.schemas.rerank import RerankResponse
from deployments.api.schemas.rerank_dialects import (
    IsaacusResponse,
    MixedbreadResponse,
    PineconeResponse,
    VoyageResponse,
)
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings
from scoring.prompts.templates import TemplateSpec

ASK = TemplateSpec(prefix="{{ query }}|", suffix="?", labels=("y", "n"))
DOCS = ["alpha", "be", "gamma ray"]
PINECONE = {"x-pinecone-api-version": "2025-10"}


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(templates={"ask": ASK}, rerank=RerankArgs(template="ask"))


@pytest.fixture
async def ranking(client: Any) -> list[tuple[int, float]]:
    """The ranking in the form that other tests prove."""
    found = (await client.post("/v2/rerank", {"query": "q", "documents": DOCS})).json()["results"]
    return [(one["index"], one["relevance_score"]) for one in found]


async def answered(client: Any, path: str, body: dict[str, Any] | str, headers: Any = ()) -> Any:
    text = body if isinstance(body, str) else json.dumps(body)
    json_type = {"content-type": "application/json"}
    found = await client.http.post(f"http://api{path}", content=text, headers=json_type | dict(headers))
    assert found.status_code == 200, found.text
    return found.content


async def test_voyage_is_known_by_its_fields(client: Any, ranking: Any) -> None:
    for fields in ({"top_k": 2}, {"top_k": None, "truncation": True}, {"truncation": False}):
        body = {"query": "q", "documents": DOCS, "model": "toy", **fields}
        found = VoyageResponse.model_validate_json(await answered(client, "/v1/rerank", body), strict=True)
        assert [(one.index, one.relevance_score) for one in found.data] == ranking[: fields.get("top_k") or 3]
        assert found.data[0].document is None and found.usage.total_tokens > 0
    body = {"query": "q", "documents": DOCS, "top_k": 1, "return_documents": True}
    found = VoyageResponse.model_validate_json(await answered(client, "/v1/rerank", body), strict=True)
    assert found.data[0].document == DOCS[ranking[0][0]]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_null_is_no_field_of_voyage(client: Any, ranking: Any, path: str) -> None:
    body = {"query": "q", "documents": DOCS, "top_n": 2, "top_k": None, "truncation": None}
    found = RerankResponse.model_validate_json(await answered(client, path, body), strict=True)
    assert [(one.index, one.relevance_score) for one in found.results] == ranking[:2]


async def test_mixedbread_has_its_path(client: Any, ranking: Any) -> None:
    body: dict[str, Any] = {"query": "q", "input": DOCS, "model": "toy"}
    found = MixedbreadResponse.model_validate_json(await answered(client, "/v1/reranking", body), strict=True)
    assert [(one.index, one.score) for one in found.data] == ranking
    assert found.data[0].input is None and not found.return_input
    objects = [{"title": "t", "body": text} for text in DOCS]
    body |= {"input": objects, "rank_fields": ["body"], "top_k": 2, "return_input": True}
    found = MixedbreadResponse.model_validate_json(await answered(client, "/v1/reranking", body), strict=True)
    assert [(one.index, one.score) for one in found.data] == ranking[:2]
    assert found.data[0].input == objects[ranking[0][0]] and found.top_k == 2


async def test_pinecone_is_known_by_its_header(client: Any, ranking: Any) -> None:
    objects = [{"id": str(index), "text": text} for index, text in enumerate(DOCS)]
    body = {"model": "toy", "query": "q", "documents": objects, "rank_fields": ["text"], "top_n": 2}
    body |= {"parameters": {"truncate": "END"}}
    found = PineconeResponse.model_validate_json(await answered(client, "/rerank", body, PINECONE.items()), strict=True)
    assert [(one.index, one.score) for one in found.data] == ranking[:2]
    assert found.data[0].document == objects[ranking[0][0]]
    body["return_documents"] = False
    found = PineconeResponse.model_validate_json(await answered(client, "/rerank", body, PINECONE.items()), strict=True)
    assert found.data[0].document is None


async def test_isaacus_has_its_path(client: Any, ranking: Any) -> None:
    body = {"model": "toy", "query": "q", "texts": DOCS, "top_n": 2, "is_iql": False, "scoring_method": "auto"}
    found = IsaacusResponse.model_validate_json(await answered(client, "/v1/rerankings", body), strict=True)
    assert [(one.index, one.score) for one in found.results] == ranking[:2]
    assert found.usage.input_tokens > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v2/rerank", {"query": "q", "documents": DOCS, "top_k": 1}, "top_k"),
        ("/rerank", {"query": "q", "texts": DOCS, "truncation": True}, "truncation"),
        ("/v1/rerank", {"query": "q", "documents": DOCS, "top_k": 1, "top_n": 1}, "top_n"),
        ("/rerank", {"query": "q", "documents": DOCS, "parameters": {"truncate": "END"}}, "parameters"),
        ("/v1/reranking", {"query": "q", "documents": DOCS}, "input"),
        ("/v1/reranking", {"query": "q", "input": []}, "input"),
        ("/v1/reranking", {"query": "q", "input": None}, "input"),
        ("/v1/rerankings", {"query": "q", "texts": None}, "texts"),
        ("/v1/reranking", {"query": "q", "input": DOCS, "rewrite_query": True}, "rewrite_query"),
        ("/v1/rerankings", {"query": "q", "texts": DOCS, "is_iql": True}, "is_iql"),
        ("/v1/rerankings", {"query": "q", "texts": DOCS, "scoring_method": "chunk_max"}, "scoring_method"),
    ],
)
async def test_what_a_form_does_not_have_is_refused(client: Any, path: str, body: Any, param: str) -> None:
    found = await client.post(path, body)
    assert found.status_code in (400, 422)
    error = found.json()
    assert error["error"]["param"] == param
    assert error["message"] == error["detail"] == error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "more", "headers", "listed"),
    [
        ("/v1/rerank", "documents", {"top_k": 9}, {}, "data"),
        ("/v1/reranking", "input", {"return_input": True}, {}, "data"),
        ("/rerank", "documents", {}, PINECONE, "data"),
        ("/v1/rerankings", "texts", {}, {}, "results"),
    ],
)
async def test_a_document_that_is_no_unicode_fails_alone_in_every_form(
    client: Any, ranking: Any, path: str, field: str, more: Any, headers: Any, listed: str
) -> None:
    body = {"query": "q", field: [*DOCS, "cut \ud83d"], **more}
    found = json.loads(await answered(client, path, json.dumps(body), headers))
    values = [(one["index"], one.get("score", one.get("relevance_score"))) for one in found[listed]]
    assert values == ranking
    assert [(one["index"], one["code"]) for one in found["errors"]] == [(3, "invalid_value")]
    assert f"`{field}[3]` must be Unicode text" in found["errors"][0]["message"]
