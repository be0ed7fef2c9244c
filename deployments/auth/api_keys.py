"""Defines API keys: which client a key names and what it may do. Only the SHA-256 of a key is stored."""

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
PREFIX = "assay-"  # scanners of repositories and logs recognise keys by it
SECRET_BYTES = 32
DIGEST = re.compile(r"[0-9a-f]{64}")
_ANY: frozenset[Scope] = frozenset(("inference", "score", "generate"))
_SCORE: frozenset[Scope] = frozenset(("inference", "score"))
_GENERATE: frozenset[Scope] = frozenset(("inference", "generate"))

# By declared path of a route: the scopes that open it; a key needs one of them. A route that is not here is closed to
# every key.
NEEDS: Mapping[str, frozenset[Scope]] = MappingProxyType(
    {
        "/generative_scoring": _SCORE,
        "/v1/score": _SCORE,
        "/classify": _SCORE,
        "/v1/classify": _SCORE,
        "/pooling": _SCORE,
        "/v1/embeddings": _SCORE,
        "/embed": _SCORE,
        "/predict": _SCORE,
        "/score": _SCORE,
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
    """Limits the requests of one name, over all its keys. None: only the server's own limits."""

    max_inflight_requests: int | None = None
    tokens_per_minute: int | None = None  # computed and generated; tokens from the prefix cache are free
    max_body_bytes: int | None = None
    min_priority: int = PRIORITIES[0]  # a lower number is served earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Holds one key. Keys with the same name, as during a rotation, share its limits and its part of the cache."""

    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key
    scopes: frozenset[Scope] = frozenset(("inference",))
    expires_at: float = math.inf  # seconds since 1970
    domain: str = ""  # of the prefix cache; "": the shared one
    limits: KeyLimits = KeyLimits()

    def may(self, route: str) -> bool:
        """Says whether a scope of the key opens a declared path."""
        return not self.scopes.isdisjoint(NEEDS.get(route, ()))


# The client of a request that needs no key.
ANONYMOUS = ApiKey(name="", digest=b"", scopes=frozenset(("inference", "metrics")))


def new_secret() -> str:
    """Returns a new key: 256 random bits, in characters that are allowed in headers."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Returns the SHA-256 of a key."""
    return hashlib.sha256(secret).digest()


def domain_of(name: str) -> str:
    """Returns a name's domain of the prefix cache, 64 characters for every name."""
    return hashlib.sha256(b"cache\0" + name.encode()).hexdigest()
