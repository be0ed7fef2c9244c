"""Rules that hold for all sources: no code is read out of data, and names and folders follow the house."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("deployments", "scoring", "engine", "gpu_sampler", "benchmarks", "tools")
MAX_MODULES = 20
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


@pytest.mark.risk("S11", figure="0 findings, 0 payloads run")
def test_no_package_reads_code_out_of_data() -> None:
    assert len(sources()) > 40
    found = {str(path.relative_to(ROOT)): findings(path.read_text(encoding="utf-8")) for path in sources()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.risk("S11", planted=True)
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


def class_names(sources_by_path: dict[str, str]) -> dict[str, list[str]]:
    """Paths of the modules that define a top-level class of each name."""
    found: dict[str, list[str]] = {}
    for path, source in sources_by_path.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path)
    return found


def shipped() -> dict[str, str]:
    paths = [path for package in PACKAGES[:4] for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_no_class_name_is_used_for_two_things() -> None:
    assert {name: paths for name, paths in class_names(shipped()).items() if len(paths) > 1} == {}


def test_a_class_name_used_twice_is_seen() -> None:
    assert class_names({"a.py": "class A: ...", "b.py": "class A: ...\nclass B: ..."})["A"] == ["a.py", "b.py"]


def test_no_folder_of_shipped_code_holds_more_than_twenty_modules() -> None:
    counts = Counter(str(Path(path).parent) for path in shipped() if not path.endswith("__init__.py"))
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_package_carries_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file() and (ROOT / package / "__init__.py").is_file()


def test_no_folder_of_tests_is_a_package() -> None:
    """A `tests/engine/__init__.py` would hide the package `engine`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
