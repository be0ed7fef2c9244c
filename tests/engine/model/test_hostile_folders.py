"""S11: whatever a model's folder holds, none of it is run. The payload leaves a mark where it could run."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.model.checkpoint import read_config, read_model
from engine.model.compatibility import UnsupportedModel
from engine.model.model_folder import BUILTIN, ModelNotFound
from engine.tokenizer.tokenizer import load_tokenizer

CPU = torch.device("cpu")


def load(folder: Path) -> Any:
    """Returns what `engine.model.hf_model.load_model` reads, before it checks what it has read."""
    return read_model(folder, read_config(folder, None), ModelConfig(path=folder), CPU)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The built-in model's, which a test may spoil."""
    return Path(shutil.copytree(BUILTIN, tmp_path / "model"))


def pickled(file: Path, mark: Path) -> None:
    torch.save({"model.embed_tokens.weight": Payload(mark)}, file)


def code(file: Path, mark: Path) -> None:
    file.write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Model: ...\nclass Config: ...\nclass Tokenizer: ...\n")


def alter(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.risk("S11", planted=True)
def test_the_payload_would_run(tmp_path: Path, mark: Path) -> None:
    """So the tests below would see it."""
    pickled(tmp_path / "weights.bin", mark)
    torch.load(tmp_path / "weights.bin", weights_only=False)
    assert mark.is_dir()
    mark.rmdir()
    code(tmp_path / "modeling.py", mark)
    namespace: dict[str, Any] = {}
    exec((tmp_path / "modeling.py").read_text(), namespace)  # noqa: S102
    assert mark.is_dir()


@pytest.mark.risk("S11")
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.pt", "model.pth", "model.ckpt"]
)
def test_weights_that_are_pickles_are_never_read(folder: Path, mark: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    pickled(folder / name, mark)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises((UnsupportedModel, ModelNotFound)):
        load(folder)
    assert not mark.exists()


def test_an_index_of_safetensors_that_points_to_a_pickle_is_refused(folder: Path, mark: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "other.safetensors")
    pickled(folder / "evil.bin", mark)
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.embed_tokens.weight": "evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Exception) as refused:
        load(folder)
    assert not mark.exists() and refused.value


def test_a_pickle_that_calls_itself_safetensors_is_not_unpickled(folder: Path, mark: Path) -> None:
    pickled(folder / "model.safetensors", mark)
    with pytest.raises(Exception) as refused:
        load(folder)
    assert not mark.exists() and refused.value


def test_pickles_beside_good_weights_are_left_alone(folder: Path, mark: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        pickled(folder / name, mark)
    load(folder)
    assert not mark.exists()


@pytest.mark.risk("S11")
def test_code_that_a_known_model_brings_is_not_run(folder: Path, mark: Path) -> None:
    code(folder / "modeling_evil.py", mark)
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "Model"}
    alter(folder / "config.json", auto_map={auto: f"modeling_evil.{name}" for auto, name in names.items()})
    model = load(folder)
    assert not mark.exists() and "transformers.models" in type(model).__module__


@pytest.mark.risk("S11")
@pytest.mark.parametrize("kept", [True, False])
def test_code_that_a_tokenizer_brings_is_not_run(folder: Path, mark: Path, kept: bool) -> None:
    code(folder / "tokenization_evil.py", mark)
    alter(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.Tokenizer", "tokenization_evil.Tokenizer"]},
        **({} if kept else {"tokenizer_class": "Tokenizer"}),
    )
    try:
        load_tokenizer(folder)
    except (ValueError, OSError, ImportError):
        assert not kept
    assert not mark.exists()
