"""The crew: processes of `fleet_client`, led through one load after another. One process cannot ask enough."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from benchmarks.fleet_client import PATIENCE_S, READY_S, Answered, Order

SLACK_S = 30.0  # to start a process and import what it needs
END_S = 5.0


class Loaded(NamedTuple):
    """What a crew's callers got, and the processor seconds that it took them to ask."""

    start_s: float
    end_s: float
    answers: list[Answered]
    cpu_s: float


class ClientPool:
    """`count` processes. A context manager; raises TimeoutError or RuntimeError where one does not answer."""

    def __init__(self, count: int) -> None:
        self._members = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fleet_client"],
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

    def load(self, orders: Sequence[Order], hold: Callable[[], object]) -> Loaded:
        """The load of one order a member, for as long as `hold` takes."""
        for member, order in zip(self._members, orders, strict=True):
            self._tell(member, order.line())
        self._hear(READY_S + SLACK_S)
        start = time.monotonic()
        for member in self._members:
            self._tell(member, "")
        try:
            hold()
        finally:
            end = time.monotonic()
            for member in self._members:
                self._tell(member, "")
        found = self._hear(PATIENCE_S + SLACK_S)
        answers = [Answered(*one) for said in found for one in said["answers"]]
        return Loaded(start, end, answers, sum(said["cpu_s"] for said in found))

    def _tell(self, member: "subprocess.Popen[str]", line: str) -> None:
        if member.stdin is None or member.poll() is not None:
            raise RuntimeError(f"A client process has ended with {member.returncode}.")
        member.stdin.write(line + "\n")
        member.stdin.flush()

    def _hear(self, seconds: float) -> list[Any]:
        """A line of each member."""
        end = time.monotonic() + seconds
        lines = [self._pool.submit(member.stdout.readline) for member in self._members if member.stdout]
        said = [line.result(max(0.0, end - time.monotonic())) for line in lines]
        if not all(said):
            raise RuntimeError("A client process has ended: see what it wrote to stderr.")
        return [json.loads(line) for line in said]
