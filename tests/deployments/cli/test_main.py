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
from deployments.cli.main import main

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
