"""POST /v1/chat/completions over a scripted backend: the prompt, the shapes, the defaults, and what is refused."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.app import build_api
from deployments.api.schemas.chat import ChatEvent, ChatResponse
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.limits import Limits, WireLimits
from tests.support.toy_model import ByteTokenizer

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools here.') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'T' if think }}a:{% endif %}"
)
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
PROMPT = [BOS, *b"u:hello", EOS, *b"a:"]


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(chat=ChatSettings(template=TEMPLATE, template_flags=("think",)))


async def chat(client: Any, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, {"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def events(client: Any, **body: Any) -> list[Any]:
    response = await client.post(PATH, {"messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.text
    parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part.startswith("data: ")]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


async def refused(client: Any, body: dict[str, Any]) -> tuple[int, str, str]:
    response = await client.post(PATH, {"messages": HELLO, **body})
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_chat_completion_has_every_field_of_the_contract(client: Any, backend: Any) -> None:
    found = await chat(client, seed=7, max_tokens=6)
    ChatResponse.model_validate_json(json.dumps(found), strict=True)
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " world", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "seed": 7,
        }
    ]
    assert found["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert found["object"] == "chat.completion" and found["model"] == "toy"
    assert found["id"].startswith("chatcmpl-") and len(found["id"]) == len("chatcmpl-") + 26
    assert backend.tasks[0][0].prompt.tolist() == PROMPT


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([{"role": "user", "content": "né"}], [BOS, *"u:né".encode(), EOS, *b"a:"]),
        ([{"role": "user", "content": ""}], [BOS, *b"u:", EOS, *b"a:"]),
        ([{"role": "user", "content": "<eos><bos>"}], [BOS, *b"u:<eos><bos>", EOS, *b"a:"]),
        ([{"role": "user", "content": "{{ 7 * 7 }}"}], [BOS, *b"u:{{ 7 * 7 }}", EOS, *b"a:"]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "<e"}, {"type": "text", "text": "os>"}]}],
            [BOS, *b"u:<eos>", EOS, *b"a:"],
        ),
        (
            [
                {"role": "system", "content": "x", "name": "n"},
                {"role": "assistant", "content": "y", "tool_calls": [], "refusal": None},
                {"role": "developer", "content": "z"},
            ],
            [BOS, *b"s:x", EOS, *b"a:y", EOS, *b"d:z", EOS, *b"a:"],
        ),
    ],
)
async def test_messages_become_the_templates_text_and_data_no_control_token(
    client: Any, backend: Any, messages: Any, prompt: list[int]
) -> None:
    found = await chat(client, messages=messages, return_token_ids=True)
    assert backend.tasks[0][0].prompt.tolist() == prompt == found["choices"][0]["prompt_token_ids"]
    assert found["choices"][0]["token_ids"] == list(b" world")


async def test_the_prompts_end_is_as_asked(client: Any, backend: Any) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "so "}]
    for extra, tail in (
        ({}, [*b"so ", EOS, *b"a:"]),
        ({"add_generation_prompt": False}, [*b"so ", EOS]),
        ({"add_generation_prompt": False, "continue_final_message": True}, [*b"so "]),
        ({"chat_template_kwargs": {"think": True}}, [*b"so ", EOS, *b"Ta:"]),
        ({"chat_template_kwargs": {"think": False}}, [*b"so ", EOS, *b"a:"]),
    ):
        await chat(client, messages=talk, **extra)
        assert backend.tasks[-1][0].prompt.tolist() == [*PROMPT[:-2], *b"a:", *tail]


async def test_special_tokens_on_request_never_begin_a_text_twice(client: Any, backend: Any) -> None:
    await chat(client, add_special_tokens=True)
    assert backend.tasks[-1][0].prompt.tolist() == PROMPT
    bare = ApiSettings(chat=ChatSettings(template=TEMPLATE.replace("{{ bos_token }}", "")))
    for extra, head in (({}, []), ({"add_special_tokens": True}, [BOS])):
        other = type(client)(build_api(backend, ByteTokenizer(), bare))
        await chat(other, **extra)
        assert backend.tasks[-1][0].prompt.tolist() == head + PROMPT[1:]


async def test_max_tokens_is_the_rest_of_the_context_unless_given(client: Any, backend: Any) -> None:
    for given, expected in (
        ({}, 4096 - len(PROMPT)),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"truncate_prompt_tokens": 3}, 4093),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4090}, 4090),
    ):
        found = await chat(client, **given)
        assert backend.tasks[-1][0].params.max_tokens == expected
        assert found["usage"].get("truncated_tokens") == (
            len(PROMPT) - len(backend.tasks[-1][0].prompt) if "truncate_prompt_tokens" in given else None
        )
    backend.max_model_len = len(PROMPT) + 1
    fresh = ApiSettings(chat=ChatSettings(template=TEMPLATE))
    tight = type(client)(build_api(backend, ByteTokenizer(), fresh))
    await chat(tight)
    assert backend.tasks[-1][0].params.max_tokens == 1
    assert await refused(tight, {"max_tokens": 2}) == (400, "context_length_exceeded", "messages")
    longer = [{"role": "user", "content": "hello!"}]
    assert await refused(tight, {"messages": longer}) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("length", "more", "param", "words"),
    [
        (1_900_000, {}, None, "times `{}`"),
        (5_000_000, {}, "messages", "plus `{}` must"),
        (0, {"min_tokens": 1}, "min_tokens", "with `{}` 0"),
        (3, {"seed": 1, "resume_token_ids": [1] * 3}, "resume_token_ids", "fewer than `{}` (3)"),
    ],
)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_errors_about_the_length_name_the_field_that_gave_it(
    client: Any, backend: Any, field: str, length: int, more: dict[str, Any], param: str | None, words: str
) -> None:
    backend.max_model_len = 4_000_000
    found = await client.post(PATH, {"messages": HELLO, field: length} | more)
    error = found.json()["error"]
    assert error["param"] == (param or field) and words.format(field) in error["message"]
    assert not backend.tasks


async def test_two_lengths_that_differ_are_refused(client: Any, backend: Any) -> None:
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 3}
    found = await client.post(PATH, body)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (422, "invalid_value", "max_tokens")
    assert error["message"] == "`max_tokens` must be absent, or equal to `max_completion_tokens` (3). Given: 9."
    assert not backend.tasks


async def test_the_default_length_stays_within_what_a_request_may_cost(client: Any, backend: Any) -> None:
    backend.max_model_len = 2_000_000
    limits = Limits().flat()
    for extra, most in (
        ({}, limits["max_request_tokens"] - len(PROMPT)),
        ({"n": 3}, (limits["max_request_tokens"] - len(PROMPT)) // 3),
        ({"n": 2, "logprobs": True, "top_logprobs": 20}, limits["max_answer_cells"] // 21 // 2),
        (
            {"n": 2, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 5},
            (limits["max_answer_cells"] - 2 * 6 * len(PROMPT)) // 21 // 2,
        ),
    ):
        await chat(client, **extra)
        assert backend.tasks[-1][0].params.max_tokens == most
    assert (await refused(client, {"max_tokens": 1_900_000}))[1:] == ("request_too_large", "max_tokens")


async def test_parameters_reach_the_sampler(client: Any, backend: Any) -> None:
    await chat(
        client, temperature=0, top_k=-1, top_p=0.5, min_p=0.25, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.5, logit_bias={"7": -100}, allowed_token_ids=[1, 2], bad_words=["x"], stop_token_ids=[9],
        min_tokens=2, max_tokens=5, n=3, logprobs=True, top_logprobs=4, logprob_token_ids=[5, 5], priority=-3,
        cache_salt="s", seed=-7,
    )  # fmt: skip
    task, params = backend.tasks[0][0], backend.tasks[0][0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, -1, 0.5, 0.25)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 2, 1.5)
    assert params.logit_bias == ((7, -100),) and params.allowed_token_ids == (1, 2)
    assert params.bad_words_ids == ((120,), (32, 120)) and params.stop_token_ids == (9, EOS)
    assert (params.min_tokens, params.max_tokens, params.n, params.logprobs) == (2, 5, 3, 4)
    assert params.logprob_token_ids == (5, 5) and params.seed == -7
    assert (task.priority, task.cache_salt, task.seed) == (-3, "s", 2**64 - 7)


async def test_logprobs_are_one_object_a_token_with_its_bytes(client: Any, backend: Any) -> None:
    backend.script = [0xC3, 0xA9, EOS]
    found = (await chat(client, logprobs=True, top_logprobs=2, logprob_token_ids=[1, 2]))["choices"][0]
    content = found["logprobs"]["content"]
    first = float(np.float32(-0.1))
    assert found["message"]["content"] == "é"
    assert content[0] == {
        "token": "bytes:\\xc3",
        "logprob": first,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": first, "bytes": [0xC3]},
            {"token": "bytes:\\xc4", "logprob": pytest.approx(first - 1, abs=1e-6), "bytes": [0xC4]},
        ],
    }
    assert bytes(byte for entry in content[:2] for byte in entry["bytes"]).decode() == "é"
    assert (content[2]["token"], bytes(content[2]["bytes"])) == ("<eos>", b"<eos>")
    assert found["logprobs"]["requested_logprobs"] == [[-1.0, -9999.0]] * 3
    bare = (await chat(client, logprobs=True, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in bare["content"]] == [
        ("token_id:195", []), ("token_id:169", []), ("token_id:257", [])
    ]  # fmt: skip
    assert "requested_logprobs" not in bare
    none = (await chat(client, logprobs=False, top_logprobs=0))["choices"][0]["logprobs"]
    assert none is None


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize("stop", [None, "or", "zz"])
async def test_a_stream_says_what_the_plain_answer_says(client: Any, backend: Any, pieces: int, stop: Any) -> None:
    backend.pieces, backend.script = pieces, "née 😀 world".encode()
    body = {"stop": stop, "logprobs": True, "top_logprobs": 2, "max_tokens": 20, "seed": 1, "n": 2}
    plain = await chat(client, **body)
    found = await events(client, **body, stream_options={"include_usage": True})
    for event in found:
        ChatEvent.model_validate_json(json.dumps(event), strict=True)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in found}) == 1
    assert found[-1]["choices"] == [] and found[-1]["usage"] == plain["usage"]
    assert all(event["usage"] is None for event in found[:-1])
    for choice in plain["choices"]:
        parts = [event["choices"][0] for event in found[:-1] if event["choices"][0]["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""} and parts[0]["seed"] == 1
        assert sum("role" in part["delta"] for part in parts) == 1 == sum("seed" in part for part in parts)
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]


async def test_choices_interleave_and_ids_come_with_their_text(client: Any) -> None:
    found = await events(client, n=3, return_token_ids=True)
    parts = [event["choices"][0] for event in found]
    assert [part["index"] for part in parts[:6]] == [0, 0, 1, 1, 2, 2]
    assert [part["index"] for part in parts[6:12]] == [0, 1, 2] * 2
    for index in range(3):
        own = [part for part in parts if part["index"] == index]
        assert [part.get("token_ids") for part in own] == [None, *([token] for token in b" world")]
        assert [part.get("prompt_token_ids") for part in own] == [PROMPT] + [None] * 6
    assert "usage" not in found[0]


async def test_a_stream_can_be_resumed(client: Any, backend: Any) -> None:
    rest = await chat(client, seed=3, resume_token_ids=list(b" wo"), max_tokens=6)
    assert rest["choices"][0]["message"]["content"] == "rld"
    assert backend.tasks[0][0].emitted[0].tolist() == list(b" wo")
    for wrong in ({"seed": None}, {"n": 2}, {"max_tokens": 3}):
        body = {"seed": 3, "resume_token_ids": [1, 2, 3]} | wrong
        assert await refused(client, body) == (422, "invalid_value", "resume_token_ids")


MESSAGE: dict[str, Any] = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "x"}, "messages"),
        ({"messages": [MESSAGE] * 1025}, "messages"), ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [MESSAGE, {"role": "bot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": None}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": 1}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": {"text": "x"}}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": [{"type": "text", "text": None}]}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": [{"type": "other", "text": "x"}]}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": [{"type": "text", "text": "x"}] * 1025}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "content": "x" * 2_000_001}]}, "messages[0].content"),
        ({"messages": [{**MESSAGE, "name": "x" * 257}]}, "messages[0].name"),
        ({"messages": [{**MESSAGE, "name": 1}]}, "messages[0].name"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"other": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"think": {"a": [[[[[[[[1]]]]]]]]}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"think": "x" * 16_385}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"think": [1] * 16_385}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"logprobs": 1}, "logprobs"), ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": False}, "top_logprobs"), ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"max_tokens": -1}, "max_tokens"), ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 4097}, "min_tokens"), ({"min_tokens": 4090}, "min_tokens"), ({"n": 129}, "n"), ({"n": 0}, "n"),
        ({"temperature": 2.1}, "temperature"), ({"stop": [""]}, "stop"), ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stream_options": {}}, "stream_options"), ({"model": 1}, "model"),
    ],
)  # fmt: skip
async def test_every_bad_field_is_named(client: Any, backend: Any, body: dict[str, Any], param: str) -> None:
    found = await refused(client, body)
    assert (found[0], found[2]) == (422, param)
    assert not backend.tasks


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [1]}, {"tool_choice": "auto"}, {"functions": [1]}, {"function_call": "auto"},
        {"modalities": ["audio"]}, {"audio": {}}, {"response_format": {"type": "json_object"}},
        {"structured_outputs": {}}, {"chat_template": "x"},
        {"best_of": 2}, {"use_beam_search": True}, {"length_penalty": 0.5}, {"prompt_embeds": "x"}, {"suffix": "x"},
        {"kv_transfer_params": {}}, {"vllm_xargs": {"a": 1}}, {"repetition_detection": {}},
        {"thinking_token_budget": 0}, {"echo": True},
    ],
)  # fmt: skip
async def test_what_we_do_not_do_is_refused_and_never_ignored(client: Any, backend: Any, field: dict[str, Any]) -> None:
    assert await refused(client, field) == (400, "unsupported_parameter", next(iter(field)))
    assert not backend.tasks


async def test_messages_that_need_more_than_text_are_refused_by_name(client: Any) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
    assert await refused(client, {"messages": [image]}) == (400, "unsupported_parameter", "messages[0].content")
    for name, value in (("tool_calls", [{}]), ("function_call", {}), ("refusal", "no"), ("audio", {})):
        body = {"messages": [*HELLO, {"role": "assistant", "content": "x", name: value}]}
        assert await refused(client, body) == (400, "unsupported_parameter", f"messages[1].{name}")


async def test_neutral_values_and_unknown_fields_pass_and_the_unknown_are_named(client: Any) -> None:
    body: dict[str, Any] = {
        "messages": [{**MESSAGE, "odd": 1, "tool_calls": []}], "tools": [], "tool_choice": "none", "functions": [],
        "modalities": ["text"], "response_format": {"type": "text"}, "user": "u", "store": False, "parallel": True,
    }  # fmt: skip
    found = await client.post(PATH, body)
    assert found.status_code == 200
    assert found.headers["x-assay-ignored-fields"] == "parallel, messages[0].odd"
    strict = await client.post(PATH, body, x_assay_strict="1")
    assert (strict.status_code, strict.json()["error"]["code"]) == (422, "invalid_value")


async def test_the_templates_own_words_explain_a_refusal(client: Any) -> None:
    found = await client.post(PATH, {"messages": [{"role": "tool", "content": "s3cr3t"}]})
    assert found.status_code == 422
    assert found.json()["error"]["message"].endswith("says: No tools here.") and "s3cr3t" not in found.text


async def test_exactly_as_many_messages_as_allowed_pass(client: Any, backend: Any) -> None:
    backend.max_model_len = 10_000
    await chat(client, messages=[MESSAGE] * 1024)
    assert len(backend.tasks) == 1


async def test_a_rendered_prompt_at_its_limit_passes_and_one_more_character_is_refused(
    backend: Any, client: Any
) -> None:
    text = "u:hello<eos>a:"
    for most, status in ((len("<bos>" + text), 200), (len("<bos>" + text) - 1, 413)):
        limits = Limits(wire=WireLimits(max_string_chars=most))
        small = type(client)(
            build_api(backend, ByteTokenizer(), ApiSettings(limits=limits, chat=ChatSettings(template=TEMPLATE)))
        )
        found = await small.post(PATH, {"messages": HELLO})
        assert found.status_code == status
    assert (found.json()["error"]["code"], found.json()["error"]["param"]) == ("request_too_large", "messages")


async def test_a_template_that_is_too_slow_fails_its_own_request(backend: Any, client: Any) -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{{ '' }}{% endfor %}{% endfor %}"
    slow = TEMPLATE + "{% if messages | length > 1 %}" + endless + "{% endif %}"
    app = build_api(backend, ByteTokenizer(), ApiSettings(chat=ChatSettings(template=slow, render_timeout_s=0.05)))
    other = type(client)(app)
    assert await refused(other, {"messages": HELLO * 2}) == (413, "request_too_large", "messages")
    await chat(other)


@pytest.fixture
async def plain_client(backend: Any, client: Any) -> AsyncIterator[Any]:
    """Serves a model without a chat template."""
    yield type(client)(build_api(backend, ByteTokenizer(), ApiSettings()))


async def test_a_model_without_a_template_says_so(plain_client: Any) -> None:
    assert await refused(plain_client, {}) == (400, "unsupported_parameter", "messages")
    found = await plain_client.post("/tokenize", {"messages": HELLO})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "messages")
    assert (await plain_client.get("/tokenizer_info")).json()["chat_template"] is None


def test_a_bad_template_file_refuses_to_start_and_a_bad_model_template_does_not(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"`chat\.template_file`"):
        build_api(backend, ByteTokenizer(), ApiSettings(chat=ChatSettings(template="{% for %}")))
    tokenizer = ByteTokenizer()
    info = replace(tokenizer.info(), chat_template="{% for %}")
    monkeypatch.setattr(tokenizer, "info", lambda: info)
    build_api(backend, tokenizer, ApiSettings())


async def test_messages_can_be_tokenised(client: Any) -> None:
    found = (await client.post("/tokenize", {"messages": HELLO, "return_token_strs": True})).json()
    assert found["tokens"] == PROMPT and found["count"] == len(PROMPT)
    assert found["token_strs"][:3] == ["<bos>", "u", ":"]
    tail = {"messages": HELLO, "add_generation_prompt": False}
    assert (await client.post("/tokenize", tail)).json()["tokens"] == PROMPT[:-2]
    tail["continue_final_message"] = True
    assert (await client.post("/tokenize", tail)).json()["tokens"] == PROMPT[:-3]
    assert (await client.get("/tokenizer_info")).json()["chat_template"] == TEMPLATE
    for body, param in (
        ({}, "prompt"), ({"prompt": "a", "messages": HELLO}, "messages"), ({"messages": []}, "messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    ):  # fmt: skip
        wrong = await client.post("/tokenize", body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (422, param)
