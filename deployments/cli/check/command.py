"""assay check CONFIG: everything that can be told of a configuration before anything starts."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

GOOD, FAULTY, UNREADABLE = 0, 1, 2
STATUSES = """exit status: 0 it can be served (there may be warnings); 1 errors were found; 2 there is no configuration
to check. A warning holds for this machine, or hurts only sometimes."""


def add(commands: Any) -> None:
    parser = commands.add_parser("check", help="find mistakes in a configuration, and start nothing", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("config", type=Path, help="a Serve config file, or a RayService manifest")
    option("--plan", action="store_true", help="what would be started: replicas, GPUs, memory")
    option("--without-model", action="store_true", help="the model's folder is on another machine: do not look at it")
    option("--json", action="store_true", help="findings and plan as JSON")


def run(given: argparse.Namespace) -> int:
    from deployments.cli.check import (
        document,
        report,  # they import Ray and torch, which takes seconds
    )

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
        _say(found, given)
    return GOOD if found.good else FAULTY


def _say(found: Any, given: argparse.Namespace) -> None:
    for one in found.findings:
        print(one)
    if given.plan:
        for plan in found.plans:
            print("\n".join(plan.lines()))
    errors = sum(one.level == "error" for one in found.findings)
    print(f"{given.config}: {errors} errors." if errors else f"{given.config}: good.")
