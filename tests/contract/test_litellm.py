"""LiteLLM: `rerank` and `completion` of `hosted_vllm/...`, `text_completion`, streams, and its own errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

PROMPT = "This sturdy red"


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], query: str, documents: list[str], messages: list[Any]) -> Any:
    given = {"url": url, "query": query, "documents": documents, "messages": messages, "prompt": PROMPT}
    return run_client("litellm_sdk", given)


@pytest.mark.parametrize(("address", "count"), [("plain", 6), ("v1", 2), ("named", 6)])
def test_documents_are_ranked(
    told: Any, ask: Any, ranking: Any, same_ranking: Any, query: str, documents: list[str], address: str, count: int
) -> None:
    found = told["rerank"][address]
    same_ranking(found["results"], ranking[:count])
    own = ask("/rerank", {"query": query, "documents": documents, "top_n": count})
    assert found["tokens"] == own["usage"]["total_tokens"] and found["id"].startswith("rerank-")
    for one, mine in zip(found["results"], own["results"], strict=True):
        assert one["score"] == pytest.approx(mine["relevance_score"], abs=1e-6)
        assert one["text"] == (None if address == "named" else documents[one["index"]])


def test_chat_is_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    [choice] = told["chat"]["choices"]
    assert choice["message"]["content"] == reference.reply(messages) and choice["finish_reason"] == "stop"
    parts = [part["choices"][0] for part in told["chat_parts"]]
    assert "".join(part["delta"]["content"] or "" for part in parts) == choice["message"]["content"]
    assert parts[-1]["finish_reason"] == "stop"


def test_a_completion_is_the_librarys_greedy_one(told: Any, reference: Any) -> None:
    [choice] = told["text"]["choices"]
    assert choice["text"] == reference.continuation(PROMPT, 12) and choice["finish_reason"] == "length"
    assert "".join(part["choices"][0]["text"] or "" for part in told["text_parts"]) == choice["text"]
    assert told["text"]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("name", "kind", "status"),
    [
        ("model", "NotFoundError", 404),
        ("long", "ContextWindowExceededError", 400),  # what its fallbacks to a model with more room catch
        ("rerank", "NotFoundError", 404),
    ],
)
def test_errors_are_the_clients_own(told: Any, name: str, kind: str, status: int) -> None:
    assert (told["errors"][name]["kind"], told["errors"][name]["status"]) == (kind, status)
