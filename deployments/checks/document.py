"""Reading a configuration: a Serve config file, or a RayService manifest with one inside."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deployments.checks.finding import Finding, error

DEAD = {  # fields of RayService that KubeRay takes and does not read
    "deploymentUnhealthySecondThreshold": "the operator no longer restarts a cluster for an unhealthy application",
    "serviceUnhealthySecondThreshold": "the operator no longer restarts a cluster for an unhealthy service",
}


class Unreadable(ValueError):
    """There is no configuration to check."""


class Document(NamedTuple):
    config: dict[str, Any]
    findings: tuple[Finding, ...]


class _Loader(yaml.SafeLoader):
    """Keeps a list of keys that stand twice in one mapping: YAML takes the last one without a word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, int]] = []

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[Hashable]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                self.twice.append((str(key), key_node.start_mark.line + 1))
            seen.add(key)
        return super().construct_mapping(node, deep)


def read(file: Path) -> Document:
    """Raises Unreadable."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as problem:
        raise Unreadable(f"{file} must be a readable text file. {type(problem).__name__}.") from None
    documents, findings = _parse(text, str(file))
    manifest = next((one for one in documents if one.get("kind") == "RayService"), None)
    if manifest is not None:
        return _of_manifest(manifest, findings)
    if len(documents) != 1 or "kind" in documents[0]:
        raise Unreadable(f"{file} must be one Serve config, or hold a RayService.")
    return Document(documents[0], tuple(findings))


def _parse(text: str, name: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    try:
        loader = _Loader(text)
        documents = list(_all(loader))
    except yaml.YAMLError as problem:
        raise Unreadable(f"{name} must be YAML: {problem}") from None
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise Unreadable(f"{name} must be a mapping, as the files of deployments/configs are.")
    found = [error(key, f"It stands twice, on line {line} again: only the last counts.") for key, line in loader.twice]
    return documents, found


def _all(loader: _Loader) -> Iterator[Any]:
    while loader.check_data():  # type: ignore[no-untyped-call]
        yield loader.get_data()


def _of_manifest(manifest: dict[str, Any], findings: list[Finding]) -> Document:
    spec = manifest.get("spec") or {}
    findings += [error(f"spec.{name}", f"Remove it: {why}.") for name, why in DEAD.items() if name in spec]
    inner = spec.get("serveConfigV2")
    if not isinstance(inner, str):
        raise Unreadable("`spec.serveConfigV2` must be the text of a Serve config.")
    documents, more = _parse(inner, "`spec.serveConfigV2`")
    return Document(documents[0], (*findings, *more))
