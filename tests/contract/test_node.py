"""Clients of Node: OpenAI's 6.49, the Vercel AI SDK 6.0 and Cohere's 8.1: texts, streams, ids, ranks and errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

PROMPT = "This sturdy red"


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], query: str, documents: list[str], messages: list[Any]) -> Any:
    given = {"url": url, "query": query, "documents": documents, "messages": messages, "prompt": PROMPT}
    return run_client("node", given)


def test_openai_completions_are_the_librarys_greedy_ones(told: Any, reference: Any) -> None:
    found = told["openai"]
    [choice] = found["text"]["choices"]
    assert choice["text"] == reference.continuation(PROMPT, 12) and choice["finish_reason"] == "length"
    assert "".join(part["choices"][0]["text"] for part in found["text_parts"]) == choice["text"]
    assert found["models"] == ["builtin"]


def test_openai_chats_are_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    found = told["openai"]
    [choice] = found["chat"]["choices"]
    assert choice["message"]["content"] == found["helper"] == reference.reply(messages)
    *parts, last = found["chat_parts"]
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
    assert last["usage"]["completion_tokens"] == found["chat"]["usage"]["completion_tokens"]


def test_the_id_that_openai_reports_names_the_request(told: Any) -> None:
    found = told["openai"]["id"]
    assert found["request"] == found["header"] and found["request"].startswith("req-")


@pytest.mark.parametrize(
    ("name", "kind", "status", "code", "param"),
    [
        ("temperature", "UnprocessableEntityError", 422, "invalid_value", "temperature"),
        ("model", "NotFoundError", 404, "model_not_found", "model"),
        ("long", "BadRequestError", 400, "context_length_exceeded", "prompt"),
    ],
)
def test_errors_of_openai(told: Any, name: str, kind: str, status: int, code: str, param: str) -> None:
    assert told["openai"]["errors"][name] == {"kind": kind, "status": status, "code": code, "param": param}


def test_vercel_texts_and_streams_are_the_librarys(told: Any, reference: Any, messages: Any) -> None:
    found = told["vercel"]
    assert found["plain"]["text"] == "".join(found["parts"]) == reference.reply(messages)
    assert found["plain"]["finish"] == found["finish"] == "stop"
    for name in ("inputTokens", "outputTokens", "totalTokens"):
        assert found["plain"]["usage"][name] == found["usage"][name] > 0


def test_errors_of_vercel(told: Any) -> None:
    found = told["vercel"]
    assert (found["error"]["status"], found["known"]) == (404, True)


@pytest.mark.parametrize(("name", "count"), [("plain", 6), ("best", 2)])
def test_cohere_ranks_documents(told: Any, ranking: Any, same_ranking: Any, name: str, count: int) -> None:
    found = told["cohere"][name]
    same_ranking(found["results"], ranking[:count])
    assert found["id"] and found["units"] == 1


def test_cohere_cuts_documents(told: Any, reference: Any, same_ranking: Any, query: str) -> None:
    scores = {one["index"]: one["score"] for one in told["cohere"]["cut"]["results"]}
    assert len(scores) == 6 and scores[1] != pytest.approx(scores[2], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "status"), [("model", "NotFoundError", 404), ("nothing", "UnprocessableEntityError", 422)]
)
def test_errors_of_cohere(told: Any, name: str, kind: str, status: int) -> None:
    found = told["cohere"]["errors"][name]
    assert (found["kind"], found["status"]) == (kind, status)
