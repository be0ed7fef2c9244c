"""assay bench: a load test of a running service."""

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from deployments.cli.bench.workloads import WORKLOADS

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
ENOUGH_RUNS = 7  # for a median with quartiles
STATUSES = """Requests are sent when they are due, whatever became of those before: a Poisson process. Latency counts
from that moment. With --concurrency each caller waits for its answer before it asks again: that tells what the service
can do, not how long callers wait. exit status: 0; 1 nothing was answered in some run; 2 refused; 130 interrupted, and
what was measured is told and written."""


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="load-test a running service", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    option("--workload", choices=sorted(WORKLOADS), default="mixed", help="what is asked (%(default)s)")
    option("--rates", type=_numbers, default=[], metavar="R,R", help="requests/s (parts of what it can do, measured)")
    option("--concurrency", type=_counts, default=[], metavar="N,N", help="instead: callers at once")
    option("--seconds", type=_positive, default=5.0, help="of one run (%(default)g)")
    option("--runs", type=int, default=ENOUGH_RUNS, help="of each load (%(default)s)")
    option("--objective-ms", type=_positive, default=1000.0, help="an answer is good within this (%(default)g)")
    option("--timeout", type=_positive, default=60.0, metavar="SECONDS", help="for one answer (%(default)g)")
    option("--seed", type=int, default=1, help="of arrivals and requests (%(default)s)")
    option("--out", type=Path, metavar="FILE.json", help="write numbers, environment and commit; the plot beside it")
    option("--note", default="", help="words that go into the file, such as how the service was started")
    option("--json", action="store_true", help="the numbers on standard output, as JSON")
    option("--no-table", action="store_true", help="say nothing on the way")


def run(given: argparse.Namespace) -> int:
    from deployments.cli.bench import (
        load_generator,  # they import the HTTP client
        runner,
    )
    from deployments.cli.bench.results import Table
    from deployments.cli.launch import system_info

    target = load_generator.Target(given.url.rstrip("/"), os.environ.get("ASSAY_API_KEY"), given.timeout)
    before = system_info.load()
    try:
        _agree(given)
        model, server = runner.served(target)
        table = Table(None if given.no_table else sys.stderr)
        work = runner.Campaign(target=target, model=model, given=given, table=table)
        status = _until_done_or_interrupted(work.run)
    except ValueError as error:
        return _complain(str(error), REFUSED)
    runner.write(work.record(server, before, status == INTERRUPTED), given)
    return FAILED if status == DONE and work.failed else status


def _agree(given: argparse.Namespace) -> None:
    """ValueError for options that contradict each other."""
    if given.rates and given.concurrency:
        raise ValueError("`--rates` and `--concurrency` exclude each other. Given: both.")
    if given.runs < 1:
        raise ValueError(f"`--runs` must be >= 1. Given: {given.runs}.")


def _until_done_or_interrupted(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """An interrupt cancels what is in flight, and what is measured stays."""
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        return _complain("interrupted.", INTERRUPTED)
    return DONE


def _numbers(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1. Given: {text}.")
    return counts


def _positive(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be > 0. Given: {text}.")
    return number


def _complain(words: str, status: int) -> int:
    print(f"assay bench: {words}", file=sys.stderr)
    return status
