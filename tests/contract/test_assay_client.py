"""`pip install 'assay-serve[client]'` in an environment of its own: it has neither torch nor Ray, and scores a file."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def assay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-compile"]
    options = ["--disable-pip-version-check", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *options, f"{ROOT}[client]"], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    assert not {"torch", "ray", "transformers", "fastapi"} & {one.name for one in packages.iterdir()}
    return folder / "bin" / "assay"


def run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_file_is_scored(assay: Path, url: str, query: str, documents: list[str], tmp_path: Path) -> None:
    records = "".join(json.dumps({"doc": document}) + "\n" for document in documents)
    (tmp_path / "in.jsonl").write_text(records)
    options = ["--route", "rerank", "--item-field", "doc", "--query", query, "--url", url]
    done = run([str(assay), "score", "in.jsonl", "-o", "out.csv", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(documents) and all(0 <= float(row["score"]) <= 1 for row in rows)


def test_load_is_measured(assay: Path, url: str, tmp_path: Path) -> None:
    options = ["--rates", "5", "--seconds", "1", "--runs", "1", "--out", "bench.json", "--no-table"]
    done = run([str(assay), "bench", "--url", url, *options], tmp_path)
    assert done.returncode == 0, done.stderr
    [level] = json.loads((tmp_path / "bench.json").read_text())["levels"]
    assert level["median"]["failed"] == 0 and level["median"]["answered_per_s"] > 0


def test_the_service_is_not_there(assay: Path, tmp_path: Path) -> None:
    done = run([str(assay), "serve"], tmp_path)
    assert done.returncode == 2 and "pip install 'assay-serve[serve]'" in done.stderr
