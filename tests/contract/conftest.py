"""Real clients against a running service: one virtual environment a client, since their pins conflict.

Run by `make contract`. Without `-m contract` this folder is not even looked at: it installs packages and starts a
server. ASSAY_CONTRACT_URL names one that runs already.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.model_folder import BUILTIN
from tests.served import served

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = Path(os.environ.get("ASSAY_CONTRACT_VENVS", ROOT / ".venv-contract"))
CLIENT_S = 480.0
TOLERANCE = 1e-5  # of a probability, or nats

Client = Callable[..., Any]
Rank = tuple[int, float]  # a document and its score


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True: ignored, unless the markers that were asked for are ours."""
    return True if str(config.getoption("markexpr")) != "contract" else None


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The CPU configuration, served by itself on a free port."""
    if "ASSAY_CONTRACT_URL" in os.environ:
        yield os.environ["ASSAY_CONTRACT_URL"]
        return
    with served("cpu.yaml", tmp_path_factory.mktemp("serve")) as found:
        yield found


@pytest.fixture(scope="session")
def python_of() -> Callable[[str], Path]:
    """`python_of(client)`: the interpreter of an environment made of `requirements/<client>.txt`, kept between runs."""

    def make(client: str) -> Path:
        requirements = HERE / "requirements" / f"{client}.txt"
        digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
        folder = VENVS / f"{client}-{digest}"
        python, stamp = folder / "bin" / "python", folder / ".complete"
        if not stamp.exists():
            # Our own pip, and nothing compiled ahead: half the time.
            subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
            install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile"]
            quiet = ["--disable-pip-version-check", "-q", "-r", str(requirements)]
            subprocess.run([*install, *quiet], check=True)
            stamp.touch()
        return python

    return make


@pytest.fixture(scope="session")
def node_modules_of() -> Callable[[str], Path]:
    """`node_modules_of(client)`: a folder with the packages of `requirements/<client>/`, kept between runs.

    It needs Node 20 or newer and npm.
    """

    def make(client: str) -> Path:
        requirements = HERE / "requirements" / client
        files = [requirements / "package.json", requirements / "package-lock.json"]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
        folder = VENVS / f"{client}-{digest}"
        stamp = folder / ".complete"
        if not stamp.exists():
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, folder)
            options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
            subprocess.run(["npm", "ci", *options], cwd=folder, check=True)
            stamp.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def run_client(
    request: pytest.FixtureRequest, python_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Client:
    """`run_client(client, arguments)`: runs `clients/<client>.py` in its environment; what it writes as its answer.

    Both ways JSON: the script gets a file with `arguments` and the name of the file for its answer. `environment` is
    another one than the script's own: the same script with another version of the client. A script that ends in .mjs
    is of Node.
    """

    def command_of(client: str, environment: str) -> tuple[list[str], Path | None]:
        """The interpreter with its script, and the folder that the script must run in."""
        script = HERE / "clients" / f"{client}.mjs"
        if script.is_file():
            return ["node", str(script)], request.getfixturevalue("node_modules_of")(environment)
        return [str(python_of(environment)), str(HERE / "clients" / f"{client}.py")], None

    def run(client: str, arguments: dict[str, Any], environment: str | None = None) -> Any:
        folder = tmp_path_factory.mktemp(client)
        given, answer = folder / "arguments.json", folder / "answer.json"
        given.write_text(json.dumps(arguments), "utf-8")
        names = ("PATH", "HOME", "LANG", "TMPDIR")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "NO_PROXY": "*"}
        command, place = command_of(client, environment or client)
        done = subprocess.run(
            [*command, str(given), str(answer)],
            cwd=place or folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads(answer.read_text("utf-8"))

    return run


@pytest.fixture(scope="session")
def ask(url: str) -> Callable[..., Any]:
    """`ask(path, body)`: the service's own JSON, through no client."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)

    return post


@pytest.fixture(scope="session")
def library() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32).eval()


class Reference:
    """Holds the expected answers, from the library in this process: its model, tokenizer and chat template."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._tokenizer = AutoTokenizer.from_pretrained(BUILTIN)

    def logprobs(self, prompt: str, answers: Sequence[str]) -> npt.NDArray[np.float64]:
        """float64 [answers]: log P of each, which is one token, after the prompt."""
        ids = [self._tokenizer(answer).input_ids for answer in answers]
        assert all(len(one) == 1 for one in ids)
        with torch.no_grad():
            logits = self._library(torch.tensor([self._tokenizer(prompt).input_ids])).logits[0, -1].double()
        found: npt.NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()[[one[0] for one in ids]]
        return found

    def probabilities(self, prompt: str, answers: Sequence[str]) -> list[float]:
        """Among the answers alone."""
        weights = np.exp(self.logprobs(prompt, answers))
        return [float(weight) for weight in weights / weights.sum()]

    def ranking(self, query: str, documents: Sequence[str]) -> list[Rank]:
        """Best first, with p(yes) / (p(yes) + p(no)) of the built-in model's own form."""
        prompts = (f"Query: {query}\nDocument: {document}\nRelevant:" for document in documents)
        found = [(index, self.probabilities(prompt, (" yes", " no"))[0]) for index, prompt in enumerate(prompts)]
        return sorted(found, key=lambda one: -one[1])

    def question(self, document: str, question: str, options: Sequence[str] = ()) -> list[float]:
        """Scores a question's options, or yes and no."""
        codes = "ABCDEF"[: len(options)]
        lines = [f"Document: {document}", f"Question: {question}"]
        lines += [f"{code}) {option}" for code, option in zip(codes, options, strict=True)]
        answers = [f" {code}" for code in codes] or [" yes", " no"]
        return self.probabilities("\n".join([*lines, "Answer:"]), answers)

    def continuation(self, prompt: str, count: int) -> str:
        """The greedy one."""
        return self._generate(self._tokenizer(prompt).input_ids, count)

    def reply(self, messages: list[dict[str, str]], count: int = 200) -> str:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._generate(self._tokenizer(text).input_ids, count)

    def _generate(self, ids: list[int], count: int) -> str:
        with torch.no_grad():
            drawn = self._library.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :]
        return str(self._tokenizer.decode(drawn, skip_special_tokens=True))


@pytest.fixture(scope="session")
def reference(library: Any) -> Reference:
    return Reference(library)


@pytest.fixture(scope="session")
def query() -> str:
    return "red chair"


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Among them two that the model is in doubt about, so that a slip of a prompt or of a sum shows in the scores."""
    return [
        "A pine lamp for reading, sturdy and red, made in Lisbon.",
        "chair chair",
        "A red chair.",
        "Chair: red.",
        "chairs, red ones",
        "the chair is red or blue",
    ]


@pytest.fixture(scope="session")
def ranking(reference: Reference, query: str, documents: list[str]) -> list[Rank]:
    """Returns what every reranker must find."""
    found = reference.ranking(query, documents)
    scores = [score for _, score in found]
    assert sum(0.1 < score < 0.99 for score in scores) == 2
    assert all(before - after > 2 * TOLERANCE for before, after in pairwise(scores))
    return found


@pytest.fixture(scope="session")
def same_ranking() -> Callable[..., None]:
    """`same_ranking(found, expected)`: the same documents in the same order, scores within 1e-5."""

    def check(found: Sequence[dict[str, Any]], expected: Sequence[Rank]) -> None:
        assert [one["index"] for one in found] == [index for index, _ in expected]
        differences = [abs(one["score"] - score) for one, (_, score) in zip(found, expected, strict=True)]
        assert max(differences) <= TOLERANCE, differences

    return check


@pytest.fixture(scope="session")
def text() -> str:
    """Two colours, so that the model is in doubt about the colour."""
    return "A red stool and a blue chair."


@pytest.fixture(scope="session")
def messages() -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You answer questions about a catalogue."},
        {"role": "user", "content": "List documents for: red chair"},
    ]
