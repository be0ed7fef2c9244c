"""Gives each request its id and its turn, and bounds what its headers do to Serve, in front of Serve's own code.

Serve reads some headers before an application sees the request. It decodes them as UTF-8, so that one byte beyond ASCII
ends the request with a bare 500, and it keeps every model id that it was ever given. Both work without an API key.

`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` must name `middlewares` before Ray starts. Serve then puts the middleware in
front of each of its HTTP servers: the proxy by default, each ingress in fast mode. `assay serve` sets the variable.

Serve's proxy imports this module, so it imports little else of ours.
"""

import asyncio
import json
import math
import os
import re
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Hashable, Iterable

from ray import serve
from ray.serve import context
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.malloc import LARGE_BYTES, TrimAfterLarge, give_back_memory
from deployments.one_write import OneWrite

SCOPE_ID = "assay.request_id"
"""The key under which the scope carries the id. A client cannot set it, while it could set any header."""
SCOPE_TELL = "assay.tell"
"""The key that asks an application to send a message of the type `BEGUN` once it begins a request."""
BEGUN = "assay.begun"
REQUEST_ID, CLIENT_ID = b"x-request-id", b"x-client-request-id"
IDS, ID_CHARS = 64, 26  # ids that are drawn together, and the characters of each
BASE32 = b"abcdefghijklmnopqrstuvwxyz234567" * 8  # of each random byte
MAX_CLIENT_ID = 512  # characters, as for OpenAI's header of this name
MAX_ASCII_BYTES = 512
_CLIENT_ID = re.compile(rb"[!-~]{1,%d}" % MAX_CLIENT_ID)
_SESSION = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")
# Serve routes by the first two, and stops to watch for a client that leaves by the third. No part of Assay needs them.
DROPPED = frozenset(
    name.lower().replace("-", "_").encode("utf-8")
    for name in ("serve_multiplexed_model_id", _SESSION, "x-request-disconnect-disabled")
)
UNWATCHED = (b"x-request-disconnect-disabled", b"?1")  # spares a request two tasks of Serve's
DECODED = frozenset((b"traceparent", b"tracestate"))  # kept, if Serve can read them
TIMEOUT = b"x-request-timeout-seconds"  # Serve's proxy would end the request in plain text, or cut the stream
OWN_TIMEOUT = b"x-assay-timeout-seconds"  # the name under which an ingress gets it, which Serve does not read

SERVES_OWN = "/-/"  # paths that Serve answers itself
TRACING = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH"  # where it is set, Serve records a span around each request

ROUNDS = 4  # of the event loop, between two requests that begin
MAX_AHEAD = 64  # requests that have begun in Serve's proxy and not in an ingress
SHARED_AHEAD = 16  # the same, while several keys have requests
SHARED_S = 1.0  # for so long several keys have requests after one came that was not of the key of the one before
TOLD = 4  # of so many requests that begin one after another, the last one says for all that an ingress has begun it
MAX_AHEAD_S = 1.0  # after which one holds back no others: an ingress may be frozen, and other applications tell nothing
MAX_KNOWN = 4096  # values of `authorization` that an ingress has accepted and the proxy remembers
UNKNOWN = hash(b"")  # the turn that all others share, and requests without one
MAX_WHOLE_BYTES = 4 << 20  # of a stream that a client of HTTP/1.0 gets in one piece: 16,000 tokens and more
LONG_S = 0.01  # after which the next one begins with the next round, however few there were: the loop has much to do

Headers = list[tuple[bytes, bytes]]


_ids: list[str] = []  # drawn together, since the kernel's random bytes cost more than all else of an id
os.register_at_fork(after_in_child=_ids.clear)


def new_id(prefix: str) -> str:
    """Returns `prefix` and 26 base32 characters of 130 random bits."""
    try:
        return prefix + _ids.pop()
    except IndexError:
        text = secrets.token_bytes(IDS * ID_CHARS).translate(BASE32).decode("ascii")
        _ids.extend(text[at : at + ID_CHARS] for at in range(0, len(text), ID_CHARS))
        return new_id(prefix)


def middlewares() -> list[Middleware]:
    """Returns what Serve puts in front of its HTTP servers, and bounds what bodies leave behind in their processes."""
    give_back_memory()
    if not _in_ingress():
        return [Middleware(ProxyMiddleware)]
    return [Middleware(IngressMiddleware, direct=not os.environ.get(TRACING))]


def _in_ingress() -> bool:
    """Tells whether this process runs the application, as in fast mode."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


class FairTurns:
    """Lets requests begin one after another, tenants in turn, as fast as the event loop can follow.

    While there is one tenant alone, a few of its requests may begin together: what they send goes in one write, and
    another process gets it together.

    A loop runs what is ready in the order in which it came. Where one tenant sends hundreds of requests together, the
    first thing that another one sends waits until the loop has begun all of them, and no queue behind it can make up
    for that. Here the loop begins one request, goes round a few times, which is what the beginning of a request takes,
    and begins the next one: the requests that wait are in queues by tenant. One round is enough where it takes long,
    because hundreds of requests are under way. Another loop begins anew.

    Where another process takes what begins here, in the order in which it comes, a bound on what it has not begun yet
    keeps the others in the queues here. It costs messages, so it is low only while there are others.
    """

    def __init__(self, max_ahead: float = math.inf, shared_ahead: float = math.inf, together: int = 1) -> None:
        """`max_ahead`: requests that begin here before `passed` is called for one of them; `shared_ahead`: while
        requests of several tenants come; `together`: how many begin together while those of one tenant come."""
        self._bounds = max_ahead, min(max_ahead, shared_ahead)
        self._together = together
        self._ahead = 0
        self._last: Hashable = None  # the tenant that came last
        self._shared_until = -math.inf  # on the loop's clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first
        self._left = 0  # rounds until the next request may begin
        self._began = 0.0  # when the last one did, on the loop's clock

    async def take(self, tenant: Hashable) -> None:
        """Returns when a request of a tenant may begin: immediately where none waits and the last one has begun.

        The caller calls `passed` once for each, if there is a bound.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._left, self._ahead = loop, 0, 0
            self._last, self._shared_until = tenant, -math.inf
            self._queues.clear()
        if tenant != self._last:
            self._last, self._shared_until = tenant, loop.time() + SHARED_S
        if not self._left and self._ahead < self._max_ahead:
            self._ahead += 1
            self._wait_rounds(loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had its turn
                self.passed()
            raise

    @property
    def shared(self) -> bool:
        """Whether requests of several tenants come."""
        return self._loop is not None and self._loop.time() < self._shared_until

    @property
    def _max_ahead(self) -> float:
        return self._bounds[self.shared]

    @property
    def many_ahead(self) -> bool:
        """Whether those that begin now are worth a message when they pass: half of what may be ahead is, or a quarter
        where tenants wait for each other."""
        alone, shared = self._bounds
        return self._ahead > (shared / 4 if self.shared else alone / 2)

    def passed(self) -> None:
        """Notes that one that began here has begun in the next process, or will not."""
        self._ahead -= 1
        if not self._left and self._loop is not None and self._begin_next():
            self._wait_rounds(self._loop)

    def _wait_rounds(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets the loop go round before the next one begins."""
        self._left, self._began = ROUNDS, loop.time()
        loop.call_soon(self._go_round, loop)

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            return
        now = loop.time()
        self._left = self._left - 1 if now - self._began < LONG_S else 0
        if self._left:
            loop.call_soon(self._go_round, loop)
        elif self._begin_next():
            self._wait_rounds(loop)

    def _begin_next(self) -> int:
        """Gives the next tenant's first requests their turns. Returns how many begin: those that may, and whose clients
        still wait."""
        begun, most = 0, 1 if self.shared else self._together
        while self._queues and begun < most and self._ahead < self._max_ahead:
            tenant, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # behind all others
            if not turn.done():  # else its client has left
                self._ahead += 1
                turn.set_result(None)
                begun += 1
        return begun


class KnownKeys:
    """Remembers which values of `authorization` an ingress has accepted: each has turns of its own, all others share.

    The proxy cannot check a key, and a client could invent one for each request. The hashes are kept, and no key is.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()  # the one that came last at the end

    def turn_of(self, value: bytes) -> int:
        """Returns whose turn a request with this value takes."""
        key = hash(value)
        if key not in self._known:
            return UNKNOWN
        self._known.move_to_end(key)
        return key

    def answered(self, value: bytes, method: str, status: int) -> None:
        """Learns from an answer. Probes need no key and errors may come before it is checked, so neither shows one."""
        key = hash(value)
        if status == 401:
            self._known.pop(key, None)
        elif method == "POST" and 200 <= status < 300 and key != UNKNOWN:
            self._known[key] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


class _HeaderMiddleware:
    """Takes headers off a request that Serve must not read, and gives it the id that answer, body and logs show.

    The head of an answer and the first part of its body go out in one write. A client of HTTP/1.0 gets streams in one
    piece.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, client_id = readable(scope["headers"])
        if scope["type"] == "http":
            send = OneWrite(send)
        request_id = new_id("req-")
        if scope.get("http_version") == "1.0":
            send = WholeAnswer(send, request_id)
        if client_id is not None:
            send = _with_header(send, CLIENT_ID, client_id)
        await self._pass_on({**scope, "headers": headers, SCOPE_ID: request_id}, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class ProxyMiddleware(_HeaderMiddleware):
    """Stands in front of Serve's proxy: gives requests their turns, and memory back after large ones."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._turns = FairTurns(MAX_AHEAD, SHARED_AHEAD)
        self._keys = KnownKeys()
        self._untold: list[_Place] = []
        self._memory = TrimAfterLarge(collect=True)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        _show_serve_the_id(scope)
        if scope["path"].startswith(SERVES_OWN):
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        key = next((value for name, value in headers if name == b"authorization"), b"")
        await self._turns.take(self._keys.turn_of(key))
        places = self._places()
        scope[SCOPE_TELL] = len(places) > 1
        sent = _Passing(send, places)
        late = asyncio.get_running_loop().call_later(MAX_AHEAD_S, sent.passed)
        try:
            await self._app(scope, receive, sent)
        finally:
            late.cancel()
            sent.passed()
            self._keys.answered(key, scope.get("method", ""), sent.status)
            if max(_declared_bytes(headers), sent.largest) >= LARGE_BYTES:
                self._memory.ended()

    def _places(self) -> "list[_Place]":
        """Returns the places that a request gives free as it begins in an ingress: its own, and, where many are ahead,
        for the last of every `TOLD` requests those of the others, which began before it."""
        place = _Place(self._turns)
        if not self._turns.many_ahead:
            return [place]
        self._untold.append(place)
        if len(self._untold) < TOLD:
            return [place]
        places, self._untold = self._untold, []
        return places


class IngressMiddleware(_HeaderMiddleware):
    """Stands in front of Serve's code in an ingress, and hands requests to the application itself.

    Serve's code around each request takes a fifth to a third of an ingress's time for a small one. It routes, counts,
    bounds and watches requests, as the application does too, which also gives turns, once it knows the key, and trims
    its own heap. Serve answers its own paths, what is not below the application's prefix, and all requests of other
    applications. A replica that ends waits for its HTTP server, so that no request is cut off.
    """

    def __init__(self, app: ASGIApp, *, direct: bool = True) -> None:
        """`direct`: whether requests may go past Serve's code."""
        super().__init__(app)
        self._direct = direct
        self._prefix: str | None = None  # of the application's paths, once Serve has put it into a request

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        replica, prefix, root = serve.get_replica_context(), self._prefix, scope.get("root_path", "")
        application: ASGIApp | None = getattr(replica.servable_object, "direct_application", None)
        if application is not None:
            if prefix is not None and _is_below(prefix, scope["path"][len(root) :]) and scope["type"] == "http":
                scope["root_path"] = root + prefix
                _name_in_logs(scope[SCOPE_ID], replica.app_name)
                await application(scope, receive, _with_header(send, REQUEST_ID, scope[SCOPE_ID].encode("ascii")))
                return
            scope["headers"].append(UNWATCHED)  # it watches its clients itself
        _show_serve_the_id(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            if self._direct:
                self._prefix = scope.get("root_path", "")[len(root) :]


class _Place:
    """Holds a request's place among those that no ingress has begun, until it has passed."""

    __slots__ = ("_turns",)

    def __init__(self, turns: FairTurns) -> None:
        self._turns: FairTurns | None = turns

    def passed(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.passed()


class _Passing:
    """Passes an answer on, keeps its status and the bytes of its largest message, and says when the request has begun
    elsewhere."""

    __slots__ = ("_places", "_send", "largest", "status")

    def __init__(self, send: Send, places: list[_Place]) -> None:
        self._send = send
        self._places = places  # until the request has passed
        self.largest = 0
        self.status = 0  # until the answer begins

    def __call__(self, message: Message) -> Awaitable[None]:
        self.passed()
        if message["type"] == BEGUN:
            return _nothing()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.largest = max(self.largest, len(message.get("body", b"")))
        return self._send(message)

    def passed(self) -> None:
        places, self._places = self._places, []
        for place in places:
            place.passed()


async def _nothing() -> None: ...


def _show_serve_the_id(scope: Scope) -> None:
    """Has Serve log the id, and answer with it."""
    scope["headers"].append((REQUEST_ID, scope[SCOPE_ID].encode("ascii")))


def _name_in_logs(request_id: str, app_name: str) -> None:
    """Has Serve log the id with each line of this request, and give it to the calls that the request makes."""
    context._serve_request_context.set(context._RequestContext(request_id=request_id, app_name=app_name))


def _is_below(prefix: str, path: str) -> bool:
    """Tells whether a path is the application's by Serve's rule, and not Serve's own."""
    return path.startswith(prefix) and not path.startswith(SERVES_OWN)


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    """Returns a `send` that adds a header to an answer."""

    def send_with_header(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (name, value)]}
        return send(message)

    return send_with_header


def _declared_bytes(headers: Headers) -> int:
    """Returns the length that a request declares for its body. One that is sent in chunks may be large."""
    for name, value in headers:
        if name == b"content-length" and len(value) < 19 and value.isdigit():
            return int(value)
        if name == b"transfer-encoding":
            return LARGE_BYTES
    return 0


class WholeAnswer:
    """Sends an answer without a declared length in one piece with its length.

    Uvicorn sends such an answer, a stream of events, in chunks, which HTTP/1.0 does not have. One of more than
    `MAX_WHOLE_BYTES` becomes an error. With an answer complete, the server says to the application that its client has
    left, so that its work ends too.
    """

    def __init__(self, send: Send, request_id: str = "") -> None:
        self._send = send
        self._id = request_id
        self._start: Message | None = None  # held back until the length is known
        self._parts: list[bytes] = []
        self._size = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                await self._send(message)
            else:
                self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        elif self._size <= MAX_WHOLE_BYTES:  # else it has been answered
            self._parts.append(message.get("body", b""))
            self._size += len(self._parts[-1])
            if self._size > MAX_WHOLE_BYTES:
                self._parts.clear()
                await self._refuse(self._start)
            elif not message.get("more_body", False):
                await self._send_whole(self._start, b"".join(self._parts))

    async def _refuse(self, start: Message) -> None:
        words = (
            f"A stream for a client of HTTP/1.0 must be at most {MAX_WHOLE_BYTES} bytes, as it is sent in one piece."
        )
        words += " Ask for less, or use HTTP/1.1."
        error: dict[str, object] = {"message": words, "type": "invalid_request_error", "param": None}
        error |= {"code": "request_too_large", "details": [{"param": None, "message": words}]}
        body = json.dumps({"error": error, "request_id": self._id}).encode("ascii")
        ids = [(name, value) for name, value in start.get("headers", ()) if name.lower().endswith(b"request-id")]
        headers = [*ids, (b"content-type", b"application/json")]
        await self._send_whole({**start, "status": 413, "headers": headers}, body)

    async def _send_whole(self, start: Message, body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode("ascii"))
        await self._send({**start, "headers": [*start.get("headers", ()), length]})
        await self._send({"type": "http.response.body", "body": body})


def readable(headers: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, bytes | None]:
    """Returns the headers that Serve may read, and the client's own id of its request.

    Args:
        headers: The request's, with names in lower case, as ASGI has them.

    Returns:
        The headers without those that Serve acts upon or cannot decode, without the client's `x-request-id`, and with
        the client's time limit under a name of ours; the client's id from `x-client-request-id`, else `x-request-id`,
        None if neither is one word of printable ASCII.
    """
    kept: Headers = []
    ids: dict[bytes, bytes] = {}
    for name, value in headers:
        plain = name.replace(b"-", b"_")
        if not name.isascii() or plain.lower() in DROPPED:
            continue
        if name in (REQUEST_ID, CLIENT_ID):
            if _CLIENT_ID.fullmatch(value):
                ids.setdefault(name, value)
        elif name == TIMEOUT:
            kept.append((OWN_TIMEOUT, value))
        elif name not in DECODED or (value.isascii() and len(value) <= MAX_ASCII_BYTES):
            kept.append((name, value))
    return kept, ids.get(CLIENT_ID, ids.get(REQUEST_ID))
