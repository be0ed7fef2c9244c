"""The guides of docs/guides work as printed: their configurations pass `assay check`, their requests are answered."""

import ast
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from deployments.cli.main import main
from engine.builtin import BUILTIN_FOLDERS
from tests.deployments.api import test_published_layouts as layouts
from tests.support import head_models
from tests.test_documentation import DOCS, requests

CHAT = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
Make = Callable[..., Awaitable[Any]]


def reranker(at: Path) -> Path:
    return layouts.make_folder(at, layouts.LAYOUTS["qwen3_reranker"])


def reward_model(at: Path) -> Path:
    head_models.save(head_models.sequence_classifier(head_models.config_of("qwen3", num_labels=1)), at)
    (at / "chat_template.jinja").write_text(CHAT)
    return at


def classifier(at: Path) -> Path:
    return head_models.save(head_models.sequence_classifier(head_models.config_of("llama", num_labels=2)), at)


def encoder(at: Path) -> Path:
    return Path(shutil.copytree(BUILTIN_FOLDERS["builtin-classifier"], at))


def declared(at: Path) -> Path:
    """A body with the declaration that the guide prints, and its tensors."""
    torch.manual_seed(0)
    head_models.save(AutoModelForCausalLM.from_config(head_models.config_of("llama")), at)
    (at / "decision.json").write_text(blocks("declare-a-head", "json")[0])
    tensors = {"norm.weight": torch.ones(64), "norm.bias": torch.zeros(64), "out.bias": torch.zeros(2)}
    save_file(tensors | {"out.weight": torch.randn(2, 64)}, at / "decision.safetensors")
    return at


GUIDES: dict[str, Callable[[Path], Path]] = {
    "serve-a-reranker": reranker,
    "serve-a-reward-model": reward_model,
    "serve-a-classifier": classifier,
    "serve-an-encoder": encoder,
    "declare-a-head": declared,
}


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / "guides" / f"{name}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", GUIDES)
async def test_a_guide_works_as_printed(
    name: str, tmp_path: Path, replica_client: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = GUIDES[name](tmp_path / "model")
    [text] = blocks(name, "yaml")
    config = yaml.safe_load(text)
    args = config["applications"][0]["args"]
    args["model"]["path"] = str(folder)  # the guide's own is what `assay pull` made
    file = tmp_path / "guide.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["check", str(file)]) == 0, capsys.readouterr().out
    args["model"] |= {"device": "cpu", "dtype": "float32"}
    client = await replica_client(engine={"kv_slots": 4096, "compile": False}, **args)
    shown = list(requests((DOCS / "guides" / f"{name}.md").read_text("utf-8")))
    assert shown
    for path, body in shown:
        found = await client.http.post(path, json=body)
        assert found.status_code == 200, found.text


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("guard", layouts.GUARDS)
async def test_the_guards_of_the_guide_are_recognised(guard: str, tmp_path: Path, replica_client: Make) -> None:
    folder = layouts.make_folder(tmp_path / "m", layouts.GUARDS[guard])
    model = {"path": str(folder), "device": "cpu", "dtype": "float32"}
    client = await replica_client(model=model, engine={"kv_slots": 4096, "compile": False})
    [code] = blocks("serve-a-classifier", "python")
    body = ast.literal_eval(next(one.value for one in ast.parse(code).body if isinstance(one, ast.Assign)))
    body |= {"template": guard, "chat_template_kwargs": layouts.VALUES[guard]}
    found = await client.http.post("/generative_scoring", json=body)
    assert found.status_code == 200, found.text
    answer = found.json()
    assert answer["template"] == guard and 0 < answer["data"][0]["score"] < 1
    table = (DOCS / "guides" / "serve-a-classifier.md").read_text("utf-8")
    [row] = [line for line in table.splitlines() if line.startswith(f"| `{guard}`")]
    assert all(f"`{label['token']}`" in row for label in answer["labels"])


async def test_a_conversation_is_scored_with_labels_of_its_request_and_never_cut(
    tmp_path: Path, replica_client: Make
) -> None:
    folder = layouts.make_folder(tmp_path / "m", layouts.GUARDS["qwen3guard"])
    model = {"path": str(folder), "device": "cpu", "dtype": "float32"}
    client = await replica_client(model=model, engine={"kv_slots": 4096, "compile": False})
    messages = [{"role": "user", "content": "red"}]

    async def post(**body: Any) -> Any:
        return await client.http.post("/generative_scoring", content=json.dumps({"messages": messages} | body))

    client.http.headers["content-type"] = "application/json"
    own = (await post(labels=["yes", "no"])).json()
    assert [one["token"] for one in own["labels"]] == ["yes", "no"] and own["template"] is None
    row = [*client.tasks[-1].prefix.tolist(), *client.tasks[-1].ids.tolist()]
    tokens = (await client.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert row == tokens
    other = [{"role": "user", "content": "blue chairs"}]
    asked = {"labels": ["yes", "no"]}
    both = (await client.http.post("/generative_scoring", json=asked | {"messages": [messages, other]})).json()
    alone = (await client.http.post("/generative_scoring", json=asked | {"messages": other})).json()
    scores = [one["score"] for one in (*own["data"], *alone["data"])]
    assert [one["score"] for one in both["data"]] == pytest.approx(scores, abs=1e-6) and scores[0] != scores[1]
    ranked = await post(continuations=[" a chair", " a lamp"])
    assert ranked.status_code == 200, ranked.text
    for wrong, param in (
        ({"query": "q"}, "query"), ({"items": ["a"]}, "items"), ({"template": "plain"}, "template"),
        ({"template": "llama_guard_3"}, "template"), ({"truncate": "item"}, "truncate"), ({}, "label_token_ids"),
        ({"labels": ["yes", "no"], "chat_template_kwargs": {"other": 1}}, "chat_template_kwargs"),
    ):  # fmt: skip
        refused = await post(**wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, param), refused.text
    messages[0]["content"] = "red " * 500
    long = await post(labels=["yes", "no"])
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    bare = await client.http.post("/generative_scoring", json={"labels": ["yes", "no"], "query": "q"})
    assert bare.json()["error"]["param"] == "items"
    kept = {"query": "q", "items": ["a"], "labels": ["yes", "no"], "add_generation_prompt": True}
    assert (await client.http.post("/generative_scoring", json=kept)).json()["error"][
        "param"
    ] == "add_generation_prompt"
