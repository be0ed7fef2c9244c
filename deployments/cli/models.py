"""Prints what this build serves: `assay models`. The list is made from the tests by `tools.served_models`."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("served_models.json")
COLUMNS = ("architecture", "head", "prompt of /rerank", "tested by")


class SupportedModel(NamedTuple):
    """Describes one architecture, or one published layout."""

    architecture: str  # a class of transformers
    head: str
    prompt: str  # where the prompt of the scoring routes comes from
    test: str  # that compares it with its reference


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("models", help="architectures, heads and prompts that this build is tested with")
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(given: argparse.Namespace) -> int:
    found = served_models()
    if given.json:
        print(json.dumps([one._asdict() for one in found], indent=1))
        return 0
    widths = [max(map(len, column)) for column in zip(COLUMNS, *found, strict=True)]
    for row in (COLUMNS, *found):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def served_models() -> list[SupportedModel]:
    """Returns the rows."""
    return [SupportedModel(**one) for one in json.loads(FILE.read_text("utf-8"))]
