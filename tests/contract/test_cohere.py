"""Cohere's client, 5.21 and 7.3: reranking by both versions of its API, and its errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

VERSIONS = {"cohere_5": "5.21.1", "cohere_7": "7.3.1"}


@pytest.fixture(scope="module", params=VERSIONS)
def told(request: Any, url: str, run_client: Callable[..., Any], query: str, documents: list[str]) -> Any:
    found = run_client("cohere_sdk", {"url": url, "query": query, "documents": documents}, request.param)
    assert found["version"] == VERSIONS[request.param]
    return found


@pytest.mark.parametrize("call", ["v1", "v1_objects", "v2", "v2_async"])
def test_documents_are_ranked_as_by_the_library(told: Any, ranking: Any, same_ranking: Any, call: str) -> None:
    found = told[call]
    same_ranking(found["results"], ranking)
    assert (found["version"], found["search_units"]) == (call[1], 1) and found["id"].startswith("rerank-")


def test_the_best_only(told: Any, ranking: Any, same_ranking: Any) -> None:
    same_ranking(told["v2_best"]["results"], ranking[:2])


def test_the_clients_types_hold_what_the_service_says(told: Any, ask: Any, query: str, documents: list[str]) -> None:
    own = ask("/v2/rerank", {"query": query, "documents": documents})
    found = told["v2"]
    for one, mine in zip(found["results"], own["results"], strict=True):
        assert one["index"] == mine["index"] and one["text"] is None
        assert one["score"] == pytest.approx(mine["relevance_score"], abs=1e-6)
    assert found["input_tokens"] == own["meta"]["tokens"]["input_tokens"] == own["usage"]["total_tokens"]


def test_documents_come_back(told: Any, documents: list[str]) -> None:
    for one in told["v1_objects"]["results"]:
        assert one["text"] == documents[one["index"]]
    [warning] = told["v1_objects"]["warnings"]
    assert "max_chunks_per_doc" in warning and told["v1"]["warnings"] is None


def test_ranked_fields_in_their_order(
    told: Any, reference: Any, same_ranking: Any, query: str, documents: list[str]
) -> None:
    texts = [f"note: none\nname: {text}" for text in documents]
    same_ranking(told["v1_fields"]["results"], reference.ranking(query, texts))
    assert all(one["text"] == texts[one["index"]] for one in told["v1_fields"]["results"])


def test_cut_documents_are_ranked_as_cut(told: Any, ask: Any, query: str, documents: list[str]) -> None:
    """`max_tokens_per_doc=2`, against documents that the service's own tokenizer has cut."""
    cut = []
    for document in documents:
        ids = ask("/tokenize", {"prompt": document})["tokens"][:2]
        cut.append(ask("/detokenize", {"tokens": ids})["prompt"])
    own = {one["index"]: one for one in ask("/v2/rerank", {"query": query, "documents": cut})["results"]}
    for one in told["v2_cut"]["results"]:
        assert one["score"] == pytest.approx(own[one["index"]]["relevance_score"], abs=1e-6)
    assert told["v2_cut"]["input_tokens"] < told["v2"]["input_tokens"]


@pytest.mark.parametrize(
    ("name", "kind", "status", "code", "param"),
    [
        ("model", "NotFoundError", 404, "model_not_found", "model"),
        ("nothing", "UnprocessableEntityError", 422, "invalid_value", "documents"),
        ("images", "BadRequestError", 400, "unsupported_parameter", "documents"),
        ("long", "BadRequestError", 400, "context_length_exceeded", "query"),
    ],
)
def test_errors_are_the_clients_own(told: Any, name: str, kind: str, status: int, code: str, param: str) -> None:
    found = told["errors"][name]
    assert (found["kind"], found["status"]) == (kind, status)
    error = found["body"]["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert found["body"]["message"] == error["message"] and f"`{param}`" in error["message"]


def test_a_slip_would_be_seen(reference: Any, same_ranking: Any, query: str, documents: list[str]) -> None:
    """The planted counterpart: the ranking under a query that differs in one article."""
    moved = [{"index": index, "score": score} for index, score in reference.ranking(f"a {query}", documents)]
    same_ranking(moved, reference.ranking(f"a {query}", documents))
    with pytest.raises(AssertionError):
        same_ranking(moved, reference.ranking(query, documents))
    true = reference.ranking(query, documents)
    with pytest.raises(AssertionError):  # the right order, and one score off by twice the tolerance
        same_ranking([{"index": index, "score": score + 2e-5 * (index == 1)} for index, score in true], true)
