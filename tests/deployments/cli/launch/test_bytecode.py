"""Bytecode is kept for the processes of a service, where Python would not keep it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli.launch import bytecode, local_serve

LIBRARY = "a_library_of_sources"


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library without bytecode, in a process that writes none; the changes of the process end with the test."""
    folder = tmp_path / "sources" / LIBRARY
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 1\n", "utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(bytecode.NOT_WRITTEN, "1")
    monkeypatch.delenv(bytecode.PREFIX, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


def kept_in(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "assay" / "bytecode"


def keeps(tmp_path: Path) -> bool:
    """Calls `keep`; tells whether it changed anything, which is all of it or nothing."""
    bytecode.keep(LIBRARY)
    folder = str(kept_in(tmp_path))
    changed = {
        os.environ.get(bytecode.PREFIX) == folder,
        bytecode.NOT_WRITTEN not in os.environ,
        sys.pycache_prefix == folder,
        kept_in(tmp_path).exists(),
    }
    assert len(changed) == 1
    return changed.pop()


def test_a_process_that_starts_later_finds_what_the_first_one_compiled(tmp_path: Path, library: Path) -> None:
    assert keeps(tmp_path) and not sys.dont_write_bytecode
    assert kept_in(tmp_path).stat().st_mode & 0o077 == 0, "others could put code there"
    command = [sys.executable, "-c", f"import {LIBRARY} as one; print(one.__cached__)"]
    environment = os.environ | {"PYTHONPATH": str(library.parent)}
    for _ in range(2):
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        kept = Path(said.strip())
        assert kept.is_relative_to(kept_in(tmp_path)) and kept.is_file()
        (library / "__init__.py").touch()  # Python compiles again what has changed
    assert not (library / "__pycache__").exists()


def test_a_library_that_was_compiled_needs_nothing(tmp_path: Path, library: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(library)], check=True)
    assert not keeps(tmp_path)


def test_where_python_can_write_beside_the_sources_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not keeps(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a read-only file system, also for root
    assert keeps(tmp_path)


def test_a_folder_that_the_environment_names_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bytecode.PREFIX, "/elsewhere")
    assert not keeps(tmp_path)


@pytest.mark.parametrize("missing", ["library", "folder", "home"])
def test_a_missing_library_or_folder_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "library":
        bytecode.keep("no_such_library")
    elif missing == "folder":
        (tmp_path / "cache").write_text("a file", "utf-8")
        bytecode.keep(LIBRARY)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", _no_home)
        bytecode.keep(LIBRARY)
    assert bytecode.PREFIX not in os.environ and os.environ[bytecode.NOT_WRITTEN] == "1" and sys.dont_write_bytecode


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_service_keeps_it_from_its_first_process_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str | None]()
    monkeypatch.setattr(bytecode, "_is_kept", lambda library: False)
    monkeypatch.setattr(local_serve.LocalService, "refuse", lambda service: None)
    monkeypatch.setattr(local_serve.LocalService, "run", lambda service: seen.append(os.environ.get(bytecode.PREFIX)))
    (tmp_path / "c.yaml").write_text("applications: []\n", "utf-8")
    assert local_serve.serve(tmp_path / "c.yaml") == local_serve.STARTED
    assert seen == [str(kept_in(tmp_path))]
