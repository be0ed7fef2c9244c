"""Writes an output in the format that its ending names: CSV and Parquet are made from JSONL once that is complete."""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from deployments.cli.score_files.journal import Journal, JournalError, Tally, line_of

STDOUT = Path("-")
LINES = (".jsonl", ".ndjson")
CHUNK = 4096  # lines in memory at a time


class Printed(Tally):
    """Prints each line on standard output. Nothing of it can be continued."""

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            sys.stdout.write(line_of(line).decode() + "\n")
        sys.stdout.flush()
        self.count(lines)

    def close(self) -> None:
        """Leaves standard output open."""


def open_output(path: Path, source: Path, terms: Mapping[str, Any]) -> Journal | Printed:
    """Opens an output, or continues one.

    Args:
        path: of the output; `-` is standard output.
        source: of the input, for messages.
        terms: see Journal.

    Raises:
        JournalError: Its ending names no format, its format cannot be written here, or it exists and is of another run.
    """
    if path == STDOUT:
        return Printed()
    if path.suffix in LINES:
        return Journal(path, source, terms)
    if path.suffix not in CONVERTERS:
        endings = ", ".join((*LINES, *CONVERTERS))
        raise JournalError(f"`--output` must be `-` or end in {endings}. Given: {path}.")
    if path.suffix == ".parquet":
        _pyarrow()
    lines = lines_of(path)
    if path.exists() and not lines.exists():
        raise JournalError(f"{path} exists and is of no run: name another output, or remove it.")
    return Journal(lines, source, terms)


def lines_of(path: Path) -> Path:
    """Returns the JSONL from which a CSV or Parquet output is made."""
    return path.with_name(path.name + ".jsonl")


def finish(path: Path) -> None:
    """Makes a CSV or Parquet output of its complete JSONL; other outputs are finished already.

    Raises:
        JournalError: The format cannot hold a value, or the file cannot be written. The JSONL stays.
    """
    convert = CONVERTERS.get(path.suffix)
    if convert is None:
        return
    draft = path.with_name(path.name + ".new")
    try:
        convert(lines_of(path), draft)
        draft.replace(path)
    except (OSError, ValueError, TypeError, OverflowError, NotImplementedError) as error:  # of the file, of values
        draft.unlink(missing_ok=True)
        raise JournalError(f"{path} cannot be made: {error}. Every line is in {lines_of(path)}.") from None


def _chunks(lines: Path) -> Iterator[list[dict[str, Any]]]:
    with lines.open("rb") as file:
        while chunk := [json.loads(line) for line in islice(file, CHUNK)]:
            yield chunk


def _to_csv(lines: Path, output: Path) -> None:
    """Writes a column for each field that a line has; lists and objects are JSON, null is empty."""
    names = list(dict.fromkeys(name for chunk in _chunks(lines) for line in chunk for name in line))
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for chunk in _chunks(lines):
            writer.writerows([_cell(line.get(name)) for name in names] for line in chunk)


def _cell(value: object) -> object:
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)


def _to_parquet(lines: Path, output: Path) -> None:
    pyarrow = _pyarrow()
    from pyarrow import parquet

    schemas: Iterable[Any] = [pyarrow.Table.from_pylist(chunk).schema for chunk in _chunks(lines)]
    schema = pyarrow.unify_schemas([pyarrow.schema([]), *schemas], promote_options="permissive")
    with parquet.ParquetWriter(output, schema) as writer:
        for chunk in _chunks(lines):
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise JournalError("A Parquet output needs pyarrow: pip install 'assay-serve[files]'.") from None
    return pyarrow


CONVERTERS: dict[str, Callable[[Path, Path], None]] = {".csv": _to_csv, ".parquet": _to_parquet}
