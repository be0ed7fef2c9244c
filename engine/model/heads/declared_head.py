"""Makes the head that a file declares, with the values that its tensors hold, in float32.

Shape legend: R rows, H hidden size, K numbers of an answer, D width of a pointer's queries and keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn

from engine.model.architectures import is_encoder
from engine.model.checkpoint_audit import FLOATS, TensorHeader, file_headers
from engine.model.heads.head_declaration import BadDeclaration, HeadDeclaration
from engine.model.heads.info import HeadInfo, HeadKind
from engine.model.heads.pooling_head import PoolingHead
from engine.model.heads.row_pooling import Pooling
from engine.model.model_folder import BadCheckpoint


class Temperature(nn.Module):
    """Divides numbers by a constant."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value, dtype=torch.float32))  # a buffer, so that the digest has it

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns numbers of the same shape."""
        return numbers / self.get_buffer("value")


class Pointer(nn.Module):
    """Computes a query and a key of each row; where a row's last query meets a key, their product is the key's number.

    The products are made where all tokens of a row are at hand, in `scoring.pointer`.
    """

    def __init__(self, query: nn.Linear, key: nn.Linear, temperature: float) -> None:
        super().__init__()
        self.query = query
        self.key = key
        self.temperature = Temperature(temperature)

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Returns [R, 2 D]: queries over the temperature, then keys."""
        return torch.cat((self.temperature(self.query(hidden_RH)), self.key(hidden_RH)), dim=-1)


def check_declared_head(
    declaration: HeadDeclaration, folder: Path, config: Any, own: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    """Checks a declaration against the headers of its tensors and the model's tokenizer. It reads no weight.

    Args:
        declaration: The declaration.
        folder: The model's files.
        config: The configuration of transformers.
        own: The tensors of the model's files, which are read where the declaration names no file.

    Returns:
        The tensors by role.

    Raises:
        BadDeclaration: The declaration and its tensors do not fit each other or the model.
        BadCheckpoint: The file of its tensors is damaged.
    """
    headers = own if declaration.weights is None else _headers(declaration)
    names = dict(declaration.tensors)
    missing = [name for name in names.values() if name not in headers]
    if missing:
        where = declaration.weights or "the model's files"
        raise BadDeclaration(f"`model.head`: {declaration.file} names the tensor {missing[0]}, and {where} lack it.")
    _check_neighbours(declaration, headers)
    found = {role: headers[name] for role, name in names.items()}
    _check_shapes(declaration, found, int(config.get_text_config(decoder=True).hidden_size))
    if declaration.labels and len(declaration.labels) != found["weight"].shape[0]:
        raise BadDeclaration(
            f"`model.head`: `labels` in {declaration.file} must be the {found['weight'].shape[0]} labels of the rows "
            f"of {names['weight']}. Given: {len(declaration.labels)}."
        )
    _check_mark(declaration, folder / "tokenizer.json")
    return found


def make_declared_head(
    declaration: HeadDeclaration, folder: Path, config: Any, own: Mapping[str, TensorHeader] | None
) -> PoolingHead:
    """Returns the head of a declaration.

    Args:
        declaration: The declaration.
        folder: The model's files.
        config: The configuration of transformers.
        own: The tensors of the model's files; None for random weights.

    Raises:
        BadDeclaration, BadCheckpoint: See `check_declared_head`.
    """
    if own is None:
        raise BadDeclaration("`model.random_weights` must be false for a head that a file declares. Given: true.")
    headers = check_declared_head(declaration, folder, config, own)
    names = dict(declaration.tensors)
    values = {role: _value(header.file, names[role]) for role, header in headers.items()}
    layers, width = _layers(declaration, values)
    kind, encoder = declaration.kind, is_encoder(config)
    pooling = Pooling(declaration.reads) if kind is HeadKind.SEQUENCE else None
    labels = declaration.labels or tuple(f"LABEL_{index}" for index in range(width))  # as transformers names them
    info = HeadInfo(
        kind,
        width,
        () if kind is HeadKind.POINTER else labels,
        declaration.problem_type,
        encoder=encoder,
        whole_rows=encoder or pooling in (Pooling.MEAN, Pooling.CLS),
        mark=declaration.mark,
    )
    return PoolingHead(info, layers, pooling)


def _headers(declaration: HeadDeclaration) -> dict[str, TensorHeader]:
    file = Path(str(declaration.weights))
    if not file.is_file():
        raise BadDeclaration(
            f"`model.head`: `weights` in {declaration.file} must be a file. Given: {file}, and there is none."
        )
    return file_headers(file)


def _check_neighbours(declaration: HeadDeclaration, headers: Mapping[str, TensorHeader]) -> None:
    """Refuses a tensor beside a declared one, such as a bias, that the declaration would leave out."""
    names = {name for _, name in declaration.tensors}
    parents = {name.rpartition(".")[0] for name in names}
    left = sorted(name for name in headers if name not in names and name.rpartition(".")[0] in parents)
    if left:
        raise BadDeclaration(
            f"`model.head`: {declaration.file} leaves out {left[0]}, which stands beside {min(names)}: name it under "
            "`tensors`, or remove it from the file."
        )


def _check_shapes(declaration: HeadDeclaration, found: Mapping[str, TensorHeader], hidden: int) -> None:
    main = found["key_weight" if declaration.head == "pointer" else "weight"]
    width = main.shape[0] if main.shape else 0
    wanted = {
        "weight": (width, hidden), "bias": (width,), "norm_weight": (hidden,), "norm_bias": (hidden,),
        "query_weight": (width, hidden), "query_bias": (width,), "key_weight": (width, hidden), "key_bias": (width,),
    }  # fmt: skip
    for role, name in declaration.tensors:
        header = found[role]
        if header.shape != wanted[role] or not width:
            raise BadDeclaration(
                f"`model.head`: {name}, `{role}` in {declaration.file}, must have shape {list(wanted[role])}. "
                f"Given: {list(header.shape)}."
            )
        if header.dtype not in FLOATS:
            raise BadDeclaration(
                f"`model.head`: {name}, `{role}` in {declaration.file}, must be one of {', '.join(FLOATS)}. "
                f"Given: {header.dtype}."
            )


def _check_mark(declaration: HeadDeclaration, tokenizer: Path) -> None:
    if declaration.mark is None or not tokenizer.is_file():
        return
    if Tokenizer.from_file(str(tokenizer)).token_to_id(declaration.mark) is None:
        raise BadDeclaration(
            f"`model.head`: `mark` in {declaration.file} must be a token of {tokenizer}. Given: {declaration.mark}."
        )


def _value(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name).float()
    if not bool(torch.isfinite(found).all()):
        raise BadCheckpoint(f"{file} holds a number in {name} that is not finite. Download or export it again.")
    return found


def _layers(declaration: HeadDeclaration, values: Mapping[str, torch.Tensor]) -> tuple[nn.Module, int]:
    """Returns the layers, and how many numbers they give."""
    if declaration.head == "pointer":
        query = _linear(values["query_weight"], values.get("query_bias"))
        key = _linear(values["key_weight"], values.get("key_bias"))
        return Pointer(query, key, declaration.temperature), 2 * key.out_features
    linear = _linear(values["weight"], values.get("bias"))
    layers: list[nn.Module] = [linear, Temperature(declaration.temperature)]
    if declaration.head == "layernorm_linear":
        norm = nn.LayerNorm(linear.in_features, eps=declaration.norm_eps, bias="norm_bias" in values)
        norm.load_state_dict({name: values[f"norm_{name}"] for name in ("weight", "bias") if f"norm_{name}" in values})
        layers.insert(0, norm)
    return nn.Sequential(*layers), linear.out_features


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer
