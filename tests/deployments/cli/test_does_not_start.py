"""Each start that docs/guides/does-not-start.md shows is provoked here, and must print the page's line."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModel, BertConfig

from deployments.cli.check import model as check_model
from deployments.cli.launch import local_serve, ray_env
from engine.config import EngineConfig, ModelConfig
from engine.model.loader import load_model
from engine.model.model_folder import BUILTIN
from tests.support import model_folders

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "does-not-start.md"
CPU = Path(local_serve.__file__).parents[2] / "configs" / "cpu.yaml"
FILE = Path("assay.yaml")
Config = dict[str, Any]


def config_of(args: dict[str, Any] | None = None, **options: Any) -> Config:
    """The CPU configuration with other sections of `args`, and other options of its HTTP server."""
    config: Config = yaml.safe_load(CPU.read_text("utf-8"))
    config["http_options"] |= options
    ours = config["applications"][0]["args"]
    for name, section in (args or {}).items():
        ours[name] = ours.get(name, {}) | section
    return config


def model(change: Callable[[Path], object]) -> Config:
    """A configuration of a copy of the built-in model that `change` has spoilt."""
    folder = Path("models/mine")
    shutil.copytree(BUILTIN, folder)
    change(folder)
    return config_of({"model": {"path": str(folder)}})


def pointer(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(model_folders.LFS_POINTER)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000_000])


def sharded(folder: Path) -> None:
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / "model.safetensors").rename(folder / files[0])
    listed = {"weight_map": dict(zip(("model.embed_tokens.weight", "model.norm.weight"), files, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def only(name: str, text: str) -> Callable[[Path], object]:
    """Leaves nothing in a folder but one file."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text(text)

    return change


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*.json"):
        file.unlink()


def encoder(folder: Path) -> None:
    shutil.rmtree(folder)
    model_folders.save(folder, BertConfig(**model_folders.SIZES), AutoModel)


def append(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text("utf-8") + text)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def keys_file(text: str) -> Config:
    Path("keys.yaml").write_text(text)
    return config_of({"auth": {"mode": "keys", "keys_file": "keys.yaml"}})


BASE = json.dumps({"base_model_name_or_path": "org/base"})
PROVOKED: dict[str, Callable[[], Config | str]] = {
    "yaml": lambda: "applications: [",
    "mapping": lambda: "- a list",
    "typo": lambda: config_of({"engine": {"max_runing": 8}}),
    "range": lambda: config_of({"engine": {"max_running": 0}}),
    "open": lambda: config_of(host="0.0.0.0"),
    "no keys": lambda: config_of({"auth": {"mode": "keys"}}),
    "keys": lambda: keys_file("keys: [{name: team-a, sha256: 9f86d0}]"),
    "keys yaml": lambda: keys_file("keys: ["),
    "nothing": lambda: config_of({"model": {"path": "models/none"}}),
    "pointer": lambda: model(pointer("model.safetensors")),
    "cut": lambda: model(cut),
    "shard": lambda: model(sharded),
    "sizes": lambda: model(lambda folder: model_folders.edit_config(folder, vocab_size=2032)),
    "json": lambda: model(append("config.json", "{")),
    "code": lambda: model(lambda folder: model_folders.edit_config(folder, model_type="mine", auto_map={"a": "b"})),
    "unknown": lambda: model(lambda folder: model_folders.edit_config(folder, model_type="mine")),
    "pickled": lambda: model(pickled),
    "gguf": lambda: model(only("model.gguf", "")),
    "adapter": lambda: model(only("adapter_config.json", BASE)),
    "beside": lambda: model(lambda folder: (folder / "adapter_config.json").write_text(BASE)),
    "encoder": lambda: model(encoder),
    "tokenizer": lambda: model(without_tokenizer),
    "tokenizer pointer": lambda: model(pointer("tokenizer.json")),
    "tokenizer json": lambda: model(append("tokenizer.json", "}")),
    "template": lambda: config_of({"rerank": {"template": "mine"}}),
}


def shown() -> list[str]:
    """The lines that the page shows as printed."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


class CheckHere:
    """Checks models in this process, which has imported torch."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def errors(self) -> list[str]:
        return [str(error) for error in check_model.errors_of(self._config)]

    def stop(self) -> None: ...


def serve_nothing(config: Path, urls: Any, name: str, *, check: Callable[[], None], **_: Any) -> None:
    check()
    pytest.fail("it was started")


@pytest.fixture
def starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_env, "adopt", lambda wanted: None)
    monkeypatch.setattr(local_serve, "ModelCheck", CheckHere)
    monkeypatch.setattr(local_serve, "_serve", serve_nothing)


def printed_by(config: Config | str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    FILE.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    capsys.readouterr()
    assert local_serve.serve(FILE) == 1
    return capsys.readouterr().err.splitlines()


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", PROVOKED)
def test_a_start_that_is_refused_prints_the_line_of_the_page(
    name: str, starts_nothing: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    lines = printed_by(PROVOKED[name](), capsys)
    missing = [line for line in lines if line not in shown()]
    assert lines and not missing, "\n".join(missing)


def test_a_port_that_is_taken_prints_the_line_of_the_page(
    starts_nothing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        [line] = printed_by(config_of(port=port), capsys)
    assert line.replace(str(port), "8000") in shown()


def test_weights_that_are_not_finite_print_the_line_of_the_page(starts_nothing: None) -> None:
    """No header shows them, so the replica finds them."""

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
        return tensors

    config = model(lambda folder: model_folders.edit_weights(folder, spoil))
    path = config["applications"][0]["args"]["model"]["path"]
    with pytest.raises(ValueError) as raised:
        load_model(ModelConfig(path=path, device="cpu"), EngineConfig(kv_slots=64))
    line = f"assay serve: {FILE} is not served: {type(raised.value).__name__}: {raised.value}"
    assert line in shown(), line


def test_cuda_on_a_machine_without_it_prints_the_line_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica finds it, since `assay check` may run on another machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError) as raised:
        load_model(ModelConfig(path="builtin", device="cuda"), EngineConfig(kv_slots=64))
    line = f"assay serve: {FILE} is not served: {type(raised.value).__name__}: {raised.value}"
    assert line in shown(), line


@pytest.mark.full
def test_every_line_of_the_page_is_provoked(
    starts_nothing: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_serve, "taken", lambda url: False)
    found = set()
    for make in PROVOKED.values():
        found |= set(printed_by(make(), capsys))
        shutil.rmtree("models", ignore_errors=True)
    others = [line for line in shown() if line.startswith("assay serve") and line not in found]
    assert len(others) == 3  # the port, the weights and CUDA, which have tests of their own
