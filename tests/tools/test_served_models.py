"""The list of served models is that of the tests, and `assay models` prints it."""

import json
from pathlib import Path

import pytest

from deployments.cli.main import main
from deployments.cli.models import served_models
from scoring.prompts.guards import GUARDS
from scoring.prompts.templates import PRESETS
from tests.deployments.api import test_published_layouts as layouts
from tools import served_models as tool

CONTENTS = tool.contents()


@pytest.mark.parametrize("path", CONTENTS, ids=lambda path: str(path.name))
def test_the_committed_list_is_current(path: Path) -> None:
    assert path.read_text("utf-8") == CONTENTS[path], "run `python -m tools.served_models`"


def test_every_row_names_a_test_that_exists() -> None:
    assert len(served_models()) > 20
    for row in served_models():
        file, _, name = row.test.partition("[")
        assert (tool.ROOT / file).is_file()
        assert not name or name.rstrip("]") in layouts.LAYOUTS | layouts.GUARDS


def test_every_preset_is_tested_in_its_published_layout() -> None:
    assert set(GUARDS) == set(layouts.GUARDS)
    assert set(PRESETS) - {"plain", "builtin"} <= {
        layout.configured.get("rerank", {}).get("template", name) for name, layout in layouts.LAYOUTS.items()
    } | {"zerank"}  # whose repository has the files


def test_the_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [row._asdict() for row in served_models()]
    assert main(["models"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(served_models()) + 1 and "architecture" in out[0]
