"""`assay score` killed at random moments and started again: every item once, in order; and a planted loss."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COUNT = 500
# The fault: what has been asked about counts as done, so what is in flight at a kill is never asked about again.
EARLY_CHECKPOINT = """
import sys
from pathlib import Path

from deployments.cli.main import main
from deployments.cli.score_files import command as score, output
from deployments.cli.score_files.journal import Journal


class Early(Journal):
    def _read(self):
        asked = Path(str(self.path) + ".asked")
        self.done = max(map(int, asked.read_text().split()), default=0) if asked.exists() else 0


class Scorer(score.FileScorer):
    def score_batch(self, batch):
        with open(sys.argv[4] + ".asked", "a") as file:
            file.write(f"{batch[-1].index + 1}\\n")
        return super().score_batch(batch)


output.Journal, score.FileScorer = Early, Scorer
sys.exit(main(sys.argv[1:]))
"""

INTERRUPTIBLE = """
import signal
import sys

from deployments.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore it
sys.exit(main(sys.argv[1:]))
"""


def lines_of(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def run_with_kills(command: list[str], output: Path, kills: int, seed: int) -> list[int]:
    """Runs the command until it ends by itself, with `kills` kills on the way; how much stood there at each."""
    draw = random.Random(seed)
    seen: list[int] = []
    for _ in range(kills):
        goal = lines_of(output) + draw.randrange(5, COUNT // (2 * kills))
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while lines_of(output) < goal:
            assert process.poll() is None and time.monotonic() < until, "it must not end before it is killed"
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        seen.append(lines_of(output))
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300).returncode == 0
    return seen


def whole(output: Path, score_of: Callable[[Any, Any], float]) -> bool:
    """Whether every item stands there once, in order, with its score."""
    found = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    return [(row["index"], row["id"], row["score"]) for row in found] == [
        (i, f"r{i}", score_of(f"query {i // 10}", f"item {i}")) for i in range(COUNT)
    ]


LABELS = ("--labels", "yes,no")


def arguments(url: str, source: Path, output: Path, asked: Sequence[str] = LABELS) -> list[str]:
    return [
        "score", str(source), "-o", str(output), "--url", url, *asked, "--id-field", "id",
        "--batch-items", "3", "--concurrency", "4", "--no-progress",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("asked", [LABELS, ("--route", "rerank")], ids=["labels", "rerank"])
def test_killed_three_times_every_item_stands_there_once(
    service: Any, make_input: Any, tmp_path: Path, score_of: Any, asked: Sequence[str]
) -> None:
    service.delay_s = 0.004
    output = tmp_path / "output.jsonl"
    command = [sys.executable, "-m", "deployments.cli", *arguments(service.url, make_input(COUNT), output, asked)]
    seen = run_with_kills(command, output, 3, 2)
    assert whole(output, score_of)
    assert len(set(seen)) == 3 and seen[-1] < COUNT
    assert service.items_asked() <= COUNT + 3 * 4 * 4 * 3  # what was in flight, three times


@pytest.mark.full
def test_an_interrupt_says_so_and_the_next_run_goes_on(
    service: Any, make_input: Any, tmp_path: Path, score_of: Any
) -> None:
    service.delay_s = 0.01
    output = tmp_path / "output.jsonl"
    command = [sys.executable, "-c", INTERRUPTIBLE, *arguments(service.url, make_input(COUNT), output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while lines_of(output) < 50:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "continues from here" in said and "Traceback" not in said and 50 <= lines_of(output) < COUNT
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300).returncode == 0
    assert whole(output, score_of)


@pytest.mark.full
def test_a_checkpoint_before_the_item_would_be_seen(
    service: Any, make_input: Any, tmp_path: Path, score_of: Any
) -> None:
    """The planted counterpart. A kill has to come between the checkpoint and the item, so that it may take a few."""
    service.delay_s = 0.004
    items = make_input(COUNT)
    for attempt in range(5):
        output = tmp_path / f"output-{attempt}.jsonl"
        run_with_kills([sys.executable, "-c", EARLY_CHECKPOINT, *arguments(service.url, items, output)], output, 3, 1)
        if not whole(output, score_of):
            break
    assert not whole(output, score_of)
    assert lines_of(output) < COUNT
