"""The closed list of errors."""

import pickle
from dataclasses import replace
from typing import Any, get_args

import pytest

from deployments.api.app import build_api
from deployments.config.settings import ApiSettings
from deployments.errors import (
    ERROR_KINDS,
    ApiError,
    Code,
    ErrorBody,
    as_api_error,
    describe,
    from_failure,
    path_of,
)
from deployments.protocol import Failure
from engine.requests import EngineError, ErrorCode
from tests.support.toy_model import ByteTokenizer


def test_every_code_has_a_status_and_every_engine_code_a_code() -> None:
    assert set(ERROR_KINDS) == set(get_args(Code))
    for code in ErrorCode:
        found = from_failure(Failure(code, "Words.", "n"))
        assert (found.code, found.param) == (as_api_error(EngineError(code, "Words.", "n")).code, "n")


@pytest.mark.parametrize("code", get_args(Code))
def test_bodies_and_headers_follow_the_contract(code: Code) -> None:
    error = ApiError(code, "Words.", "field", retry_after_s=1000)
    body = ErrorBody.model_validate(error.body("req-1"), strict=True)
    assert body.error.details[0].param == "field"
    headers = error.headers()
    assert headers.get("retry-after") == ("60" if error.status in (429, 503) else None)
    assert ("www-authenticate" in headers) == (error.status == 401)
    if code in ("deadline_exceeded", "nonfinite_logits"):
        assert headers["x-should-retry"] == "false"


@pytest.mark.parametrize("code", get_args(Code))
def test_only_an_overlong_prompt_is_refused_in_the_words_that_clients_look_for(code: Code) -> None:
    """LiteLLM looks for the first of them, LangChain for the second."""
    error = ApiError(code, "Words.", "field")
    error.flat = True
    body = error.body("req-1")
    found = {body["error"]["message"], body["message"], body["detail"], error.event("req-1")["error"]["message"]}
    if code == "context_length_exceeded":
        [said] = found
        assert said.startswith("Words. ") and "context_length_exceeded" in said
        assert "this model's maximum context length is" in said.lower()
    else:
        assert found == {"Words."}


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ApiError("overloaded", "Busy.", "n", retry_after_s=3)))  # noqa: S301
    assert (error.code, error.message, error.param, error.retry_after_s) == ("overloaded", "Busy.", "n", 3)


def test_values_are_described_without_their_text() -> None:
    described = [describe(value) for value in (None, True, 3, 1.5, 2**64, "abc", [1], {"a": 1})]
    assert described == [
        "null", "a boolean", "3", "1.5", "an integer of more than 64 bits", "a string of 3 characters",
        "a list of 1 entries", "an object of 1 fields",
    ]  # fmt: skip
    assert path_of(("items", 3, "text")) == "items[3].text"


async def test_openai_errors_have_status_400_where_ours_have_422(
    make_client: Any, backend: Any, settings: ApiSettings
) -> None:
    """The code, the message and every other status stay the same."""
    ours, theirs = (
        make_client(build_api(backend, ByteTokenizer(), replace(settings, openai_errors=openai)))
        for openai in (False, True)
    )
    bad = {"query": "q", "items": ["a"], "label_token_ids": ["x"]}
    for path, body in (("/generative_scoring", bad), ("/v1/completions", {"prompt": "a", "n": -1})):
        first, second = await ours.post(path, body), await theirs.post(path, body)
        assert (first.status_code, second.status_code) == (422, 400)
        assert first.json()["error"] == second.json()["error"]
    assert (await theirs.post("/nothing", {})).status_code == 404
    routes = (await theirs.http.get("/openapi.json")).json()["paths"]
    post = routes["/rerank"]["post"]["responses"]
    assert "422" not in post and "invalid_value" in post["400"]["description"]
