"""Models with heads through a replica and the routes: the answers are those of the library's own class."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModel

from tests.support.head_models import VOCAB, config_of, save, save_tokenizer, sequence_classifier
from tests.support.model_folders import process_reward

PATIENCE_S = 30.0
TEXTS = ["A pine chair.", "", "日本語 🙂", "a longer text " * 20, "</s>"]


def engine(**fields: Any) -> dict[str, Any]:
    return {"engine": {"kv_slots": 2048, "token_budget": 64, **fields}}


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    plain = sequence_classifier(config_of("qwen3", id2label={0: "bad", 1: "so-so", 2: "good"}))
    return save(plain, tmp_path_factory.mktemp("heads") / "classifier"), plain


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    plain = sequence_classifier(config_of("llama", num_labels=1), seed=1)
    return save(plain, tmp_path_factory.mktemp("heads") / "reranker"), plain


def logits(model: tuple[Path, Any], texts: list[str], special: bool = True) -> Any:
    folder, plain = model
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [torch.tensor([tokenizer.encode(text, add_special_tokens=special).ids]) for text in texts]
    with torch.no_grad():
        return torch.cat([plain(input_ids=one).logits for one in ids]).double()


async def test_classes_are_the_librarys(replica_client: Callable[..., Any], classifier: tuple[Path, Any]) -> None:
    client = await replica_client(model={"path": str(classifier[0]), "device": "cpu"}, **engine())
    found = (await client.post("/classify", {"input": TEXTS})).json()["data"]
    wanted = logits(classifier, TEXTS).softmax(-1)
    assert np.abs(np.array([one["probs"] for one in found]) - wanted.numpy()).max() < 1e-5
    assert [one["label"] for one in found] == [("bad", "so-so", "good")[index] for index in wanted.argmax(-1).tolist()]
    alone = [(await client.post("/classify", {"input": text})).json()["data"][0] for text in TEXTS]
    assert np.abs(np.array([one["probs"] for one in alone]) - wanted.numpy()).max() < 1e-5


async def test_documents_are_ranked_by_the_librarys_logit(
    replica_client: Callable[..., Any], reranker: tuple[Path, Any]
) -> None:
    template = {"prefix": "Query: {{ query }}\nDocument: ", "suffix": "\n"}
    sections = {"templates": {"pair": template}, "rerank": {"template": "pair"}}
    client = await replica_client(model={"path": str(reranker[0]), "device": "cpu"}, **engine(), **sections)
    body = {"query": "red chair", "texts": TEXTS[:4], "raw_scores": True}
    found = (await client.post("/rerank", body)).json()
    prompts = [f"Query: red chair\nDocument: {text}\n" for text in TEXTS[:4]]
    wanted = logits(reranker, prompts, special=False)[:, 0].numpy()
    assert [one["index"] for one in found] == np.argsort(-wanted).tolist()
    assert np.abs([one["score"] - wanted[one["index"]] for one in found]).max() < 1e-5


async def test_conversations_are_scored_by_the_librarys_logit(
    replica_client: Callable[..., Any], reranker: tuple[Path, Any], tmp_path: Path
) -> None:
    form = tmp_path / "chat.jinja"
    form.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    sections = {"chat": {"template_file": str(form)}}
    client = await replica_client(model={"path": str(reranker[0]), "device": "cpu"}, **engine(), **sections)
    asked = {"role": "user", "content": "2 + 2?"}
    chats = [[asked, {"role": "assistant", "content": text}] for text in TEXTS[:4]]
    wanted = logits(reranker, [f"user: 2 + 2?;assistant: {text};" for text in TEXTS[:4]], special=False)[:, 0]
    assert wanted.unique().numel() == 4
    for numbers, more in ((wanted, {"use_activation": False}), (wanted.sigmoid(), {})):
        found = (await client.post("/score", {"messages": chats} | more)).json()["data"]
        assert [one["score"] for one in found] == pytest.approx(numbers.tolist(), abs=1e-5)
        alone = (await client.post("/v1/score", {"messages": chats[0]} | more)).json()["data"]
        assert [one["score"] for one in alone] == pytest.approx(numbers[:1].tolist(), abs=1e-5)


async def test_conversations_are_ranked_by_the_librarys_logit(
    replica_client: Callable[..., Any], reranker: tuple[Path, Any], tmp_path: Path
) -> None:
    """As conversations of their own, and as the answers to one conversation."""
    form = tmp_path / "chat.jinja"
    form.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ mood }}")
    sections = {"chat": {"template_file": str(form)}}
    client = await replica_client(model={"path": str(reranker[0]), "device": "cpu"}, **engine(), **sections)
    asked, answers = {"role": "user", "content": "2 + 2?"}, TEXTS[:4]
    chats = [[asked, {"role": "assistant", "content": text}] for text in answers]
    wanted = logits(reranker, [f"user: 2 + 2?;assistant: {text};" for text in answers], special=False)[:, 0]
    order = wanted.argsort(descending=True).tolist()
    for numbers, more in ((wanted, {"raw_scores": True}), (wanted.sigmoid(), {})):
        for body in ({"messages": chats}, {"messages": [asked], "documents": answers}):
            for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
                found = (await client.post(path, body | more)).json()["results"]
                assert [one["index"] for one in found] == order
                assert [one["relevance_score"] for one in found] == pytest.approx(numbers[order].tolist(), abs=1e-5)
                assert all("document" in one for one in found) == ("documents" in body and path != "/v2/rerank")
    best = (await client.post("/rerank", {"messages": chats, "top_n": 1})).json()["results"]
    assert [one["index"] for one in best] == order[:1]
    half = {"messages": [asked], "documents": [*answers, "cut \ud83d"]}
    error = (await client.post("/v1/rerank", json.dumps(half).encode())).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", f"documents[{len(answers)}]")
    kind = {"messages": chats, "chat_template_kwargs": {"mood": "kind"}, "use_activation": False}
    moods = logits(reranker, [f"user: 2 + 2?;assistant: {text};kind" for text in answers], special=False)[:, 0]
    found = (await client.post("/rerank", kind)).json()["results"]
    assert [one["relevance_score"] for one in found] == pytest.approx(sorted(moods.tolist())[::-1], abs=1e-5)


async def test_the_canary_covers_the_head(replica_backend: Callable[..., Any], reranker: tuple[Path, Any]) -> None:
    backend = await replica_backend(model={"path": str(reranker[0]), "device": "cpu"}, **engine())
    server: Any = backend.server
    assert (await server._canary.run(PATIENCE_S))[0] is None
    head = server.engine.model._pooler
    weight = head.layers.weight.data.clone()
    head.layers.weight.data += 0.1
    assert (await server._canary.run(PATIENCE_S))[0] == "mismatch"
    head.layers.weight.data = weight * float("nan")
    assert (await server._canary.run(PATIENCE_S))[0] == "error"
    head.layers.weight.data = weight
    assert (await server._canary.run(PATIENCE_S))[0] is None


async def test_steps_are_those_of_the_cards_loop(replica_client: Callable[..., Any], tmp_path: Path) -> None:
    """The card: the share of the second label at each `<extra_0>`."""
    folder = process_reward(tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=512)
    save_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([AddedToken("<extra_0>")])
    tokenizer.save(file)
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **engine())
    texts = ["2 + 3 * 4?\n3 * 4 is 12.<extra_0>2 + 12 is 15.<extra_0>", "<extra_0>", "日本" * 40 + "<extra_0>, end"]
    tensors = load_file(folder / "model.safetensors")
    body = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tag, wanted = tokenizer.token_to_id("<extra_0>"), []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            hidden = body(input_ids=ids).last_hidden_state[0]
        middle = (hidden @ tensors["score.0.weight"].T + tensors["score.0.bias"]).relu()
        shares = (middle @ tensors["score.2.weight"].T + tensors["score.2.bias"]).softmax(-1)
        wanted.append(shares[ids[0] == tag, 1].tolist())
    assert [len(one) for one in wanted] == [2, 1, 1]
    for _ in range(2):  # computed, then cached
        found = (await client.post("/pooling", {"input": texts, "steps": True, "aggregate": "product"})).json()["data"]
        for one, steps in zip(found, wanted, strict=True):
            assert one["data"] == pytest.approx(steps, abs=1e-5)
            assert one["score"] == pytest.approx(np.prod(steps), abs=1e-5)
    pairs = (await client.post("/pooling", {"input": texts[0]})).json()["data"][0]["data"]
    assert [pair[1] for pair in pairs] == pytest.approx(wanted[0], abs=1e-5)
    refused = (await client.post("/pooling", {"input": "no step", "steps": True})).json()["error"]
    assert (refused["param"], refused["code"]) == ("input[0]", "invalid_value")
    facts = (await client.get("/v1/models")).json()["data"][0]["assay"]
    assert (facts["head"]["kind"], facts["prompt_source"]) == ("token", None)
