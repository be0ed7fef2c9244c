"""Schemas: request bodies in /openapi.json, although the routes parse them by themselves."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

REF = "#/components/schemas/{model}"


class Schemas:
    """Collects body models and adds them to the schema of an app when it is first asked for."""

    def __init__(self, app: FastAPI) -> None:
        self._found: dict[str, Any] = {}
        self._app = app
        self._make = app.openapi
        app.openapi = self._openapi  # type: ignore[method-assign]

    def body(self, model: type[BaseModel]) -> dict[str, Any]:
        """`openapi_extra` of a route that takes `model`. Raises ValueError where two models have one name."""
        schema = model.model_json_schema(ref_template=REF)
        for name, found in {**schema.pop("$defs", {}), model.__name__: schema}.items():
            if self._found.setdefault(name, found) != found:
                raise ValueError(f"Two different models of request bodies are called {name}.")
        content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
        return {"requestBody": {"required": True, "content": content}}

    def _openapi(self) -> dict[str, Any]:
        schema = self._make()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(self._found)
        return schema
