"""Defines the entry of one API key. It imports little, so that `assay keys` runs without the service's packages."""

import math
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, model_validator

from deployments.auth.api_keys import DIGEST, ApiKey, KeyLimits, Scope, domain_of
from deployments.limits import PRIORITIES
from deployments.section import Name, Section, matches

HIDDEN = "(not shown)"


class KeyArgs(Section):
    """Describes one key, as `assay keys new NAME` prints it."""

    name: Name
    """The client's name, which appears in no metric and no answer. Keys with the same name, as during a rotation, must
    have the same limits and share them and their part of the prefix cache."""
    sha256: Annotated[str, matches(DIGEST.pattern, "It must be 64 hexadecimal digits in lower case.")]
    """SHA-256 of the key, 64 hexadecimal digits in lower case."""
    scopes: tuple[Scope, ...] = Field(default=("inference",), min_length=1)
    """`score`: the scoring routes; `generate`: completions and chat; `inference`: both; `metrics`: /metrics. Routes
    such as /v1/models and /tokenize are open to each of the first three."""
    expires: AwareDatetime | None = None
    """The key is refused from this time on. A time with its zone, such as 2027-01-31T00:00:00Z."""
    cache_domain: Name | None = None
    """Names with the same domain share the prefix cache, and can infer from the time of an answer what others have
    sent. None: a domain of the name's own."""
    max_inflight_requests: int | None = Field(default=None, ge=1, le=1 << 20)
    """Requests of the name in flight, over all ingresses. Each ingress enforces its share, rounded up; further requests
    are refused with 429."""
    tokens_per_minute: int | None = Field(default=None, ge=1, le=1 << 40)
    """Computed and generated tokens of the name, over all ingresses. A minute's worth can be saved up; without tokens
    left, requests are refused with 429."""
    max_body_bytes: int | None = Field(default=None, ge=1, le=1 << 40)
    """Bytes of a request's body, where that is less than `limits.max_body_bytes`."""
    min_priority: int = Field(default=PRIORITIES[0], ge=PRIORITIES[0], le=PRIORITIES[1])
    """Smallest `priority` that a request may have; a lower number is served earlier."""

    @model_validator(mode="before")
    @classmethod
    def _tells_no_secret(cls, given: Any) -> Any:
        """Hides unknown values, so that a key in place of its hash is not repeated in a message or a log."""
        if not isinstance(given, dict):
            return given
        shown = {name: value if name in cls.model_fields else HIDDEN for name, value in given.items()}
        digest = shown.get("sha256")
        if "sha256" in shown and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
            shown["sha256"] = HIDDEN
        return shown

    def key(self) -> ApiKey:
        return ApiKey(
            name=self.name,
            digest=bytes.fromhex(self.sha256),
            scopes=frozenset(self.scopes),
            expires_at=math.inf if self.expires is None else self.expires.timestamp(),
            domain=domain_of(self.cache_domain or self.name),
            limits=self.limits(),
        )

    def limits(self) -> KeyLimits:
        return KeyLimits(**{item.name: getattr(self, item.name) for item in fields(KeyLimits)})
