"""A configuration of ours, served by a process of its own on a free port: as `make serve` does it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "deployments" / "configs"
READY_S = 480.0  # a busy machine takes minutes for two applications
END_S = 60.0
# `ASSAY_CHAOS_LINK=off`: the services of tests send every call over Serve's handle.
CHOSEN_LINK: dict[str, dict[str, Any]] = (
    {"router": {"link": os.environ["ASSAY_CHAOS_LINK"]}} if "ASSAY_CHAOS_LINK" in os.environ else {}
)


@contextlib.contextmanager
def served(
    name: str,
    folder: Path,
    ready_s: float = READY_S,
    environment: Mapping[str, str] | None = None,
    **sections: dict[str, Any],
) -> Iterator[str]:
    """The service's address, once it is ready. `sections` change those of the configuration `name`; `folder` gets the
    file and the log. RuntimeError with the log's end if it is not ready after `ready_s`."""
    file, port = on_a_free_port(name, folder, **sections)
    with serving(file, f"http://127.0.0.1:{port}", ready_s=ready_s, environment=environment) as url:
        yield url


@contextlib.contextmanager
def serving(
    file: Path,
    url: str,
    *,
    prefixes: Sequence[str] = ("",),
    ready_s: float = READY_S,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """`url`, once the applications of a configuration are ready; the log stands beside the file."""
    log = file.parent / "log.txt"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "serve", str(file)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": _with(ROOT), "RAY_AUTH_MODE": "disabled"} | dict(environment or {}),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the test run is ours to pass on
        )
    try:
        for prefix in prefixes:
            _wait(url + prefix, server, log, ready_s)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(END_S)


def on_a_free_port(name: str, folder: Path, **sections: dict[str, Any]) -> tuple[Path, int]:
    """A file in `folder` with the configuration `name`, some of its sections changed; and its port."""
    port = free_port()
    config = yaml.safe_load((CONFIGS / name).read_text("utf-8"))
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    for section, fields in (CHOSEN_LINK | sections).items():
        args[section] = args.get(section, {}) | fields
    file = folder / name
    file.write_text(yaml.safe_dump(config), "utf-8")
    return file, port


def _with(root: Path) -> str:
    """Packages may have been put on the path, too."""
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path, ready_s: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + ready_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with opener.open(f"{url}/readyz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # an URLError is one
            time.sleep(0.25)
    raise RuntimeError("The service did not become ready:\n" + log.read_text("utf-8")[-4000:])
