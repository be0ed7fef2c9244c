"""LlamaIndex: `CohereRerank` (/v2/rerank), `JinaRerank` (/v1/rerank) and `TextEmbeddingInference` (/rerank)."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], query: str, documents: list[str]) -> Any:
    return run_client("llama_index_rerankers", {"url": url, "query": query, "documents": documents})


@pytest.mark.parametrize("reranker", ["cohere", "jina", "tei"])
def test_the_best_nodes(told: Any, ranking: Any, same_ranking: Any, documents: list[str], reranker: str) -> None:
    same_ranking(told[reranker], ranking[:3])
    assert [one["text"] for one in told[reranker]] == [documents[index] for index, _ in ranking[:3]]


def test_every_text_has_a_score(told: Any, ranking: Any, same_ranking: Any) -> None:
    same_ranking(told["tei_all"], ranking)


def test_the_scores_are_the_services_own(told: Any, ask: Any, query: str, documents: list[str]) -> None:
    own = {one["index"]: one["score"] for one in ask("/rerank", {"query": query, "texts": documents})}
    assert {one["index"]: one["score"] for one in told["tei_all"]} == pytest.approx(own, abs=1e-6)
    best = ask("/v1/rerank", {"query": query, "documents": documents, "top_n": 3, "model": "builtin"})["results"]
    wanted = [(one["index"], pytest.approx(one["relevance_score"], abs=1e-6)) for one in best]
    for reranker in ("cohere", "jina"):
        assert [(one["index"], one["score"]) for one in told[reranker]] == wanted


def test_errors_say_what_is_wrong(told: Any) -> None:
    assert told["errors"]["cohere"]["kind"] == "NotFoundError" and "`model`" in told["errors"]["cohere"]["words"]
    jina = told["errors"]["jina"]  # raises `detail` of whatever is no result
    assert jina["kind"] == "RuntimeError" and jina["words"].startswith("`model` must be 'builtin' or absent.")
