"""The environment that Ray must find when it is imported, on every node of a cluster: it is read once."""

import contextlib
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

REPLY_BYTES = 64 << 20  # one answer of a replica over gRPC; the library's own bound is 4 MiB

LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 puts proxy and ingress behind whatever else runs on the machine
    "RAY_AUTH_MODE": "token",
    # A dead proxy is noticed at the third look. One that is only slow, as on a loaded machine, must not be killed: with
    # 2 s to get ready none ever starts on a machine that takes longer.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(REPLY_BYTES),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
THROUGHPUT = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
# One machine has one HAProxy, which hears of a stopping ingress at once: nobody needs the 30 s that Serve waits for
# load balancers elsewhere.
ONE_MACHINE = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5"}
MOST_HAPROXY_THREADS = 4
HAPROXY_PORTS = (  # beside the service's own
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
OURS = range(20_000, 30_000)  # below what the kernel gives to whoever asks for any, as Ray's workers do meanwhile


def haproxy(folder: Path, launcher: Path) -> dict[str, str]:
    """What HAProxy adds. `folder`: where its files lie, of this cluster alone; `launcher`: what Ray starts in place of
    the binary."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def haproxy_ports() -> dict[str, str]:
    """Ports drawn by lot: with Ray's fixed ones two clusters of one machine take each other's, and those that start at
    the same time cannot see it coming."""
    ports = dict(zip(HAPROXY_PORTS, _free_ports(len(HAPROXY_PORTS)), strict=True))
    return ports | {"RAY_SERVE_HAPROXY_NBTHREAD": str(min(MOST_HAPROXY_THREADS, os.cpu_count() or 1))}


def _free_ports(count: int) -> list[str]:
    """Different ones, at which nobody listens now."""
    found = list[str]()
    for port in random.SystemRandom().sample(OURS, len(OURS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(str(port))
        if len(found) == count:
            return found
    raise OSError(f"There are no {count} free ports from {OURS.start} to {OURS.stop - 1}.")


def adopt(wanted: Mapping[str, str]) -> None:
    """Sets what the operator has not set, and a token for Ray where tokens are asked for. RuntimeError where Ray has
    been imported: it would not see it."""
    if "ray" in sys.modules:
        raise RuntimeError("The environment must be set before Ray is imported.")
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
