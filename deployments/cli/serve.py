"""Serves a configuration on this machine until interrupted: `assay serve [CONFIG] [--fast]`."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deployments.cli.launch import local_serve

CPU = Path(__file__).parents[1] / "configs" / "cpu.yaml"
STATUSES = """exit status: 0 interrupted, and all its processes have ended; 1 it does not start, and the last line says
why. `assay check CONFIG` finds more, and starts nothing."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("serve", help="serve a configuration on this machine", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option(
        "config",
        nargs="?",
        type=Path,
        default=CPU,
        help="a Serve config file (the built-in model on the CPU)",
    )
    option("--fast", action="store_true", help="use Serve's throughput options and HAProxy (docs/guides/fast-mode.md)")
    option("--print-config", action="store_true", help="print the config that would be served, and start nothing")


def run(given: argparse.Namespace) -> int:
    if not given.print_config:
        with _interruptible():
            return local_serve.serve(given.config, fast=given.fast)
    try:
        print(yaml.safe_dump(local_serve.read(given.config), sort_keys=False), end="")
    except local_serve.CannotServe as error:
        print(f"assay serve: {error}", file=sys.stderr)
        return local_serve.REFUSED
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Has SIGTERM and SIGHUP interrupt as SIGINT does, so that a start which they end leaves no process behind."""
    defaults = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in defaults:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)
