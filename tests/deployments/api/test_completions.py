"""POST /v1/completions, plain: the contract's details over a scripted backend."""

import json
import threading
from typing import Any

import numpy as np
import pytest

from deployments.api.generation.choices import ChoiceState
from deployments.api.schemas.generation import CompletionResponse
from deployments.protocol import Failure
from engine.requests import ErrorCode
from engine.tokenizer.detokenizer import IncrementalDecoder
from tests.support.toy_model import ByteTokenizer


async def test_a_completion_has_every_field_of_the_contract(client: Any, backend: Any) -> None:
    found = await client.complete(seed=7)
    CompletionResponse.model_validate_json(json.dumps(found), strict=True)
    assert found["choices"] == [
        {"index": 0, "text": " world", "logprobs": None, "finish_reason": "length", "stop_reason": None, "seed": 7}
    ]
    assert found["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert found["object"] == "text_completion" and found["model"] == "toy"
    assert found["id"].startswith("cmpl-") and len(found["id"]) == len("cmpl-") + 26


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", [[256, 104, 0xC3, 0xA9]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [[256]]),
        ("<bos>", [[256, 256]]),
    ],
)
async def test_prompts_become_ids_and_ids_get_no_bos(
    client: Any, backend: Any, prompt: Any, expected: list[list[int]]
) -> None:
    found = await client.complete(prompt=prompt, return_token_ids=True)
    task = backend.tasks[0]
    rows = [request.prompt.tolist() for request in task]
    assert rows == expected
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == expected
    assert all(choice["token_ids"] == list(b" world") for choice in found["choices"])


async def test_there_are_exactly_prompts_times_n_choices_in_order(client: Any) -> None:
    found = await client.complete(prompt=[[1], [2], [3]], n=2, seed=5)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert found["usage"]["prompt_tokens"] == 3 and found["usage"]["completion_tokens"] == 36


@pytest.mark.parametrize(("given", "marked"), [({"seed": 0}, 0), ({"seed": -7}, -7), ({"seed": -1}, -1), ({}, None)])
async def test_only_a_seed_that_was_given_marks_the_row(client: Any, backend: Any, given: Any, marked: Any) -> None:
    await client.complete(**given)
    assert backend.tasks[0][0].params.seed == marked


async def test_absent_seeds_are_made_one_a_prompt_and_fit_every_json_client(client: Any, backend: Any) -> None:
    found = await client.complete(prompt=[[1], [2]], n=2)
    seeds = [choice["seed"] for choice in found["choices"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert [request.seed for request in backend.tasks[0]] == [seeds[0], seeds[2]]
    for index, seed in enumerate((-1, -2, 2**63 - 1, -(2**63)), 1):
        [choice] = (await client.complete(seed=seed))["choices"]
        assert choice["seed"] == seed and backend.tasks[index][0].seed == np.uint64(seed % 2**64)


async def test_parameters_reach_the_sampler(client: Any, backend: Any) -> None:
    await client.complete(
        temperature=0, top_k=-1, top_p=0.5, min_p=0.25, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.5, logit_bias={"7": -100, "8": 1.5}, allowed_token_ids=[1, 2], bad_words=["x", " y"],
        stop_token_ids=[9], min_tokens=2, max_tokens=5, n=3, logprobs=4, logprob_token_ids=[5, 5],
        priority=-3, cache_salt="s",
    )  # fmt: skip
    task = backend.tasks[0][0]
    params = task.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, -1, 0.5, 0.25)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 2, 1.5)
    assert params.logit_bias == ((7, -100), (8, 1.5)) and params.allowed_token_ids == (1, 2)
    assert params.bad_words_ids == ((120,), (32, 120), (32, 121))
    assert params.stop_token_ids == (9, 257)
    assert (params.min_tokens, params.max_tokens, params.n, params.logprobs) == (2, 5, 3, 4)
    assert params.logprob_token_ids == (5, 5)
    assert (task.priority, task.cache_salt) == (-3, "s")
    assert 0 < task.timeout_s <= 600


async def test_null_means_absent(client: Any, backend: Any) -> None:
    fields = ("temperature", "top_k", "stop", "logit_bias", "seed", "logprobs", "n", "max_tokens", "echo", "suffix")
    await client.complete(**dict.fromkeys(fields))
    assert backend.tasks[0][0].params.max_tokens == 16 and backend.tasks[0][0].params.temperature == 1.0


async def test_ignore_eos_leaves_only_the_requests_own_stop_ids(client: Any, backend: Any) -> None:
    await client.complete(ignore_eos=True, stop_token_ids=[3])
    assert backend.tasks[0][0].params.stop_token_ids == (3,)


async def test_the_end_token_has_an_entry_but_no_text(client: Any, backend: Any) -> None:
    backend.script = [*b"ab", 257, *b"cd"]
    found = (await client.complete(logprobs=0, skip_special_tokens=False, return_token_ids=True))["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == ("ab", "stop", None)
    assert found["token_ids"] == [97, 98, 257]
    assert found["logprobs"]["tokens"] == ["a", "b", "<eos>"]
    assert found["logprobs"]["text_offset"] == [0, 1, 2]


async def test_one_token_asked_is_one_entry_even_if_it_is_the_end(client: Any, backend: Any) -> None:
    backend.script = [257]
    found = (await client.complete(max_tokens=1, logprobs=1))["choices"][0]
    assert found["text"] == "" and len(found["logprobs"]["token_logprobs"]) == 1


async def test_the_text_keeps_the_space_that_it_begins_with(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoders of sentence pieces strip the first space of a text, and a prompt stands before an answer."""
    own = ByteTokenizer.decode
    monkeypatch.setattr(
        ByteTokenizer, "decode", lambda self, ids, **options: own(self, ids, **options).removeprefix(" ")
    )
    for options in ({}, {"logprobs": 0}, {"stop": "or"}):
        assert (await client.complete(**options))["choices"][0]["text"].startswith(" w")
    echoed = await client.complete(prompt="hello", echo=True)
    assert echoed["choices"][0]["text"].startswith("hello w")


async def test_a_stop_id_of_the_request_is_its_reason(client: Any, backend: Any) -> None:
    found = (await client.complete(stop_token_ids=[ord("r")]))["choices"][0]
    assert (found["text"], found["stop_reason"]) == (" wo", ord("r"))
    found = (await client.complete(stop_token_ids=[ord("r")], include_stop_str_in_output=True))["choices"][0]
    assert found["text"] == " wor"


async def test_a_stop_string_ends_the_text_and_the_work(client: Any, backend: Any) -> None:
    found = (await client.complete(stop=["zz", "or"], logprobs=0))["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (" w", "stop", "or")
    assert len(found["logprobs"]["tokens"]) == 4
    assert (backend.sent, backend.cancelled) == (4, 1)
    found = (await client.complete(stop="or", include_stop_str_in_output=True))["choices"][0]
    assert found["text"] == " wor"


async def test_several_branches_with_a_stop_string_run_until_all_have_ended(client: Any, backend: Any) -> None:
    found = await client.complete(stop="or", n=3)
    assert [choice["text"] for choice in found["choices"]] == [" w"] * 3
    assert found["usage"]["completion_tokens"] == 12


async def test_logprobs_are_the_classic_object(client: Any) -> None:
    found = (await client.complete(logprobs=2, max_tokens=2, logprob_token_ids=[1, 2]))["choices"][0]["logprobs"]
    first = float(np.float32(-0.1))
    assert found["tokens"] == [" ", "w"] and found["token_logprobs"][0] == first
    assert found["top_logprobs"][0] == {" ": first, "!": pytest.approx(first - 1, abs=1e-6)}
    assert found["requested_logprobs"] == [[-1.0, -9999.0]] * 2


async def test_the_sampled_token_is_among_its_alternatives_with_the_same_float(client: Any) -> None:
    for asked in (0, 1, 5):
        found = (await client.complete(logprobs=asked))["choices"][0]["logprobs"]
        for token, value, others in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert others[token] == value == max(others.values())


async def test_ids_with_one_text_do_not_hide_each_other(client: Any, backend: Any) -> None:
    backend.script = [0xC3, 254]
    found = (await client.complete(logprobs=3, return_tokens_as_token_ids=False))["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xfe"]
    assert [len(others) for others in found["top_logprobs"]] == [3, 3]
    found = (await client.complete(logprobs=2, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:195", "token_id:254"]
    assert list(found["top_logprobs"][0]) == ["token_id:195", "token_id:196"]


async def test_truncation_keeps_the_named_end_and_says_so(client: Any, backend: Any) -> None:
    found = await client.complete(prompt=list(range(9)), truncate_prompt_tokens=4)
    assert backend.tasks[0][0].prompt.tolist() == [5, 6, 7, 8] and found["usage"]["truncated_tokens"] == 5
    await client.complete(prompt=list(range(9)), truncate_prompt_tokens=4, truncation_side="right")
    assert backend.tasks[1][0].prompt.tolist() == [0, 1, 2, 3]
    backend.max_model_len = 12
    await client.complete(prompt=[1] * 4000, truncate_prompt_tokens=-1, max_tokens=5)


async def test_a_prompt_that_just_fits_passes_and_one_more_is_refused(client: Any) -> None:
    await client.complete(prompt=[1] * 4095, max_tokens=1)
    refused = await client.post("/v1/completions", {"prompt": [1] * 4096, "max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_resumed_completion_returns_only_what_is_new(client: Any, backend: Any) -> None:
    whole = await client.complete(seed=3, stop="ld")
    rest = await client.complete(seed=3, stop="ld", resume_token_ids=list(b" wo"))
    assert whole["choices"][0]["text"] == " wor" and rest["choices"][0]["text"] == "r"
    assert backend.tasks[1][0].emitted[0].tolist() == list(b" wo")
    refused = await client.post(
        "/v1/completions", {"prompt": "a", "seed": 3, "stop": "wo", "resume_token_ids": list(b" wor")}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "resume_token_ids")
    for wrong in ({"seed": None}, {"n": 2}, {"prompt": ["a", "b"]}, {"max_tokens": 3}, {"stop_token_ids": [2]}):
        body = {"prompt": "a", "seed": 3, "resume_token_ids": [1, 2, 3]} | wrong
        refused = await client.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "resume_token_ids")


@pytest.mark.parametrize(
    ("body", "follows"),
    [
        ({"prompt": [[40, 41]] * 64, "n": 8}, 64),
        ({"prompt": [40, 41], "seed": 1, "resume_token_ids": [97] * 300, "max_tokens": 301, "stop": "zz"}, 1),
    ],
)
async def test_many_choices_and_long_resumed_answers_are_begun_off_the_loop(
    client: Any, backend: Any, body: dict[str, Any], follows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder follows each prompt once, however many choices it has."""
    backend.script = b"a" * 301
    threads: list[int] = []
    made: list[int] = []
    follow, init = IncrementalDecoder.follow, ChoiceState.__init__

    def followed(decoder: IncrementalDecoder, ids: Any) -> None:
        threads.append(threading.get_ident())
        follow(decoder, ids)

    def begun(choice: ChoiceState, *args: Any) -> None:
        made.append(threading.get_ident())
        init(choice, *args)

    monkeypatch.setattr(IncrementalDecoder, "follow", followed)
    monkeypatch.setattr(ChoiceState, "__init__", begun)
    await client.complete(**body)
    assert len(threads) == follows
    assert threading.get_ident() not in {*threads, *made}
    threads.clear()
    await client.complete()
    assert threads == [threading.get_ident()], "a small request costs no turn of a thread"


@pytest.mark.parametrize(
    "field",
    [
        {"best_of": 2}, {"suffix": "x"}, {"use_beam_search": True},
        {"length_penalty": 0.5}, {"response_format": {"type": "json_object"}}, {"structured_outputs": {}},
        {"tools": [1]}, {"prompt_embeds": "x"}, {"thinking_token_budget": 0},
    ],
)  # fmt: skip
async def test_what_we_do_not_do_is_refused_and_never_ignored(client: Any, field: dict[str, Any]) -> None:
    found = await client.post("/v1/completions", {"prompt": "a", **field})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert found.json()["error"]["param"] == next(iter(field))


async def test_neutral_values_of_unsupported_fields_pass(client: Any) -> None:
    await client.complete(
        echo=False, best_of=1, suffix="", use_beam_search=False, length_penalty=1.0, response_format={"type": "text"},
        tools=[], user="u", metadata={"a": 1}, store=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (ErrorCode.NONFINITE_LOGITS, 500, "nonfinite_logits"),
        (ErrorCode.STEP_FAILED, 500, "internal_error"),
        (ErrorCode.DEADLINE_EXCEEDED, 408, "deadline_exceeded"),
        (ErrorCode.OVERLOADED, 429, "overloaded"),
        (ErrorCode.DRAINING, 503, "draining"),
        (ErrorCode.REQUEST_TOO_LARGE, 413, "request_too_large"),
    ],
)
async def test_a_failure_of_the_engine_has_its_status(
    client: Any, backend: Any, code: ErrorCode, status: int, name: str
) -> None:
    backend.chunk_failure = Failure(code, "Closed words.", None)
    found = await client.post("/v1/completions", {"prompt": "a"})
    assert (found.status_code, found.json()["error"]["code"]) == (status, name)
    assert ("retry-after" in found.headers) == (status in (429, 503))


async def test_too_many_rows_tokens_or_cells_are_refused_from_lengths_alone(client: Any, backend: Any) -> None:
    backend.max_model_len = 10**7
    for body, param, limit in (
        ({"prompt": [[1]] * 65, "n": 128}, "n", "max_rows"),
        ({"max_tokens": 1_048_576}, "max_tokens", "max_request_tokens"),
        ({"max_tokens": 50_000, "logprobs": 20}, "logprobs", "max_answer_cells"),
        ({"prompt": [1] * 2000, "n": 128, "prompt_logprobs": 9}, "prompt_logprobs", "max_answer_cells"),
    ):
        found = await client.post("/v1/completions", {"prompt": "a", **body})
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (413, param)
        assert f"(`limits.{limit}`). Given: " in error["message"]
    assert not backend.tasks


async def test_a_text_with_tokens_that_the_model_lacks_is_refused_as_text(client: Any, backend: Any) -> None:
    """A tokenizer may have more ids than the model."""
    backend.vocab_size = ord("c")
    for prompt, place in (("abc", "prompt"), (["a", "abc"], "prompt[1]")):
        body = {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False}
        found = await client.post("/v1/completions", body)
        error = found.json()["error"]
        assert (found.status_code, error["code"], error["param"]) == (422, "invalid_token_id", place)
        assert f"`{place}` must be text without the tokens that the model lacks" in error["message"]
