"""Fast mode as `assay serve --fast` starts it, in a process of its own: what listens where, the merged scrape, streams,
a killed HAProxy manager, and an end that leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deployments.cli.launch import haproxy
from deployments.cli.launch.listening_ports import Listener, descendants, listeners
from tests.served import on_a_free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
START_S = 480.0
END_S = 120.0
INGRESSES = 2
ATTEMPTS = 3
RAY_IS_LATE = "timed out during startup"
DARK_S = 1.0  # a request that was under way at the killed process is asked again
RECOVERY_S = 30.0  # of a loaded machine; what it took is printed
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
DIRECT = range(30_000, 31_001)


class Fast(NamedTuple):
    url: str
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def get(self, path: str) -> Any:
        with OPENER.open(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def up(self) -> bool:
        try:
            with OPENER.open(self.url + "/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def listeners(self) -> list[Listener]:
        return listeners(self.process.pid)

    def until_all_listen(self, seconds: float) -> None:
        """The first ingress makes /readyz answer; the other one may still be starting, and HAProxy changing over to it:
        then neither of its processes may be found with the socket."""
        start = time.monotonic()
        while not self._all_listen():
            assert self.process.poll() is None and time.monotonic() - start < seconds, self.log.read_text()[-4000:]
            time.sleep(0.1)

    def _all_listen(self) -> bool:
        found = self.listeners()
        ingresses = sum(one.port in DIRECT for one in found)
        return ingresses >= INGRESSES and any(one.process == "haproxy" for one in found)

    def until_up(self, seconds: float) -> float:
        start = time.monotonic()
        while not self.up():
            assert self.process.poll() is None and time.monotonic() - start < seconds, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return time.monotonic() - start


@contextlib.contextmanager
def serving(folder: Path, *, access_log: bool = False, **sections: dict[str, Any]) -> Iterator[Fast]:
    """Fast mode with the built-in model, and with some sections of its configuration changed; `access_log`: Serve's."""
    file, port = on_a_free_port("cpu.yaml", folder, ingress={"count": INGRESSES}, **sections)
    config = yaml.safe_load(file.read_text("utf-8")) | {"logging_config": {"enable_access_log": access_log}}
    file.write_text(yaml.safe_dump(config), "utf-8")
    fast = _start(file, folder / "log.txt", port)
    try:
        yield fast
    finally:
        if fast.process.poll() is None:
            fast.process.send_signal(signal.SIGINT)
            fast.process.wait(END_S)


def _start(file: Path, log: Path, port: int) -> Fast:
    """Again where Ray itself did not come up: it gives its raylet 30 s, which a loaded machine may need."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for attempt in range(ATTEMPTS):
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "serve", "--fast", str(file)],
                cwd=ROOT,
                env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        fast = Fast(f"http://127.0.0.1:{port}", port, process, log)
        try:
            fast.until_up(START_S)
            fast.until_all_listen(START_S)
            return fast
        except AssertionError as error:
            process.send_signal(signal.SIGINT)
            process.wait(END_S)
            if attempt + 1 == ATTEMPTS or RAY_IS_LATE not in str(error):
                raise
    raise AssertionError("unreachable")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fast]:
    haproxy.find_binary()
    with serving(tmp_path_factory.mktemp("fast"), access_log=True) as found:
        yield found


def open_beyond(found: list[Listener]) -> list[Listener]:
    """Ports of HAProxy, of proxies' and of ingresses' HTTP that others than this machine reach."""
    return [one for one in found if not one.loopback and (one.process == "haproxy" or one.port in DIRECT)]


@pytest.mark.risk("S13")
def test_nothing_of_the_service_listens_beyond_this_machine(fast: Fast) -> None:
    start = time.monotonic()
    found = fast.listeners()
    while [one.process for one in found].count("haproxy") != 3:  # the service, metrics, statistics
        assert time.monotonic() - start < RECOVERY_S, found  # one that a new one replaces may still be there
        time.sleep(0.1)
        found = fast.listeners()
    by_port = {one.port: one for one in found}
    assert by_port[fast.port].process == "haproxy"
    assert (
        len([one for one in found if one.port in DIRECT]) == INGRESSES
    )  # an ingress each: requests do not pass Serve's proxy
    assert not open_beyond(found)
    print(
        "listening beyond this machine, all of Ray's own:",
        [(one.process, one.port) for one in found if not one.loopback],
    )


@pytest.mark.risk("S13", planted=True)
def test_the_check_would_see_an_open_port(fast: Fast) -> None:
    """The planted fault: HAProxy as Ray starts it without our launcher."""
    opened = [one._replace(address="0.0.0.0") if one.process == "haproxy" else one for one in fast.listeners()]
    assert len(open_beyond(opened)) == 3


def test_the_folder_of_its_socket_is_its_owners_alone(fast: Fast) -> None:
    """HAProxy's admin socket is made for every user of the machine: the folder is what closes it."""
    commands = [Path(f"/proc/{one.pid}/cmdline").read_bytes() for one in fast.listeners() if one.process == "haproxy"]
    config = Path(commands[0].split(b"\0")[3].decode())
    assert config.name == "haproxy.cfg"
    assert config.with_name("haproxy.cfg.second").exists()
    assert config.parents[1].stat().st_mode & 0o077 == 0
    start = time.monotonic()
    while haproxy.closed(text := config.read_text("utf-8")) != text:  # Ray has written it and not yet started HAProxy
        assert time.monotonic() - start < RECOVERY_S, text
        time.sleep(0.1)


def scraped(fast: Fast) -> list[str]:
    """The deployments of the processes that a scrape tells of."""
    families = list(text_string_to_metric_families(fast.get("/metrics")))
    processes = {(s.labels["deployment"], s.labels["replica"]) for family in families for s in family.samples}
    return sorted(deployment for deployment, _ in processes)


def test_a_scrape_by_any_ingress_is_merged_over_all(fast: Fast) -> None:
    start, whole, found = time.monotonic(), ["Ingress", "Ingress", "Replica"], 0
    while found < 4:  # HAProxy rotates over ingresses, and the last to start hears of the others late
        found = found + 1 if (told := scraped(fast)) == whole else 0
        assert time.monotonic() - start < RECOVERY_S, told


@pytest.mark.risk("S15")
@pytest.mark.parametrize("name", ["x-request-id", "x-session-id", "serve_multiplexed_model_id"])
def test_bytes_beyond_ascii_in_a_header_fail_nothing_and_there_is_one_id(fast: Fast, name: str) -> None:
    with socket.create_connection(("127.0.0.1", fast.port), timeout=30) as client:
        client.sendall(
            f"GET /nope HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{name}: caf\xe9\r\n\r\n".encode("latin-1")
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    ids = [line.split()[1].decode() for line in head.splitlines() if line.lower().startswith(b"x-request-id:")]
    assert head.split()[1] == b"404" and ids == [json.loads(body)["request_id"]]


def logs_of(fast: Fast) -> Path:
    """The folder of Serve's logs."""
    commands = [cmdline(pid).decode() for pid in descendants(fast.process.pid)]
    session = next(found[1] for line in commands if (found := re.search(r"--session[-_]dir=([^\0]+)", line)))
    return Path(session) / "logs" / "serve"


def in_access_log(fast: Fast, method: str) -> int:
    """Requests that passed Serve's code in an ingress."""
    logs = [one.read_text() for one in logs_of(fast).glob("replica_*_Ingress_*.log")]
    return sum(log.count(f" -- {method} ") for log in logs)


def ask_for_a_socket(fast: Fast) -> bytes:
    """The status of the answer."""
    opening = "GET /version HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    opening += "sec-websocket-version: 13\r\nsec-websocket-key: YWJjZGVmZ2hpamtsbW5vcA==\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fast.port), timeout=30) as client:
        client.sendall(opening.encode("ascii"))
        return client.recv(65536).split()[1]


def test_requests_go_past_serves_code_and_sockets_do_not(fast: Fast) -> None:
    """Serve writes a line for each that does not. It shows an ingress to its HTTP server a moment after both began."""
    start, passed = time.monotonic(), 1
    while passed:
        requests, sockets = in_access_log(fast, "GET"), in_access_log(fast, "WS")
        for _ in range(20):
            fast.get("/version")
        assert ask_for_a_socket(fast) == b"403"
        while in_access_log(fast, "WS") == sockets:  # the last of them
            assert time.monotonic() - start < RECOVERY_S
            time.sleep(0.1)
        passed = in_access_log(fast, "GET") - requests
        assert time.monotonic() - start < RECOVERY_S, passed


def test_the_logs_of_every_process_are_written_as_they_come(fast: Fast) -> None:
    """A process that is killed leaves what it said."""
    folder = logs_of(fast)
    (replica,) = folder.glob("replica_*_Replica_*.log")
    assert "Start-up: total took" in replica.read_text()
    ingresses = list(folder.glob("replica_*_Ingress_*.log"))
    assert len(ingresses) == INGRESSES and all("HTTP server" in one.read_text() for one in ingresses)


def test_a_stream_comes_in_pieces_and_to_its_end(fast: Fast) -> None:
    body = {"prompt": "This sturdy red", "max_tokens": 200, "stream": True, "ignore_eos": True, "seed": 5}
    request = urllib.request.Request(
        fast.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with OPENER.open(request, timeout=60) as answer:
        times, lines = [], []
        for line in answer:
            if line.startswith(b"data: "):
                times.append(time.monotonic())
                lines.append(line)
    assert lines[-1].strip() == b"data: [DONE]" and len(lines) > 20
    assert times[-1] - times[0] > 0.01  # it was not held back until the end


@pytest.mark.risk(
    "R16", figure="HAProxy killed with its manager: the port dark for at most 0.38 s, a new process after 4.5 s"
)
def test_the_port_answers_while_the_manager_of_haproxy_is_killed(fast: Fast) -> None:
    """Its HAProxy ends with it: without the launcher it would live on with old routes. The second one answers."""
    old = {one.pid for one in fast.listeners() if one.process == "haproxy"}
    managers = [pid for pid in descendants(fast.process.pid) if b"HAProxyManager" in cmdline(pid)]
    assert len(managers) == 1
    os.kill(managers[0], signal.SIGKILL)
    start, longest = time.monotonic(), 0.0
    while not {one.pid for one in fast.listeners() if one.process == "haproxy"} - old:
        longest = max(longest, fast.until_up(RECOVERY_S))
        assert time.monotonic() - start < 2 * RECOVERY_S
    print(f"a new HAProxy after {time.monotonic() - start:.1f} s, dark for at most {longest:.2f} s")
    assert longest < DARK_S
    while any(map(alive, old)):
        assert time.monotonic() - start < 2 * RECOVERY_S
        time.sleep(0.1)


def test_an_interrupt_ends_all_that_it_started(tmp_path: Path) -> None:
    with serving(tmp_path) as fast:
        started = descendants(fast.process.pid)
        haproxies = [one.pid for one in fast.listeners() if one.process == "haproxy"]
        config = Path(cmdline(haproxies[0]).split(b"\0")[3].decode())
        start = time.monotonic()
        fast.process.send_signal(signal.SIGINT)
        assert fast.process.wait(END_S) == 0
        print(f"ended after {time.monotonic() - start:.1f} s")
    until = time.monotonic() + 20
    while (any(map(alive, started)) or _processes_of(config)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [(pid, cmdline(pid)) for pid in started if alive(pid)]
    assert not config.parents[1].exists()
    assert not _processes_of(config)


def _processes_of(config: Path) -> list[int]:
    """The processes with this configuration: also an HAProxy that was started while the service ended."""
    return [process.pid for process in psutil.process_iter() if str(config) in " ".join(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
