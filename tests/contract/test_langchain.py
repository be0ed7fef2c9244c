"""LangChain: `CohereRerank` of langchain-cohere, `OpenAIDecisions` and `ChatOpenAI` of langchain-openai."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

COLOURS, STYLES = ["blue", "red", "green"], ["light", "soft", "sturdy"]


@pytest.fixture(scope="module")
def told(
    url: str, run_client: Callable[..., Any], query: str, documents: list[str], text: str, messages: list[Any]
) -> Any:
    given = {"url": url, "query": query, "documents": documents, "input": text, "messages": messages}
    return run_client("langchain_partners", given)


def test_documents_are_compressed_to_the_best(told: Any, ranking: Any, same_ranking: Any, documents: list[str]) -> None:
    same_ranking(told["rerank"]["compressed"], ranking[:3])
    assert [one["text"] for one in told["rerank"]["compressed"]] == [documents[index] for index, _ in ranking[:3]]
    same_ranking(told["rerank"]["all"], ranking)


@pytest.mark.parametrize("call", ["plain", "message"])
def test_decisions(told: Any, reference: Any, text: str, call: str) -> None:
    found = told["decisions"][call]
    answers = found["answers"]
    assert answers["red"]["probability"] == pytest.approx(reference.question(text, "is it red?")[0], abs=1e-5)
    wanted = dict(zip(COLOURS, reference.question(text, "which colour?", COLOURS), strict=True))
    assert answers["colour"]["probabilities"] == pytest.approx(wanted, abs=1e-5)
    assert answers["colour"]["choice"] == "blue"
    wanted = dict(zip("012", reference.question(text, "which style is it?", STYLES), strict=True))
    assert answers["style"]["probabilities"] == pytest.approx(wanted, abs=1e-5)
    assert answers["style"]["legend"] == dict(zip("012", STYLES, strict=True))
    assert answers["style"]["score"] == pytest.approx(wanted["1"] + 2 * wanted["2"], abs=1e-5)
    assert found["model"] == "builtin" and found["usage"]["input_tokens"] > 0 == found["usage"]["output_tokens"]


def test_answers_are_keyed_by_question(told: Any, ask: Any, text: str) -> None:
    assert told["decisions"]["kinds"] == [["red"], ["colour"], ["style"]]
    question = {"type": "predicate", "instructions": "is it red?", "name": "red"}
    [own] = ask("/v1/decisions", {"input": text, "questions": [question]})["answers"]
    found = told["decisions"]["plain"]["answers"]["red"]["probability"]
    assert found == pytest.approx(own["probability"], abs=1e-6)


def test_chat_is_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any) -> None:
    found = told["chat"]
    assert found["text"] == "".join(found["parts"]) == reference.reply(messages)
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and found["finish"] == "stop"


def test_an_overlong_prompt_is_langchains_own_error(told: Any) -> None:
    """Checks the errors that its fallbacks to a model with more room catch."""
    assert "ContextOverflowError" in told["chat"]["long"] and "BadRequestError" in told["chat"]["long"]
