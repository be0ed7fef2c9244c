"""Runs one load after another from several client processes, because one process cannot send enough."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from benchmarks.fleet.client import PATIENCE_S, READY_S, Order, TimedAnswer

SLACK_S = 30.0  # to start a process and import what it needs
END_S = 5.0


class LoadAnswers(NamedTuple):
    """Holds the answers of a load, and the CPU seconds of the clients."""

    start_s: float
    end_s: float
    answers: list[TimedAnswer]
    cpu_s: float


class ClientPool:
    """Starts `count` processes and ends them. Raises TimeoutError or RuntimeError if one does not answer."""

    def __init__(self, count: int) -> None:
        self._members = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for _ in range(count)
        ]
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()
            member.wait(END_S)
        self._pool.shutdown()  # the ends of lines have come
        for member in self._members:
            for pipe in filter(None, (member.stdin, member.stdout)):
                with contextlib.suppress(BrokenPipeError):  # a line that it did not read
                    pipe.close()

    def load(self, orders: Sequence[Order], hold: Callable[[], object]) -> LoadAnswers:
        """Runs the load of one order for each process, until `hold` returns."""
        for member, order in zip(self._members, orders, strict=True):
            self._send(member, order.line())
        self._receive(READY_S + SLACK_S)
        start = time.monotonic()
        for member in self._members:
            self._send(member, "")
        try:
            hold()
        finally:
            end = time.monotonic()
            for member in self._members:
                self._send(member, "")
        found = self._receive(PATIENCE_S + SLACK_S)
        answers = [TimedAnswer(*one) for reply in found for one in reply["answers"]]
        return LoadAnswers(start, end, answers, sum(reply["cpu_s"] for reply in found))

    def _send(self, member: "subprocess.Popen[str]", line: str) -> None:
        if member.stdin is None or member.poll() is not None:
            raise RuntimeError(f"A client process has ended with {member.returncode}.")
        member.stdin.write(line + "\n")
        member.stdin.flush()

    def _receive(self, seconds: float) -> list[Any]:
        """Reads a line from each process."""
        end = time.monotonic() + seconds
        lines = [self._pool.submit(member.stdout.readline) for member in self._members if member.stdout]
        said = [line.result(max(0.0, end - time.monotonic())) for line in lines]
        if not all(said):
            raise RuntimeError("A client process has ended: see what it wrote to stderr.")
        return [json.loads(line) for line in said]
