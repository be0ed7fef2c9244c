"""The container files, read and not built: pinned, non-root, without secrets, and in step with the manifests."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest

from tests.k8s.render import K8S, Object, containers, render

ROOT = K8S.parent
FILES = ("Dockerfile.cpu", "Dockerfile.cuda")
KNOWN = {"FROM", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
EXACT = re.compile(r"^[a-z0-9./_-]+:[0-9]+\.[0-9]+\.[0-9]+[a-z0-9.-]*(@sha256:[0-9a-f]{64})?$")
SECRETIVE = re.compile(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|_KEY\b", re.IGNORECASE)
HARMLESS = {"TOKENIZERS_PARALLELISM"}
KUBERAY_NEEDS = {"bash", "wget"}
USER = "10001:10001"
CACHE, COPY_OF_CACHE = "/var/cache/assay", "/opt/assay/cache"


class Step(NamedTuple):
    verb: str
    rest: str


def steps(text: str) -> list[Step]:
    """Reads a container file: comments gone, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def travels(path: str, ignore: str) -> bool:
    """Whether .dockerignore lets a path into the build: the last rule that names it or a folder above it decides."""
    kept = True
    for line in ignore.splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#"):
            names = [path, *("/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1))]
            pattern = rule.removeprefix("!").removeprefix("**/")
            if any(fnmatch(name, pattern) or fnmatch(name.rpartition("/")[2], pattern) for name in names):
                kept = rule.startswith("!")
    return kept


def findings(text: str, ignore: str) -> Iterator[str]:
    found = steps(text)
    yield from (f"{step.verb} is not used here." for step in found if step.verb not in KNOWN)
    bases = [step.rest for step in found if step.verb == "FROM"]
    yield from (f"FROM {base} must be one exact version." for base in bases if not EXACT.match(base))
    users = [step.rest for step in found if step.verb == "USER"]
    if not users or users[-1] != USER:
        yield f"the last USER must be {USER}."
    for step in found:
        if step.verb in ("ENV", "ARG"):
            names = [part.partition("=")[0] for part in shlex.split(step.rest)]
            yield from (f"{name} would be a secret in the image." for name in names if _secretive(name))
        if step.verb == "COPY":
            yield from _copies(step, ignore)
        if step.verb == "RUN":
            yield from _runs(step)
    installed = set(" ".join(step.rest for step in found if "apt-get install" in step.rest).split())
    if not installed >= KUBERAY_NEEDS:
        yield f"KubeRay needs {sorted(KUBERAY_NEEDS - installed)}."


def _secretive(name: str) -> bool:
    return name not in HARMLESS and SECRETIVE.search(name) is not None


def _copies(step: Step, ignore: str) -> Iterator[str]:
    *sources, _ = step.rest.split()
    for source in sources:
        if not (ROOT / source).exists():
            yield f"COPY {source}: does not exist."
        elif not travels(source, ignore):
            yield f"COPY {source}: .dockerignore keeps it out."


def _runs(step: Step) -> Iterator[str]:
    for command in re.split(r"&&|\|\||;", step.rest):
        if "pip install" in command and "--constraint constraints.txt" not in command:
            yield f"RUN {command.strip()}: must take the versions of constraints.txt."
        if "|" in command and re.search(r"\|\s*(ba)?sh\b", command):
            yield f"RUN {command.strip()}: runs what it fetched."
        if "apt-get install" in command and "--no-install-recommends" not in command:
            yield f"RUN {command.strip()}: must not install what is recommended."


def read(name: str) -> tuple[str, str]:
    return (ROOT / "containers" / name).read_text("utf-8"), (ROOT / ".dockerignore").read_text("utf-8")


@pytest.mark.parametrize("name", FILES)
def test_the_container_file_is_sound(name: str) -> None:
    assert not list(findings(*read(name)))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("FROM ", "FROM python:latest AS x\nFROM ", "exact"),
        ("FROM ", "ADD https://example.com/x /x\nFROM ", "ADD"),
        (f"USER {USER}", "USER root", "USER"),
        (f"USER {USER}\n", "", "USER"),
        ("COPY scoring ./scoring", "COPY scorin ./scoring", "scorin"),
        ("COPY scoring ./scoring", "COPY tests ./tests", "dockerignore"),
        ("EXPOSE 8000", "ENV HF_TOKEN=x", "HF_TOKEN"),
        ("EXPOSE 8000", "RUN wget -O - https://example.com/x | sh", "fetched"),
        ("--constraint constraints.txt", "", "constraints.txt"),
        (" wget", "", "wget"),
    ],
)
def test_planted_fault_of_a_container_file_is_seen(name: str, right: str, wrong: str, message: str) -> None:
    text, ignore = read(name)
    assert right in text
    assert any(message in found for found in findings(text.replace(right, wrong), ignore))


@pytest.mark.parametrize(
    "path", [".git/config", "k8s/base/secret.example.yaml", "tests/conftest.py", ".venv/bin/python", "x"]
)
def test_nothing_else_travels_to_a_build(path: str) -> None:
    _, ignore = read(FILES[0])
    assert not travels(path, ignore)
    assert travels("deployments/app.py", ignore) and not travels("deployments/__pycache__/app.pyc", ignore)


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_every_package_is_in_the_image(name: str) -> None:
    wanted = {one.removesuffix("*") for one in project()["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {step.rest.split()[0] for step in steps(read(name)[0]) if step.verb == "COPY"}
    assert wanted <= copied


def test_pins_of_the_gpu_are_inside_our_range_and_beside_the_others() -> None:
    def pins(path: str) -> dict[str, str]:
        lines = (ROOT / path).read_text("utf-8").splitlines()
        return dict(line.lower().replace("_", "-").split("==") for line in lines)

    ours, gpu = pins("constraints.txt"), pins("containers/constraints-cuda.txt")
    assert not set(ours) & set(gpu)
    _, wanted = project()["project"]["optional-dependencies"]["gpu"]  # beside the service itself
    least, below = re.match(r"flashinfer-python>=([0-9.]+),<([0-9.]+)$", wanted).groups()  # type: ignore[union-attr]
    given, low, high = (tuple(map(int, one.split("."))) for one in (gpu["flashinfer-python"], least, below))
    assert low <= given < high


def test_manifests_and_images_agree(objects: list[Object]) -> None:
    """The user, the version, and where the compiled modules lie."""
    (service,) = (one for one in objects if one["kind"] == "RayService")
    version = project()["project"]["version"]
    assert {one["image"].rpartition("-")[0] for one in containers(service)} == {f"assay:{version}"}
    assert f"'runAsUser': {USER.partition(':')[0]}," in str(service)


def test_the_cache_of_the_image_is_the_one_that_workers_are_given() -> None:
    text, _ = read("Dockerfile.cuda")
    (service,) = (one for one in render(K8S / "base") if one["kind"] == "RayService")
    (warm,) = (one for one in containers(service) if one["name"] == "warm-cache")
    assert warm["command"] == ["cp", "-a", f"{COPY_OF_CACHE}/.", f"{CACHE}/"]
    assert f"FLASHINFER_WORKSPACE_BASE={CACHE}" in text and f"{CACHE}/. {COPY_OF_CACHE}/" in text
    arguments = dict(step.rest.split("=", 1) for step in steps(text) if step.verb == "ARG")
    assert f"TRITON_CACHE_DIR={CACHE}/" in text
    assert arguments["CUDA_ARCHITECTURES"] and "FLASHINFER_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES}" in text
