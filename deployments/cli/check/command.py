"""Finds mistakes in a configuration without starting anything: `assay check CONFIG`."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

GOOD, FAULTY, UNREADABLE = 0, 1, 2
STATUSES = """exit status: 0 no errors (there may be warnings); 1 errors; 2 the file holds no configuration. A warning
concerns this machine only, or causes trouble only sometimes."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "check", help="find mistakes in a configuration without starting anything", epilog=STATUSES
    )
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("config", type=Path, help="a Serve config file, or a RayService manifest")
    option("--plan", action="store_true", help="print what would be started: replicas, GPUs, memory")
    option(
        "--without-model", action="store_true", help="do not read the model's folder, because it is on another machine"
    )
    option("--json", action="store_true", help="print findings and plan as JSON")


def run(given: argparse.Namespace) -> int:
    from deployments.cli.check import document, report  # importing Ray and torch takes seconds

    try:
        found = report.check(given.config, with_model=not given.without_model)
    except document.Unreadable as error:
        print(f"assay check: {error}", file=sys.stderr)
        return UNREADABLE
    if given.json:
        findings = [asdict(one) for one in found.findings]
        plans = [plan.record() for plan in found.plans]
        print(json.dumps({"good": found.good, "findings": findings, "plans": plans}, indent=1))
    else:
        _print(found, given)
    return GOOD if found.good else FAULTY


def _print(found: Any, given: argparse.Namespace) -> None:
    for one in found.findings:
        print(one)
    if given.plan:
        for plan in found.plans:
            print("\n".join(plan.lines()))
    errors = sum(one.level == "error" for one in found.findings)
    print(f"{given.config}: {errors} errors." if errors else f"{given.config}: good.")
