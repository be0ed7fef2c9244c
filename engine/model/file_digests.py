"""Records the SHA-256 of a model's files where `assay pull` puts them, and verifies them at each start.

A folder without a record is served as it is: its files came another way.
"""

import hashlib
import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from engine.model.model_folder import BadCheckpoint, read_json

RECORD = "assay-digests.json"
WEIGHTS = ".safetensors"
TRANSFORMER_FILES = tuple(  # of sentence-transformers, which reads the first that says something
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Everything that is read of a model's folder: weights, configurations, tokenizer. Code and pickles never are.
READ_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
    *TRANSFORMER_FILES,
    "modules.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
MODULE_FOLDERS = "[0-9]_*"  # of sentence-transformers' modules
MODULE_FILES = ("config.json", "model.safetensors")
SECOND_COPIES = "consolidated*"  # the same weights in another layout


class FileRecord(NamedTuple):
    """Describes one file."""

    sha256: str
    size: int  # bytes


def is_read(name: str) -> bool:
    """Returns whether a file may be read to serve a model. `name` is its path in the model's folder."""
    folder, _, file = name.rpartition("/")
    if folder:
        return "/" not in folder and fnmatch(folder, MODULE_FOLDERS) and file in MODULE_FILES
    return any(fnmatch(name, pattern) for pattern in READ_FILES) and not fnmatch(name, SECOND_COPIES)


def record_of(file: Path) -> FileRecord:
    """Reads a file to its end and describes it."""
    with file.open("rb") as opened:
        return FileRecord(hashlib.file_digest(opened, "sha256").hexdigest(), file.stat().st_size)


def write_record(folder: Path, repository: str, commit: str, files: dict[str, FileRecord]) -> None:
    """Writes the record of a folder."""
    found = {name: one._asdict() for name, one in sorted(files.items())}
    content = {"repository": repository, "commit": commit, "files": found}
    (folder / RECORD).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def verify_files(folder: Path, *, weights: bool) -> None:
    """Compares a folder's files with its record, if it has one.

    Args:
        folder: The model's files.
        weights: Whether weights are read to their ends; else their sizes are compared.

    Raises:
        BadCheckpoint: A file differs, is missing, or is read and not in the record.
    """
    if not (folder / RECORD).is_file():
        return
    content = read_json(folder / RECORD)
    remedy = f"Run `assay pull {content.get('repository')}@{content.get('commit')} -o {folder}` again."
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise BadCheckpoint(f"{folder / RECORD} must list files with their digests. {remedy}")
    for name, listed in files.items():
        problem = _problem(folder / name, listed, weights or not name.endswith(WEIGHTS))
        if problem:
            raise BadCheckpoint(f"{folder / name} {problem} {remedy}")
    added = sorted(name for name in _names(folder) if name not in files)
    if added:
        raise BadCheckpoint(f"{folder / added[0]} is not in {RECORD}: remove it. {remedy}")


def _problem(file: Path, listed: Any, whole: bool) -> str | None:
    if not file.is_file():
        return f"is missing, and {RECORD} lists it."
    size = listed.get("size") if isinstance(listed, dict) else None
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes, and {RECORD} says {size}."
    if whole and record_of(file).sha256 != listed.get("sha256"):
        return f"has another SHA-256 than {RECORD} says."
    return None


def _names(folder: Path) -> Iterator[str]:
    """Yields the files of a folder that may be read."""
    for file in (*folder.glob("*"), *folder.glob(f"{MODULE_FOLDERS}/*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and is_read(name):
            yield name
