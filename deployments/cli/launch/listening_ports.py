"""Lists the TCP ports that a process and its descendants listen on. Linux only, from /proc."""

import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"
TABLES = (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6))


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
    owners = {inode: pid for pid in descendants(root) for inode in _sockets(pid)}
    found = [
        Listener(address, port, _name(owners[inode]), owners[inode])
        for address, port, inode in _listening()
        if inode in owners
    ]
    return sorted(found, key=lambda one: (one.port, one.address))


def descendants(root: int) -> set[int]:
    """Returns `root` and its descendants."""
    children = defaultdict[int, list[int]](list)
    for pid in _processes():
        children[_parent(pid)].append(pid)
    found, waiting = set[int](), [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting.extend(child for child in children[pid] if child not in found)
    return found


def _listening() -> Iterator[tuple[str, int, int]]:
    """Yields (address, port, inode) of every listening socket of this network namespace."""
    for table, family in TABLES:
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN:
                address, port = fields[1].split(":")
                yield _address(address, family), int(port, 16), int(fields[9])


def _address(text: str, family: int) -> str:
    """Parses an address; the kernel writes each 32-bit word in the machine's own byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _sockets(pid: int) -> Iterator[int]:
    folder = Path(f"/proc/{pid}/fd")
    try:
        for entry in folder.iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                yield int(target[8:-1])
    except OSError:
        return


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    except OSError:
        return "?"
