"""Downloads a model's files for the service, which reaches out to nothing itself: `assay pull REPOSITORY@REVISION`."""

import argparse
import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from deployments.cli.arguments import reason

if TYPE_CHECKING:
    from engine.model.file_digests import FileRecord

PULLED, FAILED, WRONG = 0, 1, 2
ABOUT = """The files go into a folder: `model.path` of the configuration. Their digests are recorded there and verified
at each start. A download that was broken off continues where it was. HF_TOKEN and HF_ENDPOINT are read from the
environment. exit status: 0 everything is there; 1 the download failed, and may be tried again; 2 wrong arguments, or a
repository without what is needed."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "pull", help="download a model's safetensors, configurations and tokenizer", epilog=ABOUT
    )
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("model", metavar="REPOSITORY[@REVISION]", help="a branch, tag or commit; main if absent")
    option("-o", "--output", type=Path, metavar="FOLDER", help="where to (models/REPOSITORY)")
    option("--quiet", action="store_true", help="show no progress")


def run(given: argparse.Namespace) -> int:
    from httpx import HTTPError, TransportError
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    repository, _, revision = str(given.model).partition("@")
    folder: Path = given.output or Path("models") / repository.replace("/", "--")
    try:
        commit = pull(repository, revision or "main", folder, quiet=given.quiet)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        print(f"assay pull: {given.model} was not found, or needs a token in HF_TOKEN.", file=sys.stderr)
        return WRONG
    except (HFValidationError, NothingToPull) as error:
        print(f"assay pull: {_first_line(error)}", file=sys.stderr)
        return WRONG
    except (HfHubHTTPError, HTTPError, OSError) as error:
        unreached = isinstance(error, TransportError)
        why = f"{ENDPOINT} cannot be reached: {reason(error)}." if unreached else _first_line(error)
        print(f"assay pull: {why}\nRun the command again: it continues.", file=sys.stderr)
        return FAILED
    print(f"{repository} at {commit} is in {folder}. In the configuration:\n\nmodel:\n  path: {folder.resolve()}")
    return PULLED


class NothingToPull(ValueError):
    """The repository has no safetensors or no configuration."""


class BrokenDownload(OSError):
    """A file is not what the repository lists."""


def pull(repository: str, revision: str, folder: Path, *, quiet: bool = False) -> str:
    """Downloads the files of one commit into a folder and records their digests.

    Args:
        repository: The repository's id.
        revision: A branch, a tag or a commit; what it points to now is what is downloaded.
        folder: Where to. Files that are there already and complete are kept.
        quiet: Show no progress.

    Returns:
        The commit, 40 hexadecimal digits.

    Raises:
        NothingToPull: The repository has no safetensors or no config.json, or needs a pickle.
        BrokenDownload: A file has not the digest that the repository lists.
        OSError: The repository cannot be reached, or the folder not be written.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    from engine.model.file_digests import is_read, write_record

    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    files = [one for one in info.siblings or () if is_read(one.rfilename)]
    names = {one.rfilename for one in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        pickled = any(one.rfilename.endswith((".bin", ".pt", ".pth")) for one in info.siblings or ())
        why = "its weights are pickled, which can run code" if pickled else "it does not"
        raise NothingToPull(f"{repository} must hold config.json and *.safetensors: {why}.")
    (disable_progress_bars if quiet else enable_progress_bars)()
    commit = str(info.sha)
    records = {one.rfilename: _fetch(repository, commit, one, folder / one.rfilename) for one in files}
    write_record(folder, repository, commit, records)
    return commit


def _fetch(repository: str, commit: str, listed: Any, file: Path) -> "FileRecord":
    """Downloads one file, from where an earlier download of the same content stopped, and checks it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    from engine.model.file_digests import record_of

    digest = None if listed.lfs is None else listed.lfs.sha256  # git's own files have none
    if digest is not None and file.is_file() and record_of(file).sha256 == digest:
        return record_of(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{(digest or commit)[:12]}.part")
    with part.open("ab") as opened:
        _own(opened, part)
        if digest is None or (listed.size is not None and opened.tell() > listed.size):
            opened.truncate(0)  # nothing tells what it is of, or it is of nothing
        http_get(
            hf_hub_url(repository, listed.rfilename, revision=commit),
            opened,
            resume_size=opened.seek(0, os.SEEK_END),
            headers={**build_hf_headers(), "Accept-Encoding": "identity"},
            expected_size=listed.size,
            displayed_filename=listed.rfilename,
        )
        opened.flush()
        found = record_of(part)
        if digest not in (None, found.sha256):
            part.unlink()
            raise BrokenDownload(
                f"{listed.rfilename} has the SHA-256 {found.sha256}, and the repository lists {digest}."
            )
        part.replace(file)
    return found


def _own(opened: BinaryIO, part: Path) -> None:
    """Keeps other downloads off a file. Raises BrokenDownload where one is under way."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened.fileno()), part.stat()):  # else it has been renamed meanwhile
            return
    raise BrokenDownload(f"{part} is being written by another download.")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
