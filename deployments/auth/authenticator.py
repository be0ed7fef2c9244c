"""Access: who asks, and whether they may. Every route is closed that is not in the public list.

The gate asks with the route that the router itself has found for the request: nothing is decided on an address put
together from `Host`, nor on the beginning of a path, and what is allowed is exactly what will answer.
"""

import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.auth.api_keys import ANYONE, Key, digest_of
from deployments.auth.rate_limiter import Quotas
from deployments.errors import ApiError, Code

Mode = Literal["disabled", "keys"]
Reason = Literal["missing", "malformed", "unknown", "expired", "scope"]
PUBLIC = frozenset(("/healthz", "/readyz", "/health"))
_SCHEME = b"bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Who may ask. With `disabled` everybody may do everything."""

    mode: Mode = "disabled"
    keys: tuple[Key, ...] = ()
    public: frozenset[str] = PUBLIC  # declared paths that need no key
    ingresses: int = 1  # a name's limits are shared out over so many


class Denied(ApiError):
    """A request without the right key. The message tells the same of every key that is not ours."""

    def __init__(self, code: Code, message: str, reason: Reason) -> None:
        super().__init__(code, message)
        self.reason: Reason = reason


class Access:
    """The keys of now, and what their names have in use. `use` changes the keys between two requests."""

    def __init__(self, settings: AuthSettings | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.quotas = Quotas()
        self.use(settings or AuthSettings())

    def use(self, settings: AuthSettings) -> None:
        """What names have in use stays counted, under their new limits."""
        self._settings = settings
        self.quotas.use({key.name: key.limits for key in settings.keys}, settings.ingresses)

    @property
    def mode(self) -> Mode:
        return self._settings.mode

    def closed(self, route: str | None) -> bool:
        """Whether a request for the declared path `route` needs a key; None: for a path that is none."""
        return self._settings.mode == "keys" and route not in self._settings.public

    def identify(self, headers: Sequence[tuple[bytes, bytes]], route: str | None) -> Key:
        """The key of a request for the declared path `route`, None if there is no such route. Raises Denied, 401."""
        if not self.closed(route):
            return ANYONE
        key = self._named(_digest(headers))
        if key is None:
            raise Denied("invalid_api_key", "The API key is not one of this server's.", "unknown")
        if self._clock() >= key.expires_at:
            raise Denied("invalid_api_key", "The API key has expired. Ask the operator for another.", "expired")
        return key

    def authorise(self, key: Key, route: str) -> None:
        """Raises Denied, 403, where none of the key's scopes is for the declared path `route`."""
        if not (key is ANYONE or key.may(route)):
            raise Denied("permission_denied", "The API key has no scope for this route.", "scope")

    def _named(self, digest: bytes) -> Key | None:
        """Takes as long whichever key it is, or none: all are compared, each in constant time."""
        found = None
        for key in self._settings.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def _digest(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """SHA-256 of the one bearer token. Raises Denied."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        message = "An API key is needed: send the header `authorization: Bearer KEY`."
        raise Denied("invalid_api_key", message, "missing")
    if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
        message = "`authorization` must be given once, as `Bearer KEY`."
        raise Denied("invalid_api_key", message, "malformed")
    return digest_of(given[0][len(_SCHEME) :].strip())


def open_to_world(host: str | None, mode: Mode) -> bool:
    """Whether anybody who reaches the address `host` may use the service: no keys, and not only this machine. A name
    counts as public unless it is `localhost`: what it stands for may change. None: nobody listens."""
    if host is None or mode != "disabled":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() != "localhost"


def refuse_open(host: str | None, mode: Mode, allow_open: bool) -> None:
    """Raises ValueError where the service would be open to the world without having been told to."""
    if open_to_world(host, mode) and not allow_open:
        raise ValueError(
            f"`auth.mode` must be keys where `http_options.host` is not this machine alone. Given: {mode} on {host}. "
            "Make keys with `assay keys new NAME`, listen on 127.0.0.1, or set `auth.allow_open: true`."
        )
