"""The plan of the house holds: each op of the sampler has its test, and no package reads code out of data."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("deployments", "scoring", "engine", "gpu_sampler", "benchmarks")
CALLS = {"eval", "exec", "compile", "pickle.load", "pickle.loads", "cPickle.load", "cPickle.loads", "torch.load"}
CALLS |= {"dill.load", "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "builtins.eval", "builtins.exec"}
CALLS |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}
NAMES = {"load", "loads", "eval", "exec", "unsafe_load", "full_load"}
MODULES = {name.rsplit(".", 1)[0] for name in CALLS if "." in name}


def findings(source: str) -> list[str]:
    """Calls by which data could become code, `trust_remote_code=` anything but False, and names that hide either."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                found.append(f"line {node.lineno}: {called}")
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "trust_remote_code" and not allowed:
                    found.append(f"line {node.lineno}: trust_remote_code")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value == "trust_remote_code"
                if named and not (isinstance(value, ast.Constant) and value.value is False):
                    found.append(f"line {node.lineno}: trust_remote_code")
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            hidden = [alias.name for alias in node.names if alias.name in NAMES]
            found.extend(f"line {node.lineno}: from {node.module} import {name}" for name in hidden)
        elif isinstance(node, ast.Import):
            renamed = [alias for alias in node.names if alias.name in MODULES and alias.asname]
            found.extend(f"line {node.lineno}: import {alias.name} as {alias.asname}" for alias in renamed)
    return found


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_package_reads_code_out_of_data() -> None:
    assert len(sources()) > 40
    found = {str(path.relative_to(ROOT)): findings(path.read_text(encoding="utf-8")) for path in sources()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle\nx = pickle.load(f)",
        "import pickle\nx = pickle.loads(b)",
        "from pickle import loads",
        "from pickle import loads as safe",
        "import pickle as p",
        "import torch as t",
        "import torch\ntorch.load('a.pt', weights_only=True)",
        "from torch import load",
        "def f(x):\n    return [eval(y) for y in x]",
        "exec('1')",
        "m = AutoModel.from_pretrained(path, trust_remote_code=True)",
        "m = AutoModel.from_pretrained(path, trust_remote_code=flag)",
        "options = {'trust_remote_code': True}",
        "import yaml\nyaml.load(f)",
    ],
)
def test_planted_source_is_found_by_the_same_scan(planted: str) -> None:
    assert len(findings(planted)) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "torch.compile(model)",
        "import json\njson.loads(b)",
        "import yaml\nyaml.safe_load(f)",
        "load(path, trust_remote_code=False)",
        "'eval(x)'  # eval(x)",
    ],
)
def test_harmless_source_is_left_alone(harmless: str) -> None:
    assert not findings(harmless)


STEMS = sorted(path.stem for path in (ROOT / "gpu_sampler" / "reference").glob("*.py") if path.stem != "__init__")
TESTED_BY = {"sample": "sampler"}  # the whole reference sampler is what `Sampler` runs on the CPU


@pytest.mark.parametrize("stem", STEMS)
def test_op_of_the_reference_has_its_test(stem: str) -> None:
    test = ROOT / "tests" / "gpu_sampler" / f"test_{TESTED_BY.get(stem, stem)}.py"
    assert "def test_" in test.read_text(encoding="utf-8")


def test_stems_are_those_of_the_design() -> None:
    assert {"patch_rows", "count_tokens", "row_stats", "select", "nucleus_scan"} <= set(STEMS)
    assert {"label_scores", "head_logprob", "philox", "order", "accept", "residual", "draft"} <= set(STEMS)


# A file of kernels has a twin of its own stem, or is a part of an op that has one. Then it stands here with the file
# that does the same plainly, and is tested through that op: it has no meaning by itself that a twin could repeat.
PART_OF = {
    "row": "reference/select.py",  # what every kernel that reads a row shares
    "group_stats": "reference/row_stats.py",  # statistics read again, and mended
    "listing": "reference/select.py",  # the first tokens of the order, which the twin has from a sort
    "drawing": "reference/select.py",
    "reporting": "reference/logprobs.py",  # log-probabilities from a total
    "handover": "workspace.py",  # names for what lies there
    "judge_draws": "reference/select.py",  # masses before draws, which the twin sums up over the row
    "rank_drawn": "reference/order.py",
    "predecessors": "reference/order.py",  # which values of a tile come before a token
    "settle": "reference/select.py",
    "proposals": "reference/accept.py",  # p and q of tokens
    "residual_sources": "reference/residual.py",  # the tokens that a residual is drawn from
    "runs": "reference/verify.py",  # the state of a run's rows, and of the slots behind it
    "turns": "reference/sample.py",  # when a kernel may begin: there one op follows the other
    "scatter_state": "state.py",  # copies the host's state, which is its own twin
}


def without_twin(kernels: set[str]) -> set[str]:
    return {stem for stem in kernels if stem not in STEMS and stem not in PART_OF}


def test_every_kernel_has_its_twin() -> None:
    kernels = {path.stem for path in (ROOT / "gpu_sampler" / "kernels").glob("[!_]*.py")}
    assert not without_twin(kernels)
    assert set(PART_OF) <= kernels - set(STEMS)
    assert all((ROOT / "gpu_sampler" / path).is_file() for path in PART_OF.values())
    assert without_twin({"select", "settle", "sorting"}) == {"sorting"}


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_package_carries_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file() and (ROOT / package / "__init__.py").is_file()


def test_no_folder_of_tests_is_a_package() -> None:
    """A `tests/engine/__init__.py` would hide the package `engine`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
