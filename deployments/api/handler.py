"""Holds what all routes share, and turns an endpoint function into a route that answers errors and disconnections."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.json_answer import AnswerTooLarge, PieceResponse, encode
from deployments.api.json_body import read_object
from deployments.api.json_pieces import JsonLimits
from deployments.api.middleware import Answer
from deployments.api.prompt_formats import chat_source, compile_chat, decision_prompts, option_limits
from deployments.api.request_context import ClientGone, ClientWatch, RequestContext, context_of, deadline_exceeded
from deployments.api.rerank_prompt import choose_rerank_prompt
from deployments.api.schemas.fields import Body
from deployments.api.schemas.known_fields import HARMLESS, REFUSED, Neutral, is_neutral
from deployments.api.tenant_threads import TENANT, TenantThreads
from deployments.auth.authenticator import Authenticator
from deployments.config.settings import ApiSettings
from deployments.errors import ApiError, as_api_error, from_validation, internal_error, unsupported
from deployments.malloc import TrimAfterLarge
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Backend, ModelCard
from deployments.time_limit import TimeLimit
from engine.model.heads.info import HeadInfo, HeadKind
from engine.requests import EngineError
from engine.tokenizer.tokenizer import Tokenizer, TooManyTokens
from gpu_sampler.sampling_params import ParamError
from scoring.errors import ScoringError
from scoring.labels import token_id_problem
from scoring.prompts.guards import find_guard
from scoring.prompts.templates import compile_templates

log = logging.getLogger("assay.http")
B = TypeVar("B", bound=Body)
P = ParamSpec("P")
T = TypeVar("T")

MAX_NAMED_FIELDS = 8  # ignored fields that the header names
MAX_NAMED_CHARS = 32
OFF_LOOP_BYTES = 16_384  # larger bodies and answers are read and written in a thread; smaller ones take below 1 ms
TEXT_COST = 16  # tokenising a character costs about what parsing this many bytes does


class RequestHandler:
    """Holds what the routes of one ingress share: backend, tokenizer, settings and templates. No per-request state."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        observer: IngressMetrics,
        access: Authenticator,
    ) -> None:
        """Compiles the templates and starts a thread pool. Raises TemplateRefused for a template that fails a check."""
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self.observer = observer
        self.access = access
        self.chat = compile_chat(tokenizer, settings)
        self.templates = compile_templates(settings.templates, tokenizer)
        self.guard = find_guard(chat_source(tokenizer, settings))
        self.rerank = choose_rerank_prompt(self.templates, tokenizer, settings)
        self.decisions = decision_prompts(tokenizer, settings, self.chat)
        self.limits = settings.limits.flat() | option_limits(self.decisions, settings.limits)
        wire = settings.limits.wire
        self._json_limits = JsonLimits(wire.max_json_depth, wire.max_json_values, wire.max_json_containers)
        self._card: ModelCard | None = None
        self._memory = TrimAfterLarge()
        self._threads = TenantThreads(settings.tokenizer_threads)

    async def card(self) -> ModelCard:
        """Returns the model that the replicas serve. Raises ApiError while there is none."""
        if self._card is None:
            self._card = await self.backend.card()
        return self._card

    async def served(self, model: str | None) -> ModelCard:
        """Returns the card if `model` is the served name, "default" or absent. Raises ApiError for another name."""
        card = await self.card()
        if model not in (None, "", "default", card.name):
            raise model_not_found(card.name)
        return card

    async def language_model(self, model: str | None, route: str) -> ModelCard:
        """Returns what `served` does. Raises ApiError, 404, if the model has no language-model head."""
        card = await self.served(model)
        if card.head is not None:
            message = f"{route} needs a language-model head, and this server's model has a {card.head.kind} head alone."
            raise ApiError("not_found", message)
        return card

    async def pooling_head(
        self, model: str | None, route: str, kinds: Sequence[HeadKind]
    ) -> tuple[ModelCard, HeadInfo]:
        """Returns what `served` does and the model's head. Raises ApiError, 404, for a head of another kind."""
        card = await self.served(model)
        if card.head is None or card.head.kind not in kinds:
            given = "language-model" if card.head is None else card.head.kind
            wanted = " or ".join(kinds)
            message = f"{route} needs a {wanted} head, and this server's model has a {given} head alone."
            raise ApiError("not_found", message)
        return card, card.head

    async def off_loop(self, size: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `call` in a thread if its input of `size` bytes would hold up the event loop."""
        if size <= OFF_LOOP_BYTES:
            return call(*args, **kwargs)
        return await self.in_thread(call, *args, **kwargs)

    async def _within(
        self,
        context: RequestContext,
        limit_s: float,
        size: int,
        call: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs `call` as `off_loop` does. Raises ApiError if the deadline of `limit_s` passes before it ends."""
        if size <= OFF_LOOP_BYTES:
            context.timeout_s(limit_s)  # raises if no time is left
            return call(*args, **kwargs)
        with self.deadline(context, limit_s):
            return await self.in_thread(call, *args, **kwargs)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `call` in a thread, in the turn of the request's tenant.

        A request that ends before leaves it running, and its memory is given back later.
        """
        loop = asyncio.get_running_loop()
        work = self._threads.submit(TENANT.get(), call, *args, **kwargs)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: _call_in(loop, self._memory.ended))
            raise
        finally:
            del work  # else an error in the thread holds itself by this frame, and with it all that the thread made

    async def tokenize(
        self,
        context: RequestContext,
        limit_s: float,
        size: int,
        call: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs `call` off the loop. Raises ApiError if the deadline of `limit_s` passes before a thread is free."""
        with self.observer.timed("tokenize"):
            return await self._within(context, limit_s, size, call, *args, **kwargs)

    async def parse(self, context: RequestContext, model: type[B], limit_s: float) -> B:
        """Parses the body as `model` within the route's deadline of `limit_s`.

        Unknown fields are named in a header, or refused if the request is strict.

        Raises:
            ApiError: The body is not valid JSON, a field is wrong, or the route lacks a field that changes answers.
        """
        with self.observer.timed("parse"):
            data, context.body = context.body, b""  # not kept for the rest of the request
            body = await self._within(context, limit_s, context.body_bytes, self._parse, data, model)
            if context.body_read is not None:
                context.body_read(context)
            unknown = [_ascii(name) for name in undeclared_fields(body, REFUSED)]
            if unknown and context.strict:
                raise ApiError(
                    "invalid_value", f"`{unknown[0]}` must be absent: it is not a field of this route.", unknown[0]
                )
            if unknown:
                context.headers["x-assay-ignored-fields"] = ", ".join(unknown[:MAX_NAMED_FIELDS])
        return body

    def _parse(self, data: bytes, model: type[B]) -> B:
        value = read_object(data, model.item_fields, self._json_limits)
        try:
            return model.model_validate(value, context={"limits": self.limits})
        except ValidationError as error:
            raise from_validation(error) from None

    def deadline(self, context: RequestContext, default_s: float) -> "Deadline":
        """Returns a block's deadline. When it is over, the block is cancelled and ApiError (408) is raised.

        Raises:
            ApiError: No time is left.
        """
        return Deadline(context.timeout_s(default_s), context.limit_s(default_s))

    def report_compute(self, context: RequestContext, queue_s: float, compute_s: float, head_s: float) -> None:
        """Reports the seconds that a scoring request took on a replica. `head_s` is part of `compute_s`."""
        context.timings(queue_s, compute_s)
        self.observer.stage("queue", queue_s)
        self.observer.stage("prefill", compute_s - head_s)
        self.observer.stage("head", head_s)

    def json(self, context: RequestContext, body: object, status: int = 200) -> Response:
        """Returns a JSON response. NaN and infinity become null. For small bodies: it runs on the event loop."""
        with self.observer.timed("encode"):
            data = to_json(body, inf_nan_mode="null")
        return Response(data, status, media_type="application/json")

    async def sized_json(self, context: RequestContext, size: int, make: Callable[[], object]) -> Response:
        """Returns a JSON response, made off the event loop and in pieces if it is large.

        Args:
            context: The request.
            size: The rough size of the answer in bytes.
            make: Makes the body.

        Raises:
            ApiError: The answer is larger than `limits.max_answer_bytes` (413).
        """
        if size <= OFF_LOOP_BYTES:
            return self.json(context, make())
        with self.observer.timed("encode"):
            maximum = self.limits["max_answer_bytes"]
            try:
                pieces = await self.in_thread(lambda: encode(make(), maximum))
            except AnswerTooLarge:
                raise answer_too_large(maximum) from None
        return PieceResponse(pieces)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Has an event loop make a call, from another thread. Does nothing once the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


Endpoint = Callable[[RequestHandler, RequestContext], Awaitable[Response]]


def answer_of(handler: RequestHandler, function: Endpoint) -> Answer:
    """Returns the endpoint as a function: errors become responses, and the work is cancelled if the client leaves."""

    async def answer(context: RequestContext, receive: Receive) -> Response:
        try:
            with ClientWatch(receive):
                return await function(handler, context)
        except (ApiError, EngineError, ParamError, ScoringError, TooManyTokens) as error:
            return context.fail(as_api_error(error)).response(context.request_id)
        except ClientGone:
            handler.observer.disconnected("queued")
            context.gone = True
            return NoResponse()
        except Exception:
            log.exception("Unhandled in %s, request %s", context.route, context.request_id)
            return context.fail(internal_error()).response(context.request_id)

    return answer


def route_of(answer: Answer, name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Returns the answer as a route of FastAPI. `name`: the route's name in the schema."""

    async def run(request: Request) -> Response:
        context = context_of(request.scope)
        context.path_params = request.path_params
        return await answer(context, request.receive)

    run.__name__ = name
    return run


class Deadline:
    """Cancels a block when its time is over, and raises ApiError (408)."""

    __slots__ = ("_limit", "_limit_s")

    def __init__(self, left_s: float, limit_s: float) -> None:
        self._limit = TimeLimit(left_s)
        self._limit_s = limit_s

    def __enter__(self) -> None:
        self._limit.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._limit.__exit__(kind, error, trace)
        except TimeoutError:
            raise deadline_exceeded(self._limit_s) from None
        if kind is not None and issubclass(kind, TimeoutError):
            raise deadline_exceeded(self._limit_s) from None


class NoResponse(Response):
    """Sends nothing, because the client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def model_not_found(served: str, *, in_path: bool = False) -> ApiError:
    """Returns the error for a model's name that is not served here. `in_path`: the name is part of the route."""
    if in_path:
        return ApiError("model_not_found", f"The model of this server is {served!r}. Given: another name.", "model")
    return ApiError("model_not_found", f"`model` must be {served!r} or absent. Given: another name.", "model")


def answer_too_large(maximum: int) -> ApiError:
    """Returns the error for an answer of more than `maximum` bytes."""
    message = f"The answer must be at most {maximum} bytes (`limits.max_answer_bytes`). Ask for less."
    return ApiError("request_too_large", message)


def check_ids(field: str, ids: Sequence[int], vocab_size: int, *, text: bool = False) -> None:
    """Raises ApiError 422 `invalid_token_id` if an id, given or made of a text, is outside [0, vocab_size)."""
    problem = token_id_problem(field, ids, vocab_size, text=text)
    if problem:
        raise ApiError("invalid_token_id", problem, field)


def undeclared_fields(body: Body, refused: Mapping[str, Neutral], prefix: str = "") -> list[str]:
    """Refuses the fields that a body does not declare and that change answers.

    Args:
        body: The request, or a part of it.
        refused: By name: the values that have no effect, besides null.
        prefix: The place of `body` in the request.

    Returns:
        The names of undeclared fields that are not known at all, nested ones with their path.

    Raises:
        ApiError: A field that changes answers has a value with an effect (400).
    """
    names = []
    for name, value in (body.model_extra or {}).items():
        if name not in refused:
            names += [prefix + name] if prefix or name not in HARMLESS else []
        elif not is_neutral(value, refused[name]):
            raise unsupported(prefix + name, "is not supported by this route")
    declared = body.__dict__
    nested = {name for name in body.model_fields_set if _has_bodies(declared.get(name))}
    for name in filter(nested.__contains__, declared) if nested else ():  # in the order in which they are declared
        for at, part in _parts(declared[name], prefix + name):
            names += undeclared_fields(part, part.refused_fields, f"{at}.")
    return names


def _has_bodies(value: object) -> bool:
    """Tells whether a field's value is a body, or a list that may hold some. All entries of a list are of one kind."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, Body | list)


def _parts(value: object, at: str) -> Iterator[tuple[str, Body]]:
    """Yields the bodies in a field's value, in lists of any depth, with their places."""
    if isinstance(value, Body):
        yield at, value
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _parts(part, f"{at}[{index}]")


def _ascii(name: str) -> str:
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "_.-[]") else "?" for char in name)
    return kept[:MAX_NAMED_CHARS] or "?"
