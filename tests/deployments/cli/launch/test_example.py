"""The request that `assay serve` shows is one that the model answers, whichever head it has."""

import io
import json
import shlex
import urllib.error
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.launch import example
from deployments.cli.launch.example import Example, example_of
from tests.support.head_models import config_of, save, sequence_classifier

URL = "http://127.0.0.1:8000"


def saying(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    """Has the service's /v1/models answer so."""

    def get(url: str) -> Any:
        assert url == f"{URL}/v1/models"
        if isinstance(answer, Exception):
            raise answer
        return io.StringIO(json.dumps(answer))

    monkeypatch.setattr(example, "get", get)


def model(kind: str, pairs: str | None = None) -> dict[str, Any]:
    return {"data": [{"assay": {"head": {"kind": kind}, "prompt_source": pairs}}]}


def refusal(status: int) -> Exception:
    return urllib.error.HTTPError(URL, status, "", Message(), None)


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        (model("lm"), "/generative_scoring"),
        (model("lm", "preset:builtin"), "/generative_scoring"),
        (model("sequence", "tokenizer"), "/rerank"),
        (model("pooled", "tokenizer"), "/rerank"),
        (model("sequence"), "/classify"),
        (model("pooled"), "/v1/embeddings"),
        (model("pointer"), "/v1/models"),
        ({"data": []}, "/v1/models"),
        (refusal(503), "/v1/models"),
        (ConnectionError(), "/v1/models"),
    ],
)
def test_the_example_follows_the_head(monkeypatch: pytest.MonkeyPatch, answer: object, path: str) -> None:
    saying(monkeypatch, answer)
    found = example_of(URL)
    assert (found.path, found.key) == (path, False)
    words = shlex.split(found.command(URL))
    assert words[:2] == ["curl", URL + path]
    assert (json.loads(words[-1]) if found.body else None) == found.body


def test_a_service_with_keys_is_asked_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, refusal(401))
    assert example_of(URL).command(URL) == f"curl {URL}/v1/models -H 'authorization: Bearer KEY'"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return save(sequence_classifier(config_of("qwen3", num_labels=3)), tmp_path / "classifier")


@pytest.mark.parametrize(
    ("path", "wanted"),
    [("builtin", "/generative_scoring"), ("builtin-classifier", "/rerank"), ("classifier", "/classify")],
)
async def test_a_model_answers_its_example(
    replica_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, classifier: Path, path: str, wanted: str
) -> None:
    folder = str(classifier) if path == "classifier" else path
    client = await replica_client(model={"path": folder, "device": "cpu"}, engine={"kv_slots": 2048})
    saying(monkeypatch, (await client.http.get("/v1/models")).json())
    found: Example = example_of(URL)
    assert found.path == wanted
    answer = await client.http.post(found.path, json=found.body)
    assert answer.status_code == 200, answer.text
