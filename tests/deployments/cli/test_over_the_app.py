"""`assay score` against the real application over the toy model, in process and over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from deployments.cli.main import main
from tests.support import toy_model

LABELS = ["--label-token-ids", "65,66"]
ASK = {"prefix": "{{ query }}|", "item": "{{ item }}", "suffix": "?", "labels": ["y", "n"]}


@pytest.fixture
async def client(replica_client: Callable[..., Any]) -> Any:
    return await replica_client(templates={"ask": ASK}, rerank={"template": "ask"})


@pytest.fixture
async def url(client: Any) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(client.app, port=0, ws="none", lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


@pytest.fixture
def score(url: str, tmp_path: Path) -> Callable[..., Any]:
    """Runs the command over records: its status and its lines."""

    async def run(records: list[dict[str, Any]], *options: str, name: str = "out") -> tuple[int, list[dict[str, Any]]]:
        source, output = tmp_path / "in.jsonl", tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        fixed = ["score", str(source), "-o", str(output), "--url", url, "--no-progress"]
        status = await asyncio.to_thread(main, [*fixed, *options])
        return status, [json.loads(line) for line in output.read_text().splitlines()]

    return run


async def test_a_file_has_the_scores_of_one_request(score: Any) -> None:
    rng = np.random.default_rng(5)
    items = [rng.integers(0, 250, rng.integers(1, 40)).tolist() for _ in range(300)]
    items[17] = [toy_model.NAN]
    items[201] = [toy_model.VOCAB_SIZE]
    query = rng.integers(0, 250, 50).tolist()
    records = [{"item": item, "query": query} for item in items]
    status, rows = await score(records, *LABELS, "--batch-items", "32", "--concurrency", "3")
    assert status == 1
    assert [row["index"] for row in rows] == list(range(300))
    assert {row["index"]: row["error"]["code"] for row in rows if row["error"]} == {
        17: "nonfinite_logits",
        201: "invalid_token_id",
    }
    options = ["--batch-items", "300", "--concurrency", "1"]
    status, other = await score(records, *LABELS, *options, name="again")
    assert status == 1
    assert [row["logprobs"] for row in rows] == [row["logprobs"] for row in other]
    assert rows[0]["logprobs"] is not None


async def test_wrong_labels_are_refused_with_the_services_words(score: Any, capsys: Any) -> None:
    status, _ = await score([{"item": "a", "query": "q"}], "--labels", "yes,no")
    assert status == 2
    assert "422 label_not_single_token" in capsys.readouterr().err


async def test_a_file_of_documents_is_ranked_as_one_request(score: Any, client: Any) -> None:
    texts = [f"item {number}" * (number % 5) for number in range(41)]
    status, rows = await score(
        [{"item": text, "query": "q"} for text in texts], "--route", "rerank", "--batch-items", "7"
    )
    answer = (await client.post("/rerank", {"query": "q", "documents": texts})).json()
    assert status == 0
    assert {row["index"]: row["score"] for row in rows} == {
        result["index"]: result["relevance_score"] for result in answer["results"]
    }


async def test_a_document_that_fails_has_an_error_and_the_others_scores(score: Any) -> None:
    texts = ["a" if number != 5 else "b" * 4096 for number in range(9)]
    options = ["--route", "rerank", "--set", "truncate=false"]
    status, rows = await score([{"item": text, "query": "q"} for text in texts], *options)
    assert status == 1
    assert {row["index"]: row["error"]["code"] for row in rows if row["error"]} == {5: "context_length_exceeded"}


@pytest.mark.parametrize("route", [["rerank"], ["generative_scoring", *LABELS]])
async def test_a_text_that_is_no_unicode_has_an_error_and_the_others_scores(score: Any, route: list[str]) -> None:
    records = [{"item": "a" if number != 5 else "cut \ud83d", "query": "q"} for number in range(9)]
    status, rows = await score(records, "--route", *route)
    assert status == 1 and {row["index"]: row["error"]["code"] for row in rows if row["error"]} == {5: "invalid_value"}
    assert len({row["score"] for row in rows if not row["error"]}) == 1


async def test_the_compact_route_says_what_one_request_says(score: Any, client: Any) -> None:
    items = [[number, 7] for number in range(20)]
    options = ["--route", "score", *LABELS, "--batch-items", "6"]
    status, rows = await score([{"item": item, "query": [1, 2]} for item in items], *options)
    body = {"query": [1, 2], "items": items, "label_token_ids": [65, 66]}
    answer = (await client.post("/v1/score", body)).json()
    assert status == 0
    assert [row["scores"] for row in rows] == answer["scores"]


@pytest.mark.parametrize("template", [[], ["--template", "ask"]])
async def test_continuations_say_what_one_request_says(score: Any, client: Any, template: list[str]) -> None:
    choices = [[f"{number}", "no", "yes" * (1 + number % 3)] for number in range(20)]
    records = [{"item": f"item {number}", "query": "q", "own": choices[number]} for number in range(20)]
    status, rows = await score(records, "--continuations-field", "own", "--batch-items", "6", *template)
    body: dict[str, Any] = {"query": "q", "items": [record["item"] for record in records], "continuations": choices}
    answer = await client.score(**body, **({"template": "ask"} if template else {}))
    assert status == 0
    for row, wanted in zip(rows, answer["data"], strict=True):
        assert row["continuations"] == wanted["continuations"] and row["score"] == wanted["score"]
