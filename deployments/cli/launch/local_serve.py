"""Starts a local Ray without a dashboard and runs a Serve config until interrupted, for `assay serve`.

It ends only the processes that it started; `ray stop` would end every Ray process of the machine.
"""

import contextlib
import http.client
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from deployments.cli.arguments import reason
from deployments.cli.launch import bytecode, haproxy, ray_env, ray_node
from deployments.cli.launch.example import example_of, get
from deployments.cli.launch.listening_ports import listeners
from deployments.cli.launch.model_check import ModelCheck
from deployments.cli.launch.withheld_output import WithheldOutput
from deployments.garbage_collection import paused
from deployments.standby.pool import StandbyPool, wanted

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

Statuses = Callable[[], Mapping[str, "ApplicationStatusOverview"]]
OBJECT_STORE_BYTES = 128 * 1024 * 1024
POLL_S, IDLE_S = 0.5, 10.0
END_S = 30.0  # for requests in flight
LOOPBACK, EVERY_INTERFACE = "127.0.0.1", ("0.0.0.0", "::")
STARTED, REFUSED = 0, 1


class CannotServe(ValueError):
    """Says why the service cannot start, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalService:
    """Runs one service on this machine."""

    config: dict[str, Any]  # a Serve config with an explicit host
    name: str  # of its file, for messages
    fast: bool = False

    @property
    def urls(self) -> dict[str, str]:
        return urls_of(self.config)

    def refuse(self) -> None:
        """Raises CannotServe for a port that is taken, a wrong variable, or a fast mode open to other machines."""
        try:
            wanted(self.config)
        except ValueError as error:
            raise CannotServe(str(error)) from None
        url = next(iter(self.urls.values()), None)
        if url is not None and taken(url):
            raise CannotServe(f"{url} is taken by another process: change http_options.port in {self.name}.")
        if self.fast and os.environ.get("RAY_AUTH_MODE", "token") != "token":
            raise CannotServe(
                "`RAY_AUTH_MODE` must be token in fast mode: replicas accept pickled calls on all interfaces. "
                f"Given: {os.environ['RAY_AUTH_MODE']}."
            )

    def run(self) -> None:
        """Serves until interrupted. Raises CannotServe for a wrong config."""
        with self.prepared() as folder:
            model_check = ModelCheck(self.config)
            standby = StandbyPool(folder, wanted(self.config))
            os.environ.update(standby.variables)
            try:
                with paused():  # of the command's own alone: other commands do without it
                    from deployments.cli.launch import early_build
                with early_build.compiling(self.config):
                    with paused():
                        from deployments.cli.check import report  # it imports Ray, which must find its environment

                    self._refuse(report.errors_of(self.config))
                    file = folder / "config.yaml"
                    file.write_text(yaml.safe_dump(self.config, sort_keys=False), "utf-8")
                    _serve(
                        file,
                        self.urls,
                        self.name,
                        check=lambda: self._refuse(model_check.errors()),
                        ready=standby.keep_spare,
                    )
            finally:
                model_check.stop()
                standby.stop()

    def _refuse(self, errors: Sequence[object]) -> None:
        if errors:
            raise CannotServe(f"{self.name} is not served: " + "\n".join(map(str, errors)))

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Path]:
        """Sets Ray's environment, and yields a folder of this service, which is removed at the end."""
        folder, launcher = _haproxy() if self.fast else (None, None)
        folder = folder or Path(tempfile.mkdtemp(prefix="assay-"))
        wanted = ray_env.LOCAL | (ray_env.THROUGHPUT | ray_env.ONE_MACHINE if self.fast else {})
        try:
            of_haproxy = ray_env.REPLAY | ray_env.UNCOUNTED | ray_env.haproxy_ports() if launcher else {}
            ray_env.adopt(wanted | of_haproxy)
            if launcher:
                os.environ.update(
                    ray_env.haproxy(folder, launcher)
                )  # overrides what is set: the paths belong to this cluster
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def read(file: Path) -> dict[str, Any]:
    """Reads a config. A missing host becomes loopback; Serve's default is all interfaces. Raises CannotServe."""
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # such as a date that there is not
        raise CannotServe(f"{file} must be a readable YAML file: {reason(error)}.") from None
    if not isinstance(found, dict):
        raise CannotServe(f"{file} must be a mapping, as the files of deployments/configs are.")
    http = found.get("http_options") or {}
    return found | {"http_options": {"host": LOOPBACK} | http} if isinstance(http, dict) else found


def serve(file: Path, *, fast: bool = False) -> int:
    """Serves a config until interrupted, and returns the exit status."""
    bytecode.keep()
    try:
        local = LocalService(config=read(file), name=str(file), fast=fast)
        local.refuse()
        local.run()
    except (CannotServe, ray_node.NodeTooLate) as error:
        print(f"assay serve: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # before there was anything to end
        pass
    return STARTED


def _haproxy() -> tuple[Path | None, Path | None]:
    """Returns HAProxy's folder and launcher. Without HAProxy, Serve's own proxy runs with the other fast options."""
    try:
        return haproxy.prepare(haproxy.find_binary())
    except haproxy.HAProxyMissing as error:
        print(f"{error} Serve's own proxy answers instead, which is slower.", file=sys.stderr)
        return None, None


def _serve(
    config: Path, urls: Mapping[str, str], name: str, *, check: Callable[[], None], ready: Callable[[], None]
) -> None:
    """Runs a config until interrupted. Raises CannotServe if an application fails to start.

    `check` says whether the models are served, and raises if not; applications start meanwhile. Ray then ends, and what
    it has printed is lost. `ready` is called once every application answers.
    """
    import ray
    from click.exceptions import Abort
    from ray import serve
    from ray.serve.scripts import cli

    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    with WithheldOutput(CannotServe) as output:
        try:
            ray_node.start(
                lambda: ray.init(
                    address="local",
                    namespace="serve",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    num_cpus=max(4, os.cpu_count() or 1),  # logical CPUs: enough for all actors on a small machine
                    logging_level=logging.WARNING,
                )
            )
            for number in (signal.SIGINT, signal.SIGTERM):  # ray.init has set its own; a shell may ignore SIGINT
                signal.signal(number, interrupt)
            cli.main(["run", "--non-blocking", str(config)], standalone_mode=False)
            check()
            output.release()
            follow(lambda: serve.status().applications, urls, name, ready)
        except (KeyboardInterrupt, Abort):  # click's name of an interrupt of `serve run`
            pass
        except SystemExit:  # `serve run` has printed the error, or was interrupted itself
            output.release()
            if not interrupted.is_set():
                raise CannotServe(f"Serve refuses {name}, for the reason above.") from None
        finally:
            if ray.is_initialized() and not output.withholds:
                _end(list(urls))
            ray.shutdown()


def _end(applications: Sequence[str]) -> None:
    """Lets the applications end. `serve.shutdown` does too, and then Ray reports the controller's end as a failure."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    until = time.monotonic() + END_S
    # A second interrupt ends the wait. There is no Serve where the first one came before it, or to `serve run`.
    with contextlib.suppress(KeyboardInterrupt, RayServeException):
        for application in applications:
            serve.delete(application, _blocking=False)
        while serve.status().applications and time.monotonic() < until:
            time.sleep(POLL_S)


def follow(
    statuses: Statuses, urls: Mapping[str, str], name: str, ready: Callable[[], None], poll_s: float = POLL_S
) -> NoReturn:
    """Announces each application once it is ready, and waits for an interrupt.

    Args:
        statuses: returns the status of each application.
        urls: of the applications by name.
        name: of the configuration's file, for messages.
        ready: is called once every application answers.
        poll_s: between two looks.

    Raises:
        CannotServe: An application has failed to start.
    """
    from deployments.start_failure import failure_of

    started = time.monotonic()
    waiting = dict(urls)
    while waiting:
        found = statuses()
        for application, url in urls.items() & waiting.items():
            status = found.get(application)
            failure = status and failure_of(status)
            if failure:
                raise CannotServe(f"{name} is not served: {failure.reason}: {failure}")
            if status and status.status == "RUNNING" and answers(url):  # before, Serve would log each look as a client
                del waiting[application]
                announce(url, time.monotonic() - started)
        time.sleep(poll_s)
    ready()
    while True:
        time.sleep(IDLE_S)


def urls_of(config: object) -> dict[str, str]:
    """Returns the URL of each application of a Serve config, from this machine; of a wrong config, what can be read."""
    found = config if isinstance(config, dict) else {}
    options, given = found.get("http_options"), found.get("applications")
    http = options if isinstance(options, dict) else {}
    host = str(http.get("host", LOOPBACK))
    host = LOOPBACK if host in EVERY_INTERFACE else f"[{host}]" if ":" in host else host
    applications = given if isinstance(given, list) and given else [{}]
    return {
        str(one.get("name", "default")): f"http://{host}:{http.get('port', 8000)}"
        + str(one.get("route_prefix") or "/").rstrip("/")
        for one in applications
        if isinstance(one, dict)
    }


def taken(url: str) -> bool:
    """Says whether a process listens there; Serve would start nevertheless, and share the port or wait.

    A wrong port is not taken; the check of the config names it.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        with socket.create_connection((parts.hostname or LOOPBACK, parts.port or 80), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def announce(url: str, seconds: float) -> None:
    """Prints the URL, an example that its model answers, and the open ports of an application that is ready."""
    print(
        f"\nReady after {seconds:.0f} s at {url}\n  {example_of(url).command(url)}\n{_open_ports()}",
        flush=True,
    )


def _open_ports() -> str:
    """Describes the ports that are open to other machines."""
    outside = [one for one in listeners(os.getpid()) if not one.loopback]
    if not outside:
        return ""
    protection = (
        "protected by Ray's token" if os.environ.get("RAY_AUTH_MODE") == "token" else "not protected by a token"
    )
    return (
        f"{len(outside)} ports of Ray's own processes are open to other machines, {protection}: "
        "docs/guides/security.md.\n"
    )


def answers(url: str) -> bool:
    """Says whether /readyz answers 200."""
    try:
        with get(f"{url}/readyz") as answer:
            return bool(answer.status == 200)
    except (http.client.HTTPException, OSError):
        return False
