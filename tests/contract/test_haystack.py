"""Haystack 3.4: a chat generator's answers, plain and streamed, and its errors; the rankers for Cohere and Jina."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], messages: list[Any]) -> Any:
    return run_client("haystack_generator", {"url": url, "messages": messages})


def test_texts_and_streams_are_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    assert told["plain"] == told["streamed"] == "".join(told["parts"]) == reference.reply(messages)
    assert len(told["parts"]) > 2 and told["finish_reason"] == "stop"
    assert told["usage"]["completion_tokens"] > 2


def test_an_error_has_its_status(told: Any) -> None:
    assert told["status"] == 422


@pytest.mark.parametrize("ranker", ["cohere", "jina"])
def test_rankers_order_documents_as_the_library(
    url: str,
    run_client: Callable[..., Any],
    query: str,
    documents: list[str],
    ranking: Any,
    same_ranking: Any,
    ranker: str,
) -> None:
    found = run_client("haystack_rankers", {"url": url, "query": query, "documents": documents})[ranker]
    same_ranking(found, ranking)
    assert [one["text"] for one in found] == [documents[index] for index, _ in ranking]
