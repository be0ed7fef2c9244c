"""Answers of the routes that operators and probes read."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Alive(BaseModel):
    status: Literal["ok"]


class Readiness(BaseModel):
    model_config = ConfigDict(extra="allow")

    status: Literal["ready", "starting", "unready", "draining"]
    replicas_ready: int
    replicas_total: int
    canary_age_s: float | None
    auth: Literal["keys", "disabled"]


class Versions(BaseModel):
    versions: dict[str, str]
    model: str | None
    revision: str | None
    templates: dict[str, str]
    """By name: a version that changes with every change of wording."""
