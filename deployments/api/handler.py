"""What every route shares: the backend, the tokenizer, the settings, and how a request becomes an answer."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.chat_template import compile_chat
from deployments.api.decision_layout import decision_prompts, option_limits
from deployments.api.middleware import internal_error
from deployments.api.request_context import ClientGone, Exchange, deadline_exceeded, exchange_of
from deployments.api.schemas.fields import Body
from deployments.api.score_response import Columns
from deployments.auth.authenticator import Authenticator
from deployments.errors import ApiError, of_engine_error, of_param_error, of_scoring_error, of_validation, unsupported
from deployments.observability.observer import Observer, Stage
from deployments.protocol import Backend, ModelCard
from deployments.settings import ApiSettings
from engine.requests import EngineError
from engine.tokenizer.tokenizer import Tokenizer
from gpu_sampler.sampling_params import ParamError
from scoring.errors import ScoringError, id_range
from scoring.rerank import rerank_template
from scoring.templates import compile_templates

log = logging.getLogger("assay.http")
B = TypeVar("B", bound=Body)
P = ParamSpec("P")
T = TypeVar("T")

MAX_NAMED = 8  # ignored fields in the header
MAX_NAMED_CHARS = 32
OFF_LOOP_BYTES = 16_384  # larger bodies and answers are parsed and made in a thread; either takes less than 1 ms
TEXT_COST = 16  # tokenising a character costs about what parsing this many bytes does


class Api:
    """One ingress's HTTP layer. Holds no queue and no per-request state."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, settings: ApiSettings, observer: Observer, access: Authenticator
    ) -> None:
        """Raises TemplateRefused for a template that must not serve."""
        self.backend = backend
        self.tokenizer = tokenizer
        self.settings = settings
        self.observer = observer
        self.access = access
        self.chat = compile_chat(tokenizer, settings)
        self.templates = compile_templates(settings.templates, tokenizer)
        self.rerank = rerank_template(self.templates, settings.rerank.template)
        self.decisions = decision_prompts(tokenizer, settings, self.chat)
        self.limits = settings.limits.flat() | option_limits(self.decisions, settings.limits)
        self._card: ModelCard | None = None
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="assay-text")

    async def card(self) -> ModelCard:
        if self._card is None:
            self._card = await self.backend.card()
        return self._card

    async def served(self, model: str | None) -> ModelCard:
        """The card, if `model` is the served name or stands for it."""
        card = await self.card()
        if model not in (None, "", "default", card.name):
            raise model_not_found(card.name)
        return card

    async def off_loop(self, size: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `call` in a thread if its input of `size` bytes would hold up the event loop."""
        if size <= OFF_LOOP_BYTES:
            return call(*args, **kwargs)
        return await self.in_thread(call, *args, **kwargs)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(call, *args, **kwargs))

    async def tokenize(
        self, exchange: Exchange, limit_s: float, size: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`call` off the loop, unless the route's deadline of `limit_s` passes before a thread is free for it."""
        with self.stage(exchange, "tokenize"):
            async with self.deadline(exchange, limit_s):
                return await self.off_loop(size, call, *args, **kwargs)

    async def parse(self, exchange: Exchange, model: type[B]) -> B:
        """The body as `model`. Unknown fields are named in a header, or refused if the request is strict."""
        with self.stage(exchange, "parse"):
            async with self.deadline(exchange, self.settings.deadlines.max_s):
                body = await self.off_loop(len(exchange.body), self._parse, exchange.body, model)
            unknown = [_ascii(name) for name in unknown_fields(body)]
            if unknown and exchange.strict:
                raise ApiError(
                    "invalid_value", f"`{unknown[0]}` must be absent: it is not a field of this route.", unknown[0]
                )
            if unknown:
                exchange.headers["x-assay-ignored-fields"] = ", ".join(unknown[:MAX_NAMED])
        return body

    def _parse(self, data: bytes, model: type[B]) -> B:
        try:
            value = from_json(data, allow_inf_nan=False)
        except ValueError:
            raise ApiError("invalid_json", "The body must be JSON in UTF-8, with finite numbers.") from None
        if not isinstance(value, dict):
            raise ApiError("invalid_json", "The body must be a JSON object.")
        check_depth(value, self.limits["max_json_depth"])
        try:
            return model.model_validate(value, context={"limits": self.limits})
        except ValidationError as error:
            raise of_validation(error) from None

    @contextlib.asynccontextmanager
    async def deadline(self, exchange: Exchange, default_s: float) -> AsyncIterator[float]:
        """Gives the seconds left; when they are over, whatever runs inside is cancelled and the answer is 408."""
        left = exchange.timeout_s(default_s)
        try:
            async with asyncio.timeout(left):
                yield left
        except TimeoutError:
            raise deadline_exceeded(exchange.limit_s(default_s)) from None

    @contextlib.contextmanager
    def stage(self, exchange: Exchange, name: Stage) -> Iterator[None]:
        """Tells the observer how long the block took, if it ends well."""
        started = exchange.elapsed_s()
        yield
        self.observer.stage(name, exchange.elapsed_s() - started)

    def computed(self, exchange: Exchange, queue_s: float, compute_s: float, head_s: float) -> None:
        """What a replica says of the time that a scoring request took there; `head_s` is part of `compute_s`."""
        exchange.timings(queue_s, compute_s)
        self.observer.stage("queue", queue_s)
        self.observer.stage("prefill", compute_s - head_s)
        self.observer.stage("head", head_s)

    def masses(self, exchange: Exchange, columns: Columns) -> None:
        """Tells of the labels' mass in the items that were scored, where it was computed."""
        if columns.label_mass is not None:
            scored = np.ones(len(columns.label_mass), np.bool_)
            scored[list(columns.errors)] = False
            self.observer.label_mass(exchange.route, columns.label_mass[scored])

    def json(self, exchange: Exchange, body: object, status: int = 200) -> Response:
        with self.stage(exchange, "encode"):
            data = to_json(body, inf_nan_mode="null")
        return Response(data, status, media_type="application/json")


Handler = Callable[[Api, Exchange, Request], Awaitable[Response]]


def endpoint(api: Api, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler as a route: errors become answers, and a client that leaves cancels the work."""

    async def run(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        try:
            return await _unless_gone(_run(handler(api, exchange, request)), request.receive)
        except ApiError as error:
            return exchange.fail(error).response(exchange.request_id)
        except EngineError as error:
            return exchange.fail(of_engine_error(error)).response(exchange.request_id)
        except ParamError as error:
            return exchange.fail(of_param_error(error)).response(exchange.request_id)
        except ScoringError as error:
            return exchange.fail(of_scoring_error(error)).response(exchange.request_id)
        except ClientGone:
            api.observer.disconnected("queued")
            exchange.gone = True
            return Nothing()
        except asyncio.CancelledError:  # how Serve says it, if that is faster than the message
            if not exchange.gone:
                api.observer.disconnected("queued")
                exchange.gone = True
            raise
        except Exception:
            log.exception("Unhandled in %s, request %s", exchange.route, exchange.request_id)
            return exchange.fail(internal_error()).response(exchange.request_id)

    run.__name__ = getattr(handler, "__name__", run.__name__)  # what the schema calls the route
    return run


class Nothing(Response):
    """Sends nothing: nobody listens any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


async def _run(work: Awaitable[T]) -> T:
    return await work


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The work's result. If the client leaves, the work is cancelled and has ended before ClientGone is raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await end_tasks(task, gone)


async def client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs and waits until it has ended. Results and errors are left for whoever reads them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


def model_not_found(served: str) -> ApiError:
    return ApiError("model_not_found", f"`model` must be {served!r} or absent. Given: another name.", "model")


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises 422 `invalid_token_id` if an id is outside [0, vocab_size): the width of the logits."""
    wrong = id_range(field, ids, vocab_size)
    if wrong:
        raise ApiError("invalid_token_id", wrong, field)


def refuse(body: Body, fields: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raises 400 for a known field that asks for what we do not do: any value but `null` and its neutral ones.
    `prefix`: where in the request `body` is."""
    for field, neutral in fields.items():
        value = getattr(body, field)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise unsupported(prefix + field)


def check_depth(value: object, most: int) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > most:
            raise ApiError("invalid_json", f"The body must be nested at most {most} levels deep.")
        inner: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            if not {dict, list}.isdisjoint(map(type, children)):
                inner.extend(child for child in children if isinstance(child, dict | list))
        level = inner


def unknown_fields(body: Body, prefix: str = "") -> list[str]:
    """Names of fields that no model declares, nested ones with their path."""
    names = [prefix + name for name in body.model_extra or {}]
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            names += unknown_fields(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, entry in enumerate(value):
                names += unknown_fields(entry, f"{prefix}{name}[{index}].")
    return names


def _ascii(name: str) -> str:
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "_.-[]") else "?" for char in name)
    return kept[:MAX_NAMED_CHARS] or "?"
