"""`serveConfigV2`: Ray's schema, the keys that it drops without a word, our arguments, and the deployments' names."""

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from deployments.app import build
from deployments.config import AppArgs
from tests.k8s.render import RenderError, documents

BUILDER = "deployments.app:build"


def findings(text: str) -> Iterator[str]:
    try:
        (config,) = documents(text)
    except (RenderError, ValueError) as error:
        yield f"serveConfigV2: {error}"
        return
    yield from (f"serveConfigV2: {path} is no key of Ray Serve." for path in unknown(ServeDeploySchema, config))
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        yield f"serveConfigV2: {error}"
        return
    for app in config["applications"]:
        yield from _application(app)


def unknown(model: type[BaseModel], given: Any, path: str = "") -> Iterator[str]:
    """Keys that the model would drop, at any depth."""
    if not isinstance(given, dict):
        return
    for key, value in given.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{path}{key}"
            continue
        for inner in _models(field.annotation):
            values = value if isinstance(value, list) else [value]
            for one in values:
                yield from unknown(inner, one, f"{path}{key}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold, also in lists and unions."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        for part in get_args(annotation):
            yield from _models(part)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def arguments(text: str) -> AppArgs:
    """Of the first application."""
    (config,) = documents(text)
    return AppArgs.model_validate(config["applications"][0]["args"])


def deployments_of(args: AppArgs) -> dict[str, Any]:
    """By name, as the builder makes them."""
    ingress = build(args)._bound_deployment
    replica = ingress.init_args[1]._bound_deployment
    return {one.name: one for one in (ingress, replica)}


def _application(app: dict[str, Any]) -> Iterator[str]:
    if app["import_path"] != BUILDER:
        yield f"serveConfigV2: import_path must be {BUILDER}. Given: {app['import_path']}."
    try:
        args = AppArgs.model_validate(app.get("args", {}))
    except ValidationError as error:
        yield f"serveConfigV2: args: {error}"
        return
    made = set(deployments_of(args))
    for one in app.get("deployments", []):
        if one["name"] not in made:
            yield f"serveConfigV2: deployments: {one['name']} must be one of {sorted(made)}."
