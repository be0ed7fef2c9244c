"""Finds a model's folder and reads the JSON in it, without torch: an ingress imports it too."""

import json
import re
from pathlib import Path
from typing import Any

from engine.builtin import BUILTIN_FOLDERS
from engine.config import ModelConfig

BUILTIN = BUILTIN_FOLDERS["builtin"]
BUILTIN_DRAFT = BUILTIN.parent / "draft"
REVISION = re.compile(r"[0-9a-f]{40}")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_ERROR = 300  # characters of another library's message


class BadCheckpoint(ValueError):
    """The files of a model are damaged, incomplete, or those of another model."""


class ModelNotFound(ValueError):
    """`model.path` or `model.revision` names nothing that can be read."""


def find_folder(model: ModelConfig) -> Path:
    """Returns the folder of the model's files. It downloads nothing.

    Raises:
        ModelNotFound: There is no such folder.
    """
    if (builtin := BUILTIN_FOLDERS.get(str(model.path))) is not None:
        return builtin
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    if model.revision is None or not REVISION.fullmatch(model.revision):
        raise ModelNotFound(
            "`model.path` must be a folder, or a repository id with `model.revision` of 40 hexadecimal digits. "
            f"There is no folder {model.path}; `assay pull` downloads one. "
            f"Given: {model.path}, revision {model.revision}."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model.path), revision=model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"`model.path` must be in the local cache at `model.revision`. Given: {model.path}, {model.revision}."
        ) from error


def find_draft_folder(draft: ModelConfig) -> Path:
    """Returns the folder of a draft model: `builtin` is the one that belongs to the built-in model.

    Raises:
        ModelNotFound: There is no such folder.
    """
    return BUILTIN_DRAFT if str(draft.path) == "builtin" else find_folder(draft)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        BadCheckpoint: The file is no JSON object; names the file, the line and the column.
    """
    text = file.read_bytes()
    refuse_pointer(file, text)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadCheckpoint(f"{file} must be JSON: {error.msg}, line {error.lineno}, column {error.colno}.") from None
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{file} must be JSON in UTF-8: {error.reason} at byte {error.start}.") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{file} must be a JSON object. Given: {type(found).__name__}.")
    return found


def one_line(error: Exception) -> str:
    """Returns another library's message in one line of at most MAX_ERROR characters."""
    return " ".join(str(error).split())[:MAX_ERROR].rstrip(".:") or type(error).__name__


def refuse_pointer(file: Path, start: bytes) -> None:
    """Raises BadCheckpoint for a file that begins as the pointer that git-lfs leaves."""
    if start.startswith(LFS_POINTER):
        raise BadCheckpoint(f"{file} is a git-lfs pointer and not the file itself: run `git lfs pull` in its folder.")
