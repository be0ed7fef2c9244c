"""Prints a benchmark's rows as a table and writes them as JSON with the machine, the versions and the commit."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from deployments.cli.launch import system_info

Row = dict[str, str | int | float | None]
PACKAGES = ("python", "torch", "triton", "transformers", "flashinfer-python", "ray", "numpy")


def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that a result depends on."""
    return {name: version for name, version in system_info.versions().items() if version and name in PACKAGES}


def machine() -> str:
    """Describes the GPU, if there is one, and the CPU."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch.cuda.is_available() else cpu


def commit() -> str:
    """Returns the commit that ran, or ASSAY_COMMIT where the tree has no history."""
    return system_info.commit() or "unknown"


def publish(name: str, rows: Sequence[Row], out: Path | None, notes: str = "") -> None:
    """Prints the rows and, with `out`, writes `out/<name>.json`."""
    table(rows)
    if out is not None:
        write(name, rows, out, notes)


def write(name: str, rows: Sequence[Row], out: Path, notes: str = "") -> None:
    """Writes the rows to `out/<name>.json`, with the machine, the versions, the commit and the date."""
    out.mkdir(parents=True, exist_ok=True)
    run = {"machine": machine(), "versions": versions(), "commit": commit(), "date": date.today().isoformat()}
    record = {"name": name, **run, "notes": notes}
    (out / f"{name}.json").write_text(json.dumps({**record, "rows": list(rows)}, indent=1) + "\n")


def table(rows: Sequence[Row]) -> None:
    """Prints rows as a table with aligned columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_show(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) if cells else len(c) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        sys.stdout.write("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n")
    sys.stdout.flush()


def _show(value: str | int | float | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else value
    )
