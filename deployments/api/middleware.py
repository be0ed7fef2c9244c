"""Decides everything about a request before its body is parsed, as pure ASGI middleware.

The order is fixed: header syntax, key, route, scope, quota, size, connection limit, media type. A request that fails
two checks reports the first one, and a client without a key learns no route and makes the server read no body.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette._utils import get_route_path
from starlette.responses import Response
from starlette.routing import Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.request_context import (
    SCOPE_KEY,
    ClientGone,
    RequestContext,
    deadline_exceeded,
    new_id,
    parse_timeout,
)
from deployments.api.sse import EventStream
from deployments.api.tenant_threads import TENANT
from deployments.auth.authenticator import AccessDenied, Authenticator
from deployments.auth.usage import SharedRoom
from deployments.config.settings import ApiSettings
from deployments.errors import OPENAI_STATUSES, ApiError, Code, internal_error
from deployments.malloc import LARGE_BYTES, TrimAfterLarge
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.proxy_middleware import BEGUN, OWN_TIMEOUT, SCOPE_ID, SCOPE_TELL, TIMEOUT, FairTurns
from deployments.time_limit import TimeLimit

log = logging.getLogger("assay.http")
Answer = Callable[[RequestContext, Receive], Awaitable[Response]]
PERIOD_S = 1.0
TOGETHER = 8  # requests that begin in one round of the event loop while all are of one key
SHED: frozenset[Code] = frozenset(
    ("overloaded", "quota_exceeded", "deadline_exceeded", "draining", "not_ready", "no_replica")
)


class RefusalLog:
    """Counts refusals by code and logs them once a period, at its end. For one event loop.

    A line for each refusal would increase the load that refusals reduce.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()

    def add(self, code: str) -> None:
        """Counts one refusal."""
        if not self._counts:
            asyncio.get_running_loop().call_later(self._period_s, self._log)
        self._counts[code] += 1

    def _log(self) -> None:
        counts = ", ".join(f"{code} {count}" for code, count in sorted(self._counts.items()))
        log.warning("Refused %d requests in %g s: %s.", self._counts.total(), self._period_s, counts)
        self._counts.clear()


_DIGITS = re.compile(rb"[0-9]{1,18}")
_JSON = re.compile(rb"application/json\s*(;.*)?", re.IGNORECASE)
Headers = Sequence[tuple[bytes, bytes]]


class RequestMiddleware:
    """Wraps the FastAPI app: request ids, keys, header and body limits, 404 and 405, and unhandled exceptions."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ApiSettings,
        observer: IngressMetrics,
        router: Router,
        answers: Mapping[tuple[str, str], Answer],
        access: Authenticator,
        check_open: Callable[[float, str], None],
    ) -> None:
        """Keeps what the checks need.

        Args:
            app: The wrapped application.
            settings: Limits and deadlines.
            observer: Receives the counts.
            router: Holds the routes of the application.
            answers: The endpoints to call without the application, by method and path.
            access: Keys, scopes and quotas.
            check_open: Raises ApiError if no replica would take work of a tenant with so many seconds left.
        """
        self._app = app
        self._settings = settings
        self._observer = observer
        self._router = router
        self._answers = answers
        self._access = access
        self._check_open = check_open
        self._statuses = OPENAI_STATUSES if settings.openai_errors else {}
        self._places = SharedRoom(settings.max_inflight_requests)  # of requests in flight with a body
        self._bytes = SharedRoom(settings.max_inflight_body_bytes)  # of bodies, until they are parsed
        self._refusals = RefusalLog()
        self._turns, self._answer_turns = FairTurns(together=TOGETHER), FairTurns()
        self._memory = TrimAfterLarge()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are no such routes, and no key is checked for them
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(request_id=scope.get(SCOPE_ID) or new_id("req-"))
        scope[SCOPE_KEY] = context
        sent = _HeaderSender(
            send,
            context,
            head=scope["method"] == "HEAD",
            statuses=self._statuses,
            read_timeout_s=self._settings.stream.read_timeout_s,
        )
        self._observer.request_started()
        status = 499
        try:
            await self._handle(scope, receive, sent, context)
            status = 499 if context.gone else sent.status
        finally:
            if status == 499:
                log.info("499 %s %s: the client left", context.route, context.request_id)
            if context.code in SHED:
                self._refusals.add(context.code)
            self._observer.request_ended(context.route, status, context.code, context.elapsed_s())
            if max(context.body_bytes, sent.largest) >= LARGE_BYTES:
                self._memory.ended()

    async def _handle(self, scope: Scope, receive: Receive, send: "_HeaderSender", context: RequestContext) -> None:
        try:
            await self._admit_or_refuse(scope, receive, send, context)
        except ClientGone:
            self._note_gone(context, send)
        except asyncio.CancelledError:  # Serve cancels too if the client leaves, sometimes before the message arrives
            self._note_gone(context, send)
            raise

    async def _admit_or_refuse(
        self, scope: Scope, receive: Receive, send: "_HeaderSender", context: RequestContext
    ) -> None:
        try:
            await self._admit(scope, receive, send, context)
        except ApiError as error:
            if isinstance(error, AccessDenied):
                self._observer.auth_failed(error.reason)
            await context.fail(error).response(context.request_id)(scope, receive, send.bounded)
        except ClientGone:
            raise
        except Exception:
            log.exception("Unhandled in %s, request %s", context.route, context.request_id)
            if not send.status:
                await context.fail(internal_error()).response(context.request_id)(scope, receive, send.bounded)

    def _note_gone(self, context: RequestContext, send: "_HeaderSender") -> None:
        """Notes that the client left, unless that is known."""
        if not context.gone:
            context.gone = True
            self._observer.disconnected("last" if send.status else "queued")

    async def _admit(self, scope: Scope, receive: Receive, send: "_HeaderSender", context: RequestContext) -> None:
        headers: Headers = scope["headers"]
        length = self._check_headers(headers, context)
        scope = _plain(scope)
        route = self._match(scope)
        context.key = self._access.identify(headers, route if isinstance(route, str) else None)
        context.tenant = context.key.name
        TENANT.set(context.tenant)
        if isinstance(route, ApiError):
            if scope["method"] == "OPTIONS" and route.code == "method_not_allowed":
                await Response(status_code=204, headers=route.headers())(scope, receive, send.bounded)
                return
            raise route
        context.route = route
        self._access.authorise(context.key, route)
        if scope["method"] != "POST":
            await self._answer(scope, receive, send, context)
            return
        await self._turns.take(context.tenant)
        if scope.get(SCOPE_TELL):
            await send({"type": BEGUN})
        with self._access.rate_limiter.request(context.tenant):
            await self._with_body(scope, receive, send, context, length)

    async def _with_body(
        self, scope: Scope, receive: Receive, send: "_HeaderSender", context: RequestContext, length: int | None
    ) -> None:
        maximum, limit = self._max_body(context)
        self._check_room(length, maximum, limit, context)
        if context.route not in _NO_WORK:
            self._check_open(context.timeout_s(self._settings.deadlines.max_s), context.tenant)
        self._places.take(context.tenant, 1)
        context.body_read = self._release
        try:
            context.body = await self._read(receive, length, maximum, limit, context)
            _check_media(scope["headers"])
            await self._answer(scope, receive, send, context)
        finally:
            self._places.give_back(context.tenant, 1)
            self._release(context)

    def _max_body(self, context: RequestContext) -> tuple[int, str]:
        """Returns the bytes that the body may have, and the limit that says so."""
        wire, own = self._settings.limits.wire, context.key.limits.max_body_bytes
        limits = [(wire.max_body_bytes, "limits.max_body_bytes")]
        if own is not None:
            limits.append((own, "max_body_bytes of the key"))
        if context.route in _NO_WORK:
            limits.append((wire.max_tokenize_bytes, "limits.max_tokenize_bytes"))
        return min(limits)

    async def _answer(self, scope: Scope, receive: Receive, send: "_HeaderSender", context: RequestContext) -> None:
        """Answers a request that passed every check. A stream bounds its writes itself, in tasks of its own."""
        answer = self._answers.get((scope["method"], context.route))
        if answer is None:
            await self._app(scope, receive, send.bounded)
        else:
            response = await answer(context, receive)
            if self._turns.shared:  # a step of the engine ends hundreds of requests of one key together
                await self._answer_turns.take(context.tenant)
            await response(scope, receive, send if isinstance(response, EventStream) else send.bounded)

    def _check_headers(self, headers: Headers, context: RequestContext) -> int | None:
        """Returns the declared body length, None for a chunked body. Raises ApiError for invalid headers."""
        limits = self._settings.limits.wire
        if len(headers) > limits.max_headers:
            raise ApiError(
                "invalid_header", f"At most {limits.max_headers} headers are accepted. Given: {len(headers)}."
            )
        size = len(b"".join(map(b"".join, headers)))
        if size > limits.max_header_bytes:
            raise ApiError(
                "invalid_header", f"At most {limits.max_header_bytes} bytes of headers are accepted. Given: {size}."
            )
        found = dict(headers)
        for name in (OWN_TIMEOUT, TIMEOUT):  # the second where no middleware of ours is in front of Serve's code
            if name in found and context.client_limit_s is None:
                context.client_limit_s = parse_timeout(found[name])
        context.pinecone = b"x-pinecone-api-version" in found
        context.cohere = found.get(b"x-fern-sdk-name", b"").startswith(b"cohere")
        context.strict = self._settings.strict or found.get(b"x-assay-strict") == b"1"
        coding = found.get(b"transfer-encoding", b"chunked")
        if coding.strip().lower() != b"chunked":
            raise ApiError(
                "invalid_header",
                "`transfer-encoding` must be chunked alone: send the body as it is.",
                "transfer-encoding",
            )
        lengths = [value for name, value in headers if name == b"content-length"]
        if not lengths:
            return None
        if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
            raise ApiError("invalid_header", "`content-length` must be one non-negative integer.", "content-length")
        return int(lengths[0])

    def _match(self, scope: Scope) -> str | ApiError:
        """Returns the declared path of the route that the app's router will find too, or the 404 or 405 error."""
        path = get_route_path(scope)
        if (scope["method"], path) in self._answers:
            return path
        allowed: set[str] = set()
        for route in self._router.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return str(getattr(route, "path", "other"))
            if match is Match.PARTIAL:
                allowed |= getattr(route, "methods", None) or set()
        if allowed:
            methods = sorted(allowed | ({"HEAD"} if "GET" in allowed else set()))
            message = f"The method must be {' or '.join(methods)}."
            return ApiError("method_not_allowed", message, headers={"allow": ", ".join((*methods, "OPTIONS"))})
        return ApiError("not_found", "There is no such route. See /openapi.json for those that exist.")

    def _check_room(self, length: int | None, maximum: int, limit: str, context: RequestContext) -> None:
        if length is not None and length > maximum:
            raise _too_large(maximum, limit)
        if not self._places.has(context.tenant, 1, shared=self._access.shared):
            raise _overloaded()
        self._check_bytes(length or 0, context)

    def _check_bytes(self, more: int, context: RequestContext) -> None:
        if not self._bytes.has(context.tenant, more, context.counted_bytes, shared=self._access.shared):
            raise _overloaded()

    def _count_bytes(self, more: int, context: RequestContext) -> None:
        """Counts a part of a body. Raises ApiError if the bodies in flight leave no room for it."""
        self._check_bytes(more, context)
        self._bytes.take(context.tenant, more)
        context.counted_bytes += more
        context.body_bytes += more
        self._observer.body(more)

    def _release(self, context: RequestContext) -> None:
        """Gives back the room of a body. Does nothing the second time."""
        counted, context.counted_bytes = context.counted_bytes, 0
        self._bytes.give_back(context.tenant, counted)
        self._observer.body(-counted)

    async def _read(
        self, receive: Receive, length: int | None, maximum: int, limit: str, context: RequestContext
    ) -> bytes:
        """Reads the whole body and counts it while reading, because a declared length may be wrong."""
        limit_s = self._settings.deadlines.scoring_s
        parts: list[bytes] = []
        size = 0
        try:
            with TimeLimit(context.timeout_s(limit_s)):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > maximum:
                        raise _too_large(maximum, limit)
                    self._count_bytes(len(part), context)
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise deadline_exceeded(context.limit_s(limit_s)) from None
        if length is not None and size != length:
            raise ApiError(
                "invalid_header",
                f"`content-length` must be the body's length, {size}. Given: {length}.",
                "content-length",
            )
        return b"".join(parts)


_NO_WORK = frozenset(("/tokenize", "/detokenize"))  # routes that need no replica


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


def _too_large(maximum: int, limit: str) -> ApiError:
    message = f"The body must be at most {maximum} bytes (`{limit}`). Send less in one request."
    return ApiError("body_too_large", message)


def _overloaded() -> ApiError:
    return ApiError("overloaded", "Too many requests are in flight. Try again later.", retry_after_s=1)


def _plain(scope: Scope) -> Scope:
    """Returns the scope as the router takes it: HEAD is GET, and a path has no slash at its end."""
    path = scope["path"]
    if path.endswith("/") and not path.endswith("//") and path != scope.get("root_path", "") + "/":
        scope = {**scope, "path": path[:-1]}
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


class _HeaderSender:
    """Adds the request id and the context's headers to a response, and keeps its status and the bytes of its largest
    message. HEAD gets no body.

    `statuses` maps statuses to others that are sent in their place.
    """

    def __init__(
        self, send: Send, context: RequestContext, *, head: bool, statuses: Mapping[int, int], read_timeout_s: float
    ) -> None:
        self._send = send
        self._read_timeout_s = read_timeout_s
        self._exchange = context
        self._head = head
        self._statuses = statuses
        self.status = 0
        self.largest = 0

    async def bounded(self, message: Message) -> None:
        """Sends a message. Raises ClientGone if the client takes nothing for `stream.read_timeout_s`.

        The server closes a connection whose answer has no end.
        """
        try:
            with TimeLimit(self._read_timeout_s):
                await self(message)
        except TimeoutError:
            raise ClientGone from None

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = self._statuses.get(message["status"], message["status"])
            ours = {"x-assay-request-id": self._exchange.request_id, **self._exchange.headers}
            pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in ours.items()]
            message = {**message, "status": self.status, "headers": [*message.get("headers", []), *pairs]}
        elif message["type"] == "http.response.body":
            self.largest = max(self.largest, len(message.get("body", b"")))
            if self._head:
                message = {**message, "body": b""}
        return self._send(message)
