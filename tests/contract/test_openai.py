"""The official OpenAI client 3.52: models, completions, chat, plain and streamed, echo, decisions, errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

PROMPT = "Query: a red chair\nDocument: A sturdy red"


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], messages: Any, text: str) -> Any:
    return run_client("openai_sdk", {"url": url, "messages": messages, "input": text})


def test_models(told: Any) -> None:
    assert [model["id"] for model in told["models"]] == ["builtin"]
    assert told["model"] == told["models"][0] and told["model"]["owned_by"] == "assay"


def test_completions(told: Any) -> None:
    [choice] = told["plain"]["choices"]
    assert choice["text"] and choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    usage = told["plain"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [one["index"] for one in told["several"]["choices"]] == list(range(6))
    assert len(told["ids"]["choices"]) == 2
    assert all(
        len(one["logprobs"]["tokens"]) > count for one, count in zip(told["ids"]["choices"], (2, 1), strict=True)
    )


def test_echo_is_the_prompt_and_the_same_answer(told: Any) -> None:
    [plain], [echo] = told["plain"]["choices"], told["echo"]["choices"]
    assert echo["text"] == PROMPT + plain["text"]
    logprobs = echo["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, others in [
        *zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ][1:]:
        assert others[token] == value <= 0
    assert "".join(logprobs["tokens"]).startswith(PROMPT)


def test_a_stream_is_the_plain_answer(told: Any) -> None:
    [echo] = told["echo"]["choices"]
    *events, last = told["events"]
    assert last["choices"] == [] and last["usage"] == told["echo"]["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    parts = [event["choices"][0] for event in events]
    assert "".join(part["text"] for part in parts) == echo["text"]
    assert parts[-1]["finish_reason"] == echo["finish_reason"]
    for name in ("tokens", "text_offset"):
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][name]] == echo["logprobs"][name]


def test_a_prompt_alone(told: Any) -> None:
    [choice] = told["prompt_only"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    first, *places = choice["prompt_logprobs"]
    assert first is None and all(1 <= len(place) <= 2 for place in places)
    assert "".join(place_token(place) for place in places) in PROMPT


def place_token(place: dict[str, Any]) -> str:
    """The token that stands there: with one alternative, the only one or the one of the lower rank."""
    return str(max(place.values(), key=lambda one: one["rank"])["decoded_token"])


@pytest.mark.parametrize(
    ("name", "kind", "status", "code", "param"),
    [
        ("temperature", "UnprocessableEntityError", 422, "invalid_value", "temperature"),
        ("model", "NotFoundError", 404, "model_not_found", "model"),
        ("long", "BadRequestError", 400, "context_length_exceeded", "prompt"),
        ("less", "UnprocessableEntityError", 422, "invalid_value", "max_tokens"),
        ("suffix", "BadRequestError", 400, "unsupported_parameter", "suffix"),
        ("missing", "NotFoundError", 404, "model_not_found", "model"),
    ],
)
def test_errors_are_the_clients_own(told: Any, name: str, kind: str, status: int, code: str, param: str) -> None:
    assert told["errors"][name] == {"kind": kind, "status": status, "code": code, "param": param}


def test_chat_is_the_librarys_greedy_answer(told: Any, reference: Any, messages: Any, ask: Any) -> None:
    [choice] = told["chat"]["plain"]["choices"]
    assert choice["message"]["content"] == reference.reply(messages)
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    body = {"messages": messages, "temperature": 0, "seed": 7, "logprobs": True, "top_logprobs": 2}
    [own] = ask("/v1/chat/completions", body)["choices"]
    assert own["message"]["content"] == choice["message"]["content"]
    for mine, entry in zip(own["logprobs"]["content"], choice["logprobs"]["content"], strict=True):
        assert (mine["token"], mine["bytes"]) == (entry["token"], entry["bytes"])
        assert mine["logprob"] == pytest.approx(entry["logprob"], abs=1e-5)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2


def test_a_streamed_chat_is_the_plain_answer(told: Any) -> None:
    *events, last = told["chat"]["events"]
    [plain] = told["chat"]["plain"]["choices"]
    usage = told["chat"]["plain"]["usage"]
    assert last["choices"] == []
    assert last["usage"] == usage | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    parts = [event["choices"][0] for event in events]
    assert parts[0]["delta"]["role"] == "assistant"
    assert "".join(part["delta"]["content"] or "" for part in parts) == plain["message"]["content"]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in plain["logprobs"]["content"]]


def test_several_answers_interleave_in_a_stream(told: Any) -> None:
    plain = [choice["message"]["content"] for choice in told["chat"]["several"]["choices"]]
    assert len(set(plain)) == 3  # the branches of one seed differ
    streamed = ["", "", ""]
    for event in told["chat"]["several_events"]:
        for part in event["choices"]:
            streamed[part["index"]] += part["delta"]["content"] or ""
    assert streamed == plain


def test_decisions(told: Any, reference: Any, text: str) -> None:
    found = told["decisions"]["plain"]
    red, colour, style = found["answers"]
    assert (red["type"], red["name"], colour["name"]) == ("predicate", "red", None)
    assert red["probability"] == pytest.approx(reference.question(text, "is it red?")[0], abs=1e-5)
    colours, styles = ["blue", "red", "green"], ["light", "soft", "sturdy"]
    wanted = reference.question(text, "which colour?", colours)
    assert [one["value"] for one in colour["probabilities"]] == colours and colour["choice"] == "blue"
    assert [one["probability"] for one in colour["probabilities"]] == pytest.approx(wanted, abs=1e-5)
    entropy = -sum(p * math.log(p) for p in wanted)
    assert colour["confidence"] == pytest.approx(1 - entropy / math.log(3), abs=1e-4)
    wanted = reference.question(text, "which style is it?", styles)
    assert [(one["value"], one["label"]) for one in style["probabilities"]] == [*enumerate(styles)]
    assert style["score"] == pytest.approx(wanted[1] + 2 * wanted[2], abs=1e-5)
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] > 0 == usage["output_tokens"]


def test_decisions_about_parts_of_a_message_are_the_same(told: Any) -> None:
    plain, parts = told["decisions"]["plain"], told["decisions"]["parts"]
    assert parts["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert parts["answers"][0]["probability"] == pytest.approx(plain["answers"][0]["probability"], abs=1e-6)


@pytest.mark.parametrize(
    ("route", "name", "kind", "status", "code", "param"),
    [
        ("chat", "tools", "BadRequestError", 400, "unsupported_parameter", "tools"),
        ("chat", "role", "UnprocessableEntityError", 422, "invalid_value", "messages[0].role"),
        ("chat", "long", "BadRequestError", 400, "context_length_exceeded", "messages"),
        ("decisions", "choices", "UnprocessableEntityError", 422, "invalid_value", "questions[0].choices"),
        ("decisions", "long", "BadRequestError", 400, "context_length_exceeded", "input"),
    ],
)
def test_errors_of_chat_and_decisions(
    told: Any, route: str, name: str, kind: str, status: int, code: str, param: str
) -> None:
    assert told[route]["errors"][name] == {"kind": kind, "status": status, "code": code, "param": param}
