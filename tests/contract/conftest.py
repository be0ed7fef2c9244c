"""Real clients against a running service: one virtual environment a client, since their pins conflict.

Run by `make contract`. Without `-m contract` this folder is not even looked at: it installs packages and starts a
server. ASSAY_CONTRACT_URL names one that runs already.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = ROOT / "deployments" / "configs" / "cpu.yaml"
VENVS = Path(os.environ.get("ASSAY_CONTRACT_VENVS", ROOT / ".contract"))
START_S = 180.0
CLIENT_S = 240.0

Client = Callable[..., Any]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True: ignored, unless the markers that were asked for are ours."""
    return True if str(config.getoption("markexpr")) != "contract" else None


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The CPU configuration, served by itself on a free port."""
    if "ASSAY_CONTRACT_URL" in os.environ:
        yield os.environ["ASSAY_CONTRACT_URL"]
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    config["http_options"]["port"] = port
    file = tmp_path_factory.mktemp("serve") / "config.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    log = file.with_name("log.txt")
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "deployments.serving", str(file)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the test run is ours to pass on
        )
    found = f"http://127.0.0.1:{port}"
    try:
        _wait(found, server, log)
        yield found
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def _wait(found: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with opener.open(f"{found}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise RuntimeError("The service did not become ready:\n" + log.read_text("utf-8")[-4000:])


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """`python_of(client)`: the interpreter of an environment made of `requirements/<client>.txt`, kept between runs."""

    def make(client: str) -> Path:
        requirements = HERE / "requirements" / f"{client}.txt"
        digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
        folder = VENVS / f"{client}-{digest}"
        python, stamp = folder / "bin" / "python", folder / ".complete"
        if not stamp.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            quiet = ["--disable-pip-version-check", "-q", "-r", str(requirements)]
            subprocess.run([str(python), "-m", "pip", "install", *quiet], check=True)
            stamp.touch()
        return python

    return make


@pytest.fixture(scope="session")
def run_client(python_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Client:
    """`run_client(client, arguments)`: runs `clients/<client>.py` in its environment; what it writes as its answer.

    Both ways JSON: the script gets a file with `arguments` and the name of the file for its answer.
    """

    def run(client: str, arguments: dict[str, Any]) -> Any:
        folder = tmp_path_factory.mktemp(client)
        given, answer = folder / "arguments.json", folder / "answer.json"
        given.write_text(json.dumps(arguments), "utf-8")
        names = ("PATH", "HOME", "LANG", "TMPDIR")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "NO_PROXY": "*"}
        done = subprocess.run(
            [str(python_of(client)), str(HERE / "clients" / f"{client}.py"), str(given), str(answer)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads(answer.read_text("utf-8"))

    return run
