"""A local Ray without a dashboard, then `serve run CONFIG` until interrupted: what `assay serve` and `make serve` do.

Starts and ends only what is its own: `ray stop` would end every Ray process of the machine.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from deployments.cli.launch import haproxy, ray_env
from deployments.cli.launch.listening_ports import listeners

OBJECT_STORE_BYTES = 128 * 1024 * 1024
POLL_S = 0.5
LOOPBACK, EVERY_INTERFACE = "127.0.0.1", ("0.0.0.0", "::")
STARTED, REFUSED, USAGE = 0, 1, 2
QUESTION = {  # in the built-in model's own form
    "query": "Query: a red chair from Lisbon\nDocument: ",
    "items": [
        "A pine chair for reading, sturdy and red, made in Lisbon.\nRelevant:",
        "A pine chair for reading, sturdy and blue, made in Lisbon.\nRelevant:",
    ],
    "labels": [" yes", " no"],
}


class Unfit(ValueError):
    """The service cannot be started like this; says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """One service on this machine."""

    config: dict[str, Any]  # a Serve config with an explicit host
    name: str  # of its file, for messages
    fast: bool = False

    @property
    def url(self) -> str:
        return url_of(self.config)

    def refuse(self) -> None:
        """Raises Unfit where the start would go wrong, or go well and be open."""
        if taken(self.url):
            raise Unfit(f"{self.url} is taken by another process: change http_options.port in {self.name}.")
        if self.fast and os.environ.get("RAY_AUTH_MODE", "token") != "token":
            raise Unfit(
                "`RAY_AUTH_MODE` must be token in fast mode: replicas take pickled calls on a port of every interface. "
                f"Given: {os.environ['RAY_AUTH_MODE']}."
            )

    def run(self) -> None:
        """Returns when interrupted. Raises Unfit for a config that is wrong."""
        with self.prepared() as folder:
            self._check()
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(self.config, sort_keys=False), "utf-8")
            _serve(file, self.url)

    def _check(self) -> None:
        from deployments.cli.check import report  # it imports Ray, which must find its environment

        errors = report.errors_of(self.config)
        if errors:
            raise Unfit("\n".join(map(str, errors)) + f"\n{self.name} is not served: `assay check` tells more.")

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Path]:
        """Sets what Ray must find, and yields a folder of this service alone, which is removed in the end."""
        folder, launcher = _haproxy() if self.fast else (None, None)
        folder = folder or Path(tempfile.mkdtemp(prefix="assay-"))
        wanted = ray_env.LOCAL | (ray_env.THROUGHPUT | ray_env.ONE_MACHINE if self.fast else {})
        try:
            ray_env.adopt(wanted | (ray_env.haproxy_ports() if launcher else {}))
            if launcher:
                os.environ.update(ray_env.haproxy(folder, launcher))  # whatever is set: they hold one cluster's files
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def read(file: Path) -> dict[str, Any]:
    """The config of a file, with an explicit host: Serve's own default is every interface. Raises Unfit."""
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise Unfit(f"{file} must be a readable YAML file: {error}") from None
    if not isinstance(found, dict):
        raise Unfit(f"{file} must be a mapping, as the files of deployments/configs are.")
    http = found.get("http_options") or {}
    return found | {"http_options": {"host": LOOPBACK} | http} if isinstance(http, dict) else found


def main(arguments: list[str]) -> int:
    """Returns when interrupted, or at once where the config cannot be read or served."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print("usage: python -m deployments.cli.launch.local_serve CONFIG.yaml", file=sys.stderr)
        return USAGE
    return serve(Path(arguments[0]))


def serve(file: Path, *, fast: bool = False) -> int:
    try:
        local = Local(config=read(file), name=str(file), fast=fast)
        local.refuse()
        local.run()
    except Unfit as error:
        print(error, file=sys.stderr)
        return REFUSED
    return STARTED


def _haproxy() -> tuple[Path | None, Path | None]:
    """HAProxy's folder and launcher; without them Serve's own proxy answers, with the other options of fast mode."""
    try:
        return haproxy.prepare(haproxy.find_binary())
    except haproxy.NotThere as error:
        print(f"{error} Serve's own proxy answers instead: faster than the default, not fast mode.", file=sys.stderr)
        return None, None


def _serve(config: Path, url: str) -> None:
    import ray
    from ray.serve.scripts import cli

    try:
        ray.init(
            address="local",
            namespace="serve",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            num_cpus=max(4, os.cpu_count() or 1),  # logical: a small machine must still place every actor
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets its own; a shell may ignore SIGINT
            signal.signal(number, _interrupt)
        threading.Thread(target=announce, args=(url,), name="announce", daemon=True).start()
        cli.main(["run", str(config)], standalone_mode=False)
    except (SystemExit, KeyboardInterrupt):
        pass  # how `serve run` ends after an interrupt, and an interrupt before it runs
    finally:
        ray.shutdown()


def url_of(config: object) -> str:
    """Where the first application of a Serve config answers, from this machine."""
    found = config if isinstance(config, dict) else {}
    http = found.get("http_options") or {}
    prefix = (found.get("applications") or [{}])[0].get("route_prefix") or "/"
    host = str(http.get("host", LOOPBACK))
    host = LOOPBACK if host in EVERY_INTERFACE else f"[{host}]" if ":" in host else host
    return f"http://{host}:{http.get('port', 8000)}{prefix.rstrip('/')}"


def taken(url: str) -> bool:
    """Whether somebody listens there: Serve would start all the same, and share the port or wait."""
    parts = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or LOOPBACK, parts.port or 80), timeout=2):
            return True
    except OSError:
        return False


def announce(url: str) -> None:
    """Waits until /readyz answers 200, then says where and how to ask, and what is open."""
    started = time.monotonic()
    while not ready(url):
        time.sleep(POLL_S)
    print(
        f"\nReady after {time.monotonic() - started:.0f} s at {url}\n"
        f"  curl {url}/generative_scoring -H 'content-type: application/json' -d '{json.dumps(QUESTION)}'\n"
        f"{_open_ports()}",
        flush=True,
    )


def _open_ports() -> str:
    """What this service listens on beyond the machine, for whoever runs it on a network."""
    beyond = [one for one in listeners(os.getpid()) if not one.loopback]
    if not beyond:
        return ""
    guard = "guarded by Ray's token" if os.environ.get("RAY_AUTH_MODE") == "token" else "not guarded by a token"
    return (
        f"{len(beyond)} ports of Ray's own processes are open beyond this machine, {guard}: "
        "see docs/guides/security.md.\n"
    )


def ready(url: str) -> bool:
    """Whether /readyz answers 200 now. No proxy of the environment is asked: the server is on this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
