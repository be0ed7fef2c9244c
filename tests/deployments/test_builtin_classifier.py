"""`configs/cpu-classifier.yaml`: the built-in cross-encoder answers /rerank, /predict, /score and /classify."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.builtin_model.train_cross_encoder import held_out_pairs

CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "cpu-classifier.yaml"
PAIRS = 60


@pytest.fixture
async def client(replica_client: Callable[..., Awaitable[Any]]) -> Any:
    args = yaml.safe_load(CONFIG.read_text())["applications"][0]["args"]
    return await replica_client(**args)


async def answered(client: Any, path: str, **body: Any) -> Any:
    found = await client.http.post(path, json=body)
    assert found.status_code == 200, found.text
    return found.json()


async def test_held_out_pairs_are_told_apart_on_every_route(client: Any) -> None:
    """An irrelevant document is wrong in exactly one word."""
    pairs = held_out_pairs(PAIRS)
    relevant = [right for *_, right in pairs]
    assert 10 < sum(relevant) < PAIRS - 10
    texts = [[query, document] for query, document, _ in pairs]
    predicted = await answered(client, "/predict", inputs=texts)
    assert [one["score"] > 0.5 for [one] in predicted] == relevant
    scored = await answered(client, "/score", text_1=[one for one, _ in texts], text_2=[one for _, one in texts])
    assert [one["score"] > 0.5 for one in scored["data"]] == relevant
    joined = await answered(client, "/classify", input=[f"{query}<|sep|> {document}" for query, document in texts])
    assert [one["probs"][0] > 0.5 for one in joined["data"]] == relevant
    assert {one["label"] for one in joined["data"]} == {"relevant"}


async def test_the_right_document_is_ranked_first(client: Any) -> None:
    documents = [
        "A pine lamp for reading, sturdy and red, made in Lisbon.",
        "A pine chair for reading, sturdy and blue, made in Lisbon.",
        "A pine chair for reading, sturdy and red, made in Lisbon.",
    ]
    found = (await answered(client, "/rerank", query="red chair", documents=documents))["results"]
    assert found[0]["index"] == 2 and found[0]["relevance_score"] > 0.99 and found[1]["relevance_score"] < 0.01
    raw = (await answered(client, "/rerank", query="red chair", documents=documents, use_activation=False))["results"]
    assert raw[0]["relevance_score"] > 4 and raw[1]["relevance_score"] < -4
