"""Keys that Ray's schemas do not know: Ray drops them without a word, at the top and in every deployment."""

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.checks.finding import Finding, error, meant, under

FREE = ("args", "user_config", "runtime_env")  # mappings of somebody else's making


def check(config: dict[str, Any]) -> Iterator[Finding]:
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
