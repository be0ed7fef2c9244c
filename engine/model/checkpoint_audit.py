"""Finds out whether a folder holds the weights of the model that its config.json describes. It reads no weight.

transformers draws missing weights at random and drops weights that it has no place for. Every later check compares the
model with itself, so neither would be seen. Start-up and `assay check` both audit the files first: the headers of the
safetensors are compared with the model, which is built without memory on the `meta` device, by transformers' own rules
for renaming and merging tensors.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from engine.model.architectures import NO_TENSOR, ArchitectureKind, architectures_of, find_kind
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.info import HeadKind
from engine.model.model_folder import LFS_POINTER, BadCheckpoint, read_json, refuse_pointer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
META = torch.device("meta")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_NAMED = 3  # tensors in a message
MODULES_OF_SCORES = ("Transformer", "LogitScore")  # of sentence-transformers: the model itself, and a reader of logits

# Tensors that a file may hold though the model has no place for them: (pattern, why nothing is lost).
UNUSED_TENSORS = (
    (r"rotary_emb\.(original_)?inv_freq$", "computed from config.json"),
    (r"(^|\.)position_ids$", "counts from zero"),
    (r"\.(attn|attention)\.(bias|masked_bias)$", "the causal mask of old GPT-2 and GPT-NeoX files"),
    (r"(^|\.)mtp(_layers)?\.", "multi-token prediction, for drafts alone"),
    (r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|image_newline|multi_modal_projector)(\.|$)", "images"),
    (r"(^|\.)(audio_tower|audio_model|embed_audio|embed_vision)(\.|$)", "sound and images"),
)


class TensorHeader(NamedTuple):
    """Describes one tensor of a safetensors file."""

    file: Path
    dtype: str  # as the format spells it, such as BF16
    shape: tuple[int, ...]


class CheckpointAudit(NamedTuple):
    """Holds what an audit found beside faults."""

    elements: int  # of all weights that the model keeps in memory, tied ones once
    tied: tuple[tuple[str, str], ...]  # (weight, the weight that it is the same as)


# Files


def read_headers(folder: Path, config: Any = None) -> dict[str, TensorHeader]:
    """Reads the headers of the safetensors that transformers would load.

    Args:
        folder: The model's files.
        config: The configuration of transformers, which may name the file (`transformers_weights`).

    Returns:
        The tensors by name.

    Raises:
        BadCheckpoint: A file is missing, damaged, or only the pointer that git-lfs leaves.
    """
    headers: dict[str, TensorHeader] = {}
    shards, listed = _shards(folder, getattr(config, "transformers_weights", None))
    for file in shards:
        headers |= file_headers(file)
    lacking = [name for name, file in listed.items() if name not in headers or headers[name].file.name != file]
    if lacking:
        raise BadCheckpoint(f"{folder / INDEX} lists {_named(lacking)} in a file that does not hold it. {DOWNLOAD}")
    return headers


DOWNLOAD = "Download or export the model again."


def _shards(folder: Path, named: str | None) -> tuple[list[Path], dict[str, str]]:
    """Returns the files to read, and the tensors that an index lists with the names of their files."""
    first = next((name for name in (named, SINGLE, INDEX) if name and (folder / name).is_file()), None)
    if first is None:
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        raise BadCheckpoint(
            f"`model.path` must hold {named or f'{SINGLE} or {INDEX}'}. Given: {folder}, with {', '.join(others)}."
        )
    if not first.endswith(".json"):
        return [folder / first], {}
    listed = read_json(folder / first).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise BadCheckpoint(f"{folder / first} must have a `weight_map` from tensors to files. {DOWNLOAD}")
    names = sorted(set(map(str, listed.values())))
    wrong = [name for name in names if not name.endswith(".safetensors") or Path(name).name != name]
    if wrong:
        raise BadCheckpoint(f"{folder / first} must list *.safetensors of its own folder. Given: {wrong[0]}.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadCheckpoint(
            f"{folder} lacks {missing[0]}, one of {len(missing)} missing of {len(names)} files in {first}. {DOWNLOAD}"
        )
    return [folder / name for name in names], {str(tensor): str(file) for tensor, file in listed.items()}


def file_headers(file: Path) -> dict[str, TensorHeader]:
    """Reads the header of one safetensors file. Raises BadCheckpoint for one that is damaged or a pointer."""
    with file.open("rb") as start:
        refuse_pointer(file, start.read(len(LFS_POINTER)))
    try:
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            return {
                name: TensorHeader(file, str(one.get_dtype()), tuple(one.get_shape())) for name, one in slices.items()
            }
    except SafetensorError as error:
        raise BadCheckpoint(
            f"{file} is damaged or cut off ({file.stat().st_size} bytes; {str(error).rstrip('.')}). {DOWNLOAD}"
        ) from None


# The folder's kind


def audit_folder(folder: Path, config: Any) -> None:
    """Checks that the folder is that of a model whose own head this build serves.

    Args:
        folder: The model's files.
        config: The configuration of transformers.

    Raises:
        UnsupportedModel: An architecture that is not served; an adapter beside the weights; an embedding model.
        BadCheckpoint: A file of the folder cannot be read.
    """
    find_kind(config)
    name = ", ".join(architectures_of(config)) or str(config.model_type)
    adapter = next((file for file in ADAPTER_FILES if (folder / file).is_file()), None)
    if adapter is not None:
        raise UnsupportedModel(
            name,
            f"an adapter stands beside its weights ({adapter}) and would be ignored; merge it into the weights, or "
            "remove its files to serve the model without it",
        )
    others = [kind for kind in _sentence_modules(folder) if kind not in MODULES_OF_SCORES]
    if others and find_kind(config).head is not HeadKind.POOLED:
        raise UnsupportedModel(
            name,
            f"its modules.json makes it an embedding model ({', '.join(others)}), whose other heads have no meaning; "
            "set `model.head` to auto or pooled, or remove the file",
        )


def _sentence_modules(folder: Path) -> list[str]:
    """Returns the classes of the chain that sentence-transformers would run."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        return [str(one["type"]).rpartition(".")[2] for one in json.loads(file.read_bytes())]
    except (ValueError, TypeError, KeyError):
        raise BadCheckpoint(f"{file} must be a list of objects with a `type`. {DOWNLOAD}") from None


def explain_other_weights(folder: Path) -> str | None:
    """Returns what a folder without a model of its own holds, and what to do; None where nothing in it says so."""
    if (folder / ADAPTER_FILES[0]).is_file():
        base = read_json(folder / ADAPTER_FILES[0]).get("base_model_name_or_path")
        return f"It holds an adapter of {base}: merge it into that model, and serve the merged folder."
    if any(folder.glob("*.gguf")):
        return "It holds GGUF files of llama.cpp, which are not read: serve the model's safetensors."
    return None


# Weights


def audit_weights(folder: Path, config: Any) -> CheckpointAudit:
    """Checks that the files hold every weight of the model and nothing that changes its answers.

    Args:
        folder: The model's files.
        config: The configuration of transformers, which passed `audit_folder`.

    Returns:
        The model's size and its tied weights.

    Raises:
        BadCheckpoint: Names the architecture, the tensors and the remedy.
    """
    headers = read_headers(folder, config)
    audit = compare(headers, config)
    for one, other in audit.tied:
        if one in headers and other in headers and not _equal(headers[one].file, one, headers[other].file, other):
            raise BadCheckpoint(
                f"`{_class_name(config)}` in {folder}: config.json ties {one} to {other} (tie_word_embeddings), "
                "and the files hold different values. Set it to false if it was trained so, or remove the former."
            )
    return audit


def compare(headers: Mapping[str, TensorHeader], config: Any) -> CheckpointAudit:
    """Compares tensors with those of the model that a configuration describes; see `audit_weights`."""
    _refuse_packed(headers, config)
    kind = find_kind(config)
    with META:
        model = kind.loaded_by.from_config(copy.deepcopy(config), dtype=torch.bfloat16, trust_remote_code=False)
    clashes = _clashes(headers, model)
    tensors = {
        name: torch.empty(one.shape, dtype=FLOATS.get(one.dtype, torch.uint8), device=META)
        for name, one in headers.items()
    }
    plan = LoadStateDictConfig(
        device_map={"": META}, dtype=torch.bfloat16, weight_mapping=get_model_conversion_mapping(model)
    )
    with _quiet():
        info, _ = convert_and_load_state_dict_in_model(model, tensors, plan)
    tied = tuple(model.all_tied_weights_keys.items())
    optional = re.compile(kind.optional_tensors)
    missing = _truly_missing(info.missing_keys - info.conversion_errors.keys(), tied)
    missing = [name for name in missing if not optional.search(name)]
    missing += [name for name in kind.required if name not in headers]
    unexpected = _truly_unexpected(info.unexpected_keys, model, kind.head_tensors)
    faults = [*_faults(missing, unexpected, info), *_head_faults(kind, headers, config), *clashes]
    if faults:
        raise BadCheckpoint(
            f"`{_class_name(config)}` in {_folder(headers)}: {'; '.join(faults)}. The files are incomplete, or "
            "config.json describes another model: download or export both again."
        )
    weights = {name: one.numel() for name, one in model.named_parameters()}
    return CheckpointAudit(sum(weights.values()) - sum(weights.get(one, 0) for one, _ in tied), tied)


def check_loading_info(info: Mapping[str, Any], module: Any, head_tensors: str = NO_TENSOR) -> None:
    """Checks what transformers reports of a load, and that tied weights are one tensor.

    Args:
        info: transformers' `output_loading_info`.
        module: The model that was loaded.
        head_tensors: `ArchitectureKind.head_tensors`.

    Raises:
        BadCheckpoint: A weight was not in the files, or was left out.
    """
    found = {
        "missing": sorted(info["missing_keys"]),
        "left out": _truly_unexpected(info["unexpected_keys"], module, head_tensors),
        "of another shape": sorted(str(name) for name, *_ in info["mismatched_keys"]),
    }
    faults = [f"{_named(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in found.items() if names]
    weights = dict(module.named_parameters(remove_duplicate=False))
    for one, other in module.get_expanded_tied_weights_keys(all_submodels=True).items():
        if one in weights and other in weights and weights[one] is not weights[other]:
            faults.append(f"{one} is not tied to {other}")
    if faults:
        raise BadCheckpoint(f"`{type(module).__name__}` was not loaded as its files say: {'; '.join(faults)}.")


def _refuse_packed(headers: Mapping[str, TensorHeader], config: Any) -> None:
    packed = [name for name, one in headers.items() if name.endswith(".weight") and one.dtype not in FLOATS]
    if packed:
        first = packed[0]
        raise BadCheckpoint(
            f"`{_class_name(config)}` in {_folder(headers)}: weights must be one of {', '.join(FLOATS)}, and {first} "
            f"is {headers[first].dtype}, as quantised ones are. config.json has no `quantization_config`. {DOWNLOAD}"
        )


def _truly_missing(missing: Iterable[str], tied: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the missing weights, without those that are the same as one that is there."""
    found, groups = set(missing), dict[str, set[str]]()
    for one, other in tied:
        groups.setdefault(other, {other}).add(one)
    for group in groups.values():
        if group - found:
            found -= group
    return sorted(found)


def _truly_unexpected(unexpected: Iterable[str], model: Any, head_tensors: str) -> list[str]:
    """Returns the tensors without a place in the model or its head whose loss changes its answers, or may."""
    own = model._keys_to_ignore_on_load_unexpected or ()  # what transformers knows of this class
    patterns = (*(one for one, _ in UNUSED_TENSORS), head_tensors, *own)
    unused = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return sorted(name for name in unexpected if not unused.search(name))


def _faults(missing: list[str], unexpected: list[str], info: Any) -> Iterator[str]:
    if missing:
        yield f"the files lack {_named(missing)}"
    if unexpected:
        yield f"they hold {_named(unexpected)}, which the model has no place for"
    if info.mismatched_keys:
        name, held, wanted = min(info.mismatched_keys)
        more = f" and {len(info.mismatched_keys) - 1} more" if len(info.mismatched_keys) > 1 else ""
        yield f"{name}{more} has shape {list(held)} in the files and {list(wanted)} by config.json"
    if info.conversion_errors:
        yield f"{_named(sorted(info.conversion_errors))} cannot be put together from the tensors of the files"


def _head_faults(kind: ArchitectureKind, headers: Mapping[str, TensorHeader], config: Any) -> Iterator[str]:
    """Finds tensors of a head of two layers that do not fit: the last one says how many numbers it gives."""
    if not kind.required or not all(name in headers for name in kind.required):
        return
    hidden, width = int(config.hidden_size), headers[kind.required[-1]].shape[0]
    for name, shape in zip(kind.required, ((hidden, hidden), (hidden,), (width, hidden), (width,)), strict=True):
        if headers[name].shape != shape:
            yield f"{name} has shape {list(headers[name].shape)} in the files and must have {list(shape)}"


def _clashes(headers: Mapping[str, TensorHeader], model: Any) -> list[str]:
    """Finds tensors that would take one place: a weight stored under two names, or a list of experts with gaps.

    transformers takes the first of the former, and counts the latter in the order of their numbers.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    state, places = model.state_dict(), dict[tuple[str, str | None], list[str]]()
    for name in headers:
        place = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        places.setdefault(place, []).append(name)
    found = []
    for (place, pattern), names in places.items():
        if place not in state or len(names) == 1:
            continue
        first, *_, last = sorted(names, key=_natural)
        if pattern is None:
            found.append(f"{first} and {last} are both {place}")
        elif not _is_a_list(names):
            found.append(f"{first} to {last} are a list with gaps, for {place}")
    return found[:1]  # the others are like it


def _natural(name: str) -> list[str]:
    """Returns a key that sorts numbers by value."""
    return [part.rjust(12, "0") if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _is_a_list(names: list[str]) -> bool:
    """Returns whether names differ in one number, which counts from zero."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if len(set(map(len, parts))) != 1:
        return False
    differ = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return len(differ) == 1 and sorted(int(one) for one in differ[0] if one.isdigit()) == list(range(len(names)))


def _equal(first: Path, one: str, second: Path, other: str) -> bool:
    """Returns whether two tensors of files hold the same values. It reads them: few files store a tied head."""
    with safe_open(first, "pt") as left, safe_open(second, "pt") as right:
        return torch.equal(left.get_tensor(one), right.get_tensor(other))


def _named(names: list[str]) -> str:
    """Lists the first few names."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _class_name(config: Any) -> str:
    return ", ".join(architectures_of(config)) or str(config.model_type)


def _folder(headers: Mapping[str, TensorHeader]) -> str:
    return str(next(iter(headers.values())).file.parent) if headers else "an empty file"


@contextmanager
def _quiet() -> Iterator[None]:
    """Shows no progress bar of transformers inside: nothing is loaded."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
