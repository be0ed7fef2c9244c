"""Tests what a process listens on: seen as the kernel has it, for descendants too, and for no other process."""

import os
import socket
import subprocess
import sys

import pytest

from deployments.cli.launch.listening_ports import Listener, listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
CHILD = """
import socket, sys
s = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(s.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False), ("::1", True), ("::", False)])
def test_a_childs_port_is_found_with_its_address(host: str, loopback: bool) -> None:
    """The planted faults are those on every interface."""
    command = [sys.executable, "-c", CHILD, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        found = next(one for one in listeners(os.getpid()) if one.port == port)
        assert (found.address, found.pid, found.loopback) == (host, child.pid, loopback)
        assert [one.port for one in listeners(child.pid)] == [port]
        child.kill()


def test_a_port_that_is_only_bound_or_another_processs_is_not_there() -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0)) as own:
        bound.bind(("127.0.0.1", 0))
        ports = {one.port for one in listeners(os.getpid())}
        assert own.getsockname()[1] in ports and bound.getsockname()[1] not in ports
        assert listeners(1 << 30) == []


@pytest.mark.parametrize(("address", "loopback"), [("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False)])
def test_an_ipv4_address_in_ipv6_clothes_is_what_it_stands_for(address: str, loopback: bool) -> None:
    assert Listener(address, 1, "x", 1).loopback is loopback
