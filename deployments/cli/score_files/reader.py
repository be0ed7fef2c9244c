"""Reads the records of an input file, JSONL, CSV or Parquet, as a stream."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

READ_BYTES = 1 << 20
PARQUET_ROWS = 1024  # in memory at a time
csv.field_size_limit(1 << 30)


class InputError(Exception):
    """Says that the input cannot be used, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """Holds one record in file order. `problem` says why it cannot be read; `fields` is then empty."""

    index: int
    fields: dict[str, Any]
    problem: str | None = None


class InputFile:
    """Reads a file of records of any length, without keeping it in memory.

    Raises:
        InputError: there is no such file, or its ending is unknown.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in READERS:
            raise InputError(f"{path} must end in {', '.join(READERS)}. Given: {path.suffix or 'no ending'}.")
        if not path.is_file():
            raise InputError(f"{path} must be a file. Given: {'a folder' if path.is_dir() else 'nothing there'}.")
        self.path = path
        self._read = READERS[path.suffix]

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the bytes, in hexadecimal."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
        return digest.hexdigest()

    def stamp(self) -> tuple[int, int]:
        """Returns size and time of change, which show that the file has changed while it was read."""
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def count(self) -> int:
        with closing(self._read(self.path)) as found:
            return sum(1 for _ in found)

    def records(self, first: int = 0) -> Iterator[InputRecord]:
        """Yields the records from number `first` on; earlier ones are read and not parsed."""
        with closing(self._read(self.path)) as calls:
            for index, make in enumerate(islice(calls, first, None), first):
                found = make()
                fields, problem = ({}, found) if isinstance(found, str) else (found, None)
                yield InputRecord(index=index, fields=fields, problem=problem)


# A reader yields for each record a function that parses it and returns its fields, or the problem with it.
Parse = Callable[[], dict[str, Any] | str]


def _jsonl(path: Path) -> Iterator[Parse]:
    """Reads a record from each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield lambda line=line, number=number: _json_fields(line, number)  # type: ignore[misc]


def _json_fields(line: bytes, number: int) -> dict[str, Any] | str:
    try:
        found = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError):
        return f"Line {number} must be a JSON object in UTF-8."
    return found if isinstance(found, dict) else f"Line {number} must be a JSON object. Given: another value."


def _csv(path: Path) -> Iterator[Parse]:
    """Reads a record from each row; the first one names the fields. Quotes are those of RFC 4180."""
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        reader = csv.reader(_strict(file), strict=True)
        try:
            names = next(reader, [])
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise InputError(f"The header line of {path} must name each column once. Twice: {twice!r}.")
            for row in reader:
                if row:
                    yield lambda row=row: _csv_fields(names, row)  # type: ignore[misc]
        except (csv.Error, UnicodeEncodeError) as error:
            line = reader.line_num + isinstance(error, UnicodeEncodeError)  # the reader has not seen it
            raise InputError(f"{path} must be CSV in UTF-8 with a header line. It is not at line {line}.") from None


def _strict(lines: Iterable[str]) -> Iterator[str]:
    """Raises UnicodeEncodeError at the line that is not UTF-8; a strict file raises before the lines ahead of it."""
    for line in lines:
        line.encode("utf-8")
        yield line


def _csv_fields(names: list[str], row: list[str]) -> dict[str, Any] | str:
    if len(row) != len(names):
        return f"A CSV row must have {len(names)} fields. Given: {len(row)}."
    return dict(zip(names, row, strict=True))


def _parquet(path: Path) -> Iterator[Parse]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError(f"{path} can be read only with pyarrow: pip install 'assay-serve[files]'.") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield lambda row=row: row  # type: ignore[misc]
    except ArrowException:
        raise InputError(f"{path} must be a Parquet file. It is not, or it is damaged.") from None


READERS: dict[str, Callable[[Path], Any]] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".parquet": _parquet}
