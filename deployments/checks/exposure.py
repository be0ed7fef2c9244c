"""Who reaches the service, and whether they are asked for a key."""

from collections.abc import Iterator
from typing import Any

from deployments.access.auth import open_to_world
from deployments.checks.finding import Finding, error, note, under, warning
from deployments.config import AppArgs

EVERY_INTERFACE = "0.0.0.0"  # Serve's default for a config file


def check(config: dict[str, Any], args: AppArgs, where: str) -> Iterator[Finding]:
    """`where`: of the application's `args`."""
    options = config.get("http_options") or {}
    named = isinstance(options, dict) and options.get("host") is not None
    host = str(options["host"]) if named else EVERY_INTERFACE
    if not open_to_world(host, args.auth.mode):
        yield from _keys(args, where)
        return
    place = "http_options.host"
    if args.auth.allow_open:
        yield note(place, f"Whoever reaches {host} may use the service: auth.allow_open is set.")
        return
    why = f"Given: {host}." if named else f"Not given, and Serve's own default is {EVERY_INTERFACE}."
    yield error(place, f"Whoever reaches it may use the service without a key: set 127.0.0.1, or auth.mode keys. {why}")


def _keys(args: AppArgs, where: str) -> Iterator[Finding]:
    """A file of keys may be mounted elsewhere only."""
    try:
        args.auth.settings()
    except ValueError as problem:
        yield warning(under(where, "auth.keys_file"), f"On this machine: {problem}")
