"""Models, tokenizer, health and schema routes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, create_model

from deployments.api.app import build_api
from deployments.api.openapi import MODEL_READ, POSTED, READ, Schemas
from deployments.api.schemas.info import (
    DetokenizeResponse,
    ModelList,
    ModelObject,
    Readiness,
    TokenizeResponse,
    TokenizerInfoResponse,
    Versions,
)
from deployments.config.settings import ApiSettings, ChatSettings, SamplingDefaults
from deployments.errors import ERROR_KINDS, ApiError
from deployments.limits import Limits
from tests.support.toy_model import ByteTokenizer

CODES = {"max_choices": 52, "max_levels": 52}  # as many as the byte tokenizer has


async def test_models_shows_the_card_and_every_limit(client: Any) -> None:
    found = await client.get("/v1/models")
    [model] = ModelList.model_validate_json(found.content, strict=True).data
    assert model.assay.model_dump() == found.json()["data"][0]["assay"]  # the schema names every field
    assert (model.id, model.root, model.max_model_len, model.assay.vocab_size) == ("toy", "toy", 4096, 300)
    assert model.assay.limits == Limits().flat() | CODES and model.assay.sampling_defaults["temperature"] == 1.0
    one = ModelObject.model_validate_json((await client.get("/v1/models/toy")).content, strict=True)
    assert one == model
    for other in ("default", "x/y", "toy//"):
        assert (await client.get(f"/v1/models/{other}")).json()["error"]["code"] == "model_not_found"


async def test_a_name_with_slashes_is_found(client: Any, backend: Any) -> None:
    backend.name = "org/model"
    assert (await client.get("/v1/models/org/model")).json()["id"] == "org/model"
    for name in ("org/model", "default", "", None):
        assert (await client.complete(model=name))["model"] == "org/model"


async def test_tokenize_and_back(client: Any) -> None:
    found = await client.post("/tokenize", {"prompt": "né", "return_token_strs": True})
    answer = TokenizeResponse.model_validate_json(found.content, strict=True)
    assert answer.tokens == [256, 110, 0xC3, 0xA9] and answer.count == 4 and answer.max_model_len == 4096
    assert answer.token_strs == ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9"]
    plain = (await client.post("/tokenize", {"prompt": "<eos>", "add_special_tokens": False})).json()
    assert plain["tokens"] == [257] and plain["token_strs"] is None
    back = await client.post("/detokenize", {"tokens": [256, 110, 0xC3, 0xA9, 257]})
    assert DetokenizeResponse.model_validate_json(back.content).prompt == "<bos>né<eos>"
    assert (await client.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_bad_tokens_are_named(client: Any) -> None:
    for tokens in ([300], [-1], [True], None, "x", [2**70]):
        found = await client.post("/detokenize", {"tokens": tokens})
        assert (found.status_code, found.json()["error"]["param"]) == (422, "tokens")


async def test_tokenizer_info_names_the_end_of_text(client: Any, backend: Any) -> None:
    found = TokenizerInfoResponse.model_validate_json((await client.get("/tokenizer_info")).content, strict=True)
    assert found.eos_token == "<eos>"
    hidden = build_api(backend, ByteTokenizer(), replace(ApiSettings(), chat=ChatSettings(expose_template=False)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=hidden), base_url="http://api") as http:
        assert "chat_template" not in (await http.get("/tokenizer_info")).json()


async def test_health_and_readiness(client: Any, backend: Any) -> None:
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    for path in ("/readyz", "/health"):
        backend.status = "ready"
        found = await client.get(path)
        assert found.status_code == 200
        assert Readiness.model_validate_json(found.content).replicas_ready == 1
        for status in ("starting", "unready", "draining"):
            backend.status = status
            assert (await client.get(path)).status_code == 503


async def test_version_and_metrics(client: Any) -> None:
    found = Versions.model_validate_json((await client.get("/version")).content, strict=True)
    assert found.model == "toy" and found.versions == {"torch": "2"}
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics.text == "assay_requests_total 1\n"


async def test_a_card_that_is_not_there_yet_is_503_and_asked_for_again(client: Any, backend: Any) -> None:
    card = backend.card

    async def fail() -> None:
        raise ApiError("not_ready", "Starting.")

    backend.card = fail
    found = await client.get("/v1/models")
    assert (found.status_code, found.headers["retry-after"]) == (503, "1")
    assert (await client.get("/version")).json()["model"] is None
    backend.card = card
    assert (await client.get("/v1/models")).status_code == 200


async def test_the_schema_declares_bodies_answers_and_errors_of_every_route(client: Any) -> None:
    schema = (await client.get("/openapi.json")).json()
    paths = schema["paths"]
    assert set(paths) == {
        "/healthz", "/readyz", "/health", "/version", "/metrics", "/v1/models", "/v1/models/{model_id}",
        "/tokenizer_info", "/tokenize", "/detokenize", "/generative_scoring", "/v1/completions",
        "/v1/decisions",
        "/v1/chat/completions",
        "/classify", "/v1/classify", "/pooling", "/v1/embeddings", "/embed", "/predict",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking", "/v1/rerankings",
    }  # fmt: skip
    defined = set(schema["components"]["schemas"])
    for path, methods in paths.items():
        for method, route in methods.items():
            statuses = set(route["responses"])
            assert {"200", "400", "500"} <= statuses and "security" not in route and "default" not in statuses
            for status in statuses - {"200"}:
                error = route["responses"][status]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                assert error in defined
            if method == "post":
                assert {int(status) for status in statuses} == {200, *POSTED}
                [content] = route["requestBody"]["content"].values()
                assert content["schema"]["$ref"].rsplit("/", 1)[1] in defined
            assert path == "/metrics" or "$ref" in route["responses"]["200"]["content"]["application/json"]["schema"]


def test_every_status_that_an_error_can_have_is_one_of_the_schemas() -> None:
    before_routes = {405}  # told before a route is known
    assert {kind.status for kind in ERROR_KINDS.values()} == {*POSTED} | before_routes
    assert {*READ} <= {*MODEL_READ} <= {*POSTED}


def test_two_request_models_of_one_name_are_refused() -> None:
    class One(BaseModel):
        a: int

    other = create_model("One", b=(str, ...))
    schemas = Schemas(FastAPI(), {})
    assert schemas.body(One) == schemas.body(One)
    with pytest.raises(ValueError, match="called One"):
        schemas.body(other)


def test_sampling_defaults_come_from_the_models_file(tmp_path: Path) -> None:
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}')
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20)
