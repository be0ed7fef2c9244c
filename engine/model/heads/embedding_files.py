"""Reads how sentence-transformers makes a vector of hidden states, as data: nothing that the files name is imported.

`modules.json` lists the chain of modules: a Transformer, a Pooling, Dense layers, and perhaps a Normalize.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.model.compatibility import UnsupportedModel
from engine.model.file_digests import TRANSFORMER_FILES
from engine.model.heads.row_pooling import Pooling

MODULES = "modules.json"
WORDING = "config_sentence_transformers.json"
MODES = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}  # by the names that the files use
OLD_MODES = {  # of files before version 6, in which each mode has a switch
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFiles:
    """Holds what a folder says of its vectors."""

    pooling: Pooling
    dense: tuple[Path, ...] = ()  # folders of linear layers behind the pooling, in order
    normalised: bool = True
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text)
    default_prompt: str | None = None
    max_tokens: int | None = None  # tokens of a row that the model was trained for


def has_pooling(folder: Path) -> bool:
    """Tells whether the folder is that of an embedding model of sentence-transformers."""
    return (folder / MODULES).is_file() and "Pooling" in [kind for kind, _ in _modules(folder)]


def read_embedding(folder: Path, name: str, pooling: str = "auto") -> EmbeddingFiles:
    """Reads a folder.

    Args:
        folder: The model's files.
        name: The architecture, for errors.
        pooling: `model.pooling`.

    Raises:
        UnsupportedModel: The files name something that this build does not compute, or nothing says how rows are
            pooled.
    """
    modules = _modules(folder) if (folder / MODULES).is_file() else []
    kinds = [kind for kind, _ in modules]
    if "Pooling" not in kinds:
        if pooling == "auto":
            raise UnsupportedModel(
                name,
                "it is an embedding model, or the body of another one, and no file says how a row becomes a vector; "
                "set `model.head: pooled` and `model.pooling` to cls, mean or last",
            )
        return EmbeddingFiles(pooling=Pooling(pooling))
    end = kinds[2:]
    plain = [kind for kind in end if kind != "Normalize"]
    if kinds[:2] != ["Transformer", "Pooling"] or end not in (plain, [*plain, "Normalize"]) or set(plain) - {"Dense"}:
        raise UnsupportedModel(
            name, f"its modules.json must be Transformer, Pooling, Dense layers, Normalize. Given: {', '.join(kinds)}"
        )
    paths = [folder / path for _, path in modules]
    own = _mode(paths[1], name)
    if pooling not in ("auto", own):
        raise UnsupportedModel(name, f"`model.pooling` must be auto or {own}, as its files say. Given: {pooling}")
    file, writing = _transformer_object(paths[0])
    if writing.get("do_lower_case"):
        raise UnsupportedModel(name, f"`do_lower_case` of its {file} must be false. Given: true")
    longest = writing.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UnsupportedModel(name, f"`max_seq_length` of its {file} must be at least 1. Given: {longest!r}")
    prompts, default = _prompts(folder, name)
    return EmbeddingFiles(
        pooling=own,
        dense=tuple(path for path, kind in zip(paths, kinds, strict=True) if kind == "Dense"),
        normalised=kinds[-1] == "Normalize",
        prompts=tuple(prompts.items()),
        default_prompt=default,
        max_tokens=longest,
    )


def dense_layers(files: EmbeddingFiles, name: str, width: int) -> list[nn.Module]:
    """Returns the layers behind the pooling, with the values that the files hold, in float32.

    Args:
        files: The description of the folder.
        name: The architecture, for errors.
        width: Numbers of a pooled row.

    Raises:
        UnsupportedModel: A layer does not fit the one before, or names an activation that this build does not compute.
    """
    layers: list[nn.Module] = []
    for folder in files.dense:
        config = _object(folder / "config.json")
        inside, outside = int(config.get("in_features", 0)), int(config.get("out_features", 0))
        activation = ACTIVATIONS.get(str(config.get("activation_function", "torch.nn.modules.activation.Tanh")))
        if inside != width or activation is None or config.get("use_residual"):
            raise UnsupportedModel(
                name,
                f"{folder.name}/config.json must have in_features {width}, no residual and an activation of "
                f"{', '.join(ACTIVATIONS)}. Given: {json.dumps(config)[:200]}",
            )
        bias = bool(config.get("bias", True))
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outside, inside)} | (
            {"linear.bias": (outside,)} if bias else {}
        )
        layer = nn.Linear(inside, outside, bias=bias)
        layer.load_state_dict({key.removeprefix("linear."): one for key, one in _tensors(folder, shapes, name).items()})
        layers += [layer, activation()]
        width = outside
    return layers


def _tensors(folder: Path, shapes: dict[str, tuple[int, ...]], name: str) -> dict[str, torch.Tensor]:
    file = folder / "model.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            found = {key: opened.get_tensor(key).float() for key in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(name, f"{folder.name}/model.safetensors cannot be read: {str(error)[:200]}") from None
    given = {key: tuple(one.shape) for key, one in found.items()}
    if given != shapes:
        raise UnsupportedModel(name, f"{folder.name}/model.safetensors must hold {shapes}. Given: {given}")
    return found


def _mode(folder: Path, name: str) -> Pooling:
    config = _object(folder / "config.json")
    old = [mode for field, mode in OLD_MODES.items() if config.get(field)]
    given = config.get("pooling_mode", old or "mean")
    modes = [given] if isinstance(given, str) else list(given)
    if len(modes) != 1 or modes[0] not in MODES:
        raise UnsupportedModel(
            name, f"its pooling must be one of {', '.join(MODES)}. Given: {', '.join(map(str, modes))}"
        )
    if config.get("include_prompt") is False:
        raise UnsupportedModel(name, "its pooling leaves the prompt out (include_prompt), which this build does not")
    return MODES[modes[0]]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Returns the class and the folder of each module, in the order of the chain."""
    try:
        found = [
            (str(one["type"]).rpartition(".")[2], str(one.get("path", "")))
            for one in json.loads((folder / MODULES).read_bytes())
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UnsupportedModel(
            str(folder.name), f"{folder / MODULES} must be a list of objects with a `type`"
        ) from None
    for _, path in found:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise UnsupportedModel(str(folder.name), f"`path` in {MODULES} must be inside the folder. Given: {path!r}")
    return found


def _prompts(folder: Path, name: str) -> tuple[dict[str, str], str | None]:
    """Returns the texts of the prompts, and the name of the default one. A prompt that is null is none."""
    wording = _object(folder / WORDING)
    given, default = wording.get("prompts") or {}, wording.get("default_prompt_name")
    if not isinstance(given, dict):
        raise UnsupportedModel(name, f"`prompts` of its {WORDING} must be an object of texts. Given: {given!r}")
    for key, text in given.items():
        if not isinstance(text, str | None):
            raise UnsupportedModel(name, f"`prompts.{key}` of its {WORDING} must be a text or null. Given: {text!r}")
    if default is not None and (not isinstance(default, str) or default not in given):
        raise UnsupportedModel(
            name, f"`default_prompt_name` of its {WORDING} must be one of {', '.join(given)}. Given: {default}"
        )
    prompts = {key: text for key, text in given.items() if text is not None}
    return prompts, default if default in prompts else None


def _transformer_object(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the name and the content of the file that describes the Transformer module."""
    for name in TRANSFORMER_FILES:
        if found := _object(folder / name):
            return name, found
    return TRANSFORMER_FILES[0], {}


def _object(file: Path) -> dict[str, Any]:
    """Returns a JSON object; {} for a file that does not exist."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(file.parent.name, f"{file} must be JSON: {error}") from None
    return found if isinstance(found, dict) else {}
