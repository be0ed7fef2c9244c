"""`assay score` against the real application over the toy model, in process and over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from deployments.cli import main
from deployments.config import AppArgs
from deployments.ingress import build_api
from deployments.messages import ModelCard, ScoreReply, ScoreTask
from deployments.replica import ReplicaServer
from deployments.settings import ApiSettings
from engine.builtin import toy
from engine.tokenizer import ByteTokenizer


class OneReplica:
    """The scoring half of a `Backend`."""

    def __init__(self, server: ReplicaServer) -> None:
        self._server = server

    async def card(self) -> ModelCard:
        return await self._server.card()

    async def score(self, task: ScoreTask) -> ScoreReply:
        reply = await self._server.score(task)
        assert isinstance(reply, ScoreReply), reply
        return reply


@pytest.fixture
async def url(toy_args: dict[str, Any]) -> AsyncIterator[str]:
    replica = ReplicaServer(AppArgs.model_validate(toy_args), "r1")
    await replica.start(toy.ToyModel(num_slots=8192))
    backend: Any = OneReplica(replica)
    app = build_api(backend, ByteTokenizer(), ApiSettings())
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving
    replica.stop()


async def test_a_file_has_the_scores_of_one_request(url: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    items = [rng.integers(0, 250, rng.integers(1, 40)).tolist() for _ in range(300)]
    items[17] = [toy.NAN]
    items[201] = [toy.VOCAB_SIZE]
    query = rng.integers(0, 250, 50).tolist()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"item": item, "query": query}) + "\n" for item in items))
    command = ["score", str(source), "-o", str(output), "--url", url, "--label-token-ids", "65,66", "--no-progress"]
    assert await asyncio.to_thread(main, [*command, "--batch-items", "32", "--concurrency", "3"]) == 1
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(300))
    assert {row["index"]: row["error"]["code"] for row in rows if row["error"]} == {
        17: "nonfinite_logits",
        201: "invalid_token_id",
    }
    again = tmp_path / "again.jsonl"
    command[3] = str(again)
    assert await asyncio.to_thread(main, [*command, "--batch-items", "300", "--concurrency", "1"]) == 1
    other = [json.loads(line) for line in again.read_text().splitlines()]
    assert [row["logprobs"] for row in rows] == [row["logprobs"] for row in other]
    assert rows[0]["logprobs"] is not None


async def test_wrong_labels_are_refused_with_the_services_words(url: str, tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"item": "a", "query": "q"}\n')
    command = ["score", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", url, "--labels", "yes,no"]
    assert await asyncio.to_thread(main, command) == 2
    assert "422 label_not_single_token" in capsys.readouterr().err
