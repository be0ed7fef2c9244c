"""docs/guides/clients.md: each block runs as it is in its client's environment, and prints the text below it."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"
ENVIRONMENTS = {
    "openai": ["openai_sdk"],
    "cohere": ["cohere_5", "cohere_7"],
    "LangChain": ["langchain_partners"],
    "LlamaIndex": ["llama_index_rerankers"],
    "LiteLLM": ["litellm_sdk"],
}
HARNESS = "lm-evaluation-harness"
RUNS = [(client, environment) for client, several in ENVIRONMENTS.items() for environment in several]


def blocks() -> dict[str, list[str]]:
    """By heading; the last of each is what is printed."""
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {one.splitlines()[0]: re.findall(r"^```\w*\n(.*?)^```$", one, re.DOTALL | re.MULTILINE) for one in sections}


def run(command: list[str], folder: Path, **variables: str) -> str:
    variables |= {"HOME": str(folder), "NO_PROXY": "*", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


def test_every_block_is_run() -> None:
    assert set(blocks()) == {*ENVIRONMENTS, HARNESS}


@pytest.mark.parametrize(("client", "environment"), RUNS)
def test_a_block_prints_what_the_page_says(
    url: str, python_of: Callable[[str], Path], tmp_path: Path, client: str, environment: str
) -> None:
    code, printed = blocks()[client]
    script = tmp_path / "block.py"
    script.write_text(code.replace("http://localhost:8000", url), "utf-8")
    command = [str(python_of(environment)), str(script)]
    assert run(command, tmp_path, PATH=os.environ["PATH"], LITELLM_LOCAL_MODEL_COST_MAP="True") == printed


def test_the_harness_prints_what_the_page_says(url: str, python_of: Callable[[str], Path], tmp_path: Path) -> None:
    task, questions, command, printed = blocks()[HARNESS]
    (tmp_path / "relevant.yaml").write_text(task, "utf-8")
    (tmp_path / "relevant.jsonl").write_text(questions, "utf-8")
    path = f"{python_of('harness').parent}:{os.environ['PATH']}"
    shell = ["sh", "-c", command.replace("http://localhost:8000", url)]
    found = run(shell, tmp_path, PATH=path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    assert printed in found
