"""The output as its own checkpoint: torn at any byte it is continued, and on other terms it is refused."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.score_files.journal import Journal, JournalError

TERMS: dict[str, Any] = {"input": "abc", "labels": ["yes"], "query": None}
LINES = [
    {"index": i, "score": i / 7, "error": {"code": "x", "message": "y"} if i == 2 else None, "text": "é\n" * i}
    for i in range(5)
]
SOURCE = Path("input.jsonl")


def begun(path: Path, count: int = len(LINES)) -> bytes:
    journal = Journal(path, SOURCE, TERMS)
    journal.append(LINES[:count])
    journal.close()
    return path.read_bytes()


def test_what_stands_there_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 4)
    journal = Journal(path, SOURCE, TERMS)
    assert (journal.done, journal.failed) == (4, 1)
    journal.append(LINES[4:])
    journal.append([])
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == LINES


@pytest.mark.full
def test_torn_at_any_byte_it_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    data = begun(path)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        journal = Journal(path, SOURCE, TERMS)
        assert journal.done == data[:size].count(b"\n")
        journal.append(LINES[journal.done :])
        journal.close()
        assert path.read_bytes() == data


def test_a_torn_line_longer_than_one_look_is_found(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    data = begun(path, 2)
    path.write_bytes(data + b'{"index": 2, "x": "' + b"y" * 200_000)
    Journal(path, SOURCE, TERMS).close()
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"input": "abd"}, "input.jsonl has changed since .*out.jsonl was begun"),
        ({"labels": ["yes", "no"]}, "another `labels`"),
        ({"query": "q"}, "another `query`"),
    ],
)
def test_other_terms_are_refused_by_name(tmp_path: Path, terms: dict[str, Any], words: str) -> None:
    path = tmp_path / "out.jsonl"
    data = begun(path, 3)
    with pytest.raises(JournalError, match=words):
        Journal(path, SOURCE, TERMS | terms)
    assert path.read_bytes() == data


def test_an_output_that_holds_nothing_takes_any_terms(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 0)
    Journal(path, SOURCE, TERMS | {"input": "other"}).close()
    with pytest.raises(JournalError, match="has changed"):
        begun(path, 1)
        Journal(path, SOURCE, TERMS | {"input": "third"})


def test_an_id_that_json_has_not_becomes_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl", SOURCE, TERMS)
    ids = [date(2026, 11, 21), float("nan"), [float("inf")]]
    journal.append([{"index": n, "id": one, "error": None} for n, one in enumerate(ids)])
    journal.close()
    found = [json.loads(line)["id"] for line in journal.path.read_text().splitlines()]
    assert found == ["2026-11-21", "nan", "[inf]"]


def test_what_another_run_wrote_before_the_lock_was_had_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    lock = Journal._lock

    def late(journal: Journal) -> None:
        monkeypatch.setattr(Journal, "_lock", lock)
        begun(path, 3)
        lock(journal)

    monkeypatch.setattr(Journal, "_lock", late)
    with pytest.raises(JournalError, match="another `labels`"):
        Journal(path, SOURCE, TERMS | {"labels": ["no"]})


@pytest.mark.parametrize(
    "data",
    [b'{"index": 0, "error": null}\n{"index": 0, "error": null}\n', b"{}\n", b"words\n", b'{"index":1,"error":null}\n'],
)
def test_a_damaged_output_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 0)
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged at line"):
        Journal(path, SOURCE, TERMS)


def test_a_file_of_another_make_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"index": 0, "error": null}\n')
    with pytest.raises(JournalError, match="does not say what it is made of"):
        Journal(path, SOURCE, TERMS)
    assert path.read_bytes() == b'{"index": 0, "error": null}\n'


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = Journal(path, SOURCE, TERMS)
    with pytest.raises(JournalError, match="another run"):
        Journal(path, SOURCE, TERMS)
    first.close()
    Journal(path, SOURCE, TERMS).close()


def test_what_a_full_disk_cuts_is_not_written_by_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    journal = Journal(path, SOURCE, TERMS)
    journal.append(LINES[:2])
    whole, file = path.read_bytes(), journal._file

    class Full:
        """Takes three bytes more, as a disk may."""

        def __init__(self) -> None:
            self.left = 3

        def write(self, data: Any) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            taken, self.left = file.write(data[: self.left]), 0
            return taken

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

    journal._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        journal.append(LINES[2:])
    journal.close()
    assert path.read_bytes()[: len(whole)] == whole and len(path.read_bytes()) == len(whole) + 3
    journal = Journal(path, SOURCE, TERMS)
    assert journal.done == 2
    journal.append(LINES[2:])
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == LINES
