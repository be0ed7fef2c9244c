"""Gate: everything that is decided about a request before its body is parsed. Pure ASGI.

The order is fixed: header syntax, key, route, scope, quota, size, room, media type. A request that fails two ways
always reports the first, and without a key nobody learns which routes exist or makes us read a body.

Refusals: logged as a rate. A line for each would make the load worse that they are there to shed.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.request_context import SCOPE_KEY, ClientGone, Exchange, deadline_exceeded, new_id, wished_seconds
from deployments.auth.authenticator import AccessDenied, Authenticator
from deployments.errors import ApiError, Code
from deployments.observability.observer import Observer
from deployments.settings import ApiSettings

log = logging.getLogger("assay.http")
PERIOD_S = 1.0
SHED: frozenset[Code] = frozenset(
    ("overloaded", "quota_exceeded", "deadline_exceeded", "draining", "not_ready", "no_replica")
)


class Refusals:
    """Counts refusals by code and tells of them once a period, at its end: the last ones are not forgotten. For one
    event loop."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()

    def add(self, code: str) -> None:
        if not self._counts:
            asyncio.get_running_loop().call_later(self._period_s, self._tell)
        self._counts[code] += 1

    def _tell(self) -> None:
        told = ", ".join(f"{code} {count}" for code, count in sorted(self._counts.items()))
        log.warning("Refused %d requests in %g s: %s.", self._counts.total(), self._period_s, told)
        self._counts.clear()


_DIGITS = re.compile(rb"[0-9]{1,18}")
_JSON = re.compile(rb"application/json\s*(;.*)?", re.IGNORECASE)
Headers = Sequence[tuple[bytes, bytes]]


class Gate:
    """Wraps the FastAPI app: request ids, header and body limits, 404 and 405, and the last resort for exceptions."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ApiSettings,
        observer: Observer,
        routes: Callable[[], Sequence[BaseRoute]],
        access: Authenticator,
        check_open: Callable[[float], None],
    ) -> None:
        """`check_open` raises ApiError where no replica would take work with so many seconds left."""
        self._app = app
        self._settings = settings
        self._observer = observer
        self._routes = routes
        self._access = access
        self._check_open = check_open
        self._requests = 0  # in flight with a body
        self._body_bytes = 0
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none, and a key is asked for nowhere but below
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(request_id=new_id("req-"))
        scope[SCOPE_KEY] = exchange
        sent = _Sender(send, exchange)
        self._observer.request_started(0)
        status = 499
        try:
            await self._handle(scope, receive, sent, exchange)
            status = 499 if exchange.gone else sent.status
        finally:
            if status == 499:
                log.info("499 %s %s: the client left", exchange.route, exchange.request_id)
            if exchange.code in SHED:
                self._refusals.add(exchange.code)
            self._observer.request_ended(
                exchange.route, status, exchange.code, exchange.elapsed_s(), len(exchange.body)
            )

    async def _handle(self, scope: Scope, receive: Receive, send: "_Sender", exchange: Exchange) -> None:
        try:
            await self._admit(scope, receive, send, exchange)
        except ApiError as error:
            if isinstance(error, AccessDenied):
                self._observer.auth_failed(error.reason)
            await exchange.fail(error).response(exchange.request_id)(scope, receive, send)
        except ClientGone:
            exchange.gone = True
        except Exception:
            log.exception("Unhandled in %s, request %s", exchange.route, exchange.request_id)
            if not send.status:
                await exchange.fail(internal_error()).response(exchange.request_id)(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        headers: Headers = scope["headers"]
        length = self._check_headers(headers, exchange)
        route = self._match(scope)
        exchange.key = self._access.identify(headers, route if isinstance(route, str) else None)
        exchange.tenant = exchange.key.name
        if isinstance(route, ApiError):
            raise route
        exchange.route = route
        self._access.authorise(exchange.key, route)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._access.rate_limiter.request(exchange.tenant):
            await self._with_body(scope, receive, send, exchange, length)

    async def _with_body(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange, length: int | None
    ) -> None:
        most = self._settings.limits.wire.max_body_bytes
        if exchange.key.limits.max_body_bytes is not None:
            most = min(most, exchange.key.limits.max_body_bytes)
        self._check_room(length, most)
        if exchange.route not in _NO_WORK:
            self._check_open(exchange.timeout_s(self._settings.deadlines.max_s))
        self._requests += 1
        try:
            exchange.body = await self._read(receive, length, most, exchange)
            self._body_bytes += len(exchange.body)
            self._observer.body(len(exchange.body))
            _check_media(scope["headers"])
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1
            self._body_bytes -= len(exchange.body)
            self._observer.body(-len(exchange.body))

    def _check_headers(self, headers: Headers, exchange: Exchange) -> int | None:
        """The declared body length, None for a chunked body."""
        limits = self._settings.limits.wire
        if len(headers) > limits.max_headers:
            raise ApiError(
                "invalid_header", f"At most {limits.max_headers} headers are accepted. Given: {len(headers)}."
            )
        size = sum(len(name) + len(value) for name, value in headers)
        if size > limits.max_header_bytes:
            raise ApiError(
                "invalid_header", f"At most {limits.max_header_bytes} bytes of headers are accepted. Given: {size}."
            )
        found = {name: value for name, value in headers if name in _READ}
        if b"x-request-timeout-seconds" in found:
            exchange.wish_s = wished_seconds(found[b"x-request-timeout-seconds"])
        exchange.strict = self._settings.strict or found.get(b"x-assay-strict") == b"1"
        lengths = [value for name, value in headers if name == b"content-length"]
        if not lengths:
            return None
        if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
            raise ApiError("invalid_header", "`content-length` must be one non-negative integer.", "content-length")
        return int(lengths[0])

    def _match(self, scope: Scope) -> str | ApiError:
        """The declared path of the route that the app's router will find too, or why there is none: 404 or 405."""
        allowed: set[str] = set()
        for route in self._routes():
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return str(getattr(route, "path", "other"))
            if match is Match.PARTIAL:
                allowed |= getattr(route, "methods", None) or set()
        if allowed:
            methods = ", ".join(sorted(allowed))
            return ApiError(
                "method_not_allowed", f"This route takes {methods}. Use one of them.", headers={"allow": methods}
            )
        return ApiError("not_found", "There is no such route. See /openapi.json for those that exist.")

    def _check_room(self, length: int | None, most: int) -> None:
        if length is not None and length > most:
            raise _too_large(most)
        full = self._requests >= self._settings.max_inflight_requests
        if full or self._body_bytes + (length or 0) > self._settings.max_inflight_body_bytes:
            raise ApiError("overloaded", "Too many requests are in flight. Try again later.", retry_after_s=1)

    async def _read(self, receive: Receive, length: int | None, most: int, exchange: Exchange) -> bytes:
        """The whole body, counted while it is read: a declared length is a claim, not a fact."""
        limit = self._settings.deadlines.scoring_s
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(exchange.timeout_s(limit)):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise deadline_exceeded(exchange.limit_s(limit)) from None
        if length is not None and size != length:
            raise ApiError(
                "invalid_header",
                f"`content-length` must be the body's length, {size}. Given: {length}.",
                "content-length",
            )
        return b"".join(parts)


_READ = frozenset({b"x-request-timeout-seconds", b"x-assay-strict"})
_NO_WORK = frozenset(("/tokenize", "/detokenize"))  # for a replica


def _check_media(headers: Headers) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ApiError(
                "unsupported_media_type",
                "`content-encoding` must be absent: send the body as it is.",
                "content-encoding",
            )
    types = [value.strip() for name, value in headers if name == b"content-type"]
    if len(types) != 1 or not _JSON.fullmatch(types[0]):
        raise ApiError("unsupported_media_type", "`content-type` must be application/json.", "content-type")


def _too_large(most: int) -> ApiError:
    return ApiError("body_too_large", f"The body must be at most {most} bytes. Send less in one request.")


def internal_error() -> ApiError:
    return ApiError("internal_error", "The server failed to handle this request. Its log names the request id.")


class _Sender:
    """Adds our request id to whatever answers, and remembers the status."""

    def __init__(self, send: Send, exchange: Exchange) -> None:
        self._send = send
        self._exchange = exchange
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = {"x-assay-request-id": self._exchange.request_id, **self._exchange.headers}
            pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in ours.items()]
            message = {**message, "headers": [*message.get("headers", []), *pairs]}
        await self._send(message)
