"""Decides which client sent a request and whether its key opens the route. Routes outside the public list are closed.

Decisions are made on the route that the router has found for the request, never on an address built from `Host` or on
the beginning of a path: what is allowed is exactly what will answer.
"""

import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.auth.api_keys import ANONYMOUS, ApiKey, digest_of
from deployments.auth.usage import RateLimiter
from deployments.errors import ApiError, Code

Mode = Literal["disabled", "keys"]
Reason = Literal["missing", "malformed", "unknown", "expired", "scope"]
PUBLIC = frozenset(("/healthz", "/readyz", "/health"))
_SCHEME = b"bearer "
_NO_KEY = ApiKey(name="", digest=bytes(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Holds the keys in force. With mode `disabled` every request is allowed."""

    mode: Mode = "disabled"
    keys: tuple[ApiKey, ...] = ()
    public: frozenset[str] = PUBLIC  # declared paths that need no key
    ingresses: int = 1  # each enforces its share of a name's limits


class AccessDenied(ApiError):
    """Refuses a request without a valid key. The message is the same for every unknown key."""

    def __init__(self, code: Code, message: str, reason: Reason) -> None:
        super().__init__(code, message)
        self.reason: Reason = reason


class Authenticator:
    """Holds the keys in force and the usage of their names. `use` changes the keys between two requests."""

    def __init__(self, settings: AuthSettings | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.rate_limiter = RateLimiter()
        self.use(settings or AuthSettings())

    def use(self, settings: AuthSettings) -> None:
        """Puts keys in force. Usage stays counted, under the new limits."""
        self._settings = settings
        self.shared = settings.mode == "keys" and len({key.name for key in settings.keys}) > 1
        """Whether there are keys of several names."""
        self._by_digest = {key.digest: key for key in settings.keys}  # the last one of a digest
        self.rate_limiter.use({key.name: key.limits for key in settings.keys}, settings.ingresses)

    @property
    def mode(self) -> Mode:
        return self._settings.mode

    def closed(self, route: str | None) -> bool:
        """Says whether a request for the declared path `route` needs a key; None is a path without a route."""
        return self._settings.mode == "keys" and route not in self._settings.public

    def identify(self, headers: Sequence[tuple[bytes, bytes]], route: str | None) -> ApiKey:
        """Returns the key of a request.

        Args:
            headers: of the request, with names in lower case.
            route: the declared path; None is a path without a route.

        Raises:
            AccessDenied: 401, the key is missing, malformed, unknown or expired.
        """
        if not self.closed(route):
            return ANONYMOUS
        key = self._named(_digest(headers))
        if key is None:
            raise AccessDenied("invalid_api_key", "The API key is not one of this server's.", "unknown")
        if self._clock() >= key.expires_at:
            raise AccessDenied("invalid_api_key", "The API key has expired. Ask the operator for another.", "expired")
        return key

    def authorise(self, key: ApiKey, route: str) -> None:
        """Raises AccessDenied, 403, if none of the key's scopes opens the declared path `route`."""
        if not (key is ANONYMOUS or key.may(route)):
            raise AccessDenied("permission_denied", "The API key has no scope for this route.", "scope")

    def _named(self, digest: bytes) -> ApiKey | None:
        """Finds a key by the SHA-256 of what was sent, whose bits a client cannot choose.

        How far a digest agrees with a stored one says nothing about the key, so the table may look it up as it likes.
        The key that it finds is compared in constant time, and an unknown one with a digest that no key has.
        """
        key = self._by_digest.get(digest, _NO_KEY)
        return key if hmac.compare_digest(key.digest, digest) and key is not _NO_KEY else None


def _digest(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Returns the SHA-256 of the one bearer token. Raises AccessDenied."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        message = "An API key is needed: send the header `authorization: Bearer KEY`."
        raise AccessDenied("invalid_api_key", message, "missing")
    if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
        message = "`authorization` must be given once, as `Bearer KEY`."
        raise AccessDenied("invalid_api_key", message, "malformed")
    return digest_of(given[0][len(_SCHEME) :].strip())


def open_to_world(host: str | None, mode: Mode) -> bool:
    """Says whether other machines can use the service without a key.

    Args:
        host: the address that the service listens on; None: it does not listen. A name other than `localhost` counts
            as reachable, because its address may change.
        mode: of authentication.
    """
    if host is None or mode != "disabled":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() != "localhost"


def refuse_open(host: str | None, mode: Mode, allow_open: bool) -> None:
    """Raises ValueError if other machines could use the service without a key and `auth.allow_open` is not set."""
    if open_to_world(host, mode) and not allow_open:
        raise ValueError(
            f"`auth.mode` must be keys where `http_options.host` is not this machine alone. Given: {mode} on {host}. "
            "Make keys with `assay keys new NAME`, listen on 127.0.0.1, or set `auth.allow_open: true`."
        )
