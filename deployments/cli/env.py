"""Prints what a bug report needs: `assay env`."""

import argparse
import json
from typing import Any

from deployments.cli.launch import system_info


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("env", help="versions, GPUs, caches and variables, for a bug report")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(given: argparse.Namespace) -> int:
    found = system_info.report()
    print(json.dumps(found, indent=1) if given.json else "\n".join(lines(found)))
    return 0


def lines(found: dict[str, Any]) -> list[str]:
    """Renders a report as text."""
    text = [f"commit: {found['commit'] or 'none'}"]
    for title in ("versions", "machine", "caches", "variables"):
        text.append(f"{title}:")
        text += [f"  {name}: {'not installed' if value is None else value}" for name, value in found[title].items()]
    text.append("gpus:")
    text += ["  " + ", ".join(one.values()) for one in found["gpus"]] or ["  none"]
    return text
