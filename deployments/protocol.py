"""Defines what crosses between an ingress and a replica: one typed value each way, with flat arrays inside.

A call carries requests of `engine.requests` as they are; this module defines the route of a call and its replies.

Shape legend: P prompt tokens, N rows, L labels, W wanted tokens of all rows, T most probable tokens, C chosen ids.
"""

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from engine.channels import TokenSink
from engine.model.heads.info import HeadInfo
from engine.requests import (
    Bools,
    EngineRequest,
    ErrorCode,
    Float32s,
    GenerateChunk,
    GenerateRequest,
    Int32s,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    RowStatus,
    ScoreRequest,
    ScoreResult,
    UInt8s,
)

MAX_MICRO_BATCH = 256  # requests

RowsCall = ScoreRequest | PoolingRequest | LikelihoodRequest
GenerateCall = tuple[GenerateRequest, ...]  # one request a prompt; all fields but prompt, seed and `emitted` are equal
AnyCall = RowsCall | GenerateCall
Call = TypeVar("Call", ScoreRequest, PoolingRequest, LikelihoodRequest, GenerateCall)


def common(call: AnyCall) -> EngineRequest:
    """Returns the request from which to read the fields that all requests of the call share."""
    return call[0] if isinstance(call, tuple) else call


def with_fields(call: Call, **changes: Any) -> Call:
    """Returns the call with some fields changed in each of its requests."""
    if isinstance(call, tuple):
        return tuple(replace(request, **changes) for request in call)
    return replace(call, **changes)


class Route(NamedTuple):
    """Says where a call is to go. The router of the calling process reads it; the replica does not."""

    replicas: tuple[str, ...]  # unique ids, best first; replicas that are not named come after them
    ticket: int  # of the caller's `LoadTracker`
    more: tuple[int, ...] = ()  # tickets of the other requests of a micro-batch


class Failure(NamedTuple):
    """Reports a request that the replica refused or lost. It is a value, so that it crosses processes unchanged."""

    code: ErrorCode
    message: str  # from a closed set: may be shown to a client
    field: str | None
    load: Load | None = None  # of a replica that was too busy
    admitted: bool = False  # the engine had taken the request before it failed


def blank_scores(request: ScoreRequest) -> ScoreResult:
    """Returns a result of the request's shape that answers no row."""
    rows = len(request.starts) - 1
    return ScoreResult(np.full((rows, len(request.labels)), np.nan, np.float32), *_unanswered(rows))


def blank_pooling(request: PoolingRequest, width: int) -> PoolingResult:
    """Returns a result of the request's shape, of a head with `width` numbers, that answers no row."""
    values = np.full((request.answers, width), np.nan, np.float32)
    return PoolingResult(values, *_unanswered(len(request.starts) - 1))


class LikelihoodReply(NamedTuple):
    """Holds the part of an `engine.requests.LikelihoodResult` that responses need, and the load of its replica."""

    logprobs: Float32s  # [W]
    greedy: Bools  # [W]
    status: UInt8s  # [N]
    cached: Int32s  # [N]
    queue_s: float
    compute_s: float
    load: Load
    head_s: float = 0.0  # part of compute_s: after the model's last layer

    @classmethod
    def blank(cls, request: LikelihoodRequest) -> "LikelihoodReply":
        """Returns a reply of the request's shape that answers no row."""
        wanted, rows = int(request.wanted.sum(dtype=np.int64)), len(request.starts) - 1
        return cls(np.full(wanted, np.nan, np.float32), np.zeros(wanted, np.bool_), *_unanswered(rows))


RowsReply = ScoreResult | PoolingResult | LikelihoodReply | Failure


def _unanswered(rows: int) -> tuple[UInt8s, Int32s, float, float, Load]:
    """Returns what follows the values in a reply: a row that no replica wrote counts as failed."""
    return np.full(rows, RowStatus.NONFINITE, np.uint8), np.zeros(rows, np.int32), 0.0, 0.0, Load(0, 0.0)


class PromptScores(NamedTuple):
    """Holds raw log-probabilities of a prompt's P tokens, except the first, each after all tokens before it."""

    logprobs: Float32s  # [P - 1]
    ranks: Int32s  # [P - 1]
    top_ids: Int32s  # [P - 1, T]
    top_logprobs: Float32s  # [P - 1, T]
    chosen_logprobs: Float32s  # [P - 1, C]
    queue_s: float
    compute_s: float

    @classmethod
    def of_one_token(cls) -> "PromptScores":
        """Returns the scores of a prompt of one token: none."""
        floats, rows = np.empty(0, np.float32), np.empty((0, 0), np.float32)
        return cls(floats, floats.astype(np.int32), rows.astype(np.int32), rows, rows, 0.0, 0.0)


FAULT = Failure(ErrorCode.STEP_FAILED, "The server failed on this request.", None)


class PromptChunk(NamedTuple):
    """Holds new tokens of one branch of prompt `prompt`, or the prompt's own scores, or its failure."""

    prompt: int
    chunk: GenerateChunk | PromptScores | Failure


class GenerateReply(NamedTuple):
    """Holds what one step brought (streaming), or the whole answer (unary: one chunk a branch, in order)."""

    chunks: tuple[PromptChunk, ...]
    epoch: int  # of the call: a chunk of an older epoch is dropped
    load: Load


class PendingReply(Protocol):
    """Represents the reply to one call. Awaiting it does not own the call: `cancel` ends it."""

    def __await__(self) -> Generator[Any, None, object]: ...

    def cancel(self) -> object: ...


class ReplyStream(Protocol):
    """Represents the replies of a stream, until StopAsyncIteration. `cancel` ends the call."""

    async def __anext__(self) -> object: ...

    def cancel(self) -> object: ...


class ReplicaTransport(Protocol):
    """Carries calls from an ingress to replicas.

    Serve's handle (`deployments.routing.handle_transport`) and the link (`deployments.routing.link_transport`) are the
    implementations. Replies are the values that a replica returns. A lost replica raises an exception of Ray or
    `deployments.link.client.LinkLost` where the reply is awaited; `deployments.routing.replica_call` knows both.
    """

    def call(self, call: AnyCall, route: Route, epoch: int = 0) -> PendingReply:
        """Sends a call that has one reply."""
        ...

    def batch(self, requests: tuple[RowsCall, ...], route: Route) -> PendingReply:
        """Sends a micro-batch, whose reply is a tuple of replies."""
        ...

    def stream(self, call: GenerateCall, route: Route, epoch: int) -> ReplyStream:
        """Sends a generation whose results come as they are made."""
        ...

    def is_direct(self, replica: str) -> bool:
        """Tells whether calls of this replica travel together by themselves, so that micro-batches gain nothing."""
        ...

    async def card(self) -> object:
        """Returns the model card of a replica."""
        ...


class StreamReceiver(Protocol):
    """Receives the parts of one streamed generation call, in the event loop that began it."""

    number: int  # names the call

    @property
    def token_sink(self) -> TokenSink:
        """Gets the single tokens of its streams, each named by `number` and its prompt."""
        ...

    def add(self, item: PromptChunk) -> None:
        """Takes new tokens that came otherwise, or a prompt's scores, or its failure."""
        ...

    def end(self) -> None:
        """Notes that nothing follows. It is not called after `cancel`."""
        ...


class RunningCall(Protocol):
    """Represents a call that a replica works on."""

    def cancel(self) -> object:
        """Ends the call. Does nothing once it has ended."""
        ...


class ReplicaService(Protocol):
    """Shows a replica to the transports. `deployments.replica.replica.ReplicaServer` is the implementation.

    No method raises for a bad request: a `Failure` is a value.
    """

    def begin_rows(self, request: RowsCall, deliver: Callable[[RowsReply], None]) -> RunningCall | Failure:
        """Starts a scoring request, whose reply, without a load, is given to `deliver` after this has returned.

        The arrays of `request` must be writable, as those of a link's messages are.
        """
        ...

    async def generate(
        self, requests: GenerateCall, epoch: int = 0, route: Route | None = None
    ) -> "GenerateReply | Failure": ...

    def begin_stream(self, requests: GenerateCall, receiver: StreamReceiver) -> RunningCall | Failure:
        """Starts a generation whose parts are given to `receiver` as they are made."""
        ...

    def load(self) -> Load:
        """Returns how much waits at the replica."""
        ...


class ModelCard(NamedTuple):
    """Holds what an ingress must know of the model that its replicas serve."""

    name: str  # served name
    root: str  # where it came from: "builtin" or the repository id or folder name, never a full path
    revision: str | None
    vocab_size: int  # width of the logits
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    logprobs_mode: str
    versions: dict[str, str]
    head: HeadInfo | None = None  # None: a language model
    weights_digest: str = ""  # of all weights, the draft model's too


class Backend(Protocol):
    """Shows the replicas to the HTTP endpoints. `deployments.routing.dispatcher` is the implementation.

    Every method raises `deployments.errors.ApiError` (deadline, no replica, overloaded, ...), never a Ray error.
    Cancelling the caller, or closing the iterator, cancels the work.
    """

    async def score(self, request: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        """`all_or_nothing`: a failed row spoils the answer, so rows after it need not be computed."""
        ...

    async def pooling(self, request: PoolingRequest, all_or_nothing: bool = False) -> PoolingResult: ...

    async def likelihood(self, request: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply: ...

    async def generate(self, call: GenerateCall) -> GenerateReply: ...

    def stream(self, call: GenerateCall) -> AsyncIterator[GenerateReply]: ...

    async def card(self) -> ModelCard: ...

    def check_open(self, timeout_s: float, tenant: str) -> None:
        """Raises the error that any work of the tenant would meet now, so that its body need not be read."""
        ...

    def readiness(self) -> dict[str, object]:
        """Returns the body of /readyz: `status`, `replicas_ready`, `replicas_total` and `canary_age_s`."""
        ...

    async def metrics(self) -> Sequence[bytes]:
        """Returns the Prometheus text of every replica and every ingress, merged, in pieces."""
        ...
