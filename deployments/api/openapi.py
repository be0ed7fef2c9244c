"""Writes the OpenAPI document: the bodies that routes parse themselves, and every status that a route can answer."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from deployments.errors import ERROR_KINDS, MAX_RETRY_AFTER_S, ErrorBody, ErrorEvent

Responses = dict[int | str, dict[str, Any]]
REF = "#/components/schemas/{model}"
PROBED = (400, 500)
"""Statuses that every route can answer besides 200: invalid headers, and an unhandled exception."""
READ = (400, 401, 403, 500)
MODEL_READ = (*READ, 503)
POSTED = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)
REQUEST_ID = {"x-assay-request-id": {"required": True, "schema": {"type": "string"}}}
BEARER = "key"
DONE = {"const": "[DONE]"}
TEXT = {"text/plain": {"schema": {"type": "string"}}}
RETRY_AFTER = {"type": "integer", "minimum": 1, "maximum": MAX_RETRY_AFTER_S}


class Schemas:
    """Collects the models that no route's signature names, and adds them to the schema of an app when it is built."""

    def __init__(self, app: FastAPI, statuses: Mapping[int, int]) -> None:
        """
        Args:
            app: The application.
            statuses: Maps statuses of errors to others that are sent in their place.
        """
        self._statuses = statuses
        self._found: dict[str, Any] = {}
        self._keyed = False
        self._app = app
        self._make = app.openapi
        app.openapi = self._openapi  # type: ignore[method-assign]

    def body(self, model: type[BaseModel]) -> dict[str, Any]:
        """Returns the options of a route that takes `model`. Raises ValueError where two models have one name."""
        content = {"application/json": {"schema": {"$ref": self._add(model, "validation")}}}
        return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}

    def events(self, model: type[BaseModel]) -> dict[str, Any]:
        """Returns the content of an answer that may be a stream of `model` events; the last one is `[DONE]`."""
        bodies = [{"$ref": self._add(one, "serialization")} for one in (model, ErrorEvent)]
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": bodies}}
        one = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [DONE, data]}}}
        return {"text/event-stream": {"schema": one}}

    def refusals(self, statuses: tuple[int, ...], error: type[ErrorBody] = ErrorBody) -> Responses:
        """Returns the description of each status, with its codes and its headers."""
        content = {"application/json": {"schema": {"$ref": self._add(error, "serialization")}}}
        sent = dict.fromkeys(self._statuses.get(status, status) for status in statuses)
        return {status: {**self._refusal(status), "content": content} for status in sent}

    def keyed(self) -> dict[str, Any]:
        """Returns the options of a route that needs a key."""
        self._keyed = True
        return {"security": [{BEARER: []}]}

    def _add(self, model: type[BaseModel], mode: Literal["validation", "serialization"]) -> str:
        title, schemas = schemas_of(model, mode)
        for name, found in schemas.items():
            if self._found.setdefault(name, found) != found:
                raise ValueError(f"Two different models of bodies are called {name}.")
        return REF.format(model=title)

    def _refusal(self, status: int) -> dict[str, Any]:
        sent = {code: self._statuses.get(kind.status, kind.status) for code, kind in ERROR_KINDS.items()}
        codes = [code for code, one in sent.items() if one == status]
        headers: dict[str, Any] = dict(REQUEST_ID)
        if status == 401:
            headers["www-authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
        if status in (429, 503):
            headers["retry-after"] = {"required": True, "schema": RETRY_AFTER}
        return {"description": "Code " + " or ".join(codes) + ".", "headers": headers}

    def _openapi(self) -> dict[str, Any]:
        schema = self._make()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(self._found)
        if self._keyed:
            schema["components"]["securitySchemes"] = {BEARER: {"type": "http", "scheme": "bearer"}}
        return schema


@cache
def schemas_of(model: type[BaseModel], mode: Literal["validation", "serialization"]) -> tuple[str, dict[str, Any]]:
    """Returns the name of a model in the document, and the schemas of it and of all that it refers to, by name."""
    schema = model.model_json_schema(ref_template=REF, mode=mode)
    title = str(schema["title"])
    return title, {**schema.pop("$defs", {}), title: schema}


def path_parameter(name: str) -> dict[str, Any]:
    """Returns the options of a route with one parameter in its path, which the route reads itself."""
    one = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return {"openapi_extra": {"parameters": [one]}}


def answered(content: dict[str, Any] | None = None) -> Responses:
    """Returns the description of status 200. `content` stands beside the answer's model, or in its place."""
    return {200: {"description": "The answer.", "headers": REQUEST_ID, "content": content or {}}}


def not_ready(answer: type[BaseModel]) -> Responses:
    """Returns the description of a probe's 503, which has the same model as its 200."""
    return {503: {"model": answer, "description": "Not ready.", "headers": REQUEST_ID}}
