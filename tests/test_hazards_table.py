"""docs/hazards.md has a line for every hazard, and every test that it names stands in the tree."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IDS = [f"{kind}{n}" for kind, most in (("R", 15), ("D", 4), ("S", 15), ("F", 1), ("Q", 8)) for n in range(1, most + 1)]
CELLS = 6
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def lines_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables, by id."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    found: dict[str, list[str]] = {}
    for row in rows:
        cells = [cell.strip() for cell in row]
        assert cells[0] not in found, f"{cells[0]} has two lines"
        found[cells[0]] = cells
    return found


def findings(text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the page: ids without a line, lines without a test or a word, tests that do not exist."""
    lines = lines_of(text)
    found = [f"{id} has no line" for id in IDS if id not in lines]
    found += [f"{id} is no hazard" for id in lines if id not in IDS]
    for id, cells in lines.items():
        if len(cells) != CELLS or not all(cells):
            found.append(f"{id} has {len(cells)} cells, or an empty one")
        elif not NAMED.search(cells[2]) and "**open**" not in cells[2]:
            found.append(f"{id} names no test and does not say that it is open")
    for file, name in NAMED.findall(text):
        if name not in defined_in(root / file):
            found.append(f"{file}::{name} does not exist")
    return found


def defined_in(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def page() -> str:
    return (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")


def test_every_hazard_has_its_line_and_every_test_exists() -> None:
    assert not findings(page())


def test_what_is_missing_would_be_found() -> None:
    text = page()
    without = "\n".join(line for line in text.splitlines() if not line.startswith("| R9 |"))
    assert findings(without) == ["R9 has no line"]
    assert findings(text.replace("::test_a_nan_row_fails_alone`", "::test_a_nan_row_fails_a_lot`"))
    assert findings(text.replace("tests/chaos/test_zombies.py", "tests/chaos/test_ghosts.py"))
    assert findings(text.replace("| 0 of 9 | 0 |", "|  | 0 |"))
    assert findings(re.sub(r"\| S10 \|", "| S99 |", text))
