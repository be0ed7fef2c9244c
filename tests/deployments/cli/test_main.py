"""The `assay` command itself: its version, its help, and what it can do without the service's packages."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from deployments.cli.launch import local_serve
from deployments.cli.main import READER_GONE, main

LIGHT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from deployments.cli.main import main
import deployments.cli.bench.runner, deployments.cli.score_files.command, deployments.cli.score_files.routes
sys.exit(main(sys.argv[1:]))
"""
CLIENT = {"numpy", "aiohttp", "pydantic", "psutil", "pyyaml", "urllib3"}
OF_THE_SERVICE = ("torch", "ray", "transformers", "tokenizers", "safetensors", "fastapi", "starlette", "msgspec",
                  "prometheus_client", "jinja2", "uvicorn", "httpx", "huggingface_hub",
                  "pyarrow")  # fmt: skip


def light(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `assay` where the packages of the service are not installed."""
    script = LIGHT.replace("{names}", repr(OF_THE_SERVICE))
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"assay {metadata.version('assay-serve')}\n"


def test_alone_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    found = capsys.readouterr().out
    assert found.startswith("usage: assay") and all(f"\n    {verb} " in found for verb in ("serve", "check", "score"))


def test_a_client_needs_neither_torch_nor_ray() -> None:
    made = light("keys", "new", "crawler")
    assert made.returncode == 0 and '"name": "crawler"' in made.stdout
    for verb in ("score", "bench"):
        assert light(verb, "--help").returncode == 0


def test_the_service_says_what_to_install() -> None:
    for verb in (["serve"], ["check", "x.yaml"], ["pull", "org/model"], ["warm", "x.yaml"]):
        found = light(*verb)
        assert found.returncode == 2
        assert "is not installed: pip install 'assay-serve[serve]'" in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [([], ""), (["serve", "--help"], ""), (["check", "{config}"], ""), (["env"], "1")]
)
def test_output_that_is_cut_off_ends_without_a_traceback(arguments: list[str], unbuffered: str) -> None:
    """As `assay ... | head` cuts it. The output may be written as the command ends, or line by line."""
    command = [sys.executable, "-m", "deployments.cli", *(one.format(config=local_config()) for one in arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def local_config() -> Path:
    return Path(local_serve.__file__).parents[2] / "configs" / "cpu.yaml"


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(local_serve, "serve", broken)
    with pytest.raises(BrokenPipeError):
        main(["serve"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["bench", "--rates", "x"], "must be a number. Given: x."),
        (["bench", "--concurrency", "1,"], "must be a whole number. Given: nothing."),
        (["bench", "--seed", "x"], "must be a whole number. Given: x."),
        (["score", "a.jsonl", "-o", "-", "--patience", "x"], "must be a number. Given: x."),
        (["score", "a.jsonl", "-o", "-", "--label-token-ids", "1,a"], "must be a whole number. Given: a."),
        (["keys", "new", "a", "--days", "x"], "must be a number. Given: x."),
    ],
)
def test_what_is_no_number_is_refused_in_plain_words(
    option: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(option)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith(f"{words}\n") and "invalid" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file or directory."),
        ("a: [", "expected the node content, but found '<stream end>', line 1, column 5."),
        ("a: 2024-13-45", "month must be in 1..12."),
        ("a: \0", "unacceptable character #x0000: special characters are not allowed"),
        (b"\xff", "it is not UTF-8."),
    ],
)
@pytest.mark.parametrize("verb", ["check", "serve"])
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    verb: str, text: str | bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main([verb, str(file)])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"assay {verb}: {file} must be ") and words in line and "Err" not in line


def test_the_help_of_score_and_bench_names_the_variable_of_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("score", "bench"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert "ASSAY_API_KEY" in capsys.readouterr().out


def test_what_is_installed_with_no_extra_is_what_a_client_imports() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    names = {re.split(r"[<>=\[]", one)[0] for one in project["dependencies"]}
    assert names == CLIENT
    assert {re.split(r"[<>=\[]", one)[0] for one in project["optional-dependencies"]["serve"]} >= {"torch", "ray"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_start_lets_it_end_what_it_began(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def starting(*_: object, **__: object) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            ended.append(number)
        return 0

    monkeypatch.setattr(local_serve, "serve", starting)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt):
            main(["serve"])
        assert ended == [number] and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
