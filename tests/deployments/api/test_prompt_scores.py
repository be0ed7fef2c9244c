"""`echo` and `prompt_logprobs` of completions over an engine with the toy model, and what lm-evaluation-harness needs.

The harness asks for `echo` with `logprobs: 1` and `max_tokens: 1`, pairs choices with contexts by order, and sums the
entries `[context:-1]`: every slip would move its numbers without any error. Each of its traps has a test here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deployments.api.schemas.chat import ChatResponse
from deployments.api.schemas.generation import CompletionResponse
from engine.batch.input_batch import ScheduledSequence, StepKind
from tests.support import toy_model

PROMPT = [256, 104, 195, 169, 32, 7, 104, 200]
ROOM = 200


class Row(NamedTuple):
    """Scores the token after a prefix: float32, as an answer must tell it."""

    logprobs: npt.NDArray[np.float32]  # [V]
    order: npt.NDArray[np.int64]  # [V]


@pytest.fixture
def after() -> Callable[[list[int]], Row]:
    """The toy model's log-softmax after some tokens, without any engine, in float64."""
    model = toy_model.ToyModel(num_slots=512)

    def rows(ids: list[int]) -> Row:
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, np.array(ids, np.int32), np.array([len(ids) - 1], np.int32))
        z = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).double().numpy()[0]
        return Row((z - z.max() - np.log(np.exp(z - z.max()).sum())).astype(np.float32), np.argsort(-z, kind="stable"))

    return rows


@pytest.fixture
async def toy_client(replica_client: Callable[..., Any]) -> Any:
    return await replica_client(model={"path": "toy", "max_model_len": ROOM})


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/v1/completions", {"prompt": [1, 2, 3], **body})
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


# The traps.


async def test_trap_1_each_list_of_tokens_has_its_choice_and_no_bos(toy_client: Any, after: Any) -> None:
    prompts = [[104, 105], [7], [9, 8, 7, 6]]
    found = await toy_client.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, return_token_ids=True)
    CompletionResponse.model_validate_json(json.dumps(found), strict=True)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        assert choice["prompt_token_ids"] == prompt
        reported = choice["logprobs"]["token_logprobs"]
        assert len(reported) == len(prompt) + 1
        assert reported[1:-1] == [float(after(prompt[:at]).logprobs[prompt[at]]) for at in range(1, len(prompt))]
    [one] = (await toy_client.complete(prompt=prompts[:1], echo=True, logprobs=1, max_tokens=1))["choices"]
    assert one["logprobs"]["token_logprobs"][:-1] == found["choices"][0]["logprobs"]["token_logprobs"][:-1]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_trap_2_entries_cover_prompt_and_answer_and_the_first_is_null(
    toy_client: Any, after: Any, max_tokens: int
) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "seed": 3, "ignore_eos": True}
    choice = (await toy_client.complete(**body, return_token_ids=True))["choices"][0]
    reported = choice["logprobs"]
    assert {name: len(values) for name, values in reported.items()} == dict.fromkeys(reported, len(PROMPT) + max_tokens)
    assert reported["token_logprobs"][0] is None and reported["top_logprobs"][0] is None
    ids = [*PROMPT, *choice["token_ids"]]
    for at in range(1, len(ids)):
        row = after(ids[:at])
        assert reported["token_logprobs"][at] == float(row.logprobs[ids[at]])
        assert sorted(reported["top_logprobs"][at].values()) == sorted(
            {float(row.logprobs[token]) for token in (*row.order[:2], ids[at])}
        )


async def test_trap_2_what_is_impossible_is_minus_9999(toy_client: Any) -> None:
    """A token that the model never proposes: its logit is -inf. The last token of the prompt is not computed."""
    found = await toy_client.post(
        "/v1/completions", {"prompt": [1, 2, toy_model.NAN], "echo": True, "logprobs": 1, "max_tokens": 0}
    )
    assert found.status_code == 200
    assert found.json()["choices"][0]["logprobs"]["token_logprobs"][-1] == -9999.0
    assert "Infinity" not in found.text and "NaN" not in found.text


async def test_trap_3_one_token_asked_is_one_entry_even_if_it_is_the_end(toy_client: Any) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1, "allowed_token_ids": [toy_model.EOS]}
    choice = (await toy_client.complete(**body, return_token_ids=True))["choices"][0]
    assert choice["token_ids"] == [toy_model.EOS] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == "<eos>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT) + 1


async def test_trap_4_greedy_is_equality_of_floats(toy_client: Any, after: Any) -> None:
    best = int(after(PROMPT).order[0])
    prompt = [*PROMPT, best, 77]
    for asked in (0, 1, 3):
        body = {"prompt": prompt, "echo": True, "logprobs": asked, "max_tokens": 0}
        reported = (await toy_client.complete(**body))["choices"][0]["logprobs"]
        rows = [*zip(reported["tokens"], reported["token_logprobs"], reported["top_logprobs"], strict=True)]
        for at, (token, value, others) in enumerate(rows[1:], 1):
            assert others[token] == value
            assert asked == 0 or (value == max(others.values())) == (after(prompt[:at]).order[0] == prompt[at])
        assert rows[len(PROMPT)][1] == max(rows[len(PROMPT)][2].values())


@pytest.mark.full
async def test_trap_5_no_alternative_hides_another(replica_client: Any) -> None:
    """Texts of one position are distinct: the built-in vocabulary has pieces of characters."""
    client = await replica_client(model={"path": "builtin", "device": "cpu"})
    body = {"prompt": "Ein Stück 漢字 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "echo": True}
    for named in (False, True):
        choice = (await client.complete(**body, logprobs=20, max_tokens=0, return_tokens_as_token_ids=named))[
            "choices"
        ][0]
        reported = choice["logprobs"]
        for token, others in [*zip(reported["tokens"], reported["top_logprobs"], strict=True)][1:]:
            assert len(others) in (20, 21) and token in others
        assert any(token.startswith("token_id:" if named else "bytes:\\x") for token in reported["tokens"])


async def test_trap_6_a_prompt_that_leaves_one_token_passes(toy_client: Any) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    found = await toy_client.complete(prompt=[[1] * (ROOM - 1)], **body)
    assert len(found["choices"][0]["logprobs"]["token_logprobs"]) == ROOM
    assert await refusal(toy_client, prompt=[[1] * ROOM], **body) == (400, "context_length_exceeded", "prompt")
    await toy_client.complete(prompt=[[1] * ROOM], echo=True, logprobs=1, max_tokens=0)
    assert (await refusal(toy_client, prompt=[[1] * (ROOM + 1)], **body | {"max_tokens": 0}))[0] == 400


async def test_trap_7_generation_takes_the_end_text_and_strange_arguments(toy_client: Any) -> None:
    body = {
        "prompt": [[104, 105]], "model": "toy", "max_tokens": 8, "temperature": 0, "seed": 1234,
        "stop": ["\n\n", "<eos>"], "do_sample": False, "max_gen_toks": 8, "until": ["x"],
    }  # fmt: skip
    found = await toy_client.post("/v1/completions", body)
    assert found.status_code == 200
    assert found.headers["x-assay-ignored-fields"] == "max_gen_toks, until"


# Prefill alone.


def behind(choice: Any) -> tuple[list[float], dict[str, float]]:
    """The requested log-probabilities and the best ones at the last position of a completion's answer."""
    reported = choice["logprobs"]
    return reported["requested_logprobs"][-1], reported["top_logprobs"][-1]


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"prompt_logprobs": 2}, {"stream": True}, {"n": 2, "seed": 3}])
async def test_prefill_alone_tells_the_position_behind_the_prompt(
    toy_client: Any, after: Any, top: int, more: dict[str, Any]
) -> None:
    row, labels = after(PROMPT), [3, 250, 7]
    body = {"prompt": PROMPT, "max_tokens": 0, "logprobs": top, "logprob_token_ids": labels} | more
    if "stream" in more:
        events = await toy_client.events(**body, stream_options={"include_usage": True})
        [choice], usage = events[0]["choices"], events[-2]["usage"]
    else:
        found = await toy_client.complete(**body, return_token_ids=True)
        CompletionResponse.model_validate_json(json.dumps(found), strict=True)
        choice, usage = found["choices"][-1], found["usage"]
        assert choice["token_ids"] == [] and len(found["choices"]) == more.get("n", 1)
    assert choice["finish_reason"] == "length" and usage["completion_tokens"] == 0
    reported, best = behind(choice)
    assert reported == [float(row.logprobs[label]) for label in labels]
    assert sorted(best.values()) == sorted(map(float, row.logprobs[row.order[: max(top, 1)]]))
    assert choice["logprobs"]["token_logprobs"][-1] == float(row.logprobs[row.order[0]])
    entries = len(PROMPT) + 1 if "echo" in more else 1
    assert {len(values) for values in choice["logprobs"].values()} == {entries}
    assert (choice["text"] == "") == ("echo" not in more)
    if "prompt_logprobs" in more:
        assert len(choice["prompt_logprobs"]) == len(PROMPT)


@pytest.mark.parametrize("top", [0, 2])
async def test_prefill_alone_tells_as_much_of_the_prompt_as_was_asked(toy_client: Any, top: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": top}
    plain, behind_too = [
        (await toy_client.complete(**body, **more))["choices"][0]["logprobs"]["top_logprobs"]
        for more in ({}, {"logprob_token_ids": [3]})
    ]
    assert behind_too[:-1] == plain


async def test_prefill_alone_is_what_one_greedy_token_would_tell(
    replica_client: Callable[..., Any], tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    client = await replica_client(model={"path": "toy"}, chat={"template_file": str(template)})
    for path, given in (
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        ),
    ):
        body = {**given, "logprob_token_ids": [5, 6], "temperature": 0}
        none, one = [(await client.post(path, {**body, "max_tokens": count})).json() for count in (0, 1)]
        assert none["choices"][0]["logprobs"] == one["choices"][0]["logprobs"]
        assert (none["usage"]["completion_tokens"], one["usage"]["completion_tokens"]) == (0, 1)


async def test_prefill_alone_without_a_question_warms_the_cache(toy_client: Any) -> None:
    body = {"prompt": PROMPT * 4, "seed": 1}
    found = await toy_client.complete(**body, max_tokens=0)
    assert found["choices"][0]["text"] == "" and found["choices"][0]["logprobs"] is None
    warmed = (await toy_client.complete(**body, max_tokens=1))["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert warmed == 4 * len(PROMPT) - 1
    assert await refusal(toy_client, max_tokens=0, min_tokens=1) == (422, "invalid_value", "min_tokens")


async def test_trap_8_the_remote_tokenizer_finds_the_end_token(toy_client: Any) -> None:
    info = (await toy_client.get("/tokenizer_info")).json()
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    found = (await toy_client.post("/tokenize", asked)).json()
    assert found["tokens"] == [toy_model.EOS]


# Beyond the traps.


async def test_the_text_begins_with_the_prompt_and_offsets_say_where_tokens_stand(toy_client: Any) -> None:
    text = "a réd chair"
    plain = (await toy_client.complete(prompt=text, max_tokens=9, seed=3, logprobs=0))["choices"][0]
    found = (await toy_client.complete(prompt=text, max_tokens=9, seed=3, logprobs=0, echo=True))["choices"][0]
    assert found["text"] == text + plain["text"]
    reported, count = found["logprobs"], 1 + len(text.encode())
    assert reported["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert reported["text_offset"][:6] == [0, 0, 1, 2, 3, 3]  # the begin token has no text, "é" is two tokens
    assert reported["text_offset"][count:] == [len(text) + at for at in plain["logprobs"]["text_offset"]]
    shown = await toy_client.complete(prompt=text, max_tokens=1, echo=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"].startswith("<bos>" + text) and shown["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_stream_is_the_plain_answer_in_pieces(toy_client: Any, max_tokens: int, logprobs: int | None) -> None:
    body = {
        "prompt": [[104, 105, 7], [9]], "echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "n": 2,
        "seed": 4, "ignore_eos": True, "return_token_ids": True, "logprob_token_ids": [5, 5] if logprobs else None,
    }  # fmt: skip
    plain = await toy_client.complete(**body)
    *events, done = await toy_client.events(**body)
    assert done == "[DONE]"
    for choice in plain["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_prompt_logprobs_name_the_token_and_the_first_of_the_order(toy_client: Any, after: Any) -> None:
    for asked in (0, 2):
        found = await toy_client.complete(prompt=[PROMPT, [7]], prompt_logprobs=asked, max_tokens=2, seed=1, n=2)
        CompletionResponse.model_validate_json(json.dumps(found), strict=True)
        assert [choice["prompt_logprobs"] for choice in found["choices"][2:]] == [[None]] * 2
        assert all(choice["logprobs"] is None for choice in found["choices"])
        for choice in found["choices"][:2]:
            first, *places = choice["prompt_logprobs"]
            assert first is None
            for at, place in enumerate(places, 1):
                row = after(PROMPT[:at])
                expected = {
                    str(token): (float(row.logprobs[token]), 1 + int(np.flatnonzero(row.order == token)[0]))
                    for token in (*row.order[:asked], PROMPT[at])
                }
                assert {key: (one["logprob"], one["rank"]) for key, one in place.items()} == expected
                [name] = toy_client_names([PROMPT[at]])
                assert place[str(PROMPT[at])]["decoded_token"] == name


def toy_client_names(ids: list[int]) -> list[str]:
    from tests.support.toy_model import ByteTokenizer

    return ByteTokenizer().token_texts(ids)


async def test_a_prompt_alone_costs_its_tokens_and_an_answer_one_more(toy_client: Any) -> None:
    before = await toy_client.computed()
    alone = await toy_client.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=0)
    assert alone["choices"][0] | {"seed": 0, "prompt_logprobs": []} == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None, "seed": 0,
        "prompt_logprobs": [],
    }  # fmt: skip
    assert alone["usage"]["completion_tokens"] == 0
    assert await toy_client.computed() - before == len(PROMPT) - 1
    found = await toy_client.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=1)
    # The cached prompt has no logits: it is computed again, once, and the answer finds it.
    assert await toy_client.computed() - before == 2 * (len(PROMPT) - 1) + 1
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_what_is_cached_has_the_same_floats(toy_client: Any) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 3, "max_tokens": 4, "seed": 5}
    first = (await toy_client.complete(**body))["choices"]
    await toy_client.complete(prompt=PROMPT, max_tokens=9)
    assert (await toy_client.complete(**body))["choices"] == first
    assert (await toy_client.complete(**body, cache_salt="other"))["choices"] == first
    both = await toy_client.complete(**body | {"prompt": [[9, *PROMPT], PROMPT]})
    assert both["choices"][1]["logprobs"] == first[0]["logprobs"]


async def test_named_ids_have_a_list_at_every_place_but_the_first(toy_client: Any, after: Any) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 1, "logprob_token_ids": [5, 250, 5]}
    choice = (await toy_client.complete(**body, return_token_ids=True))["choices"][0]
    first, *rest = choice["logprobs"]["requested_logprobs"]
    assert first is None and len(rest) == len(PROMPT)
    for at, values in enumerate(rest, 1):
        assert values == [float(after(PROMPT[:at]).logprobs[token]) for token in (5, 250, 5)]


async def test_echo_and_prompt_logprobs_go_together(toy_client: Any) -> None:
    choice = (await toy_client.complete(prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1))[
        "choices"
    ][0]
    for token, place in [*zip(choice["logprobs"]["token_logprobs"], choice["prompt_logprobs"], strict=False)][1:]:
        assert token in [one["logprob"] for one in place.values()] and len(place) in (4, 5)
    assert all(len(others) <= 2 for others in choice["logprobs"]["top_logprobs"][1:])


async def test_echo_without_logprobs_costs_nothing_more(toy_client: Any) -> None:
    before = await toy_client.computed()
    found = await toy_client.complete(prompt="abc", echo=True, max_tokens=1, cache_salt="fresh")
    assert found["choices"][0]["text"].startswith("abc")
    assert await toy_client.computed() - before == 4


async def test_stop_strings_are_not_looked_for_in_the_prompt(toy_client: Any) -> None:
    whole = (await toy_client.complete(prompt="xyz", max_tokens=30, seed=2, echo=True))["choices"][0]
    found = (await toy_client.complete(prompt="xyz", max_tokens=30, seed=2, echo=True, stop="xyz", logprobs=0))[
        "choices"
    ][0]
    assert found["text"] == whole["text"] and len(found["logprobs"]["tokens"]) > 4


@pytest.mark.risk("R11")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_without_finite_logits_fails_the_request(toy_client: Any, stream: bool) -> None:
    body = {"prompt": [1, toy_model.NAN, 3], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    assert await refusal(toy_client, **body) == (500, "nonfinite_logits", None)
    clean = await toy_client.complete(prompt=[1, 2, 3], echo=True, logprobs=1, max_tokens=0)
    assert clean["choices"][0]["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"max_tokens": -1, "echo": True}, 422, "invalid_value", "max_tokens"),
        ({"max_tokens": -1, "echo": False}, 422, "invalid_value", "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, 422, "invalid_value", "min_tokens"),
        ({"echo": 1}, 422, "invalid_value", "echo"),
        ({"echo": "true"}, 422, "invalid_value", "echo"),
        ({"prompt_logprobs": -1}, 422, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": -1, "echo": True, "logprobs": 1}, 422, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 21}, 422, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": True}, 422, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 1.0}, 422, "invalid_value", "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, 422, "invalid_value", "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, 422, "invalid_value", "logprobs"),
        ({"echo": True, "resume_token_ids": [1], "seed": 1}, 422, "invalid_value", "resume_token_ids"),
        ({"prompt_logprobs": 0, "resume_token_ids": [1], "seed": 1}, 422, "invalid_value", "resume_token_ids"),
        ({"echo": True, "logprobs": 1, "prompt": [264]}, 422, "invalid_token_id", "prompt"),
    ],
)
async def test_a_bad_wish_is_refused_by_field(
    toy_client: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    before = await toy_client.computed()
    assert await refusal(toy_client, **body) == (status, code, param)
    assert await toy_client.computed() == before


async def test_prompts_count_in_the_size_of_an_answer(replica_client: Any) -> None:
    client = await replica_client(limits={"max_answer_cells": 100})
    await client.complete(prompt=[1] * 30, echo=True, logprobs=1, max_tokens=1)
    assert await refusal(client, prompt=[1] * 35, echo=True, logprobs=1, max_tokens=16) == (
        413,
        "request_too_large",
        "echo",
    )
    await client.complete(prompt=[1] * 50, prompt_logprobs=1, max_tokens=0)
    refused = await refusal(client, prompt=[1] * 51, prompt_logprobs=1, max_tokens=0)
    assert refused == (413, "request_too_large", "prompt_logprobs")


async def test_chat_tells_of_its_prompt_too(replica_client: Any, tmp_path: Any) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}", "utf-8")
    client = await replica_client(chat={"template_file": str(template)})
    body = {"messages": [{"role": "user", "content": "abc"}], "prompt_logprobs": 1, "max_tokens": 2, "seed": 1}
    found = await client.post("/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    ChatResponse.model_validate_json(found.text, strict=True)
    same = await client.complete(prompt=[97, 98, 99], prompt_logprobs=1, max_tokens=2, seed=1)
    assert found.json()["choices"][0]["prompt_logprobs"] == same["choices"][0]["prompt_logprobs"]


@pytest.mark.risk("D4", planted=True)
async def test_entries_moved_by_one_would_be_seen(toy_client: Any, after: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted counterpart: the floats of the prompt, one place late."""
    from engine.scheduler import request_state

    true_targets = request_state._targets
    monkeypatch.setattr(request_state, "_targets", lambda request: np.roll(true_targets(request), 1))
    reported = (await toy_client.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=0))["choices"][0]["logprobs"]
    expected = [float(after(PROMPT[:at]).logprobs[PROMPT[at]]) for at in range(1, len(PROMPT))]
    assert reported["token_logprobs"][1:] != expected
