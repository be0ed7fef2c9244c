"""Writes the output of `assay score`, which is its own checkpoint: line k belongs to record k, and a record is done if
its whole line is written. A note beside the output names the input and the options it is made from."""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SYNC_S = 1.0  # output of at most this time is lost if the machine stops; none is if only the process does
TAIL_BYTES = 1 << 16


class JournalError(Exception):
    """Says why an output cannot be continued, and what to do."""


class Tally:
    """Counts the lines of an output, those with an error among them, and keeps the first error."""

    def __init__(self) -> None:
        self.done = self.failed = 0
        self.first_error: dict[str, Any] | None = None  # with the index of its record

    def count(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Counts lines that have been written."""
        for line in lines:
            self.done += 1
            if line.get("error") is not None:
                self.failed += 1
                self.first_error = self.first_error or {"index": line["index"], **line["error"]}


class Journal(Tally):
    """Appends lines to an output, which one process at a time has open, or continues an output that exists.

    `done` lines are written, `failed` of them with an error. An incomplete last line is removed.

    Args:
        path: of the output.
        source: of the input, for messages.
        terms: options that the output depends on, and "input", the input's fingerprint.

    Raises:
        JournalError: the output exists and was made from another input or with other options.
    """

    def __init__(self, path: Path, source: Path, terms: Mapping[str, Any]) -> None:
        self.path = path
        self.source = source
        self.note = path.with_name(path.name + ".assay")
        super().__init__()
        self._file = path.open("ab", buffering=0)  # what could not be written is not tried again by `close`
        try:
            self._lock()
            self._agree(json.loads(json.dumps(terms)))
            self._repair()
            self._read()
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes lines. If the process is killed meanwhile, only the first ones are written."""
        if not lines:
            return
        data = memoryview(b"".join(line_of(line) + b"\n" for line in lines))
        while data:
            data = data[self._file.write(data) :]
        self.count(lines)
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        if not self._file.closed:
            self._sync()
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self.path} is being written by another run.") from None
        self._file.seek(0, os.SEEK_END)  # another run may have written since it was opened

    def _agree(self, terms: dict[str, Any]) -> None:
        empty = self._file.tell() == 0
        if empty:
            self._write_note(terms)
            return
        try:
            noted = json.loads(self.note.read_text("utf-8"))
        except (OSError, ValueError):
            raise JournalError(
                f"{self.path} exists and {self.note.name} does not say what it is made of: name another output."
            ) from None
        for name in {**terms, **noted}:
            if noted.get(name) == terms.get(name):
                continue
            if name == "input":
                raise JournalError(
                    f"{self.source} has changed since {self.path} was begun: name another output, or remove this one."
                )
            raise JournalError(f"{self.path} was begun with another `{name}`: name another output, or remove this one.")

    def _write_note(self, terms: dict[str, Any]) -> None:
        """Writes the note atomically, before the first line."""
        draft = self.note.with_name(self.note.name + ".new")
        with draft.open("w", encoding="utf-8") as file:
            json.dump(terms, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.note)

    def _repair(self) -> None:
        """Removes an incomplete last line."""
        size = end = self._file.tell()
        with self.path.open("rb") as file:
            while end > 0:
                start = max(0, end - TAIL_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
        if end < size:
            self._file.truncate(end)
            self._file.seek(end)

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                try:
                    found = json.loads(line)
                    index, error = found["index"], found["error"]
                    whole = error is None or {**error}.keys() >= {"code", "message"}
                except (ValueError, TypeError, KeyError):
                    index, whole = None, False
                if index != self.done or not whole:
                    raise JournalError(f"{self.path} is damaged at line {self.done + 1}: name another output.")
                self.count([found])


def line_of(line: Mapping[str, Any]) -> bytes:
    """Returns a line of output as JSON. An `id` of a type that JSON does not have, such as a date or a NaN of a Parquet
    file, becomes text."""
    try:
        return json.dumps(line, default=str, allow_nan=False).encode()
    except ValueError:
        return json.dumps({**line, "id": str(line["id"])}, allow_nan=False).encode()
