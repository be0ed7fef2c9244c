"""The `args` of an application: typing mistakes, values out of range, options that do not go together.

Keys that Ray's schemas do not know: Ray drops them without a word, at the top and in every deployment.

Reading a configuration: a Serve config file, or a RayService manifest with one inside.
"""

import types
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.cli.check.findings import Finding, error, meant, under
from deployments.config.app_args import AppArgs
from deployments.limits import Limits

FREE = ("args", "user_config", "runtime_env")  # mappings of somebody else's making


def check_schema(config: dict[str, Any]) -> Iterator[Finding]:
    found = list(unknown_keys(config, ServeDeploySchema, ""))
    yield from found
    reported = {one.where for one in found}
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as refused:
        for one in refused.errors(include_url=False, include_context=False):
            where = path(one["loc"])
            if where not in reported:
                yield error(where, f"{one['msg']}.{given(one['input'])}")


def unknown_keys(value: object, model: type[BaseModel], where: str) -> Iterator[Finding]:
    """Of a mapping and of all below it whose type is a model of Ray's."""
    if not isinstance(value, dict):
        return
    fields = {(field.alias or name): field for name, field in model.model_fields.items()}
    for key, inner in value.items():
        if key not in fields:
            yield error(under(where, key), f"Ray does not know this key and would ignore it. {meant(key, fields)}")
        elif key not in FREE:
            yield from _inside(inner, fields[key].annotation, under(where, key))


def _inside(value: object, annotation: Any, where: str) -> Iterator[Finding]:
    models = [one for one in _parts(annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    if not models:
        return
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from unknown_keys(inner, models[0], under(where, index))
    else:
        yield from unknown_keys(value, models[0], where)


def _parts(annotation: Any) -> Iterator[Any]:
    """The types that a union or a list is made of; of a mapping none."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def path(loc: tuple[int | str, ...]) -> str:
    where = ""
    for key in loc:
        where = under(where, key)
    return where


def given(value: object) -> str:
    """What stood there, if it is short enough to say."""
    return f" Given: {value!r}." if isinstance(value, bool | int | float | str) and len(str(value)) <= 80 else ""


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


SECRET = "auth"  # what is given there is not repeated


def check_arguments(args: object, where: str) -> tuple[AppArgs | None, list[Finding]]:
    """The arguments, None where there are errors."""
    try:
        return AppArgs.model_validate(args), []
    except ValidationError as refused:
        return None, list(_findings(refused, where))


def findings_of(model: type[BaseModel], given: object, where: str) -> list[Finding]:
    """Of values for another model than AppArgs."""
    try:
        model.model_validate(given)
    except ValidationError as refused:
        return list(_findings(refused, where, model))
    return []


def _findings(refused: ValidationError, where: str, root: type[BaseModel] = AppArgs) -> Iterator[Finding]:
    for one in refused.errors(include_url=False, include_context=False):
        loc = one["loc"]
        place = path((where, *loc))
        if one["type"] == "extra_forbidden":
            yield error(place, f"There is no such option. {_instead(loc, root)}")
        elif loc and loc[0] == "limits":
            yield error(place, f"{_plain(one['msg'])} {_limit(one['input'])}".strip())
        else:
            said = _plain(one["msg"])
            shown = "" if "Given" in said or loc[:1] == (SECRET,) else given(one["input"])
            yield error(place, f"{said.rstrip('.')}.{shown}")


def _instead(loc: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """The option of the same section with the nearest name, or the section that has one of this very name."""
    name, known = str(loc[-1]), fields_of(loc[:-1], root)
    elsewhere = [section for section, fields in sections() if name in fields and section != loc[0]]
    if elsewhere and root is AppArgs:
        return f"`{under(elsewhere[0], name)}` is: move it there."
    return meant(name, known)


def fields_of(loc: tuple[int | str, ...], root: type[BaseModel] = AppArgs) -> set[str]:
    """Names of the options in the section at `loc`."""
    model = root
    for key in loc:
        field = model.model_fields.get(str(key))
        if field is None:  # the name of a template: its section is a mapping's value
            continue
        models = [part for part in _leaves(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        if models:
            model = models[0]
    return set(model.model_fields)


def sections() -> Iterator[tuple[str, set[str]]]:
    """Each section with the names of its options."""
    for name, field in AppArgs.model_fields.items():
        for part in _leaves(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield name, set(part.model_fields)
    yield "limits", set(Limits().flat())


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)


def _limit(given: object) -> str:
    known = Limits().flat()
    wrong = [name for name in given if name not in known] if isinstance(given, dict) else []
    return meant(wrong[0], known) if wrong else ""


def _plain(message: str) -> str:
    """Without what pydantic puts in front of a validator's own words."""
    return message.removeprefix("Value error, ")
