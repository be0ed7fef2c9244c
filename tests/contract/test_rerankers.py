"""The package `rerankers` 0.10 over the dialects of Cohere, Jina and TEI."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], query: str, documents: list[str]) -> Any:
    return run_client("rerankers_api", {"url": url, "query": query, "documents": documents})


@pytest.mark.parametrize("provider", ["cohere", "jina", "text-embeddings-inference"])
def test_documents_are_ranked(told: Any, ranking: Any, same_ranking: Any, documents: list[str], provider: str) -> None:
    same_ranking(told[provider], ranking)
    assert [one["text"] for one in told[provider]] == [documents[one["index"]] for one in told[provider]]
