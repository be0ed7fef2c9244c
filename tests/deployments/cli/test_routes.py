"""Tests what `assay score` asks of each route, and the lines that it makes of the answers."""

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from deployments.cli.main import main

Score = Callable[..., int]


@pytest.fixture
def score(service: Any, tmp_path: Path) -> Score:
    """Runs the command over records; `output` is out.jsonl."""

    def run(records: list[dict[str, Any]], *options: str) -> int:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
        fixed = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", service.url, "--no-progress"]
        return main([*fixed, *options])

    return run


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]


def refusal(code: str, param: str) -> tuple[int, Any, dict[str, str]]:
    return 422, {"error": {"code": code, "message": f"About {param}.", "param": param}}, {}


def test_documents_have_their_relevance_in_the_order_of_the_input(
    service: Any, score: Score, tmp_path: Path, score_of: Any, capsys: Any
) -> None:
    documents: list[Any] = ["chair", {"text": "lamp"}, "", "table", "bed"]
    records = [{"query": f"q{i // 3}", "item": document} for i, document in enumerate(documents)]
    assert score(records, "--route", "rerank", "--set", 'rank_fields=["text"]', "--json") == 0
    assert {header["path"] for header in service.headers} == {"/rerank"}
    assert sorted(service.bodies, key=lambda body: body["query"]) == [
        {"query": "q0", "documents": documents[:3], "rank_fields": ["text"], "return_documents": False},
        {"query": "q1", "documents": documents[3:], "rank_fields": ["text"], "return_documents": False},
    ]
    assert rows(tmp_path) == [
        {"index": i, "score": score_of(f"q{i // 3}", document), "truncated": False, "error": None}
        for i, document in enumerate(documents)
    ]
    summary = json.loads(capsys.readouterr().out)
    assert (summary["prompt_tokens"], summary["cached_tokens"]) == (50, 20)


@pytest.mark.parametrize(
    "results",
    [
        [{"index": 0, "relevance_score": 0.5}],
        [{"index": 0, "relevance_score": 0.5}] * 2,
        [{"index": 0, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.5}],
        [{"index": 0, "relevance_score": 0.5}, {"index": 1}],
        [{"index": 0, "relevance_score": 0.5}, None],
    ],
)
def test_an_answer_that_leaves_a_document_out_ends_the_run(
    service: Any, score: Score, tmp_path: Path, results: list[Any]
) -> None:
    service.script = lambda body: (200, {"results": results}, {})
    assert score([{"query": "q", "item": "a"}, {"query": "q", "item": "b"}], "--route", "rerank") == 2
    assert rows(tmp_path) == []


def test_a_document_that_fails_is_found_by_halving(service: Any, score: Score, tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> Any:
        return refusal("invalid_value", "documents[0]") if "item 5" in body["documents"] else None

    service.script = script
    records = [{"query": "q", "item": f"item {i}"} for i in range(8)]
    assert score(records, "--route", "rerank", "--id-field", "query") == 1
    found = rows(tmp_path)
    assert [row["index"] for row in found if row["error"]] == [5]
    error = {"code": "invalid_value", "message": "About documents[0]."}
    assert found[5] == {"index": 5, "id": "q", "score": None, "truncated": False, "error": error}


def test_a_query_of_token_ids_cannot_be_ranked_for(score: Score, service: Any, tmp_path: Path) -> None:
    records = [{"query": [1], "item": "a"}, {"query": "q", "item": [1]}, {"query": "q", "item": "a"}]
    assert score(records, "--route", "rerank") == 1
    first, second = (row["error"]["message"] for row in rows(tmp_path)[:2])
    assert first == "`query` must be text. Given: another value."
    assert second == "`item` must be text or an object. Given: another value."
    assert [body["documents"] for body in service.bodies] == [["a"]]


def test_a_server_that_ranks_nothing_ends_the_run(score: Score, service: Any, capsys: Any) -> None:
    error = {"code": "not_found", "message": "This server ranks no documents.", "param": None}
    service.script = lambda body: (404, {"error": error}, {})
    assert score([{"query": "q", "item": "a"}], "--route", "rerank") == 2
    assert "ranks no documents" in capsys.readouterr().err


def test_the_compact_route_has_a_number_for_each_label(
    service: Any, score: Score, tmp_path: Path, score_of: Any
) -> None:
    records = [{"query": "q", "item": "a"}, {"query": "q", "item": "bb"}, {"query": "q", "item": [1]}]
    assert score(records, "--route", "score", "--label-token-ids", "7,9", "--set", "apply_softmax=true") == 1
    [body] = service.bodies
    assert body == {"query": "q", "items": ["a", "bb"], "label_token_ids": [7, 9], "apply_softmax": True}
    assert {header["path"] for header in service.headers} == {"/v1/score"}
    value = score_of("q", "bb")
    *_, second, third = rows(tmp_path)
    assert second == {"index": 1, "score": value, "scores": [value, 1 - value], "truncated": False, "error": None}
    assert third["error"]["code"] == "invalid_record" and third["scores"] is None


def test_every_record_may_have_continuations_of_its_own(service: Any, score: Score, tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> Any:
        row = {"index": 0, "object": "score", "score": 0.5, "error": None}
        return 200, {"data": [{**row, "continuations": own} for own in body["continuations"]]}, {}

    service.script = script
    texts = [["x"], ["y", "z"], ["", "w"], "x", [], [[1], [2, 3]], [[1], "x"]]
    records: list[dict[str, Any]] = [{"query": "q", "item": "a", "choices": own} for own in texts]
    assert score(records, "--continuations-field", "choices", "--set", "normalization=bytes") == 1
    fixed = {"query": "q", "normalization": "bytes"}
    assert sorted(service.bodies, key=lambda body: -len(body["items"])) == [
        {**fixed, "items": ["a", "a"], "continuations": [["x"], ["y", "z"]]},
        {**fixed, "items": ["a"], "continuations": [[[1], [2, 3]]]},
    ]
    found = rows(tmp_path)
    assert found[1] == {"index": 1, "score": 0.5, "continuations": ["y", "z"], "error": None}
    assert [row["index"] for row in found if row["error"]] == [2, 3, 4, 6]
    assert found[2]["continuations"] is None and "probabilities" not in found[2]
    assert "`choices` must be a list of texts" in found[2]["error"]["message"]


@pytest.mark.parametrize("own", [True, False])
def test_a_continuation_at_fault_meets_its_item_or_every_item(
    service: Any, score: Score, tmp_path: Path, own: bool
) -> None:
    """One that all items share would be refused for each of them."""
    service.script = lambda body: refusal("invalid_value", "continuations[0]")
    options = ["--continuations-field", "choices"] if own else ["--set", 'continuations=["x"]']
    assert score([{"query": "q", "item": "a", "choices": ["x"]}], *options) == (1 if own else 2)
    assert len(rows(tmp_path)) == own


@pytest.mark.parametrize("own", [True, False])
def test_a_query_at_fault_meets_its_items_or_every_item(service: Any, score: Score, tmp_path: Path, own: bool) -> None:
    service.script = lambda body: refusal("invalid_value", "query")
    options = [] if own else ["--query", "q"]
    assert score([{"query": "q", "item": "a"}], "--labels", "a", *options) == (1 if own else 2)
    assert len(rows(tmp_path)) == own


def test_a_document_with_a_date_is_asked_about(service: Any, tmp_path: Path) -> None:
    """Parquet has types that JSON does not have."""
    document = {"text": "chair", "made": datetime.date(2026, 1, 31), "price": decimal.Decimal("9.50")}
    source = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"query": ["q"], "item": [document]}), source)
    command = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", service.url, "--route", "rerank"]
    assert main(command) == 0
    assert service.bodies[0]["documents"] == [{"text": "chair", "made": "2026-01-31", "price": "9.50"}]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--route", "rerank", "--labels", "a"], "`--labels` must be absent: /rerank does not take it"),
        (["--route", "rerank", "--template", "t"], "`--template` must be absent"),
        (["--route", "score"], "`--label-token-ids` must be given"),
        (["--route", "score", "--label-token-ids", "1", "--labels", "a"], "`--labels` must be absent"),
        (["--route", "score", "--label-token-ids", "1", "--continuations-field", "c"], "`--continuations-field` must"),
        (["--labels", "a", "--continuations-field", "c"], "Given: labels and continuations_field"),
        ([], "must be given, one of them. Given: none"),
    ],
)
def test_options_that_a_route_does_not_take_are_refused(
    score: Score, capsys: Any, options: list[str], words: str
) -> None:
    assert score([{"query": "q", "item": "a"}], *options) == 2
    assert words in capsys.readouterr().err


def test_another_route_is_another_output(score: Score, capsys: Any) -> None:
    records = [{"query": "q", "item": "a"}]
    assert score(records, "--route", "rerank") == 0
    assert score(records, "--labels", "a") == 2
    assert "another `route`" in capsys.readouterr().err
