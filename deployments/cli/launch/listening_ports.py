"""Lists the TCP ports that a process and its descendants listen on."""

import ipaddress
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """Holds one listening socket."""

    address: str
    port: int
    process: str
    pid: int

    @property
    def loopback(self) -> bool:
        found = ipaddress.ip_address(self.address)
        mapped = getattr(found, "ipv4_mapped", None)
        return bool((mapped or found).is_loopback)


def listeners(root: int) -> list[Listener]:
    """Returns the listening sockets of `root` and its descendants, by port."""
    ours = descendants(root)
    found = [
        Listener(one.laddr.ip, one.laddr.port, process_name(one.pid), one.pid)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in ours
    ]
    return sorted(found, key=lambda one: (one.port, one.address))


def descendants(root: int) -> set[int]:
    """Returns `root` and its descendants."""
    try:
        return {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
    except psutil.NoSuchProcess:
        return {root}


def process_name(pid: int) -> str:
    """Returns the name of a process, `?` once it has ended."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.NoSuchProcess:
        return "?"
