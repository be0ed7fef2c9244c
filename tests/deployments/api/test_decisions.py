"""POST /v1/decisions: every refusal by name, and answers equal to a plain computation over the built-in model."""

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer

from deployments.api.app import build_api
from deployments.api.prompt_formats import compile_chat, decision_prompts
from deployments.api.schemas.decisions import DecisionResponse
from deployments.config.app_args import AppArgs
from deployments.config.sections import DecisionArgs
from deployments.config.settings import ApiSettings, SamplingDefaults
from deployments.limits import Limits
from engine.model.model_folder import BUILTIN
from engine.requests import ScoreRequest
from engine.tokenizer.tokenizer import Tokenizer
from scoring.prompts.chat_template import ChatTemplate
from scoring.prompts.decision_prompts import SYSTEM
from tools.builtin_model import evaluate, grammar

RED = "A pine chair for reading, sturdy and red, made in Lisbon."
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "is it a red chair?"}
COLOURS = ["blue", "red", "green"]
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "which colour?",
    "choices": [{"value": value} for value in COLOURS],
}
LEVELS: dict[str, Any] = {
    "type": "score",
    "instructions": "which city?",
    "levels": [{"label": "Paris"}, {"label": "Lisbon", "description": "in Portugal"}],
}
BODY: dict[str, Any] = {"input": RED, "questions": [PREDICATE]}


async def ask(client: Any, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/decisions", {**BODY, **body})
    assert response.status_code == 200, response.text
    DecisionResponse.model_validate_json(response.text, strict=True)
    found: dict[str, Any] = response.json()
    return found


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/v1/decisions", {**BODY, **body})
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


# The wire, over a scripted backend


def row_bytes(task: ScoreRequest, row: int) -> bytes:
    return bytes(x % 251 for x in (*task.prefix, *task.ids[task.starts[row] : task.starts[row + 1]]))


def text_of(task: ScoreRequest, row: int = 0) -> str:
    ids = (*task.prefix, *task.ids[task.starts[row] : task.starts[row + 1]])
    return bytes(x for x in ids if x < 256).decode()


async def test_answers_of_multi_token_codes_follow_the_formulas(client: Any, backend: Any, label_logprob: Any) -> None:
    """The byte tokenizer spells every answer: ` yes` is read in four rows, a code in two."""
    found = await ask(client, questions=[PREDICATE, CHOICE | {"name": "colour"}, LEVELS])
    [task] = backend.score_tasks
    assert task.full
    starts = [0, 5, 7]  # of each question's rows: 5 beginnings of " yes" and " no", 2 of codes
    prompts = [bytes((*task.prefix, *task.ids[task.starts[r] : task.starts[r + 1]])[1:]) for r in starts]

    def logprob(prompt: bytes, code: str) -> float:
        ids = [256, *prompt]
        total = 0.0
        for token in code.encode():
            total += label_logprob(bytes(x % 251 for x in ids), token)
            ids.append(token)
        return total

    weights = [
        [math.exp(logprob(prompt, code)) for code in codes]
        for prompt, codes in zip(prompts, [(" yes", " no"), (" A", " B", " C"), (" A", " B")], strict=True)
    ]
    p = [[w / math.fsum(row) for w in row] for row in weights]
    entropy = [-math.fsum(x * math.log(x) for x in row) / math.log(len(row)) for row in p]
    predicate, choice, score = found["answers"]
    assert predicate == {
        "type": "predicate", "name": None,
        "probability": pytest.approx(p[0][0], rel=1e-12), "label_mass": pytest.approx(math.fsum(weights[0]), rel=1e-9),
    }  # fmt: skip
    assert (choice["type"], choice["name"], choice["choice"]) == ("choice", "colour", COLOURS[int(np.argmax(p[1]))])
    assert [row["value"] for row in choice["probabilities"]] == COLOURS
    assert [row["probability"] for row in choice["probabilities"]] == pytest.approx(p[1], rel=1e-12)
    assert choice["confidence"] == pytest.approx(1 - entropy[1], abs=1e-12)
    assert choice["label_mass"] == pytest.approx(math.fsum(weights[1]), rel=1e-9)
    assert score["score"] == pytest.approx(p[2][1], rel=1e-12)
    assert score["confidence"] == pytest.approx(1 - entropy[2], abs=1e-12)
    assert [(row["value"], row["label"]) for row in score["probabilities"]] == [(0, "Paris"), (1, "Lisbon")]
    assert found["prompt_format_version"] == "assay-decisions-1" and found["model"] == "toy"
    tokens = sum(len(row_bytes(task, row)) for row in range(len(task.starts) - 1))
    assert found["usage"] == {
        "input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 8 * len(task.prefix), "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


async def test_every_item_and_part_reaches_the_prompt_and_the_rest_is_ignored(client: Any, backend: Any) -> None:
    mark = {"mode": "explicit"}
    items = [
        {"type": "message", "role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "input_text", "text": "s", "prompt_cache_breakpoint": mark}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "one"}, {"type": "input_json", "data": {"ü": [1]}}],
        },
        {
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "two"}, {"type": "refusal", "refusal": "three"}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "i", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "four"},
        {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "raw", "namespace": None},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "five"}]},
    ]
    question = PREDICATE | {
        "instructions": [{"type": "input_text", "text": "so?"}, {"type": "input_json", "data": [{}]}]
    }
    response = await client.post("/v1/decisions", {"input": items, "questions": [question]})
    assert response.status_code == 200 and "x-assay-ignored-fields" not in response.headers
    text = text_of(backend.score_tasks[0])
    assert text[text.index("<developer>") :] == (
        "<developer>\nbe brief\n</developer>\n<system>\ns\n</system>\n"
        '<user>\none\n{"ü":[1]}\n</user>\n<assistant>\ntwo\nthree\n</assistant>\n'
        '<function_call name="f" call_id="c">\n{}\n</function_call>\n'
        '<function_call_output call_id="c">\nfour\n</function_call_output>\n'
        '<custom_tool_call name="g" call_id="c">\nraw\n</custom_tool_call>\n'
        '<custom_tool_call_output call_id="c">\nfive\n</custom_tool_call_output>\n'
        "</input>\n\nQuestion: so?\n[{}]\nAnswer with yes or no only.\nAnswer:"
    )


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def part(data: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_json", "data": data}]}]}


AT = "input[0].content[0].data"
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"input": None}, 422, "invalid_value", "input"),
        ({"input": []}, 422, "invalid_value", "input"),
        ({"input": [3]}, 422, "invalid_value", "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, 422, "invalid_value", "input[0].role"),
        ({"input": [{"role": "user"}]}, 422, "invalid_value", "input[0].content"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, 422, "invalid_value", "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, 422, "invalid_value",
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, 422, "invalid_value", "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [IMAGE]}]}, 400,
         "unsupported_parameter", "input[1].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
                    {"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]}, 400,
         "unsupported_parameter", "input[1].output[0].type"),
        ({"questions": [PREDICATE | {"instructions": [IMAGE]}]}, 400, "unsupported_parameter",
         "questions[0].instructions[0].type"),
        ({"input": [IMAGE]}, 400, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, 422, "invalid_value",
         "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
                    {"type": "custom_tool_call_output", "call_id": "a", "output": "b"}]}, 422, "invalid_value",
         "input[1].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}]}, 422, "invalid_value",
         "input[0].call_id"),
        (part(nested(33)), 422, "invalid_value", AT),
        (part({"a": [0] * 9_999}), 422, "invalid_value", AT),
        (part({"a": "x" * 262_137}), 422, "invalid_value", AT),
        (part("a"), 422, "invalid_value", AT),
        (part([{}, 1]), 422, "invalid_value", AT),
        (part(None), 422, "invalid_value", AT),
        ({"questions": None}, 422, "invalid_value", "questions"),
        ({"questions": []}, 422, "invalid_value", "questions"),
        ({"questions": [PREDICATE] * 401}, 422, "invalid_value", "questions"),
        ({"questions": [{"type": "other", "instructions": "a"}]}, 422, "invalid_value", "questions[0].type"),
        ({"questions": [{"instructions": "a"}]}, 422, "invalid_value", "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, 422, "invalid_value", "questions[0].instructions"),
        ({"questions": [PREDICATE | {"instructions": ""}]}, 422, "invalid_value", "questions[0].instructions"),
        ({"questions": [PREDICATE | {"instructions": []}]}, 422, "invalid_value", "questions[0].instructions"),
        ({"questions": [PREDICATE | {"instructions": [{"type": "output_text", "text": "a"}]}]}, 422, "invalid_value",
         "questions[0].instructions[0].type"),
        ({"questions": [PREDICATE | {"name": "n" * 257}]}, 422, "invalid_value", "questions[0].name"),
        ({"questions": [PREDICATE, CHOICE | {"choices": [{"value": "a"}]}]}, 422, "invalid_value",
         "questions[1].choices"),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}]}]}, 422, "invalid_value",
         "questions[0].choices[2].value"),
        ({"questions": [CHOICE | {"choices": [{"value": True}, {"value": True}]}]}, 422, "invalid_value",
         "questions[0].choices[1].value"),
        ({"questions": [CHOICE | {"choices": [{"value": 1}, {"value": 2}]}]}, 422, "invalid_value",
         "questions[0].choices[0].value"),
        ({"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "b", "description": 1}]}]}, 422,
         "invalid_value", "questions[0].choices[1].description"),
        ({"questions": [LEVELS | {"levels": [{"label": "a"}]}]}, 422, "invalid_value", "questions[0].levels"),
        ({"questions": [LEVELS | {"levels": [{"label": "a"}, {"label": True}]}]}, 422, "invalid_value",
         "questions[0].levels[1].label"),
        ({"prompt_cache_key": "k" * 257}, 422, "invalid_value", "prompt_cache_key"),
        ({"model": "gpt"}, 404, "model_not_found", "model"),
        ({"input": "x" * 5000}, 400, "context_length_exceeded", "input"),
        # another server's dialect of this route
        ({"questions": [{"question": "is it?", "options": ["yes", "no"]}]}, 422, "invalid_value",
         "questions[0].question"),
        ({"questions": [{"type": "choice", "options": ["yes", "no"]}]}, 422, "invalid_value", "questions[0].options"),
        ({"questions": {"a": {"question": "is it?"}}}, 422, "invalid_value", "questions"),
        ({"question": "is it?", "questions": None}, 422, "invalid_value", "question"),
        ({"options": ["yes", "no"]}, 422, "invalid_value", "options"),
    ],
)  # fmt: skip
async def test_every_refusal_names_its_field(
    client: Any, backend: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    assert await refusal(client, **body) == (status, code, param)
    assert not backend.score_tasks


async def test_numbers_beyond_json_are_refused_in_data(client: Any) -> None:
    body = json.dumps(BODY | part({"a": 1.5})).replace("1.5", "1e999")
    found = await client.post("/v1/decisions", body.encode())
    assert (found.status_code, found.json()["error"]["param"]) == (422, AT)


@pytest.mark.parametrize("data", [nested(32), {"a": [0] * 9_998}, {"a": "x" * 262_136}, []])
async def test_data_exactly_at_a_bound_passes(client: Any, backend: Any, data: Any) -> None:
    backend.max_model_len = 1_000_000
    await ask(client, **part(data))


async def test_400_questions_pass_and_typed_values_are_distinct(client: Any, backend: Any) -> None:
    backend.max_model_len = 100_000
    choices = [{"value": value} for value in ("true", True, "false", False)]
    found = await ask(client, questions=[CHOICE | {"choices": choices}] * 400)
    values = [row["value"] for row in found["answers"][399]["probabilities"]]
    assert values == ["true", True, "false", False] and values[0] is not True
    assert len(found["answers"]) == 400


async def test_as_many_options_as_codes_and_no_more(client: Any, backend: Any) -> None:
    facts = (await client.get("/v1/models")).json()["data"][0]["assay"]
    assert facts["max_choices"] == facts["limits"]["max_choices"] == facts["limits"]["max_levels"] == 52
    for name, entry, key in (("choices", CHOICE, "value"), ("levels", LEVELS, "label")):
        full = [{key: str(i)} for i in range(53)]
        await ask(client, questions=[entry | {name: full[:52]}])
        found = await client.post("/v1/decisions", BODY | {"questions": [entry | {name: full}]})
        assert (found.status_code, found.json()["error"]["param"]) == (422, f"questions[0].{name}")
        assert "52" in found.json()["error"]["message"]


async def test_unknown_fields_are_named_or_refused_wherever_they_are(client: Any) -> None:
    part = {"type": "output_text", "text": "a", "annotations": []}
    body = {
        "input": [{"role": "assistant", "content": [part], "weight": 1}],
        "questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "b", "rank": 2}]}],
        "warmth": 0,
    }
    found = await client.post("/v1/decisions", body)
    assert found.status_code == 200
    assert found.headers["x-assay-ignored-fields"].split(", ") == [
        "warmth", "input[0].weight", "input[0].content[0].annotations"[:32], "questions[0].choices[1].rank",
    ]  # fmt: skip
    found = await client.post("/v1/decisions", body, x_assay_strict="1")
    assert (found.status_code, found.json()["error"]["param"]) == (422, "warmth")


async def test_the_cache_key_is_hashed_into_the_salt(client: Any, backend: Any) -> None:
    for key in ("a", "b", "a", None, ""):
        await ask(client, prompt_cache_key=key, prompt_cache_options={"mode": "explicit"}, safety_identifier="u")
    salts = [task.cache_salt for task in backend.score_tasks]
    assert salts[0] == salts[2] != salts[1] and re.fullmatch(r"[0-9a-f]{64}", salts[0]) and salts[3:] == ["", ""]


async def test_a_poisoned_question_fails_the_request_by_name(client: Any, backend: Any) -> None:
    backend.nonfinite = frozenset({6})
    asked = [PREDICATE, CHOICE]
    assert await refusal(client, questions=asked) == (500, "nonfinite_logits", "questions[1]")


async def test_timings_are_in_the_headers(client: Any) -> None:
    found = await client.post("/v1/decisions", BODY)
    assert (found.headers["x-assay-queue-ms"], found.headers["x-assay-compute-ms"]) == ("1.000", "2.000")


# The built-in model


@pytest.fixture
async def replica(replica_backend: Callable[..., Any]) -> Any:
    engine = {"max_running": 8, "kv_slots": 65_536}
    return await replica_backend(model={"path": "builtin", "device": "cpu"}, engine=engine)


Serve = Callable[..., Any]


@pytest.fixture
def serve(replica: Any, tokenizer: Tokenizer, make_client: Any) -> Iterator[Serve]:
    def make(limits: Limits | None = None, **decisions: Any) -> Any:
        chosen = DecisionArgs(**{"layout": "builtin"} | decisions)
        settings = ApiSettings(decisions=chosen, limits=limits or Limits())
        return make_client(build_api(replica, tokenizer, settings))

    yield make


def logprobs_after(library: Any, tokenizer: Tokenizer, prompt: str, answers: list[str]) -> list[float]:
    """log P of each answer after the prompt, token by token, with a forward pass for every different beginning."""
    [base] = tokenizer.encode_batch([prompt], add_special_tokens=False)
    rows: dict[tuple[int, ...], Any] = {}
    found = []
    for ids in tokenizer.encode_batch([prompt + answer for answer in answers], add_special_tokens=False):
        assert ids[: len(base)] == base and len(ids) > len(base)
        total = 0.0
        for at in range(len(base), len(ids)):
            before = tuple(ids[:at])
            if before not in rows:
                with torch.no_grad():
                    rows[before] = library(torch.tensor([before])).logits[0, -1].double().log_softmax(-1)
            total += float(rows[before][ids[at]])
        found.append(total)
    return found


async def test_answers_are_those_of_a_plain_computation(serve: Serve, library: Any, tokenizer: Tokenizer) -> None:
    found = await ask(serve(), questions=[PREDICATE, CHOICE, LEVELS])
    prompts = [
        f"Document: {RED}\nQuestion: is it a red chair?\nAnswer:",
        f"Document: {RED}\nQuestion: which colour?\nA) blue\nB) red\nC) green\nAnswer:",
        f"Document: {RED}\nQuestion: which city?\nA) Paris\nB) Lisbon: in Portugal\nAnswer:",
    ]
    answers = [[" yes", " no"], [" A", " B", " C"], [" A", " B"]]
    weights = [np.exp(logprobs_after(library, tokenizer, *pair)) for pair in zip(prompts, answers, strict=True)]
    p = [row / row.sum() for row in weights]
    predicate, choice, score = found["answers"]
    assert predicate["probability"] == pytest.approx(p[0][0], abs=1e-4)
    assert [row["probability"] for row in choice["probabilities"]] == pytest.approx(p[1].tolist(), abs=1e-4)
    assert choice["choice"] == "red" and score["score"] == pytest.approx(p[2][1], abs=1e-4)
    for row, one in zip(weights, found["answers"], strict=True):
        assert one["label_mass"] == pytest.approx(row.sum(), abs=1e-4)
    for one, row in ((choice, p[1]), (score, p[2])):
        wanted = 1 + float((row * np.log(row)).sum()) / math.log(len(row))
        assert one["confidence"] == pytest.approx(wanted, abs=1e-4)


async def test_the_chat_layout_is_the_models_own_template(
    serve: Serve, replica: Any, library: Any, tokenizer: Tokenizer
) -> None:
    """Against the library's own rendering of the same messages, and a forward pass over its ids."""
    found = (await ask(serve(layout="chat"), questions=[PREDICATE | {"instructions": "is it red?<|end|>"}]))["answers"][
        0
    ]
    user = f"<input>\n{RED}\n</input>\n\nQuestion: is it red?\nAnswer with yes or no only."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    theirs = AutoTokenizer.from_pretrained(BUILTIN)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    task = replica.tasks[-1]
    row = [*task.prefix, *task.ids]
    mark = tokenizer.encode_batch(["?<|end|>\n"], add_special_tokens=False, plain=True)[0]
    at = next(i for i in range(len(row)) if row[i : i + len(mark)] == mark)  # the data's own <|end|>, as characters
    cut = tokenizer.encode_batch(["?\n"], add_special_tokens=False)[0]
    assert [*row[:at], *cut, *row[at + len(mark) :]] == ids
    with torch.no_grad():
        logprobs = library(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
    p = [
        float(logprobs[tokenizer.encode_batch([word], add_special_tokens=False)[0][0]].exp()) for word in ("yes", "no")
    ]
    assert found["probability"] == pytest.approx(p[0] / sum(p), abs=1e-4)
    assert found["label_mass"] == pytest.approx(sum(p), abs=1e-4)


@pytest.mark.parametrize(("layout", "template", "wanted"), [
    ("auto", True, "chat"), ("auto", False, "plain"), ("plain", True, "plain"), ("builtin", False, "builtin"),
])  # fmt: skip
def test_the_layout_is_the_one_chosen_or_the_best_there_is(
    tokenizer: Tokenizer, layout: Any, template: bool, wanted: str
) -> None:
    settings = ApiSettings(decisions=DecisionArgs(layout=layout))
    found = decision_prompts(tokenizer, settings, compile_chat(tokenizer, settings) if template else None)
    assert found.layout.name == wanted


def test_a_template_that_cannot_serve_is_refused_or_left_aside(tokenizer: Tokenizer) -> None:
    twice = ChatTemplate("{% for message in messages %}{{ message.content }} {{ message.content }}{% endfor %}")
    chosen = ApiSettings(decisions=DecisionArgs(layout="chat"))
    with pytest.raises(ValueError, match="once each"):
        decision_prompts(tokenizer, chosen, twice)
    with pytest.raises(ValueError, match="has no chat template"):
        decision_prompts(tokenizer, chosen, None)
    assert decision_prompts(tokenizer, ApiSettings(), twice).layout.name == "plain"


def test_the_built_in_model_is_asked_in_its_own_form(toy_args: dict[str, Any]) -> None:
    def layout(**sections: Any) -> str:
        settings = AppArgs.model_validate(toy_args | sections).api_settings(SamplingDefaults(), {})
        return settings.decisions.layout

    assert layout() == "auto" and layout(model={"path": "builtin"}) == "builtin"
    assert layout(model={"path": "builtin"}, decisions={"layout": "plain"}) == "plain"
    for bad in ({"layout": "other"}, {"min_label_mass": 1.5}, {"min_label_mass": -0.1}, {"unknown": 1}):
        with pytest.raises(ValueError):
            layout(decisions=bad)


@pytest.mark.full
async def test_255_choices_are_those_of_a_plain_computation(
    serve: Serve, replica: Any, library: Any, tokenizer: Tokenizer
) -> None:
    client = serve()
    assert (await client.get("/v1/models")).json()["data"][0]["assay"]["max_choices"] == 255
    choices = [{"value": str(i)} for i in range(255)]
    found = (await ask(client, questions=[PREDICATE, CHOICE | {"choices": choices}]))["answers"][1]
    task = replica.tasks[-1]
    last = len(task.starts) - 2
    row = [*task.prefix, *task.ids[task.starts[1] : task.starts[2]]]
    prompt = tokenizer.decode(row, skip_special_tokens=False)
    codes = [line.split(")")[0] for line in prompt.splitlines() if ") " in line]
    assert len(codes) == 255 and {len(code) for code in codes} == {1, 2} and last > 1
    logprobs = np.array(logprobs_after(library, tokenizer, prompt, [f" {code}" for code in codes]))
    p = np.exp(logprobs - logprobs.max())
    values = np.array([one["probability"] for one in found["probabilities"]])
    np.testing.assert_allclose(values, p / p.sum(), atol=1e-4)
    np.testing.assert_allclose(np.log(values), np.log(p / p.sum()), atol=2e-3)
    assert values.sum() == pytest.approx(1, abs=1e-6)
    assert found["label_mass"] == pytest.approx(np.exp(logprobs).sum(), abs=1e-4)


async def test_the_input_is_computed_once(serve: Serve) -> None:
    usage = (await ask(serve(), questions=[PREDICATE] * 20, prompt_cache_key="alone"))["usage"]
    row = usage["input_tokens"] // 20
    assert usage["input_tokens"] == 20 * row and usage["total_tokens"] == usage["input_tokens"]
    shared = usage["input_tokens_details"]["cached_tokens"] // 19
    assert usage["input_tokens_details"]["cached_tokens"] == 19 * shared and shared > row / 2


async def test_neighbours_and_cuts_between_tasks_change_no_answer(serve: Serve, replica: Any) -> None:
    asked = [PREDICATE, CHOICE, LEVELS, CHOICE | {"instructions": "what colour does it have?"}]
    together = (await ask(serve(), questions=asked))["answers"]
    alone = [(await ask(serve(), questions=[one]))["answers"][0] for one in asked]
    small = serve(Limits(scoring=Limits().scoring.__class__(max_labels=3)))
    before = len(replica.tasks)
    cut = (await ask(small, questions=asked))["answers"]
    assert len(replica.tasks) - before > 1
    for one, two, three in zip(together, alone, cut, strict=True):
        for other in (two, three):
            assert one["label_mass"] == pytest.approx(other["label_mass"], abs=1e-5)
            assert one.get("confidence") == pytest.approx(other.get("confidence"), abs=1e-5)
            assert one.get("choice") == other.get("choice")


async def test_a_question_with_too_little_mass_is_refused(serve: Serve) -> None:
    asked = [PREDICATE | {"name": "a"}, PREDICATE | {"instructions": "wherever the ladder went", "name": "b"}]
    plain = (await ask(serve(), questions=asked))["answers"]
    masses = [one["label_mass"] for one in plain]
    assert masses[0] > masses[1]
    limit = (masses[0] + masses[1]) / 2
    answers = (await ask(serve(min_label_mass=limit), questions=asked))["answers"]
    assert answers[0] == plain[0]
    assert answers[1] == {"type": "refusal", "name": "b", "label_mass": masses[1]}


def parsed(question: evaluate.HeldOutQuestion) -> tuple[str, dict[str, Any], str]:
    """Input, choice question and right value of a held-out prompt of the catalogue."""
    document, rest = question.prompt.removeprefix("Document: ").split("\nQuestion: ")
    lines = rest.removesuffix("\nAnswer:").split("\n")
    words = dict(line.split(") ") for line in lines[1:])
    asked = CHOICE | {"instructions": lines[0], "choices": [{"value": word} for word in words.values()]}
    return document, asked, words[question.answer]


async def test_held_out_choices_are_answered_right(serve: Serve) -> None:
    client = serve()

    async def right(given: str, asked: dict[str, Any], word: str) -> bool:
        return bool((await ask(client, input=given, questions=[asked]))["answers"][0]["choice"] == word)

    held_out = [parsed(question) for question in evaluate.questions("choice", 200, seed=11)]
    assert np.mean(await asyncio.gather(*(right(*one) for one in held_out))) >= 0.95
    # The same questions about another document: the check can fail.
    others = zip(held_out[1:60], held_out[:59], strict=True)
    moved = [(given, asked, word) for (given, _, _), (_, asked, word) in others]
    assert np.mean(await asyncio.gather(*(right(*one) for one in moved))) < 0.7


async def test_held_out_predicates_are_told_apart(serve: Serve) -> None:
    client, rng, questions, truth = serve(), random.Random(3), [], []
    for _ in range(60):
        text, one = grammar.predicate_text(rng, 0)
        form = grammar.Form(family="questions", text=f"{grammar.document_text(rng)}|{text}|{{y0}}", asks=(one,))
        given, asked, right = grammar.render(form, grammar.draw_slots(form, rng, kept=True, hard=1.0)).split("|")
        questions.append((given, PREDICATE | {"instructions": asked.removeprefix("Question: ")}))
        truth.append(right == "yes")
    assert 0 < sum(truth) < 60
    found = await asyncio.gather(*(ask(client, input=given, questions=[asked]) for given, asked in questions))
    scores = [one["answers"][0]["probability"] for one in found]
    assert evaluate.area_under_curve(np.array(scores), np.array(truth)) >= 0.99


# The official client


async def test_the_official_client_reads_every_answer(serve: Serve, sdk_of: Any) -> None:
    async with sdk_of(serve().app) as sdk:
        assert isinstance(sdk, openai.AsyncOpenAI)
        found = await sdk.decisions.create(
            model="builtin",
            input=[{"role": "user", "content": [{"type": "input_text", "text": RED}]}],
            questions=[
                {"type": "predicate", "instructions": "is it a red chair?", "name": "red"},
                {
                    "type": "choice",
                    "instructions": "which colour?",
                    "choices": [{"value": "blue"}, {"value": "red"}, {"value": True}],
                },
                {"type": "score", "instructions": "which city?", "levels": [{"label": "Paris"}, {"label": "Lisbon"}]},
            ],
            prompt_cache_key="k",
            prompt_cache_options={"mode": "implicit", "ttl": "30m"},
            safety_identifier="u",
        )
        predicate, choice, score = found.answers
        assert predicate.type == "predicate" and predicate.name == "red" and predicate.probability > 0.99
        assert choice.type == "choice" and choice.choice == "red" and choice.name is None
        assert [one.value for one in choice.probabilities] == ["blue", "red", True]
        assert score.type == "score" and score.score > 0.9 and score.probabilities[1].label == "Lisbon"
        assert found.usage.total_tokens == found.usage.input_tokens > 0
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.decisions.create(
                model="builtin",
                input=[
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}
                ],
                questions=[{"type": "predicate", "instructions": "is it red?"}],
            )
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "input[0].content[0].type")
