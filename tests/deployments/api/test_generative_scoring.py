"""POST /generative_scoring over a scripted backend whose log-probabilities are a pure function of the row."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from deployments.api.schemas.generative_scoring import ScoringResponse
from deployments.config.settings import ApiSettings
from deployments.limits import Limits
from scoring.errors import ScoringLimits
from scoring.prompts.templates import PRESETS, TemplateSpec

ASK = TemplateSpec(
    prefix="<eos>{{ instruction }}|{{ query }}|", suffix="?", labels=("y", "n"), defaults={"instruction": "match"}
)
ALONE = TemplateSpec(prefix="{{ system }}:", suffix="?")
LATE = TemplateSpec(item="{{ item }}|", suffix="{{ query }}", labels=("y", "n"))
QUERY = {"query": "is it?", "items": [" yes it is", " no", ""], "label_token_ids": [5, 7]}


@pytest.fixture
def settings() -> ApiSettings:
    limits = Limits(scoring=ScoringLimits(max_items=5, max_labels=4, max_instruction_chars=9))
    return ApiSettings(limits=limits, templates={"ask": ASK, "alone": ALONE, "late": LATE})


def expected(label_logprob: Any, row: bytes, labels: list[int]) -> list[float]:
    return [float(label_logprob(row, label)) for label in labels]


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/generative_scoring", {**QUERY, **body})
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


@pytest.mark.risk("Q7", figure="equal")
async def test_rows_follow_the_formulas_of_the_contract(client: Any, label_logprob: Any) -> None:
    found = await client.score(**QUERY)
    ScoringResponse.model_validate_json(json.dumps(found), strict=True)
    for index, (item, row) in enumerate(zip(QUERY["items"], found["data"], strict=True)):
        ids = bytes(x % 251 for x in [256, *f"is it?{item}".encode()])
        values = expected(label_logprob, ids, [5, 7])
        weights = [math.exp(value) for value in values]
        assert row["index"] == index and row["logprobs"] == values
        assert row["probabilities"] == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
        assert row["label_mass"] == pytest.approx(min(1.0, sum(weights)), rel=1e-12)
        assert row["score"] == row["probabilities"][0]
        assert row["prompt_tokens"] == len(ids)
        assert (row["truncated"], row["truncated_tokens"], row["error"]) == (False, 0, None)
    tokens = sum(row["prompt_tokens"] for row in found["data"])
    cached = sum(row["cached_tokens"] for row in found["data"])
    assert found["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 0,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "computed_tokens": tokens - cached,
    }
    assert found["labels"] == [{"token_id": 5, "token": "\x05"}, {"token_id": 7, "token": "\x07"}]
    assert found["id"].startswith("generative-scoring-") and found["template"] is None


async def test_one_task_a_request_with_the_shared_prefix(client: Any, backend: Any) -> None:
    await client.score(query=[1, 2], items=[[3, 4], [3, 5]], label_token_ids=[0], priority=4, cache_salt="s")
    [task] = backend.score_tasks
    assert task.prefix.tolist() == [1, 2, 3] and task.ids.tolist() == [4, 5] and task.starts.tolist() == [0, 1, 2]
    assert (task.priority, task.cache_salt, task.full) == (4, "s", True) and 0 < task.timeout_s <= 60


async def test_without_softmax_probabilities_are_the_models_own(client: Any) -> None:
    found = await client.score(**QUERY, apply_softmax=False)
    for row in found["data"]:
        assert row["probabilities"] == pytest.approx([math.exp(value) for value in row["logprobs"]], rel=1e-12)


async def test_detail_probabilities_computes_only_the_labels(client: Any, backend: Any) -> None:
    full = await client.score(**QUERY)
    found = await client.score(**QUERY, detail="probabilities")
    assert backend.score_tasks[1].full is False
    for row, other in zip(found["data"], full["data"], strict=True):
        assert row["logprobs"] is None and row["label_mass"] is None
        assert row["probabilities"] == pytest.approx(other["probabilities"], rel=1e-6)
    assert await refusal(client, detail="probabilities", apply_softmax=False) == (422, "invalid_value", "detail")


async def test_layouts_hold_the_same_numbers(client: Any, backend: Any) -> None:
    backend.nonfinite = frozenset({1})
    rows = (await client.score(**QUERY))["data"]
    columns = (await client.score(**QUERY, layout="columns"))["columns"]
    packed = await client.score(**QUERY, layout="packed")
    ScoringResponse.model_validate_json(json.dumps(packed), strict=True)
    for name in ("score", "probabilities", "logprobs", "label_mass", "prompt_tokens", "cached_tokens"):
        values = [row[name] for row in rows]
        assert columns[name] == values
        kind = "<i4" if name.endswith("tokens") else "<f4"
        found = np.frombuffer(base64.b64decode(packed["columns"][name]), kind)
        width = 2 if name in ("probabilities", "logprobs") else 1
        plain = (
            np.array([[math.nan] * width if value is None else value for value in values], kind).ravel()
            if (width == 2)
            else np.array([math.nan if value is None else value for value in values], kind)
        )
        np.testing.assert_array_equal(found, plain)
    assert list(columns["error"]) == ["1"] and columns["error"] == packed["columns"]["error"]


async def test_a_poisoned_item_fails_alone(client: Any, backend: Any) -> None:
    clean = (await client.score(**QUERY))["data"]
    backend.nonfinite = frozenset({1})
    found = await client.post("/generative_scoring", QUERY)
    rows = found.json()["data"]
    assert rows[0] == clean[0] and rows[2] == clean[2] and "NaN" not in found.text
    assert rows[1]["score"] is None and rows[1]["error"]["code"] == "nonfinite_logits"
    assert await refusal(client, on_item_error="fail") == (500, "nonfinite_logits", "items[1]")


@pytest.mark.risk("Q6", figure="every good item answered")
async def test_bad_items_are_reported_and_their_neighbours_scored(client: Any) -> None:
    body = {"query": [1], "items": [[2], [300], [], [-1]], "label_token_ids": [5]}
    clean = (await client.score(query=[1], items=[[2], []], label_token_ids=[5]))["data"]
    rows = (await client.score(**body))["data"]
    assert [row["error"] and row["error"]["code"] for row in rows] == [
        None, "invalid_token_id", None, "invalid_token_id"
    ]  # fmt: skip
    assert [rows[0]["score"], rows[2]["score"]] == [row["score"] for row in clean]
    assert await refusal(client, **body, on_item_error="fail") == (422, "invalid_token_id", "items[1]")
    assert await refusal(client, query=[1], items=[[300], [-1]]) == (422, "invalid_token_id", "items[0]")


@pytest.mark.risk("Q6")
@pytest.mark.parametrize("more", [{}, {"seam": "joint"}, {"item_first": True}])
async def test_an_item_that_is_no_unicode_fails_alone(client: Any, more: dict[str, Any]) -> None:
    given = QUERY | more
    clean = (await client.score(**given))["data"]
    items = [*given["items"][:1], "cut \ud83d", *given["items"][1:]]
    found = await client.post("/generative_scoring", given | {"items": items})
    assert found.status_code == 200 and found.headers["x-assay-failed-items"] == "1"
    rows = found.json()["data"]
    assert rows[1]["score"] is None and rows[1]["error"] == {
        "code": "invalid_value", "message": "`items[1]` must be Unicode text. Given: half of a surrogate pair."
    }  # fmt: skip
    assert [row | {"index": 0} for row in [rows[0], *rows[2:]]] == [row | {"index": 0} for row in clean]
    whole = given | {"items": items, "on_item_error": "fail"}
    assert await refusal(client, **whole) == (422, "invalid_value", "items[1]")


async def test_a_text_with_tokens_that_the_model_lacks_fails_its_item(client: Any, backend: Any) -> None:
    backend.vocab_size = ord("z")
    rows = (await client.score(query="q", items=["a", "az"], label_token_ids=[5], add_special_tokens=False))["data"]
    assert rows[0]["error"] is None and rows[1]["error"]["code"] == "invalid_token_id"
    assert "`items[1]` must be text without the tokens that the model lacks" in rows[1]["error"]["message"]


async def test_long_items_are_cut_and_say_so_or_are_refused(client: Any, backend: Any) -> None:
    backend.max_model_len = 20
    found = (await client.score(**QUERY | {"items": ["x" * 30, "y"]}))["data"]
    assert [(row["truncated"], row["truncated_tokens"], row["prompt_tokens"]) for row in found] == [
        (True, 17, 20), (False, 0, 8)
    ]  # fmt: skip
    short = (await client.score(**QUERY | {"items": ["x" * 13]}))["data"]
    assert short[0]["score"] == found[0]["score"]
    rows = (await client.score(**QUERY | {"items": ["x" * 30, "y"], "truncate": "error"}))["data"]
    assert [row["error"] and row["error"]["code"] for row in rows] == ["context_length_exceeded", None]
    assert await refusal(client, items=["x" * 30], truncate="error") == (400, "context_length_exceeded", "items[0]")
    assert await refusal(client, query="q" * 30) == (400, "context_length_exceeded", "query")


async def test_label_strings_are_one_token_or_refused(client: Any) -> None:
    found = await client.score(query="q", items=["a"], labels=["y", "n"])
    assert found["labels"] == [{"token_id": 121, "token": "y"}, {"token_id": 110, "token": "n"}]
    assert await refusal(client, label_token_ids=None, labels=["yes"]) == (422, "label_not_single_token", "labels[0]")
    assert await refusal(client, label_token_ids=None, labels=["y", "y"]) == (422, "duplicate_label", "labels[1]")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"label_token_ids": None}, 422, "invalid_value", "label_token_ids"),
        ({"labels": ["a"]}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": [1, 1]}, 422, "duplicate_label", "label_token_ids[1]"),
        ({"label_token_ids": [-1]}, 422, "invalid_token_id", "label_token_ids"),
        ({"label_token_ids": [300]}, 422, "invalid_token_id", "label_token_ids"),
        ({"label_token_ids": [True]}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": list(range(5))}, 422, "invalid_value", "label_token_ids"),
        ({"label_token_ids": []}, 422, "invalid_value", "label_token_ids"),
        ({"items": []}, 422, "invalid_value", "items"),
        ({"items": ["a"] * 6}, 422, "invalid_value", "items"),
        ({"items": "a"}, 422, "invalid_value", "items"),
        ({"items": ["a", [1]]}, 422, "invalid_value", "items"),
        ({"items": [[1]]}, 422, "invalid_value", "items"),
        ({"query": [1.0]}, 422, "invalid_value", "query"),
        ({"query": None}, 422, "invalid_value", "query"),
        ({"query": [300], "items": [[1]]}, 422, "invalid_token_id", "query"),
        ({"query": [1], "items": [[1]], "seam": "joint"}, 422, "invalid_value", "seam"),
        ({"max_item_tokens": 0}, 422, "invalid_value", "max_item_tokens"),
        ({"max_query_tokens": -1}, 422, "invalid_value", "max_query_tokens"),
        ({"seam": "other"}, 422, "invalid_value", "seam"),
        ({"layout": 1}, 422, "invalid_value", "layout"),
        ({"priority": 1001}, 422, "invalid_value", "priority"),
        ({"cache_salt": ""}, 422, "invalid_value", "cache_salt"),
        ({"cache_salt": "s" * 257}, 422, "invalid_value", "cache_salt"),
        ({"model": "m"}, 404, "model_not_found", "model"),
        ({"continuations": ["a"]}, 422, "invalid_value", "continuations"),
        ({"template": "other"}, 422, "invalid_value", "template"),
        ({"instruction": "i"}, 422, "invalid_value", "instruction"),
        ({"system": ""}, 422, "invalid_value", "system"),
        ({"template": "ask", "system": "s"}, 422, "invalid_value", "system"),
        ({"template": "ask", "instruction": "i" * 10}, 422, "invalid_value", "instruction"),
        ({"template": "ask", "query": None}, 422, "invalid_value", "query"),
        ({"template": "ask", "query": [1], "items": [[1]]}, 422, "invalid_value", "query"),
        ({"template": "ask", "items": [[1]]}, 422, "invalid_value", "items"),
        ({"template": "ask", "item_first": True}, 422, "invalid_value", "item_first"),
        ({"template": "ask", "add_special_tokens": True}, 422, "invalid_value", "add_special_tokens"),
        ({"template": "ask", "seam": "concat"}, 422, "invalid_value", "seam"),
        ({"template": "ask", "labels": ["y"]}, 422, "invalid_value", "label_token_ids"),
        ({"template": "ask", "label_token_ids": None, "labels": ["yes"]}, 422, "label_not_single_token", "labels[0]"),
        ({"template": "alone", "query": None}, 422, "invalid_value", "system"),
        ({"template": "alone", "system": "s"}, 422, "invalid_value", "query"),
        (
            {"template": "alone", "system": "s", "query": None, "label_token_ids": None},
            422,
            "invalid_value",
            "label_token_ids",
        ),
        ({"template": ""}, 422, "invalid_value", "template"),
        ({"template": "t" * 257}, 422, "invalid_value", "template"),
        ({"template": {"prefix": "x"}}, 422, "invalid_value", "template"),
        ({"normalization": "tokens"}, 422, "invalid_value", "normalization"),
    ],
)
async def test_every_bad_field_is_named(
    client: Any, backend: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    assert await refusal(client, **body) == (status, code, param)
    assert not backend.score_tasks


async def test_timings_are_in_the_headers(client: Any) -> None:
    found = await client.post("/generative_scoring", QUERY)
    assert (found.headers["x-assay-queue-ms"], found.headers["x-assay-compute-ms"]) == ("1.000", "2.000")


def row_of(task: Any, index: int) -> list[int]:
    found: list[int] = [*task.prefix.tolist(), *task.ids[task.starts[index] : task.starts[index + 1]].tolist()]
    return found


async def test_a_template_writes_the_row_and_brings_its_labels(client: Any, backend: Any, label_logprob: Any) -> None:
    found = await client.score(query="q", items=["one", "<eos>"], template="ask")
    ScoringResponse.model_validate_json(json.dumps(found), strict=True)
    [task] = backend.score_tasks
    assert row_of(task, 0) == [257, *b"match|q|one?"] and row_of(task, 1) == [257, *b"match|q|<eos>?"]
    assert [label["token"] for label in found["labels"]] == ["y", "n"]
    assert found["template"] == "ask" and found["prompt_format_version"] == f"ask@{ASK.version}"
    ids = bytes(x % 251 for x in row_of(task, 0))
    assert found["data"][0]["logprobs"] == [label_logprob(ids, ord("y")), label_logprob(ids, ord("n"))]
    other = await client.score(query="q", items=["one"], template="ask", instruction="find", seam="joint")
    assert row_of(backend.score_tasks[1], 0) == [257, *b"find|q|one?"]
    assert other["prompt_format_version"] == found["prompt_format_version"]


async def test_labels_of_a_request_replace_the_templates(client: Any) -> None:
    found = await client.score(query="q", items=["a"], template="ask", labels=["a", "b", "c"])
    assert [label["token"] for label in found["labels"]] == ["a", "b", "c"]
    found = await client.score(query="q", items=["a"], template="ask", label_token_ids=[257])
    assert [label["token_id"] for label in found["labels"]] == [257]


async def test_a_template_without_a_query_needs_none(client: Any, backend: Any) -> None:
    await client.score(items=["a"], template="alone", system="s", labels=["y"])
    assert row_of(backend.score_tasks[0], 0) == list(b"s:a?")


async def test_a_query_after_the_item_is_kept_whole(client: Any, backend: Any) -> None:
    backend.max_model_len = 10
    found = await client.score(query="is it?", items=["x" * 30], template="late")
    assert row_of(backend.score_tasks[0], 0) == list(b"xxx|is it?")
    assert found["data"][0]["truncated_tokens"] == 27


async def test_plain_is_the_query_and_the_item(client: Any, backend: Any) -> None:
    found = await client.score(query="<bos>q", items=["i"], template="plain", labels=["y"])
    assert row_of(backend.score_tasks[0], 0) == list(b"<bos>qi")
    assert found["prompt_format_version"] == f"plain@{PRESETS['plain'].version}"


async def test_templates_are_listed_with_their_versions(client: Any) -> None:
    [model] = (await client.get("/v1/models")).json()["data"]
    assert model["assay"]["templates"] == ["alone", "ask", "late", "plain"]  # not what the tokenizer cannot serve
    versions = (await client.get("/version")).json()["templates"]
    assert versions["ask"] == f"ask@{ASK.version}" and set(versions) == {"alone", "ask", "late", "plain"}


async def test_labels_behind_a_long_end_are_bounded(client_of: Any, backend: Any) -> None:
    limits = Limits(scoring=ScoringLimits(max_joined_chars=400))
    client = client_of(ApiSettings(limits=limits))
    body = {"query": "q" * 99, "items": ["a"], "item_first": True}
    statuses = []
    for labels in (["y", "n"], ["y", "n", "m", "o"]):
        found = await client.post("/generative_scoring", body | {"labels": labels})
        statuses.append((found.status_code, found.json().get("error", {}).get("param")))
    assert statuses == [(200, None), (413, "labels")]
