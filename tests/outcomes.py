"""A file of tests' outcomes, one JSON object a line, which outlives a machine that is taken away in the middle.

Each run begins with {"sources": a digest of what it ran}; every test that ends adds {"test", "outcome", "seconds",
"worker", "reason"}. Written again by a later run, a test is what it was last.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

SUFFIXES = {".py", ".toml", ".json", ".safetensors"}  # of what a test's outcome depends on
NO_SOURCES = {"__pycache__", "results"}

Word = Literal["passed", "failed", "skipped"]


class Outcome(NamedTuple):
    """The outcome of one test, over its set-up, call and tear-down."""

    test: str
    outcome: Word
    seconds: float
    worker: str
    reason: str  # why it failed or was skipped, in a line; "" where it passed


class Outcomes:
    """The file, open to add to. A line is in it before the next test is heard of."""

    def __init__(self, path: Path, sources: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n")  # ends what a killed run left unfinished
        self._write({"sources": sources})

    def add(self, outcome: Outcome) -> None:
        self._write(outcome._asdict())

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def passed_in(path: Path, sources: str) -> frozenset[str]:
    """Tests that passed when they last ran on these sources. Raises OSError where there is no such file."""
    passed: set[str] = set()
    same = False
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # blank, or unfinished
            continue
        if "sources" in told:
            same = told["sources"] == sources
        elif same and told["outcome"] == "passed":
            passed.add(told["test"])
        elif same:
            passed.discard(told["test"])
    return frozenset(passed)


def digest_of(root: Path) -> str:
    """Hashes all sources below `root`, so that a change that is not committed counts, and git need not be there."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NO_SOURCES)
        for path in (Path(folder, name) for name in sorted(files)):
            if path.suffix in SUFFIXES:
                content = hashlib.sha256(path.read_bytes()).digest()
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()
