"""/generative_scoring with `continuations`: the toy model bit for bit, the built-in one against the library."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deployments.api.schemas.generative_scoring import ScoringResponse
from engine.batch.input_batch import ScheduledSequence, StepKind
from tests.support import toy_model

BODY: dict[str, Any] = {"query": "is it", "items": [" a cat", " a dog", ""], "continuations": [" yes", " no", "!"]}
TOLERANCE = 1e-4  # nats
Logprobs = Callable[[list[int], list[int]], list[float]]


@pytest.fixture
def expected() -> Logprobs:
    """Log-probabilities of tokens after others, from the toy model without any engine, in float64."""
    model = toy_model.ToyModel(num_slots=512)

    def found(before: list[int], tokens: list[int]) -> list[float]:
        ids = np.array([*before, *tokens], np.int32)
        slots = np.arange(1, len(ids) + 1, dtype=np.int32)
        run = ScheduledSequence(0, slots[:0], slots, ids, np.arange(len(before) - 1, len(ids) - 1, dtype=np.int32))
        z = model.forward(StepKind.SCORE, [run], torch.zeros((1, 1), dtype=torch.int32)).double().numpy()
        z -= z.max(1, keepdims=True)
        rows = (z - np.log(np.exp(z).sum(1, keepdims=True))).astype(np.float32)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    return found


@pytest.fixture
async def toy_client(replica_client: Callable[..., Any]) -> Any:
    return await replica_client(model={"path": "toy", "max_model_len": 200})


@pytest.fixture
async def builtin(replica_client: Callable[..., Any]) -> Any:
    return await replica_client(model={"path": "builtin", "device": "cpu"})


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/generative_scoring", {key: v for key, v in {**BODY, **body}.items() if v is not None})
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


async def test_rows_follow_the_formulas_of_the_contract(toy_client: Any, expected: Logprobs) -> None:
    found = await toy_client.score(**BODY, cache_salt="formulas")
    ScoringResponse.model_validate_json(json.dumps(found), strict=True)
    for index, (item, row) in enumerate(zip(BODY["items"], found["data"], strict=True)):
        context = [256, *f"is it{item}".encode()]
        assert (row["index"], row["truncated"], row["error"]) == (index, False, None)
        assert "probabilities" not in row
        for text, reported in zip(BODY["continuations"], row["continuations"], strict=True):
            tokens = [*text.encode()]
            assert reported["token_ids"] == tokens
            assert reported["token_logprobs"] == expected(context, tokens)
            assert reported["logprob"] == pytest.approx(math.fsum(reported["token_logprobs"]), rel=1e-12)
        powers = [math.exp(reported["logprob"]) for reported in row["continuations"]]
        weights = [reported["weight"] for reported in row["continuations"]]
        assert weights == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)
        assert row["score"] == weights[0]
        assert row["prompt_tokens"] == 3 * len(context) + sum(map(len, BODY["continuations"]))
    tokens = sum(row["prompt_tokens"] for row in found["data"])
    assert found["labels"] == [] and found["usage"]["prompt_tokens"] == tokens
    assert found["usage"]["completion_tokens"] == 0
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found["usage"]["computed_tokens"] == tokens - cached


async def test_contexts_are_computed_once(toy_client: Any) -> None:
    before = await toy_client.computed()
    await toy_client.score(
        query="q" * 40, items=["abc" * 9, "xyz" * 9], continuations=["one", "two", "three"], cache_salt="once"
    )
    # Begin token and query; per item its text, and per continuation its length: the context's last token again, its
    # own last one never. The first continuation shares its context's run.
    assert await toy_client.computed() - before == 41 + 2 * (26 + 3 + 3 + 5)


async def test_a_greedy_continuation_is_what_generation_says(toy_client: Any) -> None:
    context = "is it a cat"
    drawn = await toy_client.complete(
        prompt=context, max_tokens=6, temperature=0, return_token_ids=True, ignore_eos=True
    )
    greedy = drawn["choices"][0]["token_ids"]
    others = [*greedy[:5], (greedy[5] + 1) % 256]
    [row] = (await toy_client.score(query=[256, *context.encode()], items=[[]], continuations=[greedy, others]))["data"]
    assert [reported["is_greedy"] for reported in row["continuations"]] == [True, False]


async def test_nothing_depends_on_neighbours_or_the_cache(toy_client: Any) -> None:
    texts = [f" item {i}" * (1 + i % 3) for i in range(11)]
    more = [" yes", " not at all", " maybe so"]
    together = (await toy_client.score(query="which", items=texts, continuations=more))["data"]
    for text, row in zip(texts, together, strict=True):
        for salt in ("a", "b", "a"):
            [alone] = (await toy_client.score(query="which", items=[text], continuations=more, cache_salt=salt))["data"]
            assert alone["continuations"] == row["continuations"]
        [only] = (await toy_client.score(query="which", items=[text], continuations=more[1:2]))["data"]
        assert only["continuations"][0]["token_logprobs"] == row["continuations"][1]["token_logprobs"]


@pytest.mark.risk("D4")
async def test_echo_says_the_same_floats(toy_client: Any) -> None:
    found = await toy_client.score(**BODY)
    for item, row in zip(BODY["items"], found["data"], strict=True):
        for text, reported in zip(BODY["continuations"], row["continuations"], strict=True):
            prompt = f"is it{item}{text}"
            echoed = await toy_client.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)
            entries = echoed["choices"][0]["logprobs"]["token_logprobs"]
            assert entries[-1 - len(text) : -1] == reported["token_logprobs"]


@pytest.mark.risk("D4")
async def test_labels_of_one_token_have_the_same_floats(toy_client: Any) -> None:
    body = {"query": "q", "items": ["a", "bc"]}
    labelled = (await toy_client.score(**body, labels=["y", "n"]))["data"]
    reported = (await toy_client.score(**body, continuations=["y", "n"]))["data"]
    for one, other in zip(labelled, reported, strict=True):
        assert one["logprobs"] == [found["logprob"] for found in other["continuations"]]
        assert one["probabilities"] == pytest.approx([found["weight"] for found in other["continuations"]], rel=1e-12)


async def test_lists_an_item_normalisation_and_layouts(toy_client: Any, expected: Logprobs) -> None:
    body = {"query": "q", "items": ["a", "b"], "continuations": [["é", "xyz"], ["longer"]]}
    found = await toy_client.score(**body, normalization="tokens")
    sums = [math.fsum(expected([256, *b"qa"], [*text.encode()])) for text in ("é", "xyz")]
    powers = [math.exp(total / size) for total, size in zip(sums, (2, 3), strict=True)]
    weights = [reported["weight"] for reported in found["data"][0]["continuations"]]
    assert weights == pytest.approx([power / sum(powers) for power in powers], rel=1e-9)
    assert [reported["weight"] for reported in found["data"][1]["continuations"]] == [1.0]
    by_bytes = (await toy_client.score(**body, normalization="bytes"))["data"]  # a token of this model is a byte
    assert [row["continuations"] for row in by_bytes] == [row["continuations"] for row in found["data"]]
    columns = (await toy_client.score(**body, normalization="tokens", layout="columns"))["columns"]
    ScoringResponse.model_validate_json(json.dumps(found | {"data": None, "columns": columns}), strict=True)
    assert columns["continuations"] == [row["continuations"] for row in found["data"]]
    assert columns["score"] == [row["score"] for row in found["data"]] and columns["error"] == {}


async def test_a_poisoned_item_fails_alone(toy_client: Any) -> None:
    clean = (await toy_client.score(query=[1], items=[[2], [3]], continuations=[[5], [6, 7]]))["data"]
    rows = (await toy_client.score(query=[1], items=[[2], [toy_model.NAN], [300], [3]], continuations=[[5], [6, 7]]))[
        "data"
    ]
    codes = [row["error"] and row["error"]["code"] for row in rows]
    assert codes == [None, "nonfinite_logits", "invalid_token_id", None]
    assert [rows[0]["continuations"], rows[3]["continuations"]] == [row["continuations"] for row in clean]
    assert rows[1]["score"] is None and rows[1]["continuations"] is None
    body = {"query": [1], "items": [[toy_model.NAN], [2]], "continuations": [[5]]}
    assert await refusal(toy_client, **body, on_item_error="fail") == (500, "nonfinite_logits", "items[0]")


@pytest.mark.parametrize("seam", ["concat", "joint"])
async def test_an_item_that_is_no_unicode_fails_alone(toy_client: Any, seam: str) -> None:
    given = {"query": "q", "continuations": [" a", " bc"], "seam": seam}
    clean = (await toy_client.score(items=["x", "y"], **given))["data"]
    rows = (await toy_client.score(items=["x", "cut \ud83d", "y"], **given))["data"]
    assert [rows[0]["continuations"], rows[2]["continuations"]] == [row["continuations"] for row in clean]
    assert rows[1]["continuations"] is None and "`items[1]` must be Unicode text" in rows[1]["error"]["message"]


async def test_long_items_are_cut_so_that_every_continuation_fits(toy_client: Any) -> None:
    found = (await toy_client.score(query="q", items=["x" * 300, "y"], continuations=["abcdef", "g"]))["data"]
    assert [(row["truncated"], row["truncated_tokens"]) for row in found] == [(True, 108), (False, 0)]
    [short] = (await toy_client.score(query="q", items=["x" * 192], continuations=["abcdef", "g"]))["data"]
    assert short["continuations"] == found[0]["continuations"]
    assert await refusal(toy_client, items=["x" * 300], truncate="error") == (
        400,
        "context_length_exceeded",
        "items[0]",
    )


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"continuations": []}, 422, "invalid_value", "continuations"),
        ({"continuations": [""]}, 422, "invalid_value", "continuations"),
        ({"continuations": [[]]}, 422, "invalid_value", "continuations"),
        ({"continuations": "a"}, 422, "invalid_value", "continuations"),
        ({"continuations": [1]}, 422, "invalid_value", "continuations"),
        ({"continuations": ["a", [1]]}, 422, "invalid_value", "continuations"),
        ({"continuations": [["a"], ["b"]]}, 422, "invalid_value", "continuations"),
        ({"continuations": [["a"], [[1]], ["b"]]}, 422, "invalid_value", "continuations"),
        ({"continuations": [["a"], [], ["b"]]}, 422, "invalid_value", "continuations"),
        ({"continuations": [[True]]}, 422, "invalid_value", "continuations"),
        ({"continuations": ["a"] * 257}, 422, "invalid_value", "continuations"),
        ({"continuations": [[1] * 1025]}, 422, "invalid_value", "continuations"),
        ({"continuations": ["a" * 1025]}, 422, "invalid_value", "continuations[0]"),
        ({"continuations": [[264]]}, 422, "invalid_token_id", "continuations[0]"),
        ({"continuations": [[-1]]}, 422, "invalid_token_id", "continuations[0]"),
        ({"continuations": [["a"], ["b"], ["c" * 1025]]}, 422, "invalid_value", "continuations[2][0]"),
        ({"continuations": ["a" * 300]}, 400, "context_length_exceeded", "continuations"),
        ({"labels": ["y", "n"]}, 422, "invalid_value", "continuations"),
        ({"label_token_ids": [1]}, 422, "invalid_value", "continuations"),
        ({"apply_softmax": True}, 422, "invalid_value", "apply_softmax"),
        ({"detail": "probabilities"}, 422, "invalid_value", "detail"),
        ({"layout": "packed"}, 422, "invalid_value", "layout"),
        ({"normalization": "chars"}, 422, "invalid_value", "normalization"),
        ({"normalization": "bytes", "continuations": [[1]]}, 422, "invalid_value", "normalization"),
        ({"normalization": "tokens", "continuations": None, "labels": ["y"]}, 422, "invalid_value", "normalization"),
        ({"seam": "joint", "continuations": [[1]]}, 422, "invalid_value", "seam"),
        ({"continuations": None}, 422, "invalid_value", "label_token_ids"),
    ],
)
async def test_every_bad_field_is_named(
    toy_client: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    before = await toy_client.computed()
    assert await refusal(toy_client, **body) == (status, code, param)
    assert await toy_client.computed() == before


async def test_rows_tokens_and_cells_are_counted_first(replica_client: Any) -> None:
    few = await replica_client(limits={"max_rows": 8, "max_answer_cells": 40, "max_request_tokens": 60})
    body = {"query": [1], "items": [[2], [3]]}
    await few.score(**body, continuations=[[5]] * 4)
    assert await refusal(few, **body, continuations=[[5]] * 5) == (413, "request_too_large", "continuations")
    await few.score(**body, continuations=[[5] * 10] * 2)
    assert await refusal(few, **body, continuations=[[5] * 11] * 2) == (413, "request_too_large", "continuations")
    long = {"query": [1] * 57, "items": [[2]]}
    await few.score(**long, continuations=[[5], [6, 7]])
    assert await refusal(few, **long, continuations=[[5], [6, 7, 8]]) == (413, "request_too_large", "items")


# The built-in model, whose tokens join over seams.


def by_the_library(module: Any, ids: list[int], count: int) -> list[float]:
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0].double()
    rows = torch.log_softmax(logits, -1)
    return [float(rows[at - 1, ids[at]]) for at in range(len(ids) - count, len(ids))]


@pytest.mark.parametrize("seam", ["concat", "joint"])
async def test_the_built_in_model_says_what_the_library_says(
    builtin: Any, library: Any, tokenizer: Any, seam: str
) -> None:
    query, items = "Query: a red chair\nDocument:", [" A sturdy chair in re", " A blue lamp"]
    more = ["d, made in Lisbon.", " for reading", "s"]
    body = {"query": query, "items": items, "continuations": more, "seam": seam}
    for _ in range(2):  # computed, then with the query cached
        found = (await builtin.score(**body))["data"]
        for item, row in zip(items, found, strict=True):
            for text, reported in zip(more, row["continuations"], strict=True):
                if seam == "joint":
                    [ids] = tokenizer.encode_batch([query + item + text], add_special_tokens=True)
                else:
                    parts = tokenizer.encode_batch([query, item, text], add_special_tokens=False)
                    ids = [token for part in parts for token in part]
                count = len(reported["token_ids"])
                assert reported["token_ids"] == ids[-count:]
                expected = by_the_library(library, ids, count)
                assert np.abs(np.array(reported["token_logprobs"]) - expected).max() < TOLERANCE


async def test_the_joint_seam_differs_where_tokens_join(builtin: Any) -> None:
    body = {"query": "Document:", "items": [" A sturdy chair in re"], "continuations": ["d, made"]}
    [concat], [joint] = [(await builtin.score(**body, seam=seam))["data"] for seam in ("concat", "joint")]
    assert concat["continuations"][0]["token_ids"] != joint["continuations"][0]["token_ids"]


async def test_a_label_of_joined_text_is_the_token_of_a_continuation_or_refused(builtin: Any) -> None:
    body = {"query": "Query: red chair\nDocument:", "seam": "joint"}
    sound = body | {"items": [" A red chair.\nRelevant:", " A lamp.\nRelevant:"]}
    labelled = await builtin.score(**sound, labels=[" yes", " no"])
    continued = await builtin.score(**sound, continuations=[" yes", " no"])
    for label, found in zip(labelled["labels"], continued["data"][0]["continuations"], strict=True):
        assert found["token_ids"] == [label["token_id"]]
    merged = body | {"items": [" A red chair.\nRelevant: "], "labels": ["yes", "no"]}
    response = await builtin.post("/generative_scoring", merged)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "label_not_single_token")


async def test_a_template_is_followed_by_continuations_as_data(builtin: Any) -> None:
    body = {"template": "builtin", "query": "red chair", "items": ["A red chair.", "A lamp."]}
    labelled = (await builtin.score(**body))["data"]
    found = await builtin.score(**body, continuations=[" yes", " no", "<|endoftext|>"])
    assert found["template"] == "builtin" and found["prompt_format_version"]
    for one, other in zip(labelled, found["data"], strict=True):
        reported = other["continuations"]
        assert [len(x["token_ids"]) for x in reported[:2]] == [1, 1] and len(reported[2]["token_ids"]) > 1
        assert np.abs(np.array(one["logprobs"]) - [x["logprob"] for x in reported[:2]]).max() < 1e-5
