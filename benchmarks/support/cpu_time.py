"""Measures the CPU time of a service's processes, which does not depend on other load of the machine."""

import os
from collections import Counter
from pathlib import Path

from deployments.cli.launch.listening_ports import descendants

TICKS = os.sysconf("SC_CLK_TCK")
PARTS = {  # what a command line holds
    "Ingress": "ingress",
    "ServeReplica": "replica",  # after the ingress, which is one too
    "SERVE_REPLICA": "replica",
    "ProxyActor": "proxy",
    "haproxy -db": "proxy",
}


def cpu_s(root: int) -> Counter[str]:
    """Returns the CPU seconds of all processes below `root` by part. Ray's own processes are not counted."""
    found = Counter[str]()
    for pid in descendants(root):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        part = next((part for word, part in PARTS.items() if word in command), None)
        if part is not None:
            found[part] += (int(fields[11]) + int(fields[12])) / TICKS  # type: ignore[assignment]
    return found
