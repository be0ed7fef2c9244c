"""The documentation agrees with the code: links, files, fields, options, metrics and the requests that it shows."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deployments.api.schemas.chat import ChatRequest, Message
from deployments.api.schemas.classify import ClassifyRequest
from deployments.api.schemas.decisions import ChoiceOption, DecisionRequest, ScoreLevel
from deployments.api.schemas.embeddings import EmbeddingsRequest, EmbedRequest, PredictRequest
from deployments.api.schemas.fields import Body
from deployments.api.schemas.generation import CompletionRequest
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.schemas.info import DetokenizeRequest, TokenizeRequest
from deployments.api.schemas.pooling import PoolingBody
from deployments.api.schemas.rerank import RerankRequest
from deployments.api.schemas.score import ScoreBody
from deployments.config.app_args import AppArgs
from deployments.limits import Limits

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "engine" / "builtin" / "README.md"])
BODIES: dict[str, type[Body]] = {
    "/generative_scoring": ScoringRequest,
    "/score": ScoreBody,
    "/v1/score": ScoreBody,
    "/pooling": PoolingBody,
    "/v1/embeddings": EmbeddingsRequest,
    "/embed": EmbedRequest,
    "/predict": PredictRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/decisions": DecisionRequest,
    "/classify": ClassifyRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
FIELDS: dict[str, tuple[tuple[type[BaseModel], ...], tuple[str, ...]]] = {
    "generative_scoring": ((ScoringRequest,), ("generative_scoring",)),
    "score": ((ScoreBody,), ("score",)),
    "rerank": ((RerankRequest,), ("rerank",)),
    "classify": ((ClassifyRequest,), ("classify",)),
    "pooling": ((PoolingBody,), ("pooling", "classify")),
    "embeddings": ((EmbeddingsRequest, EmbedRequest), ("embeddings", "pooling", "classify")),
    "predict": ((PredictRequest,), ("predict",)),
    "decisions": ((DecisionRequest, ChoiceOption, ScoreLevel), ("decisions",)),
    "completions": ((CompletionRequest,), ("completions",)),
    "chat": ((ChatRequest, Message), ("chat", "completions")),
    "tokenize": ((TokenizeRequest, DetokenizeRequest), ("tokenize",)),
}
"""By page: the bodies whose fields it explains, and the pages on which they may stand."""
CURL = re.compile(r"localhost:8000(/[\w/]+)")
FILE = re.compile(
    r"`((?:deployments|engine|gpu_sampler|scoring|tests|tools|benchmarks|k8s|containers|docs)/[\w./-]*\w/?)[`:]"
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PAGE = re.compile(r"docs/[\w/-]+\.md")
MODULE = re.compile(r"python -m ([a-z]\w*(?:\.\w+)+)")
METRIC = re.compile(r"`(assay_\w+)")
ENDINGS = {"py", "json", "yaml", "md"}  # of a file, where an option looks alike
OPTION = re.compile(r"`(\w+)\.(\w+)(?:: [^`]*)?`")


def texts() -> Iterator[tuple[Path, str]]:
    """Every page, without the changelog's table of names that are gone."""
    for page in PAGES:
        yield page, re.sub(r"^### Renames.*?^### ", "### ", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken_links(page: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            found.append(f"{page.relative_to(ROOT)}: {target}")
    return found


def missing_files(page: Path, text: str) -> list[str]:
    return [f"{page.name}: {name}" for name in FILE.findall(text) if "*" not in name and not (ROOT / name).exists()]


def missing_modules(text: str) -> list[str]:
    paths = ((name, ROOT / name.replace(".", "/")) for name in MODULE.findall(text))
    return [
        name for name, path in paths if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ]


def requests(text: str) -> Iterator[tuple[str, Any]]:
    """Path and body of every curl command with a body."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for command in re.split(r"^(?=curl )", block, flags=re.MULTILINE):
            path = CURL.search(command)
            words = shlex.split(command) if path and " -d " in command else []
            if path and words:
                yield path[1], json.loads(words[words.index("-d") + 1])


def unknown_fields(path: str, body: Any) -> list[str]:
    """Fields of a body that its route does not know. Raises ValidationError for a body that it refuses."""
    read = BODIES[path].model_validate(body, context={"limits": Limits().flat()})
    return sorted(read.model_extra or ())


def options() -> dict[str, set[str]]:
    """Keys of each section of the configuration: a pydantic model or a dataclass."""
    kinds = {name: field.annotation for name, field in AppArgs.model_fields.items()}
    sections = {name: kind for name, kind in kinds.items() if isinstance(kind, type)}
    read = {
        name: getattr(kind, "model_fields", getattr(kind, "__dataclass_fields__", {}))
        for name, kind in sections.items()
    }
    return {name: set(keys) for name, keys in read.items() if keys}


def metrics() -> set[str]:
    """Names of metrics in the code that exports them, without the endings that Prometheus adds."""
    sources = (ROOT / "deployments" / "observability").rglob("*.py")
    return {name for file in sources for name in re.findall(r'"(assay_\w+)"', file.read_text("utf-8"))}


def unknown_options(text: str) -> list[str]:
    known = options()
    return [f"{name}.{key}" for name, key in OPTION.findall(text) if name in known and key not in known[name] | ENDINGS]


def unknown_metrics(text: str) -> list[str]:
    known = metrics()
    found = (re.sub(r"_(total|bucket|sum|count)$", "", name) for name in METRIC.findall(text))
    return [name for name in found if name not in known and not name.endswith("_")]


def test_links_lead_somewhere() -> None:
    assert [link for page, text in texts() for link in broken_links(page, text)] == []


def test_files_that_pages_name_exist() -> None:
    assert [name for page, text in texts() for name in missing_files(page, text)] == []


def test_pages_that_code_names_exist() -> None:
    folders = ("deployments", "engine", "gpu_sampler", "scoring", "benchmarks", "k8s", "tools", "tests")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".txt")
    ]
    named = [(path.name, page) for path in files for page in PAGE.findall(path.read_text("utf-8"))]
    assert len(named) > 20
    assert [(name, page) for name, page in named if not (ROOT / page).exists()] == []


def test_commands_that_pages_show_exist() -> None:
    assert [f"{page.name}: {name}" for page, text in texts() for name in missing_modules(text)] == []


def test_options_that_pages_name_exist() -> None:
    assert [f"{page.name}: {name}" for page, text in texts() for name in unknown_options(text)] == []


def test_metrics_that_pages_name_exist() -> None:
    assert [f"{page.name}: {name}" for page, text in texts() for name in unknown_metrics(text)] == []


def test_requests_that_pages_show_are_accepted() -> None:
    shown = [(page, path, body) for page, text in texts() for path, body in requests(text)]
    assert len(shown) > 15
    assert [(page.name, path, names) for page, path, body in shown if (names := unknown_fields(path, body))] == []


def test_programs_that_pages_show_are_valid() -> None:
    shown = [
        code for _, text in texts() for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    assert len(shown) > 10
    for code in shown:
        compile(code, "page", "exec")


@pytest.mark.parametrize("page", FIELDS)
def test_a_page_explains_every_field_of_its_bodies(page: str) -> None:
    models, names = FIELDS[page]
    text = "".join(prose((DOCS / "api" / f"{name}.md").read_text("utf-8")) for name in names)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert sorted({field for model in models for field in model.model_fields} - words) == []


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#no-such-heading", "#no-such-heading"])
def test_a_broken_link_is_found(link: str) -> None:
    assert broken_links(DOCS / "getting-started.md", f"[x]({link}) [index](index.md#guides)")


def test_a_missing_file_an_old_option_and_an_old_metric_are_found() -> None:
    assert missing_files(DOCS / "index.md", "`engine/no_such/` `engine/model/`") == ["index.md: engine/no_such/"]
    text = "`engine/no_such.py` `engine/core.py` `engine.no_such` `engine.seed` `assay_no_such_total` `assay_requests`"
    assert missing_files(DOCS / "index.md", text) == ["index.md: engine/no_such.py"]
    assert missing_modules("python -m tools.no_such; python -m deployments.cli") == ["tools.no_such"]
    assert unknown_options(text) == ["engine.no_such"]
    assert unknown_metrics(text) == ["assay_no_such"]


def test_a_request_that_is_refused_is_found() -> None:
    assert unknown_fields("/v1/completions", {"prompt": "a", "top_pp": 1}) == ["top_pp"]
    with pytest.raises(ValidationError):
        unknown_fields("/v1/completions", {"prompt": 1})
