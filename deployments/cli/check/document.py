"""Reads a Serve config file, or a RayService manifest with one inside, and checks its keys and values.

Ray drops keys that its schemas do not have, at the top and in every deployment, and YAML drops the first of two equal
keys. Both are reported here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deployments.cli.arguments import reason
from deployments.cli.check.arguments import check_section, given, path_of
from deployments.cli.check.findings import Finding, error, meant, under
from deployments.config.schema import options, section_in

FREE = ("args", "user_config", "runtime_env")  # mappings whose keys Ray does not define
REMOVED = {  # fields of RayService that KubeRay accepts and ignores
    "deploymentUnhealthySecondThreshold": "the operator no longer restarts a cluster for an unhealthy application",
    "serviceUnhealthySecondThreshold": "the operator no longer restarts a cluster for an unhealthy service",
}


class Unreadable(ValueError):
    """Says that a file holds no configuration that can be checked."""


class Document(NamedTuple):
    """Holds the Serve config of a file, and what reading it found."""

    config: dict[str, Any]
    findings: tuple[Finding, ...]


class _Loader(yaml.SafeLoader):
    """Lists keys that occur twice in one mapping; YAML itself silently takes the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, int]] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looks at the keys as they are written: construction puts those of `<<` among them."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                self.twice.append((key.value, key.start_mark.line + 1))
            seen.add((key.tag, key.value))
        return node


def read(file: Path) -> Document:
    """Reads the Serve config of a file. Raises Unreadable."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as problem:
        raise Unreadable(f"{file} must be a readable text file: {reason(problem)}.") from None
    documents, findings = _parse(text, str(file))
    manifest = next((one for one in documents if one.get("kind") == "RayService"), None)
    if manifest is not None:
        return _from_manifest(manifest, findings)
    if len(documents) != 1 or "kind" in documents[0]:
        raise Unreadable(f"{file} must be one Serve config, or hold a RayService.")
    return Document(documents[0], tuple(findings))


def _parse(text: str, name: str) -> tuple[list[dict[str, Any]], list[Finding]]:
    try:
        loader = _Loader(text)
        documents = list(_all(loader))
    except (ValueError, yaml.YAMLError) as problem:  # such as a date that there is not
        raise Unreadable(f"{name} must be YAML: {reason(problem)}.") from None
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise Unreadable(f"{name} must be a mapping, as the files of deployments/configs are.")
    found = [error(key, f"It stands twice, on line {line} again: only the last counts.") for key, line in loader.twice]
    return documents, found


def _all(loader: _Loader) -> Iterator[Any]:
    while loader.check_data():  # type: ignore[no-untyped-call]
        yield loader.get_data()


def _from_manifest(manifest: dict[str, Any], findings: list[Finding]) -> Document:
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        raise Unreadable("`spec` of a RayService must be a mapping.")
    findings += [error(f"spec.{name}", f"Remove it: {why}.") for name, why in REMOVED.items() if name in spec]
    inner = spec.get("serveConfigV2")
    if not isinstance(inner, str):
        raise Unreadable("`spec.serveConfigV2` must be the text of a Serve config.")
    documents, more = _parse(inner, "`spec.serveConfigV2`")
    return Document(documents[0], (*findings, *more))


def check_schema(config: dict[str, Any]) -> Iterator[Finding]:
    """Checks a config against Ray's own schema."""
    found = list(_unknown_keys(config, ServeDeploySchema, ""))
    yield from found
    reported = {one.where for one in found}
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as refused:
        for one in refused.errors(include_url=False, include_context=False):
            where = path_of(one["loc"])
            if where not in reported:
                yield error(where, f"{one['msg']}.{given(one['input'])}")
    else:
        yield from _autoscaling(config)


def _autoscaling(config: dict[str, Any]) -> Iterator[Finding]:
    """Checks what Ray's schema takes as it is, and refuses when it deploys. The rest fits the schema."""
    for index, application in enumerate(config.get("applications") or []):
        for number, deployment in enumerate(application.get("deployments") or []):
            found = deployment.get("autoscaling_config")
            if found is not None:
                place = under(under(under(under("applications", index), "deployments"), number), "autoscaling_config")
                yield from check_section(AutoscalingConfig, found, place)


def _unknown_keys(value: object, model: type[BaseModel], where: str) -> Iterator[Finding]:
    """Finds keys that Ray's schema does not have, in a mapping and in the mappings below it."""
    if not isinstance(value, dict):
        return
    aliases = {field.alias or name: name for name, field in model.model_fields.items()}
    types = options(model)
    for key, inner in value.items():
        if key not in aliases:
            yield error(under(where, key), f"Ray does not know this key and would ignore it. {meant(key, aliases)}")
        elif key not in FREE and (section := _model_in(types[aliases[key]])):
            entries = enumerate(inner) if isinstance(inner, list) else [(None, inner)]
            for index, entry in entries:
                place = under(where, key)
                yield from _unknown_keys(entry, section, place if index is None else under(place, index))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    found = section_in(annotation)
    return found if found is not None and issubclass(found, BaseModel) else None
