"""Ports that two parts of one service, or somebody else, would both listen on."""

import socket
from collections.abc import Iterator
from typing import Any

from deployments.checks.finding import Finding, error, warning

HTTP, GRPC = 8000, 9000  # Serve's defaults
OF_RAY = {6379: "Ray's GCS", 8265: "Ray's dashboard", 10001: "Ray's client server", 8076: "Ray's object manager"}
OF_FAST_MODE = {
    9101: "HAProxy's metrics",
    8404: "HAProxy's statistics",
    8500: "the proxy behind HAProxy",
    9500: "the gRPC proxy behind HAProxy",
}
DIRECT = ((30_000, 31_000, "HTTP"), (40_000, 41_000, "gRPC"))  # where ingresses listen in fast mode
LEAST, MOST = 1, 65_535


def check(config: dict[str, Any]) -> Iterator[Finding]:
    http = _port(config, "http_options", HTTP)
    grpc = _port(config, "grpc_options", GRPC)
    if http is None:
        return
    where = "http_options.port"
    if not LEAST <= http <= MOST:
        yield error(where, f"A port must be in [{LEAST}, {MOST}]. Given: {http}.")
        return
    if http in OF_RAY:
        yield error(where, f"{OF_RAY[http]} listens there: choose another. Given: {http}.")
    if _grpc_listens(config) and http == grpc:
        yield error("grpc_options.port", f"The HTTP proxy has this port: choose another. Given: {grpc}.")
    if http in OF_FAST_MODE:
        yield warning(where, f"In fast mode {OF_FAST_MODE[http]} listens there: choose another. Given: {http}.")
    for low, high, kind in DIRECT:
        if low <= http <= high:
            yield warning(where, f"In fast mode ingresses take ports {low} to {high} for {kind}. Given: {http}.")
    if taken(http):
        yield warning(where, f"On this machine another process listens on {http}: here `assay serve` would refuse.")


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _grpc_listens(config: dict[str, Any]) -> bool:
    options = config.get("grpc_options")
    return isinstance(options, dict) and bool(options.get("grpc_servicer_functions"))


def _port(config: dict[str, Any], section: str, default: int) -> int | None:
    """None where what stands there is no number: the schema says so."""
    options = config.get(section) or {}
    found = options.get("port", default) if isinstance(options, dict) else default
    return found if isinstance(found, int) and not isinstance(found, bool) else None
