"""Key: whom a secret names and what it may do. Of the secret itself only a SHA-256 is ever kept."""

import hashlib
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from deployments.limits import PRIORITIES

Scope = Literal["inference", "score", "generate", "metrics"]
PREFIX = "assay-"  # so that scanners of repositories and logs know one when they see it
SECRET_BYTES = 32
DIGEST = re.compile(r"[0-9a-f]{64}")
_ANY: frozenset[Scope] = frozenset(("inference", "score", "generate"))
_SCORE: frozenset[Scope] = frozenset(("inference", "score"))
_GENERATE: frozenset[Scope] = frozenset(("inference", "generate"))

# Scopes of which a key needs one, by the declared path of the route. A route that is not here is closed to every key:
# whoever adds one says here for whom.
NEEDS: Mapping[str, frozenset[Scope]] = MappingProxyType(
    {
        "/generative_scoring": _SCORE,
        "/v1/score": _SCORE,
        "/rerank": _SCORE,
        "/v1/rerank": _SCORE,
        "/v2/rerank": _SCORE,
        "/v1/decisions": _SCORE,
        "/v1/completions": _GENERATE,
        "/v1/chat/completions": _GENERATE,
        "/v1/models": _ANY,
        "/v1/models/{model_id:path}": _ANY,
        "/tokenize": _ANY,
        "/detokenize": _ANY,
        "/tokenizer_info": _ANY,
        "/version": _ANY,
        "/openapi.json": _ANY,
        "/healthz": _ANY,
        "/readyz": _ANY,
        "/health": _ANY,
        "/metrics": frozenset(("metrics",)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Bounds of everything that one name does at a time, over all its keys. None: only the server's own."""

    max_inflight_requests: int | None = None
    tokens_per_minute: int | None = None  # computed and generated; what came out of the prefix cache is free
    max_body_bytes: int | None = None
    min_priority: int = PRIORITIES[0]  # a lower number is served earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Several keys may have one name, as while one takes over from another: they share its limits and its cache."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key
    scopes: frozenset[Scope] = frozenset(("inference",))
    expires_at: float = math.inf  # seconds since 1970
    domain: str = ""  # of the prefix cache; "": everybody's
    limits: KeyLimits = KeyLimits()

    def salt(self, given: str | None) -> str:
        """The engine's cache salt for a request that asks for `given`. No salt leads into another key's domain: this
        one's, whose length is fixed, comes first."""
        return f"{self.domain}{given or ''}"

    def may(self, route: str) -> bool:
        """`route`: a declared path."""
        return not self.scopes.isdisjoint(NEEDS.get(route, ()))


# Who asks where no key is asked for.
ANYONE = Key(name="", digest=b"", scopes=frozenset(("inference", "metrics")))


def new_secret() -> str:
    """A key that nobody can guess: 256 random bits, in characters that every header carries."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def domain_of(name: str) -> str:
    """A name's part of the cache, of 64 characters whatever the name."""
    return hashlib.sha256(b"cache\0" + name.encode()).hexdigest()
