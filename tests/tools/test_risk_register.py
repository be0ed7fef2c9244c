"""The risk register is current, every risk has a test, and what is missing is found."""

from pathlib import Path

import pytest

from tools import risk_register

RISKS = """
[[risk]]
id = "R1"
group = "Reliability"
risk = "a request is lost"
target = "0"
"""
TESTS = """
import pytest

@pytest.mark.risk("R1", figure="0 of 9")
def test_nothing_is_lost(): ...

@pytest.mark.risk("R1", planted=True)
async def test_a_loss_is_seen(): ...
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one risk and two tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "risks.toml").write_text(RISKS)
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    return tmp_path


def test_the_register_is_current_and_every_risk_has_a_test() -> None:
    assert risk_register.main(["--check"]) == 0


def test_it_tells_tests_planted_faults_figures_and_targets(tree: Path) -> None:
    assert risk_register.main([], tree) == 0
    line = (tree / risk_register.PAGE).read_text().splitlines()[-1]
    guard, planted = "`tests/test_it.py::test_nothing_is_lost`", "`tests/test_it.py::test_a_loss_is_seen`"
    assert line == f"| R1 | a request is lost | {guard} | {planted} | 0 of 9 | 0 |"
    assert risk_register.main(["--check"], tree) == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "wrong"),
    [
        ("test_it.py", "def test_nothing_is_lost", "def test_something_is_lost", "is not current"),
        ("test_it.py", "0 of 9", "1 of 9", "is not current"),
        ("test_it.py", '"R1", figure', '"R2", figure', "names R2"),
        ("test_it.py", '@pytest.mark.risk("R1", figure="0 of 9")', "", "R1 has no test"),
        ("risks.toml", "is lost", "is doubled", "is not current"),
    ],
)
def test_what_is_wrong_is_found(
    tree: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, wrong: str
) -> None:
    risk_register.main([], tree)
    path = tree / "tests" / file
    path.write_text(path.read_text().replace(old, new))
    assert risk_register.main(["--check"], tree) == 1
    assert wrong in capsys.readouterr().err
