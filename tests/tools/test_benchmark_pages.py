"""docs/benchmarks/ is what tools/benchmark_pages.py writes, and holds every result."""

import json
import shutil
from pathlib import Path

from tools.benchmark_pages import PAGES, RESULTS, manifest, pages

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
