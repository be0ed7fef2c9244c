"""Odd numbers and long lists, for every field of every route: a 4xx that names the field, or a legal request."""

import json
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from deployments.api.schemas.chat import ChatRequest
from deployments.api.schemas.decisions import DecisionRequest
from deployments.api.schemas.generation import CompletionRequest
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.schemas.info import DetokenizeRequest, TokenizeRequest
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.limits import Limits

ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/generative_scoring": (ScoringRequest, {"query": "q", "items": ["a"], "label_token_ids": [1]}),
    "/v1/decisions": (DecisionRequest, {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
ODD = [
    "1e999",
    "-1e999",
    "-0.0",
    "9223372036854775808",
    "-9223372036854775809",
    "1e400",
    "true",
    '"1"',
    "1.0",
    "[]",
    "{}",
]
NUMBERS = {
    "max_tokens", "n", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "seed", "logprobs", "truncate_prompt_tokens", "priority",
    "max_item_tokens", "max_query_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs", "best_of",
}  # fmt: skip
LEGAL = {
    ("temperature", "-0.0"), ("min_p", "-0.0"), ("presence_penalty", "-0.0"), ("frequency_penalty", "-0.0"),
    ("temperature", "1.0"), ("min_p", "1.0"), ("top_p", "1.0"), ("presence_penalty", "1.0"),
    ("frequency_penalty", "1.0"), ("repetition_penalty", "1.0"), ("top_k", "9223372036854775808"),
}  # fmt: skip


def numeric(field: FieldInfo) -> bool:
    """`int`, `float`, either with `| None`, and any of it annotated."""
    union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if union else (field.annotation,)
    return any((get_args(kind)[0] if hasattr(kind, "__metadata__") else kind) in (int, float) for kind in kinds)


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(chat=ChatSettings(template="{% for m in messages %}{{ m.content }}{% endfor %}"))


CASES = [
    (path, name, odd)
    for path, (model, _) in ROUTES.items()
    for name, field in model.model_fields.items()
    if numeric(field)
    for odd in ODD
]


@pytest.mark.risk("S5")
def test_every_numeric_field_is_covered() -> None:
    assert {name for _, name, _ in CASES} == NUMBERS


@pytest.mark.risk("S5", figure="0 answers of 5xx")
@pytest.mark.parametrize("path", [path for path in ROUTES if any(case[0] == path for case in CASES)])
async def test_odd_numbers_are_refused_by_name_or_legal(client: Any, path: str) -> None:
    for _, name, odd in (case for case in CASES if case[0] == path):
        body = json.dumps(ROUTES[path][1])[:-1] + f', "{name}": {odd}}}'
        found = await client.post(path, body.encode())
        if (name, odd) in LEGAL:
            assert found.status_code == 200, (name, odd, found.text)
        else:
            assert 400 <= found.status_code < 500, (name, odd, found.text)
            assert found.json()["error"]["param"] == name, (name, odd, found.text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/completions", "stop_token_ids"),
        ("/v1/completions", "allowed_token_ids"),
        ("/v1/completions", "logprob_token_ids"),
        ("/v1/completions", "resume_token_ids"),
        ("/generative_scoring", "label_token_ids"),
        ("/detokenize", "tokens"),
    ],
)
@pytest.mark.parametrize("odd", [odd for odd in ODD if odd != "[]"])
async def test_odd_numbers_among_ids_are_refused_by_name(client: Any, path: str, name: str, odd: str) -> None:
    found = await client.post(path, (json.dumps(ROUTES[path][1])[:-1] + f', "{name}": [1, {odd}]}}').encode())
    assert (found.status_code, found.json()["error"]["param"]) == (422, name)


@pytest.mark.risk("S5")
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_does_not_know_are_refused(client: Any, literal: str) -> None:
    for path, (_, body) in ROUTES.items():
        found = await client.post(path, (json.dumps(body)[:-1] + f', "user": {literal}}}').encode())
        assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("path", "field", "entry", "limit"),
    [
        ("/v1/completions", "prompt", [1], "max_prompts"),
        ("/v1/completions", "prompt", "a", "max_prompts"),
        ("/v1/completions", "stop", "a", "max_stop"),
        ("/v1/completions", "stop_token_ids", 1, "max_stop_token_ids"),
        ("/v1/completions", "allowed_token_ids", 1, "max_allowed_token_ids"),
        ("/v1/completions", "bad_words", "a", "max_bad_words"),
        ("/v1/chat/completions", "messages", {"role": "user", "content": "a"}, "max_messages"),
        ("/v1/completions", "logprob_token_ids", 1, "max_logprob_token_ids"),
        ("/generative_scoring", "items", "a", "max_items"),
        ("/generative_scoring", "labels", "a", "max_labels"),
    ],
)
async def test_a_list_at_its_limit_passes_and_one_more_is_refused(
    client: Any, backend: Any, path: str, field: str, entry: Any, limit: str
) -> None:
    bound = Limits().flat()[limit]
    body = dict(ROUTES[path][1])
    if field == "labels":
        del body["label_token_ids"]
        entries = [chr(33 + i) for i in range(bound + 1)]
    else:
        entries = [entry] * (bound + 1)
    found = await client.post(path, {**body, field: entries[:bound]})
    assert found.status_code == 200 or found.json()["error"]["code"] == "label_not_single_token", found.text
    calls = len(backend.tasks) + len(backend.score_tasks)
    found = await client.post(path, {**body, field: entries})
    assert (found.status_code, found.json()["error"]["param"]) == (422, field)
    assert str(bound) in found.json()["error"]["message"]
    assert len(backend.tasks) + len(backend.score_tasks) == calls


async def test_biases_are_counted_and_their_keys_never_echoed(client: Any) -> None:
    most = Limits().flat()["max_logit_bias"]
    for bias in (
        {str(i): 1 for i in range(most + 1)}, {"secret": 1}, {"1": 101}, {"1": "x"}, {"1": None}, {"1": True},
        {"1" * 30: 1}, {"١": 1}, {"300": 1}, {"-1": 1}, {"1": 10**400}, {"1": 1, "01": 2}, [1],
    ):  # fmt: skip
        found = await client.post("/v1/completions", {"prompt": "a", "logit_bias": bias})
        assert (found.status_code, found.json()["error"]["param"]) == (422, "logit_bias"), bias
        assert "secret" not in found.text
    await client.complete(logit_bias={"299": -100, "0": 100.0})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": "x" * 257}, "stop"), ({"stop": [""]}, "stop"), ({"stop": [1]}, "stop"), ({"stop": {}}, "stop"),
        ({"bad_words": [""]}, "bad_words"), ({"bad_words": ["x" * 17]}, "bad_words"),
        ({"cache_salt": "x" * 257}, "cache_salt"), ({"model": "x" * 257}, "model"), ({"model": 1}, "model"),
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [True]}, "prompt"), ({"prompt": [[1.0]]}, "prompt"),
        ({"prompt": {}}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": "x" * 2_000_001}, "prompt"),
        ({"prompt": [300]}, "prompt"), ({"prompt": [[1], [-1]]}, "prompt[1]"), ({"prompt": [2**64]}, "prompt"),
        ({"stop_token_ids": [300]}, "stop_token_ids"), ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [300]}, "logprob_token_ids"), ({"min_tokens": 17}, "min_tokens"),
        ({"top_k": -2}, "top_k"), ({"top_p": 0}, "top_p"), ({"temperature": 2.1}, "temperature"), ({"n": 129}, "n"),
        ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"max_tokens": -1}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"truncation_side": "up"}, "truncation_side"),
        ({"stream": 1}, "stream"), ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
    ],
)  # fmt: skip
async def test_every_bad_field_is_named(client: Any, backend: Any, body: dict[str, Any], param: str) -> None:
    found = await client.post("/v1/completions", {"prompt": "a", **body})
    assert (found.status_code, found.json()["error"]["param"]) == (422, param), found.text
    assert not backend.tasks


async def test_errors_never_repeat_the_requests_text(client: Any) -> None:
    secret = "s3cr3t"
    for path, (model, body) in ROUTES.items():
        for name in model.model_fields:
            for value in (secret, [secret], {secret: secret}, [[secret]], [{secret: 1}]):
                found = await client.post(path, {**body, name: value})
                if found.status_code != 200:
                    assert secret not in found.text, (path, name, value)
                assert found.status_code < 500


async def test_details_name_up_to_eight_fields(client: Any) -> None:
    names = ["n", "top_k", "top_p", "min_p", "seed", "min_tokens", "max_tokens", "temperature", "logprobs", "stream"]
    found = await client.post("/v1/completions", {"prompt": "a", **dict.fromkeys(names, "x")})
    details = found.json()["error"]["details"]
    assert len(details) == 8 and all(detail["param"] in names for detail in details)


@pytest.mark.risk("S6")
async def test_odd_text_goes_through_unharmed(client: Any, backend: Any) -> None:
    for text in ("\x00", "אבג", "😀", "{{ 7*7 }}", "</s>", "a" * 200_000):
        backend.max_model_len = 2_000_000
        found = await client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        back = await client.post("/detokenize", {"tokens": found.json()["tokens"]})
        assert back.json() == {"prompt": text}
