"""The official OpenAI client 3.52 against a running service: models, completions plain and streamed, echo, errors."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

PROMPT = "Query: a red chair\nDocument: A sturdy red"


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any]) -> Any:
    return run_client("openai_sdk", {"url": url})


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
        ("nothing", "UnprocessableEntityError", 422, "invalid_value", "max_tokens"),
        ("suffix", "BadRequestError", 400, "unsupported_parameter", "suffix"),
        ("missing", "NotFoundError", 404, "model_not_found", "model"),
    ],
)
def test_errors_are_the_clients_own(told: Any, name: str, kind: str, status: int, code: str, param: str) -> None:
    assert told["errors"][name] == {"kind": kind, "status": status, "code": code, "param": param}
