"""Heads that a file declares, over the routes: the answers are torch's own arithmetic over the library's body."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from deployments.cli.main import main
from tests.support.head_models import config_of, perturbed, save

WIDTH, HIDDEN, LABELS = 8, 64, ("bad", "so-so", "good")
TEXTS = ["A pine chair.", "", "日本語 🙂", "a longer text " * 20]
CHOICES = ["Which?\nred</s>blue</s>green</s>\nChoice:", "</s>", "日本</s>" * 30]
ENGINE = {"kv_slots": 2048, "token_budget": 64, "compile": False}
Value = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    module = perturbed(AutoModelForCausalLM.from_config(config_of("qwen3"), attn_implementation="eager"))
    found = save(module, tmp_path_factory.mktemp("declared") / "model")
    (found / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}</s>")
    return found


def declare(folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]], **fields: Any) -> Value:
    """Writes NAME.json and NAME.safetensors beside the model; returns the tensors by role."""
    torch.manual_seed(2)
    values = {role: torch.randn(shape) * 0.2 for role, shape in shapes.items()}
    save_file({f"{name}.{role}": value for role, value in values.items()}, folder / f"{name}.safetensors")
    content = fields | {"weights": f"{name}.safetensors", "tensors": {role: f"{name}.{role}" for role in shapes}}
    (folder / f"{name}.json").write_text(yaml.safe_dump(content))
    return values


async def client_of(make: Callable[..., Any], folder: Path, name: str, **sections: Any) -> Any:
    return await make(model={"path": str(folder), "device": "cpu", "head": f"{name}.json"}, engine=ENGINE, **sections)


def hidden(folder: Path, text: str, special: bool = True) -> tuple[torch.Tensor, list[int]]:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=special).ids
    body = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return body(input_ids=torch.tensor([ids])).last_hidden_state[0], ids


async def test_classes_of_a_declared_head(replica_client: Callable[..., Any], folder: Path) -> None:
    shapes = {"norm_weight": (HIDDEN,), "weight": (3, HIDDEN), "bias": (3,)}
    value = declare(
        folder, "classes", shapes, head="layernorm_linear", reads="last", temperature=2.0, labels=list(LABELS)
    )
    client = await client_of(replica_client, folder, "classes")
    rows = torch.stack([hidden(folder, text)[0][-1] for text in TEXTS])
    normed = F.layer_norm(rows, (HIDDEN,), value["norm_weight"])
    wanted = F.linear(normed, value["weight"], value["bias"]) / 2.0
    for raw, numbers in ((True, wanted), (False, wanted.softmax(-1))):
        body = {"input": TEXTS, "use_activation": not raw}
        found = (await client.post("/classify", body)).json()["data"]
        assert np.abs(np.array([one["probs"] for one in found]) - numbers.numpy()).max() < 1e-5
        assert [one["label"] for one in found] == [LABELS[index] for index in wanted.argmax(-1).tolist()]
        pooled = (await client.post("/pooling", body | {"task": "classify"})).json()["data"]
        assert np.abs(np.array([one["data"] for one in pooled]) - numbers.numpy()).max() < 1e-5
    predicted = (await client.post("/predict", {"inputs": TEXTS[0]})).json()
    assert {one["label"]: one["score"] for one in predicted} == pytest.approx(
        dict(zip(LABELS, wanted[0].softmax(-1).tolist(), strict=True)), abs=1e-5
    )
    refused = await client.post("/rerank", {"query": "q", "documents": ["a"]})
    assert refused.status_code == 404 and "3 numbers" in refused.json()["error"]["message"]


async def test_documents_are_ranked_and_scored_by_a_declared_number(
    replica_client: Callable[..., Any], folder: Path
) -> None:
    value = declare(folder, "relevance", {"weight": (1, HIDDEN)}, head="linear", reads="last", temperature=0.5)
    template = {"prefix": "Query: {{ query }}\nDocument: ", "suffix": "\n"}
    sections = {"templates": {"pair": template}, "rerank": {"template": "pair"}}
    client = await client_of(replica_client, folder, "relevance", **sections)
    prompts = [f"Query: red chair\nDocument: {text}\n" for text in TEXTS]
    rows = torch.stack([hidden(folder, text, special=False)[0][-1] for text in prompts])
    wanted = (F.linear(rows, value["weight"]) / 0.5)[:, 0]
    ranked = (await client.post("/rerank", {"query": "red chair", "texts": TEXTS, "raw_scores": True})).json()
    assert [one["index"] for one in ranked] == wanted.argsort(descending=True).tolist()
    assert [one["score"] for one in ranked] == pytest.approx(wanted.sort(descending=True)[0].tolist(), abs=1e-5)
    scored = (await client.post("/score", {"text_1": "red chair", "text_2": TEXTS})).json()["data"]
    assert [one["score"] for one in scored] == pytest.approx(wanted.sigmoid().tolist(), abs=1e-5)
    chat = [{"role": "user", "content": "red"}]
    last = hidden(folder, "red;</s>", special=False)[0][-1]
    own = (await client.post("/score", {"messages": chat, "use_activation": False})).json()["data"][0]["score"]
    assert own == pytest.approx(float(F.linear(last, value["weight"]) / 0.5), abs=1e-5)


async def test_marked_tokens_are_answered(replica_client: Callable[..., Any], folder: Path) -> None:
    value = declare(folder, "steps", {"weight": (2, HIDDEN)}, head="linear", reads="marked", mark="</s>")
    client = await client_of(replica_client, folder, "steps")
    wanted = []
    for text in CHOICES:
        rows, ids = hidden(folder, text)
        wanted.append(F.linear(rows[torch.tensor(ids) == 257], value["weight"]).softmax(-1)[:, 1].tolist())
    for _ in range(2):  # computed, then cached
        found = (await client.post("/pooling", {"input": CHOICES, "steps": True, "aggregate": "min"})).json()["data"]
        for one, steps in zip(found, wanted, strict=True):
            assert one["data"] == pytest.approx(steps, abs=1e-5) and one["score"] == pytest.approx(min(steps), abs=1e-5)
    for route, body in (("/classify", {"input": "a</s>"}), ("/rerank", {"query": "q", "documents": ["a"]})):
        refused = await client.post(route, body)
        assert refused.status_code == 404, route


async def test_a_pointer_answers_with_a_distribution_over_marked_tokens(
    replica_client: Callable[..., Any], folder: Path
) -> None:
    shapes = {"query_weight": (WIDTH, HIDDEN), "key_weight": (WIDTH, HIDDEN), "key_bias": (WIDTH,)}
    value = declare(folder, "choice", shapes, head="pointer", mark="</s>", temperature=WIDTH**0.5)
    client = await client_of(replica_client, folder, "choice")

    def numbers(text: str, special: bool = True) -> torch.Tensor:
        rows, ids = hidden(folder, text, special)
        keys = F.linear(rows[torch.tensor(ids) == 257], value["key_weight"], value["key_bias"])
        found: torch.Tensor = torch.mv(keys, F.linear(rows[-1], value["query_weight"])) / WIDTH**0.5
        return found

    wanted = [numbers(text) for text in CHOICES]
    assert [len(one) for one in wanted] == [3, 1, 30]
    for _ in range(2):  # computed, then cached
        found = (await client.post("/classify", {"input": CHOICES})).json()["data"]
        pooled = (await client.post("/pooling", {"input": CHOICES, "use_activation": False})).json()["data"]
        for one, raw, right in zip(found, pooled, wanted, strict=True):
            assert one["probs"] == pytest.approx(right.softmax(-1).tolist(), abs=1e-5)
            assert (one["num_classes"], one["label"]) == (len(right), str(int(right.argmax())))
            assert raw["data"] == pytest.approx(right.tolist(), abs=1e-5)
    alone = (await client.post("/classify", {"input": CHOICES[2]})).json()["data"][0]["probs"]
    assert alone == pytest.approx(wanted[2].softmax(-1).tolist(), abs=1e-5)
    chat = {
        "messages": [{"role": "user", "content": "red</s>"}]
    }  # no message spells a mark: the template's is the only
    spoken = (await client.post("/pooling", chat)).json()["data"][0]["data"]
    assert spoken == [1.0]
    unmarked = await client.post("/classify", {"input": ["a</s>", "none"]})
    assert (unmarked.status_code, unmarked.json()["error"]["param"]) == (422, "input[1]")
    for field, given in (("steps", True), ("dimensions", 4), ("step_tag_id", 5)):
        refused = await client.post("/pooling", {"input": CHOICES[0], field: given})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, field)
    for route, body in (
        ("/rerank", {"query": "q", "documents": ["a"]}),
        ("/score", {"text_1": "q", "text_2": "a"}),
        ("/score", chat),
        ("/v1/embeddings", {"input": "a"}),
        ("/predict", {"inputs": "a"}),
        ("/generative_scoring", {"query": "q", "items": ["a"], "label_token_ids": [5]}),
    ):
        assert (await client.post(route, body)).status_code == 404, route
    facts = (await client.get("/v1/models")).json()["data"][0]["assay"]
    assert (facts["head"]["kind"], facts["head"]["labels"], facts["prompt_source"]) == ("pointer", [], None)


async def test_the_canary_covers_a_declared_head(replica_backend: Callable[..., Any], folder: Path) -> None:
    shapes = {"query_weight": (WIDTH, HIDDEN), "key_weight": (WIDTH, HIDDEN)}
    declare(folder, "canary", shapes, head="pointer", mark="</s>")
    model = {"path": str(folder), "device": "cpu", "head": "canary.json"}
    server: Any = (await replica_backend(model=model, engine=ENGINE)).server
    assert (await server._canary.run(30.0))[0] is None
    server.engine.model._pooler.layers.key.weight.data += 0.1
    assert (await server._canary.run(30.0))[0] == "mismatch"


def test_assay_check_verifies_a_declaration(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declare(folder, "checked", {"weight": (2, HIDDEN)}, head="linear", reads="last")
    file = tmp_path / "config.yaml"

    def check(head: str) -> tuple[int, str]:
        args = {"model": {"path": str(folder), "device": "cpu", "head": head}}
        app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build", "args": args}
        file.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [app]}))
        return main(["check", str(file)]), capsys.readouterr().out

    assert check("checked.json") == (0, f"{file}: good.\n")
    assert check(str(folder / "checked.json"))[0] == 0
    text = (folder / "checked.json").read_text()
    for change, words in (
        (("linear", "linar"), "`head` in"),
        (("checked.weight", "checked.wait"), "names the tensor checked.wait"),
        (("checked.safetensors", "other.safetensors"), "`weights` in"),
    ):
        (folder / "checked.json").write_text(text.replace(*change))
        status, said = check("checked.json")
        assert status == 1 and words in said
    assert check("nothing.json")[0] == 1
