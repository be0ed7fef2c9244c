"""POST /v1/score over a scripted backend whose log-probabilities are a pure function of the row."""

import json
import math
from typing import Any

import pytest

from deployments.api.schemas.score import ScoreResponse
from deployments.config.settings import ApiSettings
from deployments.limits import Limits, WireLimits
from scoring.errors import ScoringLimits

BODY = {"query": "is it?", "items": [" yes it is", " no", ""], "label_token_ids": [5, 7]}


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(limits=Limits(scoring=ScoringLimits(max_items=5, max_labels=4)))


async def score(client: Any, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/score", {**BODY, **body})
    assert response.status_code == 200, response.text
    ScoreResponse.model_validate_json(response.content, strict=True)
    found: dict[str, Any] = response.json()
    return found


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/v1/score", {**BODY, **body})
    error = found.json()["error"]
    assert "detail" not in found.json()  # only rerank clients look for it
    return found.status_code, error["code"], error["param"]


def probabilities(label_logprob: Any, text: str) -> list[float]:
    row = bytes(x % 251 for x in [256, *text.encode()])
    return [math.exp(label_logprob(row, label)) for label in (5, 7)]


async def test_scores_are_the_models_own_probabilities(client: Any, backend: Any, label_logprob: Any) -> None:
    found = await score(client)
    for item, scores in zip(BODY["items"], found["scores"], strict=True):
        assert scores == pytest.approx(probabilities(label_logprob, f"is it?{item}"), rel=1e-12)
    assert backend.score_tasks[0].full
    tokens = sum(len(f"is it?{item}") + 1 for item in BODY["items"])
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (tokens, 0, tokens)
    assert usage["computed_tokens"] == tokens - usage["prompt_tokens_details"]["cached_tokens"]
    rest = {name: value for name, value in found.items() if name not in ("scores", "usage")}
    assert rest == {
        "pooled_hidden_states": None, "model": "toy", "object": "scoring", "truncated": [False, False, False]
    }  # fmt: skip


async def test_softmax_is_among_the_labels_and_computes_only_them(
    client: Any, backend: Any, label_logprob: Any
) -> None:
    found = await score(client, apply_softmax=True)
    assert not backend.score_tasks[0].full
    for item, scores in zip(BODY["items"], found["scores"], strict=True):
        weights = probabilities(label_logprob, f"is it?{item}")
        assert scores == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6)


async def test_item_first_joins_the_other_way(client: Any, label_logprob: Any) -> None:
    found = await score(client, item_first=True)
    assert found["scores"][0] == pytest.approx(probabilities(label_logprob, " yes it isis it?"), rel=1e-12)


async def test_a_bare_string_is_one_item_and_no_items_give_no_scores(client: Any, backend: Any) -> None:
    assert (await score(client, items=" no"))["scores"] == [(await score(client))["scores"][1]]
    asked = len(backend.score_tasks)
    found = await score(client, items=[])
    assert (found["scores"], found["truncated"], found["usage"]["total_tokens"]) == ([], [], 0)
    assert len(backend.score_tasks) == asked


async def test_ids_are_joined_as_they_are(client: Any, backend: Any) -> None:
    await score(client, query=[1, 2], items=[[3], [4, 5]])
    [task] = backend.score_tasks
    assert task.prefix.tolist() == [1, 2] and task.ids.tolist() == [3, 4, 5]


async def test_a_cut_item_is_named(client: Any, backend: Any) -> None:
    backend.max_model_len = 20
    found = await score(client, items=["x" * 30, "y"])
    assert found["truncated"] == [True, False]
    assert found["scores"][0] == (await score(client, items=["x" * 13]))["scores"][0]


async def test_any_failed_item_fails_the_request(client: Any, backend: Any) -> None:
    assert await refusal(client, query=[1], items=[[2], [300]]) == (422, "invalid_token_id", "items[1]")
    backend.nonfinite = frozenset({1})
    assert await refusal(client) == (500, "nonfinite_logits", "items[1]")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"query": None}, 422, "invalid_value", "query"),
        ({"query": 3}, 422, "invalid_value", "query"),
        ({"query": [1]}, 422, "invalid_value", "items"),
        ({"items": [[1]]}, 422, "invalid_value", "items"),
        ({"items": [1, 2]}, 422, "invalid_value", "items"),
        ({"items": ["a", [1]]}, 422, "invalid_value", "items"),
        ({"items": None}, 422, "invalid_value", "items"),
        ({"items": ["a"] * 6}, 422, "invalid_value", "items"),
        ({"label_token_ids": None}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": []}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": [1, 2, 3, 4, 5]}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": [300]}, 422, "invalid_token_id", "label_token_ids"),
        ({"label_token_ids": [-1], "items": []}, 422, "invalid_token_id", "label_token_ids"),
        ({"label_token_ids": [1, 1]}, 422, "duplicate_label", "label_token_ids[1]"),
        ({"apply_softmax": 1}, 422, "invalid_value", "apply_softmax"),
        ({"item_first": "true"}, 422, "invalid_value", "item_first"),
        ({"model": "m"}, 404, "model_not_found", "model"),
        ({"embed_override_token_id": 0}, 400, "unsupported_parameter", "embed_override_token_id"),
        ({"query_embed_overrides": []}, 400, "unsupported_parameter", "query_embed_overrides"),
        ({"item_embed_overrides": [[]]}, 400, "unsupported_parameter", "item_embed_overrides"),
        ({"return_pooled_hidden_states": True}, 400, "unsupported_parameter", "return_pooled_hidden_states"),
        ({"text_1": "a", "text_2": "b"}, 422, "invalid_value", "query"),
        ({"instruction": "a"}, 422, "invalid_value", "instruction"),
    ],
)
async def test_every_bad_field_is_named(
    client: Any, backend: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    assert await refusal(client, **body) == (status, code, param)
    assert not backend.score_tasks


async def test_neutral_values_of_refused_fields_are_accepted(client: Any) -> None:
    await score(client, return_pooled_hidden_states=False, embed_override_token_id=None, text_1=None)


async def test_pairs_without_a_prompt_say_what_to_configure(client: Any) -> None:
    found = await client.post("/v1/score", {"text_1": "a", "text_2": ["b"]})
    assert found.status_code == 404 and "rerank: {template:" in found.json()["error"]["message"]


@pytest.mark.parametrize(("wire", "given"), [({"max_rows": 2}, 3), ({"max_answer_cells": 5}, 6)])
async def test_sizes_are_refused_from_lengths(backend: Any, client_of: Any, wire: dict[str, int], given: int) -> None:
    exact = client_of(ApiSettings(limits=Limits(wire=WireLimits(**dict.fromkeys(wire, given)))))
    await score(exact)
    small = client_of(ApiSettings(limits=Limits(wire=WireLimits(**wire))))
    assert await refusal(small) == (413, "request_too_large", "items")
    assert len(backend.score_tasks) == 1


async def test_unknown_fields_are_named(client: Any) -> None:
    found = await client.post("/v1/score", {**BODY, "foo": json.dumps(1)})
    assert found.headers["x-assay-ignored-fields"] == "foo"
