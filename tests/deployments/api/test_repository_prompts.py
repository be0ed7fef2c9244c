"""Prompts that a model's repository names: the files of sentence-transformers, the chat template, and none at all.

Every folder is a tiny random Qwen3 in the published layout; references are written out here, and scores are the
library's over the reference ids.
"""

import functools
import json
import math
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from deployments.api.rerank_prompt import RerankPrompt, choose_rerank_prompt, remedy
from deployments.config.app_args import AppArgs
from deployments.config.settings import SamplingDefaults
from engine.tokenizer.tokenizer import load_tokenizer
from scoring.prompts.templates import TemplateRefused, compile_templates

BUILTIN = Path(__file__).parents[3] / "engine" / "builtin" / "target"
CONTROLS = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
WEB = "Given a web search query, retrieve relevant passages that answer the query"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ROLE = '{{{{ (messages | selectattr("role", "eq", "{}") | map(attribute="content") | first){} }}}}'
PAIR_TEMPLATE = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: "
    + '{% set given = messages | selectattr("role", "eq", "system") | map(attribute="content") | first %}'
    + f"{{{{ given | default('{WEB}', true) }}}}\n<Query>: {ROLE.format('query', '')}\n"
    + f"<Document>: {ROLE.format('document', '')}{ANSWER}"
    + '{{ "" }}'  # Jinja drops a last newline
)
LISTS = (
    '{{ "<|im_start|>user\n" }}{% for m in messages %}{{ m.role }}={{ m.content[0].text }};{% endfor %}'
    '{% if add_generation_prompt %}{{ "<|im_end|>" }}{% endif %}'
)
DOCUMENTS = ["", "red chair", "\u6905\u5b50\u662f\u7ea2\u8272\u7684", "\U0001fa91 \U0001f468\u200d\U0001f469", ANSWER]
CLOSE = 1e-5
Make = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with the control tokens of ChatML, and without anything that says how it ranks."""
    folder: Path = tmp_path_factory.mktemp("bare")
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in THINK])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size() + 3, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=400, bos_token_id=None,
        eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def token_id(folder: Path, text: str) -> int:
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    assert isinstance(found, int)
    return found


def published(bare: Path, made: Path, template: str | None = PAIR_TEMPLATE, **files: Any) -> Path:
    """Copies a folder and adds a chat template and JSON files; `__` in a name is a slash, `None` leaves a file out."""
    shutil.copytree(bare, made)
    if template is not None:
        (made / "chat_template.jinja").write_text(template)
    for name, found in files.items():
        file = made / f"{name.replace('__', '/')}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found))
    return made


PACKAGE = "sentence_transformers."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}base.modules.transformer.Transformer"},
    {"idx": 1, "name": "1", "path": "1_LogitScore", "type": f"{PACKAGE}cross_encoder.modules.logit_score.LogitScore"},
]


def chain(bare: Path, **more: Any) -> dict[str, Any]:
    """Returns the files of sentence-transformers for a reranker of two tokens."""
    return {
        "modules": MODULES,
        "1_LogitScore__config": {"true_token_id": token_id(bare, "yes"), "false_token_id": token_id(bare, "no")},
        "config_sentence_transformers": {
            "prompts": {"web": "Find it"},
            "default_prompt_name": "web",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
        "sentence_bert_config": {
            "transformer_task": "text-generation",
            "modality_config": {"message": {"method": "forward", "format": "flat"}},
        },
    } | more


def chosen(folder: Path, **sections: Any) -> tuple[RerankPrompt, str]:
    """Returns the prompt of a folder, and the message of a server without one."""
    args = AppArgs.model_validate({"model": {"path": str(folder)}} | sections)
    settings, tokenizer = args.api_settings(SamplingDefaults(), {}, folder), load_tokenizer(str(folder))
    templates = compile_templates(settings.templates, tokenizer)
    found = choose_rerank_prompt(templates, tokenizer, settings)
    return found, remedy(templates, found, tokenizer, labelled=True)


@functools.cache
def library(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_ids(folder: Path, parts: list[str]) -> list[int]:
    """Returns the ids of a row. Strings that are control tokens stand alone; all other text is ordinary characters."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bare = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    special = (*CONTROLS, *THINK)
    ids: list[int] = []
    for part in parts:
        found = tokenizer.token_to_id(part) if part in special else None
        ids += bare.encode(part, add_special_tokens=False).ids if found is None else [found]
    return ids


def published_row(folder: Path, instruction: str, query: str, document: str) -> list[int]:
    """Returns the ids of Qwen3-Reranker's row by the arithmetic of its card."""
    start, end = CONTROLS
    user = f"user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    turns = [start, f"system\n{SYSTEM}", end, "\n", start, user, end, "\n"]
    return plain_ids(folder, [*turns, start, "assistant\n", THINK[0], "\n\n", THINK[1], "\n\n"])


def logit(folder: Path, ids: list[int], text: str) -> float:
    with torch.no_grad():
        logits = library(folder)(torch.tensor([ids])).logits[0, -1].double()
    return float(logits[token_id(folder, text)])


def difference(folder: Path, ids: list[int]) -> float:
    return logit(folder, ids, "yes") - logit(folder, ids, "no")


@pytest.fixture
def service(replica_client: Callable[..., Any]) -> Make:
    async def make(folder: Path, **sections: Any) -> Any:
        model = {"path": str(folder), "served_name": "m", "device": "cpu", "dtype": "float32"}
        engine = {"max_running": 8, "kv_slots": 8192, "token_budget": 1024, "compile": False}
        return await replica_client(model=model, engine=engine, **sections)

    return make


async def answered(client: Any, path: str, **body: Any) -> Any:
    response = await client.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def prompt_source(client: Any) -> Any:
    return (await client.http.get("/v1/models")).json()["data"][0]["assay"]["prompt_source"]


@pytest.mark.full
async def test_rows_and_scores_are_those_of_the_repositorys_files(
    bare_folder: Path, tmp_path: Path, service: Make
) -> None:
    client = await service(published(bare_folder, tmp_path / "m", **chain(bare_folder)))
    assert await prompt_source(client) == "repository"
    for instruction in (None, "Is it a chair?"):
        found = await answered(client, "/rerank", query="", documents=DOCUMENTS, instruction=instruction)
        task = client.tasks[-1]
        for result in found["results"]:
            index = result["index"]
            wanted = published_row(bare_folder, instruction or "Find it", "", DOCUMENTS[index])
            row = [*task.prefix.tolist(), *task.ids[task.starts[index] : task.starts[index + 1]].tolist()]
            assert row == wanted
            assert result["relevance_score"] == pytest.approx(difference(bare_folder, wanted), abs=CLOSE)
    ranked = await answered(client, "/rerank", query="red chair", documents=["chair " * 900])
    assert ranked["results"][0]["truncated"]
    tail = plain_ids(
        bare_folder, ["<|im_end|>", "\n", "<|im_start|>", "assistant\n", "<think>", "\n\n", "</think>", "\n\n"]
    )
    row = [*client.tasks[-1].prefix.tolist(), *client.tasks[-1].ids.tolist()]
    assert row[-len(tail) :] == tail  # the text after a cut document is whole


ONE_LOGIT = {"suffix": "\nRelevant:", "prefix": "{{ query }}: ", "labels": ["yes"]}


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.full
async def test_one_logit_is_the_score_of_a_logit_score_without_a_false_token(
    bare_folder: Path, tmp_path: Path, service: Make
) -> None:
    """A softmax over the one label would give every document the same score."""
    one = {"1_LogitScore__config": {"true_token_id": token_id(bare_folder, "yes"), "false_token_id": None}}
    client = await service(published(bare_folder, tmp_path / "m", **chain(bare_folder, **one)))
    assert await prompt_source(client) == "repository"
    found = (await answered(client, "/rerank", query="q", documents=DOCUMENTS))["results"]
    wanted = [logit(bare_folder, published_row(bare_folder, "Find it", "q", text), "yes") for text in DOCUMENTS]
    assert len(set(wanted)) == len(wanted)
    assert [result["relevance_score"] for result in found] == sorted(
        (result["relevance_score"] for result in found), reverse=True
    )
    for result in found:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=CLOSE)
    raw = await answered(client, "/rerank", query="q", texts=DOCUMENTS, raw_scores=True)
    assert [item["score"] for item in raw] == pytest.approx([one["relevance_score"] for one in found], abs=CLOSE)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("labels", "activation", "apply"),
    [
        (["yes"], "sigmoid", sigmoid),
        (["yes"], "none", float),
        (["yes", "no"], "none", float),
        (["yes", "no"], "softmax", sigmoid),  # of two logits: the sigmoid of their difference
    ],
)
async def test_the_activation_applies_to_the_logit_or_to_the_difference(
    bare_folder: Path, tmp_path: Path, service: Make, labels: list[str], activation: str, apply: Callable[..., float]
) -> None:
    own = {"prefix": "<|im_start|>{{ query }}: ", "suffix": "<|im_end|>", "labels": labels}
    client = await service(bare_folder, templates={"own": own}, rerank={"template": "own", "activation": activation})
    for result in (await answered(client, "/rerank", query="q", documents=DOCUMENTS))["results"]:
        row = plain_ids(bare_folder, [CONTROLS[0], f"q: {DOCUMENTS[result['index']]}", CONTROLS[1]])
        value = difference(bare_folder, row) if len(labels) > 1 else logit(bare_folder, row, "yes")
        assert result["relevance_score"] == pytest.approx(apply(value), abs=CLOSE)


def test_a_softmax_over_one_number_is_refused(bare_folder: Path) -> None:
    with pytest.raises(TemplateRefused, match=r"rerank\.activation.*softmax"):
        chosen(bare_folder, templates={"own": ONE_LOGIT}, rerank={"template": "own", "activation": "softmax"})


async def test_a_tokenizer_alone_proves_no_prompt_and_the_named_lines_work(bare_folder: Path, service: Make) -> None:
    client = await service(bare_folder)
    assert await prompt_source(client) is None
    refused = await client.http.post("/rerank", json={"query": "q", "documents": ["d"]})
    assert refused.status_code == 404
    message = refused.json()["message"]
    lines = re.findall(r"`([a-z]+: \{.*?\})`", message)
    assert len(lines) == 5, message
    for given, labels in ((lines[:1], 2), (lines[1:2], 2), (lines[2:3], 2), (lines[3:], 2)):
        sections = yaml.safe_load("\n".join(given))
        found, _ = chosen(bare_folder, **sections)
        assert found.source == "configuration" and found.template is not None
        assert len(found.template.labels) == labels
    client = await service(bare_folder, **yaml.safe_load(lines[1]))
    assert await prompt_source(client) == "configuration"
    await answered(client, "/rerank", query="q", documents=["d"])


def test_a_preset_is_used_where_the_chat_template_writes_its_text(bare_folder: Path, tmp_path: Path) -> None:
    found, _ = chosen(published(bare_folder, tmp_path / "same"))
    assert found.source == "preset:qwen3_reranker" and found.activation == "sigmoid"
    other, message = chosen(published(bare_folder, tmp_path / "other", PAIR_TEMPLATE.replace("<Query>", "<Question>")))
    assert other.template is not None and not other.template.labels
    assert "which tokens" in message


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "no chat template with the roles"),
        (PAIR_TEMPLATE.replace("| first) }}", "| first) | trim }}"), "changes or repeats"),
        ("{% for m in messages %}{{ m.content | replace('<', '') }}|{% endfor %}", "in a way of its own"),
        ("{% for m in messages %}{{ m.content }}|{{ m.content }}{% endfor %}", "changes or repeats"),
        ("{% for m in messages | reverse %}{{ m.content }}|{% endfor %}", "after the document"),
        ("{% for m in messages %}", "no Jinja template"),
        ("{{ raise_exception('no') }}", "no chat template with the roles"),
    ],
)
def test_a_chat_template_that_cannot_be_followed_exactly_is_not_used(
    bare_folder: Path, tmp_path: Path, template: str, why: str
) -> None:
    found, message = chosen(published(bare_folder, tmp_path / "m", template, **chain(bare_folder)))
    assert found.template is None and why in message


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("modules", [MODULES[0], {"path": "", "type": f"{PACKAGE}models.Dense"}], "Dense"),
        ("modules", [{"path": "", "type": "custom.Transformer"}], "custom.Transformer"),
        ("modules", [{"path": "../x", "type": MODULES[0]["type"]}], "../x"),
        ("modules", {"type": 1}, "modules.json"),
        ("config_sentence_transformers", {"activation_fn": "torch.nn.modules.activation.Tanh"}, "activation.Tanh"),
        ("config_sentence_transformers", {"activation_fn": ["a"]}, "activation_fn"),
        ("config_sentence_transformers", {"default_prompt_name": "lost", "prompts": {}}, "lost"),
        ("config_sentence_transformers", {"prompts": []}, "prompts"),
        ("1_LogitScore__config", {"true_token_id": None, "false_token_id": 5}, "None and 5"),
        ("1_LogitScore__config", {"true_token_id": True, "false_token_id": 1}, "True and 1"),
        ("1_LogitScore__config", {"true_token_id": 999_999, "false_token_id": 10}, "999999"),
        ("sentence_bert_config", {"modality_config": {"message": {"format": "xml"}}}, "xml"),
    ],
)
def test_what_the_files_name_is_known_or_refused_by_name(
    bare_folder: Path, tmp_path: Path, name: str, content: Any, why: str
) -> None:
    found, message = chosen(published(bare_folder, tmp_path / "m", **chain(bare_folder, **{name: content})))
    assert found.template is None and why in message
    if "activation" in why:  # the operator's own template does not answer which activation applies
        named, message = chosen(tmp_path / "m", rerank={"template": "qwen3_reranker"})
        assert named.template is None and why in message and "rerank.activation" in message
        [line] = [one for one in re.findall(r"`(rerank: \{.*?\})`", message) if "qwen3" in one]
        named, _ = chosen(tmp_path / "m", **yaml.safe_load(line))
        assert named.template is not None and named.activation == "sigmoid"


@pytest.mark.full
def test_contents_may_be_lists_of_parts(bare_folder: Path, tmp_path: Path) -> None:
    wording = {"modality_config": {"message": {"format": "structured"}}}
    values = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    for name, more, end in (("bare", {}, ""), ("opened", values, "#")):
        files = chain(bare_folder, sentence_bert_config=wording | more, config_sentence_transformers={})
        found, _ = chosen(published(bare_folder, tmp_path / name, LISTS, **files))
        assert found.source == "repository" and found.activation == "sigmoid" and found.template is not None
        plain = " ".join(re.sub(r"<[0-9a-f]+:[0-9]+>", "#", found.template.frame("q", {}).row("d")).split())
        assert plain == "#user query=q;document=d;" + end
        assert "system=i;" in found.template.frame("q", {"instruction": "i"}).row("d")
