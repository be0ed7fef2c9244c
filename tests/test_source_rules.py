"""Rules that hold for all sources: no code is read out of data; names, folders and prose follow the house."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
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


def test_classes_that_the_glossary_names_exist() -> None:
    page = (ROOT / "docs/concepts/glossary.md").read_text(encoding="utf-8")
    named = re.findall(r"`([A-Z]\w+)`", "".join(re.findall(r"^\|[^|]*\|", page, re.MULTILINE)))
    assert len(named) > 40
    assert set(named) <= set(class_names(shipped()))


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_package_carries_its_types(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file() and (ROOT / package / "__init__.py").is_file()


def test_no_folder_of_tests_is_a_package() -> None:
    """A `tests/engine/__init__.py` would hide the package `engine`."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


PRIVATE_WORDS = re.compile(
    r"\b(nobody|somebody|whoever|none (is|are) told|(is|are|was|were) told|for good|of which|comes to|at once|company"
    r"|convoys?|wards?|convict(s|ed)?|twins?|laws?)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(^|(?<=[.:!?] ))(Of|As|What|Whoever) \S")
# A generated page of figures names the commit that it was measured at, behind the date: that is data.
COMMITS = re.compile(r"(?<!\d{4}-\d\d-\d\d, commit )\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b")
DOCUMENTS = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
OTHER_SOURCES = ("k8s", "containers", "pyproject.toml", "Makefile")


def paragraphs(text: str) -> Iterator[str]:
    """Joins the lines of each paragraph, table row or list entry. Headings and code blocks are no sentences."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^#+ .*$", "", prose, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|>]|\d+\.|\w+:) ?)", prose):
        if paragraph.strip():
            yield " ".join(paragraph.split()).lstrip("-*>| ")


def docstrings(source: str) -> Iterator[str]:
    """Yields every string that stands as a statement: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def comments(source: str) -> Iterator[str]:
    """Yields comments; the lines of a block that stands alone are joined."""
    block, last = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("#: "), token.start[0]
            alone = not token.line[: token.start[1]].strip()
            if alone and block and line == last + 1:
                block = f"{block} {text}"
            else:
                yield block
                block = text
            last = line if alone else 0
    yield block


def prose_of(path: Path, text: str) -> Iterator[str]:
    """Yields the prose of a file: a document's paragraphs, or the docstrings and comments of a source."""
    if path.suffix == ".md":
        yield from paragraphs(text)
    elif path.suffix == ".py":
        for docstring in docstrings(text):
            yield from paragraphs(docstring)
        yield from comments(text)
    else:
        yield from (" ".join(found.split()) for found in re.findall(r"(?:^|\s)#+ (.*)$", text, re.MULTILINE))


def private_phrases(path: Path, text: str) -> list[str]:
    """Finds phrases that CONTRIBUTING.md rules out, each with the sentence around it."""
    return [
        f"{found.group(0).strip()!r} in: {prose[max(0, found.start() - 40) : found.end() + 40]}"
        for prose in prose_of(path, text)
        for rule in (PRIVATE_WORDS, OPENINGS, COMMITS)
        for found in rule.finditer(prose)
    ]


def written() -> list[Path]:
    """Returns the files whose prose is checked: documents, packages, manifests and images; no tests."""
    roots = [ROOT / name for name in (*DOCUMENTS, *PACKAGES, *OTHER_SOURCES)]
    files = [file for root in roots for file in (sorted(root.rglob("*")) if root.is_dir() else [root])]
    kinds = {".md", ".py", ".yaml", ".toml"}
    return [
        file
        for file in files
        if file.is_file() and (file.suffix in kinds or file.name.startswith(("Dockerfile", "Makefile")))
    ]


def test_prose_uses_plain_words() -> None:
    assert len(written()) > 300
    found = {str(path.relative_to(ROOT)): private_phrases(path, path.read_text(encoding="utf-8")) for path in written()}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""What a row may draw."""'),
        ("a.py", 'class A:\n    """Holds rows. As before."""'),
        ("a.py", 'def f():\n    """Runs.\n\n    Args:\n        kind: Of the step.\n    """'),
        ("a.py", 'x: int\n"""Drawn from another law."""'),
        ("a.py", "x = 1  # two rows at once"),
        ("a.py", "# Rows that\n# nobody reads."),
        ("a.py", "# Two words, is\n# told across lines."),
        ("a.md", "A page, one\nof which is long."),
        ("a.md", "| a | Whoever asks |"),
        ("a.md", "Measured at 26d9b34."),
        ("a.yaml", "key: 1  # What the pod runs."),
    ],
)
def test_planted_phrase_is_found(name: str, text: str) -> None:
    assert private_phrases(Path(name), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'x = "nobody"'),
        ("a.py", '"""Turns rows into tokens, at most once."""'),
        ("a.md", "## What a key may do"),
        ("a.md", "```\nnobody\n```"),
        ("a.md", "Date: 2026-11-23, commit e90fada, torch 2.11.0"),
        ("a.md", "At 1000000 rows, as before, defaced walls."),
    ],
)
def test_plain_words_are_left_alone(name: str, text: str) -> None:
    assert not private_phrases(Path(name), text)
