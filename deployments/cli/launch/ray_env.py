"""Defines the environment variables that Ray reads when it is imported."""

import contextlib
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

REPLY_BYTES = 64 << 20  # of one answer of a replica over gRPC; the library's default is 4 MiB
INLINE_BYTES = 128 << 20  # of one result of a call: more than the largest answer

# Serve calls it for the middleware of its HTTP servers, which import it by this path.
PROXY_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_middleware.middlewares"}
# A replica that fails its health checks is killed. Serve would wait for `drain` to pass, while a frozen process holds
# its device and its memory. Ray then asks the process to end, and kills it after 5 s by default.
KILL_UNHEALTHY = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_kill_worker_timeout_milliseconds": "1000",
}
# Serve's proxy has one event loop. With a second one in a thread of its own, to choose the ingress, a request waits for
# the interpreter's lock several times, up to 5 ms each time, while the other loop has much to do. The handles of an
# ingress then choose replicas in the ingress's loop, too. (Ingresses keep the thread for their code: without it default
# mode serves up to a fifth fewer small requests.)
ONE_LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
# Bodies and answers travel in the messages of calls. Ray puts larger ones into its object store, whose pages stay with
# each process that has touched them, and which writes to disk what does not fit.
INLINE = dict.fromkeys(("RAY_max_direct_call_object_size", "RAY_task_rpc_inlined_bytes_limit"), str(INLINE_BYTES))
LOCAL = (
    PROXY_CALLBACK
    | KILL_UNHEALTHY
    | ONE_LOOP
    | INLINE
    | {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Every worker of a service needs it. Those that Ray starts ahead import it before there is a controller.
        "RAY_preload_python_modules": "ray.serve",
        "RAY_worker_niceness": "0",  # Ray's default, 15, puts proxy and ingress behind all other processes
        "RAY_AUTH_MODE": "token",
        # A dead proxy is noticed at the third check. A slow one, as on a loaded machine, must not be killed: with 2 s
        # to get ready, a proxy would never start on a machine that takes longer.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # `assay serve` ends when a start fails
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(REPLY_BYTES),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
# The second is Serve's default in the other mode. The first would make it 1000 lines, and a log stays empty until then:
# there is no line for each request, so that would be hours, and a replica that is killed would leave none.
# The third is how often each process hands its counts to Ray: ten times a second costs a quarter of an idle one.
THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
# One machine has one HAProxy, which is notified of a stopping ingress immediately. Serve's default of 30 s is for load
# balancers that poll.
ONE_MACHINE = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5"}
# HAProxy sends a request again, to another ingress, if its ingress died before it answered: answers are functions of
# their requests. A request that is larger than the buffer is not kept, and the whole buffer is copied for each, full or
# not: at 256 KiB that is a third of what HAProxy does for a small one, and 600 that come together take it 0.66 s and
# 183 MB; at 64 KiB 0.23 s and 65 MB. HAProxy prefers the ingress with the fewest connections, which is the dead
# one until one of them is refused. A kept connection that is dead too costs a try, and tells HAProxy nothing; a request
# without tries left is closed without an answer. And an HAProxy that was replaced may know of the dead ingress alone:
# with three refusals before it turns to its backup, 14 of 3,414 requests among 40 kills used all of five tries more;
# with one, the most was three.
REPLAY = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response junk-response",
    "RAY_SERVE_HAPROXY_RETRIES": "10",
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(64 << 10),
}
# Serve counts the requests of HAProxy by a line of log for each, which a Python process parses: a tenth of what a small
# request costs. The application's own /metrics counts them too.
UNCOUNTED = {"RAY_SERVE_HAPROXY_METRICS_ENABLED": "0"}
MAX_HAPROXY_THREADS = 4
HAPROXY_PORTS = (  # beside the service's own
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
PORT_RANGE = range(20_000, 30_000)  # below the kernel's ephemeral ports, which Ray's workers use


def haproxy(folder: Path, launcher: Path) -> dict[str, str]:
    """Returns the variables of HAProxy.

    Args:
        folder: for the files of this cluster's HAProxy.
        launcher: starts in place of the binary.
    """
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
    """Draws free ports at random: with Ray's fixed ports two clusters of one machine would use the same ones."""
    ports = dict(zip(HAPROXY_PORTS, free_ports(len(HAPROXY_PORTS), PORT_RANGE), strict=True))
    return ports | {"RAY_SERVE_HAPROXY_NBTHREAD": str(min(MAX_HAPROXY_THREADS, os.cpu_count() or 1))}


def free_ports(count: int, among: range) -> list[str]:
    """Returns different ports that are free now, drawn at random.

    Raises:
        OSError: There are not as many.
    """
    found = list[str]()
    for port in random.SystemRandom().sample(among, len(among)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(str(port))
        if len(found) == count:
            return found
    raise OSError(f"There are no {count} free ports from {among.start} to {among.stop - 1}.")


def adopt(wanted: Mapping[str, str]) -> None:
    """Sets variables that the operator has not set, and a token where Ray's authentication needs one.

    Raises:
        RuntimeError: Ray has been imported and would not read them.
    """
    if "ray" in sys.modules:
        raise RuntimeError("The environment must be set before Ray is imported.")
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
