"""Encoders and embedding models through a replica and the routes: the answers are sentence-transformers' own."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from engine.model.compatibility import UnsupportedModel
from engine.model.heads.embedding_files import read_embedding
from tests.engine.model.encoder.conftest import ENCODERS
from tests.support.head_models import config_of, perturbed, save_tokenizer
from tests.support.model_folders import edit_config, write_json

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!-"
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
QUERY = "what is a red chair?"
TEXTS = ["a pine chair, red.", "", "日本語 🙂", "a longer text " * 12, "over-long " * 60, "[SEP] no end [CLS]"]
PATIENCE_S = 30.0
TOLERANCE = 1e-5
FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert", "deberta-v3", "electra", "distilbert")
KEPT = 2  # of the families, in the fast tier
LONGEST = 280
ENGINE: dict[str, Any] = {"engine": {"token_budget": 256}}


def save_pair_tokenizer(folder: Path, *, segments: bool) -> None:
    """Saves a tokenizer of letters that writes [CLS] text [SEP], and a second text [SEP], as BERT's does."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    kind = int(segments)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{kind} [SEP]:{kind}",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if segments else [])]
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=LONGEST, model_input_names=inputs, **names
    ).save_pretrained(folder)


def save_encoder(folder: Path, name: str, auto: Any, **changes: Any) -> Any:
    """Saves a tiny model of a family, and returns it."""
    config = ENCODERS[name]()
    config.pad_token_id = 0
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    module = perturbed(auto.from_config(config, attn_implementation="eager"))
    module.save_pretrained(folder)
    save_pair_tokenizer(folder, segments=name in ("bert", "electra"))
    return module


def cross_encoder(folder: Path, pairs: list[tuple[str, str]]) -> Any:
    """sentence-transformers' own scores, before any activation."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", max_length=LONGEST, local_files_only=True)
    return model.predict(pairs, activation_fn=torch.nn.Identity(), batch_size=4)


def without_controls(texts: list[str]) -> list[str]:
    """The library reads control tokens in texts, which this service takes for ordinary characters."""
    return [text for text in texts if "[SEP]" not in text]


@pytest.mark.full(keep=KEPT)
@pytest.mark.parametrize("name", FAMILIES)
async def test_documents_are_ranked_as_the_cross_encoder_does(
    replica_client: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    folder, texts = tmp_path / name, without_controls(TEXTS)
    save_encoder(folder, name, AutoModelForSequenceClassification, num_labels=1)
    client = await replica_client(model={"path": str(folder), "device": "cpu", "max_model_len": LONGEST}, **ENGINE)
    wanted = cross_encoder(folder, [(QUERY, text) for text in texts])
    found = (await client.post("/rerank", {"query": QUERY, "texts": texts, "raw_scores": True})).json()
    assert [one["index"] for one in found] == np.argsort(-wanted, kind="stable").tolist()
    assert np.abs([one["score"] - wanted[one["index"]] for one in found]).max() < TOLERANCE
    body: dict[str, Any] = {"text_1": [QUERY, *reversed(texts)][: len(texts)], "text_2": texts, "use_activation": False}
    scores = (await client.post("/v1/score", body)).json()["data"]
    wanted = cross_encoder(folder, list(zip(body["text_1"], texts, strict=True)))
    assert np.abs([one["score"] - wanted[one["index"]] for one in scores]).max() < TOLERANCE
    one = (await client.post("/score", {"queries": QUERY, "documents": texts[0]})).json()["data"]
    expected = torch.tensor(cross_encoder(folder, [(QUERY, texts[0])])).sigmoid()
    assert abs(one[0]["score"] - float(expected[0])) < TOLERANCE
    pairs = [[QUERY, text] for text in texts]
    predicted = (
        await client.post("/predict", {"inputs": [*pairs, [QUERY]], "raw_scores": True, "truncate": True})
    ).json()
    ranked = sorted(found, key=lambda entry: int(entry["index"]))
    assert np.abs([p[0]["score"] - r["score"] for p, r in zip(predicted[:-1], ranked, strict=True)]).max() < TOLERANCE


@pytest.mark.parametrize("name", ["roberta", "bert"])
async def test_both_texts_have_one_segment_where_the_tokenizer_gives_them_one(
    replica_client: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    folder, texts = tmp_path / name, without_controls(TEXTS)
    save_encoder(folder, name, AutoModelForSequenceClassification, num_labels=1, type_vocab_size=2)
    save_pair_tokenizer(folder, segments=False)
    client = await replica_client(model={"path": str(folder), "device": "cpu", "max_model_len": LONGEST}, **ENGINE)
    wanted = cross_encoder(folder, [(QUERY, text) for text in texts])
    found = (await client.post("/rerank", {"query": QUERY, "texts": texts, "raw_scores": True})).json()
    assert np.abs([one["score"] - wanted[one["index"]] for one in found]).max() < TOLERANCE
    inputs = [[QUERY, texts[0]], [texts[0]]]
    predicted = (await client.post("/predict", {"inputs": inputs, "raw_scores": True})).json()
    assert abs(predicted[0][0]["score"] - wanted[0]) < TOLERANCE


async def test_a_control_token_in_a_text_ends_no_segment(replica_client: Callable[..., Any], tmp_path: Path) -> None:
    save_encoder(tmp_path / "bert", "bert", AutoModelForSequenceClassification, num_labels=1)
    client = await replica_client(model={"path": str(tmp_path / "bert"), "device": "cpu"}, **ENGINE)
    texts = ["[SEP]", "(SEP)"]  # the brackets are unknown to the vocabulary
    scores = (await client.post("/score", {"text_1": "a", "text_2": texts})).json()["data"]
    assert scores[0]["score"] == pytest.approx(scores[1]["score"], abs=1e-7)


@pytest.mark.parametrize(
    ("name", "applied"), [("linear.Identity", "none"), ("activation.Sigmoid", "sigmoid"), (None, "sigmoid")]
)
async def test_the_activation_is_the_one_that_the_config_names(
    replica_client: Callable[..., Any], tmp_path: Path, name: str | None, applied: str
) -> None:
    folder = tmp_path / "bert"
    save_encoder(folder, "bert", AutoModelForSequenceClassification, num_labels=1)
    if name is not None:
        edit_config(folder, sentence_transformers={"activation_fn": f"torch.nn.modules.{name}"})
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **ENGINE)
    body = {"query": QUERY, "texts": TEXTS[:1]}
    raw = (await client.post("/rerank", body | {"raw_scores": True})).json()[0]["score"]
    found = (await client.post("/rerank", body)).json()[0]["score"]
    assert found == pytest.approx(raw if applied == "none" else 1 / (1 + np.exp(-raw)), abs=1e-7)


async def test_an_activation_that_is_not_known_ranks_nothing(
    replica_client: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "bert"
    save_encoder(folder, "bert", AutoModelForSequenceClassification, num_labels=1)
    edit_config(folder, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **ENGINE)
    found = await client.post("/rerank", {"query": QUERY, "texts": TEXTS[:1]})
    assert (found.status_code, "activation.Tanh" in found.text, "rerank.activation" in found.text) == (404, True, True)


async def test_classes_of_an_encoder_are_the_librarys(replica_client: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "roberta"
    module = save_encoder(folder, "roberta", AutoModelForSequenceClassification, id2label={0: "a", 1: "b", 2: "c"})
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **ENGINE)
    texts = without_controls(TEXTS)[:4]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        logits = torch.cat([module(input_ids=one, attention_mask=torch.ones_like(one)).logits for one in ids]).double()
    wanted = logits.softmax(-1).numpy()
    found = (await client.post("/classify", {"input": texts})).json()["data"]
    assert np.abs(np.array([one["probs"] for one in found]) - wanted).max() < TOLERANCE
    pooled = (await client.post("/pooling", {"input": texts, "task": "classify", "use_activation": False})).json()
    assert np.abs(np.array([one["data"] for one in pooled["data"]]) - logits.numpy()).max() < TOLERANCE
    best = (await client.post("/predict", {"inputs": texts[0]})).json()
    assert [one["label"] for one in best] == [("a", "b", "c")[index] for index in np.argsort(-wanted[0])]
    refused = await client.post("/rerank", {"query": "a", "texts": ["b"]})
    assert (refused.status_code, "3 numbers" in refused.text) == (404, True)


def sentence_folder(folder: Path, mode: str, *extra: str, width: int = 64, **wording: Any) -> None:
    """Writes the files of sentence-transformers beside a model."""
    chain = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((f"{2 + i}_{kind}", kind) for i, kind in enumerate(extra)),
    ]
    write_json(
        folder,
        "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(chain)
        ],
    )
    for path, _ in chain[1:]:
        (folder / path).mkdir()
    write_json(folder / "1_Pooling", "config.json", {"word_embedding_dimension": width, f"pooling_mode_{mode}": True})
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})
    write_json(folder, "config_sentence_transformers.json", wording)


def dense(folder: Path, inside: int, outside: int) -> None:
    from safetensors.torch import save_file

    activation = "torch.nn.modules.activation.Tanh"
    write_json(
        folder,
        "config.json",
        {"in_features": inside, "out_features": outside, "bias": True, "activation_function": activation},
    )
    weights = {"linear.weight": torch.randn(outside, inside) * 0.2, "linear.bias": torch.randn(outside)}
    save_file(weights, folder / "model.safetensors")


def sentence_vectors(folder: Path, texts: list[str], **options: Any) -> Any:
    """sentence-transformers' own vectors."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts, **options)


@pytest.mark.parametrize("given", [{"max_seq_length": "512"}, {"max_seq_length": 0}, {"do_lower_case": True}])
def test_a_file_that_says_what_cannot_be_done_is_refused_by_its_name(given: dict[str, Any], tmp_path: Path) -> None:
    sentence_folder(tmp_path, "mean_tokens")
    write_json(tmp_path, "sentence_bert_config.json", given)
    with pytest.raises(UnsupportedModel, match=f"`{next(iter(given))}` of its sentence_bert_config.json must be"):
        read_embedding(tmp_path, "BertModel")


async def test_vectors_of_an_encoder_are_sentence_transformers(
    replica_client: Callable[..., Any], tmp_path: Path
) -> None:
    folder, texts = tmp_path / "model", without_controls(TEXTS)
    save_encoder(folder, "bert", AutoModel, matryoshka_dimensions=[8, 16])
    prompts = {"query": "find: ", "document": "read: "}
    sentence_folder(folder, "mean_tokens", "Dense", "Normalize", prompts=prompts, default_prompt_name="document")
    dense(folder / "2_Dense", 64, 32)
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **ENGINE)
    wanted = sentence_vectors(folder, texts)
    body = {"input": texts, "truncate_prompt_tokens": -1}
    found = (await client.post("/v1/embeddings", body)).json()
    assert np.abs(np.array([one["embedding"] for one in found["data"]]) - wanted).max() < TOLERANCE
    packed = (await client.post("/v1/embeddings", body | {"encoding_format": "base64"})).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed]
    assert np.abs(np.array(decoded) - wanted).max() < TOLERANCE
    query = (await client.post("/embed", {"inputs": texts, "truncate": True, "prompt_name": "query"})).json()
    assert np.abs(np.array(query) - sentence_vectors(folder, texts, prompt_name="query")).max() < TOLERANCE
    short = (await client.post("/v1/embeddings", body | {"dimensions": 8})).json()["data"]
    cut = wanted[:, :8] / np.linalg.norm(wanted[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array([one["embedding"] for one in short]) - cut).max() < TOLERANCE
    refused = (await client.post("/v1/embeddings", body | {"dimensions": 9})).json()["error"]
    assert (refused["param"], "8, 16" in refused["message"]) == ("dimensions", True)
    pooled = (await client.post("/pooling", body | {"task": "embed"})).json()["data"]
    assert np.abs(np.array([one["data"] for one in pooled]) - wanted).max() < TOLERANCE
    asked = sentence_vectors(folder, [QUERY], prompt_name="query")
    cosines = (asked * wanted).sum(1)
    scores = (await client.post("/v1/score", {"text_1": QUERY, "text_2": texts, "truncate_prompt_tokens": -1})).json()
    assert np.abs(np.array([one["score"] for one in scores["data"]]) - cosines).max() < TOLERANCE
    too_long = await client.post("/v1/embeddings", {"input": texts})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
async def test_vectors_of_a_causal_model_are_sentence_transformers(
    replica_client: Callable[..., Any], tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    perturbed(AutoModel.from_config(config_of("qwen3"), attn_implementation="eager")).save_pretrained(folder)
    save_tokenizer(folder)
    write_json(
        folder,
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
    )
    sentence_folder(folder, mode)
    engine = {"engine": {"kv_slots": 2048, "token_budget": 64}}
    client = await replica_client(model={"path": str(folder), "device": "cpu"}, **engine)
    texts = [text for text in TEXTS if len(text.encode()) < 250]
    wanted = sentence_vectors(folder, texts, batch_size=1)
    for _ in range(2):  # computed, then cached
        found = (await client.post("/v1/embeddings", {"input": texts})).json()["data"]
        assert np.abs(np.array([one["embedding"] for one in found]) - wanted).max() < TOLERANCE
    unit = (await client.post("/embed", {"inputs": texts})).json()
    assert np.abs(np.linalg.norm(unit, axis=1) - 1).max() < TOLERANCE


async def test_the_canary_covers_an_encoder(replica_backend: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    save_encoder(folder, "bert", AutoModelForSequenceClassification, num_labels=1)
    backend = await replica_backend(model={"path": str(folder), "device": "cpu"}, **ENGINE)
    server: Any = backend.server
    assert (await server._canary.run(PATIENCE_S))[0] is None
    layer = server.engine.model._encoder._base.encoder.layer[0].output.dense
    weight = layer.weight.data.clone()
    layer.weight.data = weight * 1.5
    assert (await server._canary.run(PATIENCE_S))[0] == "mismatch"
    layer.weight.data = weight
    assert (await server._canary.run(PATIENCE_S))[0] is None
