"""Who reaches the service, and whether they are asked for a key."""

import ipaddress
from collections.abc import Iterator
from typing import Any

from deployments.checks.finding import Finding, error, note
from deployments.config import AppArgs

EVERY_INTERFACE = "0.0.0.0"  # Serve's default for a config file


def check(config: dict[str, Any], args: AppArgs) -> Iterator[Finding]:
    options = config.get("http_options") or {}
    named = isinstance(options, dict) and options.get("host") is not None
    host = str(options["host"]) if named else EVERY_INTERFACE
    if not open_to_world(host, mode_of(args)):
        return
    where = "http_options.host"
    if getattr(getattr(args, "auth", None), "allow_open", False):
        yield note(where, f"Whoever reaches {host} may use the service: auth.allow_open is set.")
        return
    why = f"Given: {host}." if named else f"Not given, and Serve's own default is {EVERY_INTERFACE}."
    yield error(where, f"Whoever reaches it may use the service without a key: set 127.0.0.1, or auth.mode keys. {why}")


def mode_of(args: AppArgs) -> str:
    """`auth.mode`."""
    return str(getattr(getattr(args, "auth", None), "mode", "disabled"))


def open_to_world(host: str, mode: str) -> bool:
    """Whether others than this machine's users reach `host` without a key. A name that is not `localhost` counts as
    open: what it stands for may change."""
    if mode != "disabled":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() != "localhost"
