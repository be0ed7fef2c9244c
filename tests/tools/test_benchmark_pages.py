"""docs/benchmarks/ is what tools/benchmark_pages.py writes, and holds every result."""

import json
import re
import shutil
from pathlib import Path

from tools.benchmark_pages import PAGES, RESULTS, ROOT, manifest, pages

AGAIN = "run `python -m tools.benchmark_pages`"


def test_the_committed_pages_are_current() -> None:
    assert {path.name: path.read_text("utf-8") for path in PAGES.glob("*.md")} == pages(), AGAIN


def test_every_result_is_on_a_page_or_named_as_raw() -> None:
    found = manifest()
    named = {one["file"] for page in found["pages"] for one in page["results"]} | set(found["raw"])
    assert named == {path.name for path in RESULTS.iterdir()}


def test_every_section_has_rows_a_method_and_a_date() -> None:
    for name, text in pages().items():
        for section in text.split("\n## ")[1:]:
            assert section.count("\n| ") >= 2, f"{name}: {section[:40]} has no rows"
            assert "\nMethod: `" in section and "\nDate: 20" in section, f"{name}: {section[:40]}"


def test_another_figure_gives_another_page(tmp_path: Path) -> None:
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy)
    file = copy / "rerank-builtin.json"
    record = json.loads(file.read_text("utf-8"))
    record["rows"][0]["auc"] = 0.5
    file.write_text(json.dumps(record), "utf-8")
    assert pages(copy)["quality.md"] != pages()["quality.md"]


def figures(text: str) -> list[str]:
    """Numbers in the cells of a table of figures, without its first column."""
    rows = [line.split("|")[2:] for line in text.splitlines() if line.startswith("| ")]
    return [number for row in rows for cell in row for number in re.findall(r"\d[\d,]+", cell)]


def test_the_figures_of_the_readme_are_on_the_pages() -> None:
    table = (ROOT / "README.md").read_text("utf-8").split("## Figures")[1].split("\n## ")[0]
    shown = {number for text in pages().values() for number in figures(text)}
    assert len(figures(table)) > 15
    assert [number for number in figures(table) if number not in shown] == []


def test_a_figure_without_a_result_is_found() -> None:
    assert figures("| workload | Assay |\n|---|---|\n| 64 items | 987,654,321 |") == ["987,654,321"]
    assert "987,654,321" not in {number for text in pages().values() for number in figures(text)}
