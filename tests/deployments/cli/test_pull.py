"""assay pull, against a registry on this machine that speaks the hub's protocol."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.check import model as check_model
from deployments.config.app_args import AppArgs
from engine.config import EngineConfig, ModelConfig
from engine.model.file_digests import RECORD, is_read, verify_files
from engine.model.loader import load_model
from engine.model.model_folder import BadCheckpoint
from tests.support import model_folders as folders

COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "1_LogitScore/config.json"}


class Registry:
    """Serves one repository from memory, and notes what is asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.wrong: str | None = None  # a file whose listed digest is not its own
        self.cut_at: int | None = None  # bytes of weights after which the connection breaks; later ones break at 0
        self.gets: list[tuple[str, str | None]] = []  # file and Range header
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                registry.answer(self, body=True)

            def do_HEAD(self) -> None:
                registry.answer(self, body=False)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, to: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = to.path.partition("?")[0]
        if path in (f"/api/models/org/tiny/revision/{name}" for name in ("v1", COMMIT)):
            self._json(to, {"id": "org/tiny", "sha": COMMIT, "siblings": [self._sibling(name) for name in self.files]})
        elif path.startswith(start := f"/org/tiny/resolve/{COMMIT}/") and path[len(start) :] in self.files:
            self._file(to, path[len(start) :], body)
        else:
            missing = {"X-Error-Code": "RevisionNotFound" if "/org/tiny/" in path else "RepoNotFound"}
            self._send(to, 404, b"", missing)

    def _sibling(self, name: str) -> dict[str, Any]:
        digest = "0" * 64 if name == self.wrong else hashlib.sha256(self.files[name]).hexdigest()
        size = len(self.files[name])
        lfs = {"sha256": digest, "size": size, "pointerSize": 130} if name.endswith((".safetensors", ".bin")) else None
        return {"rfilename": name, "size": size, "blobId": "b", "lfs": lfs}

    def _json(self, to: BaseHTTPRequestHandler, content: Any) -> None:
        self._send(to, 200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, to: BaseHTTPRequestHandler, name: str, body: bool) -> None:
        content = self.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        given = to.headers.get("Range")
        if not body:
            self._send(to, 200, content, headers, body=False)
            return
        self.gets.append((name, given))
        start = int(given.removeprefix("bytes=").split("-")[0]) if given else 0
        part = content[start:]
        if given:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.cut_at if name.endswith(".safetensors") else None
        self.cut_at = self.cut_at if cut is None else 0
        self._send(to, 206 if given else 200, part, headers, cut=cut)

    def _send(
        self,
        to: BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        headers: dict[str, str],
        *,
        body: bool = True,
        cut: int | None = None,
    ) -> None:
        to.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            to.send_header(name, value)
        to.end_headers()
        if body:
            to.wfile.write(content if cut is None else content[:cut])
        if cut is not None:
            to.close_connection = True


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry with a tiny Llama among files that are not read."""
    folder = folders.save(tmp_path / "published", folders.llama())
    found = Registry()
    found.files = {file.name: file.read_bytes() for file in folder.iterdir()}
    found.files |= {
        "tokenizer.json": b"{}", "1_LogitScore/config.json": b"{}", "modeling_tiny.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle", "README.md": b"", "onnx/model.safetensors": b"x",
        "consolidated.safetensors": b"x",
    }  # fmt: skip
    yield found
    found.close()


def pull(registry: Registry, folder: Path, model: str = "org/tiny@v1") -> subprocess.CompletedProcess[str]:
    """Runs the command as a user does: HF_ENDPOINT is read when a process starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "deployments.cli", "pull", model, "-o", str(folder)]
    return subprocess.run(
        command,
        env=environment
        | {"TQDM_POSITION": "-1"}  # progress is shown, though nothing is a terminal
        | {"HF_ENDPOINT": registry.url, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_files_of_one_commit_are_pulled_recorded_and_verified_at_each_start(registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = pull(registry, folder)
    assert done.returncode == 0, done.stderr
    assert COMMIT in done.stdout and f"path: {folder}" in done.stdout
    assert "100%" in done.stderr  # the progress bar
    assert {name for name, _ in registry.gets} == READ
    record = json.loads((folder / RECORD).read_text())
    assert (record["repository"], record["commit"]) == ("org/tiny", COMMIT)
    assert {name: one["sha256"] for name, one in record["files"].items()} == {
        name: hashlib.sha256(registry.files[name]).hexdigest() for name in READ
    }
    load = ModelConfig(path=folder, device="cpu")
    load_model(load, EngineConfig(kv_slots=128))
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=rf"another SHA-256.*assay pull org/tiny@{COMMIT}"):
        load_model(load, EngineConfig(kv_slots=128))
    weights.write_bytes(content[:-1] + registry.files["model.safetensors"][-1:])
    load_model(load, EngineConfig(kv_slots=128))


@pytest.mark.full
def test_a_file_has_one_writer_and_a_part_that_is_too_long_begins_anew(registry: Registry, tmp_path: Path) -> None:
    weights = registry.files["model.safetensors"]
    folder = tmp_path / "model"
    folder.mkdir()
    part = folder / f"model.safetensors.{hashlib.sha256(weights).hexdigest()[:12]}.part"
    part.write_bytes(bytes(len(weights) + 1))
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        found = pull(registry, folder)
        assert found.returncode == 1 and "is being written by another download" in found.stderr
    assert pull(registry, folder).returncode == 0
    assert (folder / "model.safetensors").read_bytes() == weights


@pytest.mark.full
def test_a_download_that_broke_off_continues(registry: Registry, tmp_path: Path) -> None:
    registry.files["model.safetensors"] += bytes(12 << 20)  # files are written in pieces of 10 MiB
    registry.cut_at = 11 << 20
    broken = pull(registry, tmp_path / "model")
    assert broken.returncode == 1 and "it continues" in broken.stderr
    assert not (tmp_path / "model" / RECORD).exists()
    registry.cut_at, registry.gets = None, []
    done = pull(registry, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    [(_, given)] = [one for one in registry.gets if one[0] == "model.safetensors"]
    assert given is not None and int(given.removeprefix("bytes=").rstrip("-")) == 10 << 20
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == registry.files["model.safetensors"]
    registry.gets = []
    assert pull(registry, tmp_path / "model").returncode == 0
    assert "model.safetensors" not in [name for name, _ in registry.gets]  # it is there


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "model", "status", "words"),
    [
        (lambda one: setattr(one, "wrong", "model.safetensors"), "org/tiny@v1", 1, "the repository lists 0000"),
        (lambda one: one.files.pop("model.safetensors"), "org/tiny@v1", 2, "pickled"),
        (lambda one: one.files.pop("config.json"), "org/tiny@v1", 2, "config.json"),
        (lambda one: None, "org/tiny@v2", 2, "v2"),
        (lambda one: None, "org/other", 2, "org/other"),
        (lambda one: None, "a/b/c", 2, "a/b/c"),
    ],
)
def test_what_cannot_be_pulled_is_refused_with_its_reason(
    registry: Registry, tmp_path: Path, change: Any, model: str, status: int, words: str
) -> None:
    change(registry)
    done = pull(registry, tmp_path / "model", model)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "model" / RECORD).exists()


def test_a_host_that_cannot_be_reached_is_named(registry: Registry, tmp_path: Path) -> None:
    address = registry.url
    registry.close()
    done = pull(registry, tmp_path / "model")
    assert done.returncode == 1
    assert done.stderr.startswith(f"assay pull: {address} cannot be reached: Connection refused.\nRun"), done.stderr


def recorded(tmp_path: Path) -> Path:
    from engine.model.file_digests import record_of, write_record

    folder = folders.save(tmp_path / "model", folders.llama())
    write_record(folder, "org/tiny", COMMIT, {file.name: record_of(file) for file in folder.iterdir()})
    return folder


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda at: folders.edit_config(at, hidden_act="gelu"), "config.json has"),
        (lambda at: (at / "generation_config.json").unlink(), "generation_config.json is missing"),
        (lambda at: folders.write_json(at, "tokenizer.json", {}), "tokenizer.json is not in"),
        (lambda at: folders.cut_off(at), "model.safetensors has"),
        (lambda at: folders.write_json(at, RECORD, {"files": 3}), "must list files"),
    ],
)
def test_changed_files_are_found_by_start_and_check(tmp_path: Path, change: Any, why: str) -> None:
    folder = recorded(tmp_path)
    verify_files(folder, weights=True)
    change(folder)
    with pytest.raises(BadCheckpoint, match=why):
        verify_files(folder, weights=True)
    args = AppArgs.model_validate({"model": {"path": str(folder)}})
    _, findings = check_model.check(args, "args")
    assert any(one.level == "error" for one in findings)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model-00001-of-00002.safetensors", True), ("model.safetensors.index.json", True), ("vocab.txt", True),
        ("1_Pooling/config.json", True), ("2_Dense/model.safetensors", True), ("chat_template.jinja", True),
        ("modeling_x.py", False), ("pytorch_model.bin", False), ("onnx/config.json", False),
        ("1_Pooling/modeling.py", False), ("consolidated.safetensors", False), ("training_args.bin", False),
        ("a/1_Pooling/config.json", False), ("model.gguf", False),
    ],
)  # fmt: skip
def test_code_pickles_and_second_copies_are_not_pulled(name: str, read: bool) -> None:
    assert is_read(name) is read
