"""Load-tests a running service: `assay bench`."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from deployments.cli.api_key import api_key
from deployments.cli.arguments import integer, number
from deployments.cli.bench.workloads import WORKLOADS

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
ENOUGH_RUNS = 7  # for a median with quartiles
STATUSES = """Requests are sent at the times of a Poisson process, whether or not earlier ones are answered, and latency
counts from these times. With --concurrency each client waits for its answer before its next request: that measures
throughput, not latency. The API key of a service with keys is read from ASSAY_API_KEY. exit status: 0; 1 all requests
of a run failed; 2 refused; 130 interrupted, and the results so far are printed and written."""


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("bench", help="load-test a running service", epilog=STATUSES)
    parser.set_defaults(run=run)
    option = parser.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the service (%(default)s)")
    option("--workload", choices=sorted(WORKLOADS), default="mixed", help="the kind of requests (%(default)s)")
    option(
        "--rates",
        type=_numbers,
        default=[],
        metavar="R,R",
        help="requests/s; by default fractions of the measured throughput",
    )
    option("--concurrency", type=_counts, default=[], metavar="N,N", help="clients of a closed loop, instead of rates")
    option("--seconds", type=_positive, default=5.0, help="length of a run (%(default)g)")
    option("--runs", type=integer, default=ENOUGH_RUNS, help="runs at each load (%(default)s)")
    option(
        "--objective-ms", type=_positive, default=1000.0, help="latency within which an answer is good (%(default)g)"
    )
    option("--timeout", type=_positive, default=60.0, metavar="SECONDS", help="for one answer (%(default)g)")
    option("--seed", type=integer, default=1, help="seed of arrivals and requests (%(default)s)")
    option("--out", type=Path, metavar="FILE.json", help="write results, environment and commit, and a plot beside it")
    option("--note", default="", help="a note for the file, such as how the service was started")
    option("--json", action="store_true", help="print the results as JSON on standard output")
    option("--no-table", action="store_true", help="print no table")


def run(given: argparse.Namespace) -> int:
    from deployments.cli.bench import (
        load_generator,  # they import the HTTP client
        runner,
    )
    from deployments.cli.bench.results import Table
    from deployments.cli.launch import system_info

    before = system_info.load()
    try:
        _agree(given)
        target = load_generator.Target(given.url.rstrip("/"), api_key(), given.timeout)
        model, server = runner.served(target)
        if given.out is not None:
            _check_out(given.out)
        table = Table(None if given.no_table else sys.stderr)
        work = runner.LoadTest(target=target, model=model, given=given, table=table)
        status = _until_done_or_interrupted(work.run)
    except ValueError as error:
        return _report(str(error), REFUSED)
    runner.write(work.record(server, before, status == INTERRUPTED), given)
    return FAILED if status == DONE and work.failed else status


def _agree(given: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    if given.rates and given.concurrency:
        raise ValueError("`--rates` and `--concurrency` exclude each other. Given: both.")
    if given.runs < 1:
        raise ValueError(f"`--runs` must be >= 1. Given: {given.runs}.")


def _check_out(file: Path) -> None:
    """Raises ValueError for results that could not be written at the end."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"`--out` must be a file that can be written. Given: {file}: {error.strerror}.") from None


def _until_done_or_interrupted(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs the test. An interrupt cancels requests in flight and keeps the results."""
    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        return _report("interrupted.", INTERRUPTED)
    return DONE


def _numbers(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    counts = [integer(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1. Given: {text}.")
    return counts


def _positive(text: str) -> float:
    found = number(text)
    if not (found > 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"must be > 0. Given: {text}.")
    return found


def _report(message: str, status: int) -> int:
    print(f"assay bench: {message}", file=sys.stderr)
    return status
