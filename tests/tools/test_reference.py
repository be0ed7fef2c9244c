"""Checks that the generated reference pages are current and complete."""

from pathlib import Path

import pytest

from deployments.auth.key_args import KeyArgs
from deployments.config.app_args import AppArgs
from deployments.config.schema import options, section_in
from deployments.errors import ERROR_KINDS
from deployments.limits import Limits
from tools import reference

PAGES = reference.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.name))
def test_the_committed_page_is_current(path: Path) -> None:
    assert path.read_text("utf-8") == PAGES[path], "run `python -m tools.reference`"


def test_every_key_has_a_description_and_its_default() -> None:
    sections = [KeyArgs, *filter(None, map(section_in, options(AppArgs).values()))]
    assert len(sections) > 20
    for section in sections:
        for option in reference.section_options(section):
            assert option.meaning.endswith("."), (section.__name__, option)
            assert option.type and option.default, (section.__name__, option)


def test_rows_name_labels_and_arguments_as_they_are_used() -> None:
    """Also of a metric without a sample before the start, and of an argument whose name in the code is another one."""
    assert "| `assay_warmup_seconds` | gauge | `part` |" in PAGES[reference.FOLDER / "metrics.md"]
    assert "| `REPOSITORY[@REVISION]` |  | a branch" in PAGES[reference.FOLDER / "cli.md"]


def test_every_limit_and_every_error_code_is_explained() -> None:
    assert reference.LIMITS.keys() == Limits().flat().keys()
    assert reference.ERRORS.keys() == ERROR_KINDS.keys()


def test_a_page_that_is_not_current_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    assert reference.main(["--check"]) == 1 and not list(tmp_path.iterdir())
    assert reference.main([]) == 0 and len(list(tmp_path.iterdir())) == len(PAGES)
    assert reference.main(["--check"]) == 0
    page = tmp_path / "errors.md"
    page.write_text(page.read_text("utf-8").replace("429", "430"), "utf-8")
    assert reference.main(["--check"]) == 1
