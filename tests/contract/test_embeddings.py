"""huggingface_hub's client and LlamaIndex's of text-embeddings-inference (/embed, /predict)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModel, BertConfig

from tests.served import served
from tests.support.head_models import config_of, perturbed, save, sequence_classifier
from tests.support.model_folders import write_json

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

TEXTS = ["A red chair.", "日本語 🙂", "a longer text, " * 9 + "the end"]  # LlamaIndex strips spaces at the ends
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT in the files of sentence-transformers: the mean, normalised."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256,
    )  # fmt: skip
    body = perturbed(AutoModel.from_config(config, attn_implementation="eager"))
    folder = save(body, tmp_path_factory.mktemp("models") / "embedder")
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    chain = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in paths.items()]
    write_json(folder, "modules.json", chain)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder, "tokenizer_config.json", kind)  # BERT's own class would read another vocabulary
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling", "config.json", {"pooling_mode_mean_tokens": True})
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    plain = sequence_classifier(config_of("qwen3", id2label={0: "bad", 1: "so-so", 2: "good"}))
    return save(plain, tmp_path_factory.mktemp("models") / "classifier"), plain


@pytest.fixture(scope="module")
def told(embedder: Path, classifier: tuple[Path, Any], run_client: Callable[..., Any], tmp_path_factory: Any) -> Any:
    """The clients' answers, from a service with the embedding model and then one with the classifier."""
    found: dict[str, Any] = {}
    for part, folder in (("embed", embedder), ("predict", classifier[0])):
        model = {"path": str(folder), "device": "cpu", "served_name": folder.name}
        with served("cpu-classifier.yaml", tmp_path_factory.mktemp(part), model=model) as url:
            found |= run_client("embedding_clients", {"url": url, "part": part, "texts": TEXTS})
    return found


def vectors(folder: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    """The library's means, which are not normalised."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    body = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        rows = [body(input_ids=torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in texts]
    found: npt.NDArray[np.float32] = torch.stack([row.mean(0) for row in rows]).numpy()
    return found


@pytest.mark.parametrize("client", ["hub", "hub_batch", "hub_async", "llama_index"])
def test_vectors_are_the_librarys(told: Any, embedder: Path, client: str) -> None:
    wanted = F.normalize(torch.from_numpy(vectors(embedder, TEXTS)), dim=1).numpy()
    assert np.abs(np.array(told[client]) - wanted).max() < TOLERANCE


def test_vectors_keep_their_length_where_the_client_says_so(told: Any, embedder: Path) -> None:
    assert np.abs(np.array(told["hub_raw"]) - vectors(embedder, TEXTS)).max() < TOLERANCE


def test_the_best_label_is_the_librarys(told: Any, classifier: tuple[Path, Any]) -> None:
    folder, plain = classifier
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, found in zip(TEXTS, told["labels"], strict=True):
        with torch.no_grad():
            wanted = plain(input_ids=torch.tensor([tokenizer.encode(text).ids])).logits[0].softmax(-1).tolist()
        best = int(np.argmax(wanted))
        assert found["label"] == ("bad", "so-so", "good")[best]
        assert found["score"] == pytest.approx(wanted[best], abs=TOLERANCE)


def test_a_text_that_is_too_long_is_refused_or_cut(told: Any) -> None:
    assert told["long"]["status"] == 400 and told["cut"] == 1
