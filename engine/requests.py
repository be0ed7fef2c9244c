"""Defines the requests that the engine takes and the results that it gives: plain arrays, no objects per token.

The same request classes travel from an ingress through Ray to the engine: nothing on the way is copied into another
class.

Shape legend: P prefix or prompt tokens, N rows, M tokens of all rows, L labels, W wanted tokens of all rows,
T most probable tokens, C chosen ids, k tokens of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import SamplingParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
UInt8s = npt.NDArray[np.uint8]
Float64s = npt.NDArray[np.float64]
NO_DEADLINE = float("inf")
ABSENT = -1  # in a column: the row has no such number


class ErrorCode(StrEnum):
    """Names why a request failed. The set is closed: `deployments.errors` maps each code to an HTTP status."""

    INVALID_VALUE = "invalid_value"
    INVALID_TOKEN_ID = "invalid_token_id"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"  # could never fit the KV pool or the sampler's state
    NONFINITE_LOGITS = "nonfinite_logits"
    STEP_FAILED = "step_failed"  # an exception in a step that computed this request
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    QUARANTINED = "quarantined"  # raised by a replica, not by the engine: the request ended other replicas
    LOST = "lost"  # the engine ended, or hangs, while it worked on this request


class EngineError(Exception):
    """Reports that a request failed.

    `field` names the input at fault where there is one. The message may be shown to a client. `admitted` says that the
    engine had taken the request and counted its cost before it failed.
    """

    def __init__(self, code: ErrorCode, message: str, field: str | None = None) -> None:
        super().__init__(code, message, field)  # all three, so that it survives pickling
        self.code = code
        self.message = message
        self.field = field
        self.admitted = False

    def __str__(self) -> str:
        return self.message


class FinishReason(StrEnum):
    """Says why a branch ended."""

    STOP = "stop"
    LENGTH = "length"


class PoolingTask(StrEnum):
    """Says what a pooling head is used for. Each kind of head serves one task."""

    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"
    EMBED = "embed"


class RowStatus:
    """Holds the values of `status` in the results of rows."""

    OK = 0
    NONFINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Holds the fields that every request has."""

    request_id: str
    cache_salt: str = ""  # domain of the prefix cache: requests of different salts share nothing
    tenant: str = ""  # requests are served fairly between tenants
    priority: int = 0  # lower is earlier
    timeout_s: float = NO_DEADLINE  # seconds until the deadline, counted from submission
    isolated: bool = False  # shares no step with another request
    already_admitted: bool = False  # counted before (`Engine.check_room`, a lost replica): a full queue takes it too


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest(EngineRequest):
    """Holds N rows behind one prefix, which is computed once."""

    prefix: Int32s  # [P], may be empty
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1], starts[0] == 0, starts[N] == M


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(RowsRequest):
    """Requests label log-probabilities, or the labels' logits, after each of N rows.

    Row i is `prefix + ids[starts[i]:starts[i + 1]]`; its own part is empty only if the prefix is not. `full` requests a
    log-softmax over the whole vocabulary. Without it the softmax is over the labels only, which needs only their rows
    of the LM head. `raw_logits` requests no softmax at all, and excludes `full`.
    """

    labels: Int32s  # [L], distinct
    full: bool = True
    raw_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest(RowsRequest):
    """Requests what the model's pooling head answers for each of N rows.

    Row i is `prefix + ids[starts[i]:starts[i + 1]]`; its own part is never empty. The prefix is empty for a head whose
    rows are whole (`HeadInfo.whole_rows`). `positions` belong to the task `token_classify` alone.
    """

    task: PoolingTask
    positions: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # [W] places in `ids`, ascending, that
    # have answers, at least one a row; empty: each row has one answer
    segments: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # [N] tokens of each row that stand before
    # its second segment, as encoders embed it; empty: no row has one

    @property
    def answers(self) -> int:
        """Returns how many answers the request has."""
        return len(self.positions) or len(self.starts) - 1


class TenantTokens(NamedTuple):
    """Holds the tokens that one tenant has waiting in one priority."""

    tenant: str
    priority: int  # lower is earlier
    tokens: int


class Load(NamedTuple):
    """Says what waits at an engine. Every reply of a replica carries it, so that nothing has to poll."""

    queued_tokens: int  # of cost: see engine.request_cost
    tokens_per_s: float  # at which they are worked off; 0 while unknown
    max_queued_tokens: int = 0  # a longer wait takes nothing more; 0 where that is not reported
    tenants: tuple[TenantTokens, ...] = ()  # the longest queues that `queued_tokens` are of
    other_queues: int = 0  # how many more there are


class ScoreResult(NamedTuple):
    """Holds label log-probabilities in nats: NaN for a row that is not OK. Times are in seconds."""

    label_logprobs: Float32s  # [N, L]
    status: UInt8s  # [N], RowStatus
    cached: Int32s  # [N] tokens of the row whose keys and values already existed
    queue_s: float
    compute_s: float
    load: Load = Load(0, 0.0)  # of the replica that answered, which sets it
    head_s: float = 0.0  # part of compute_s: after the last layer


class PoolingResult(NamedTuple):
    """Holds the head's numbers before any activation: NaN for a row that is not OK. Times are in seconds."""

    values: Float32s  # [N, width of the head]; with `positions` [W, width]
    status: UInt8s  # [N], RowStatus
    cached: Int32s  # [N] tokens of the row whose keys and values already existed
    queue_s: float
    compute_s: float
    load: Load = Load(0, 0.0)  # of the replica that answered, which sets it
    head_s: float = 0.0  # part of compute_s: after the last layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodRequest(RowsRequest):
    """Requests raw log-probabilities of the last `wanted[i]` tokens of row i, each after all tokens before it.

    Row i is `prefix + own`, where `own` is the first `shared[i]` tokens of row i - 1's own part and then
    `ids[starts[i]:starts[i + 1]]`. Prefix and shared tokens are computed once.

    Logits exist only where a token is computed. The prefix cache therefore serves the prefix alone, and the token
    before a row's first wanted one must belong to the row and must not be shared. A row's last token is not computed.
    """

    shared: Int32s  # [N], shared[0] == 0
    wanted: Int32s  # [N], >= 1
    top: int = 0  # T: how many of the most probable tokens to report beside each wanted one
    chosen: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # [C] ids to report beside each wanted one
    keep: bool = False  # one row without a prefix: what it computed stays in the cache, where a generation finds it


class LikelihoodResult(NamedTuple):
    """Holds W wanted tokens, row after row. Values of a row that is not OK may be NaN."""

    logprobs: Float32s  # [W]
    ranks: Int32s  # [W], 1-based place in the total order
    greedy: Bools  # [W], no logit was larger: equality counts
    top_ids: Int32s  # [W, T], padded with INVALID_TOKEN
    top_logprobs: Float32s  # [W, T], padded with -inf
    chosen_logprobs: Float32s  # [W, C]
    status: UInt8s  # [N], RowStatus
    cached: Int32s  # [N] tokens of the row whose keys and values already existed
    queue_s: float
    compute_s: float
    head_s: float  # part of compute_s: after the last layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(EngineRequest):
    """Requests `params.n` continuations ("branches") of one prompt.

    `emitted[b]` are the tokens that branch b already has (a resumed stream). The engine continues exactly where the
    branch was, and `params.max_tokens` still counts from the start.

    With `prompt_logprobs` the caller first submits `prompt_request()`; `Engine.generate` itself ignores the field.
    """

    prompt: Int32s  # [P], P >= 1
    params: SamplingParams
    seed: int  # u64, drawn by the caller if its client gave none
    emitted: tuple[Int32s, ...] = ()
    isolated_tokens: int = 0  # > 0: isolated only until each branch has so many new tokens or has ended
    stream_interval: int = 1  # tokens that a chunk holds at least, unless it is its branch's last
    prompt_logprobs: int | None = None  # T of the prompt's own log-probabilities; None: they are not wanted
    prompt_only: bool = False  # only the prompt's log-probabilities are wanted

    def prompt_request(self) -> LikelihoodRequest | None:
        """Returns the request for the prompt's log-probabilities, or None for a prompt of one token, which has none.

        It leaves the prompt in the prefix cache, where the generation finds it.
        """
        size = len(self.prompt)
        if size < 2:
            return None
        return LikelihoodRequest(
            **{item.name: getattr(self, item.name) for item in fields(EngineRequest)},
            prefix=self.prompt[:0],
            ids=self.prompt,
            starts=np.array([0, size], np.int32),
            shared=np.zeros(1, np.int32),
            wanted=np.array([size - 1], np.int32),
            top=self.prompt_logprobs or 0,
            chosen=np.array(self.params.logprob_token_ids or (), np.int32),
            keep=True,
        )


class GenerateChunk(NamedTuple):
    """Holds consecutive new tokens of one branch. Log-probability fields are None unless the request wants them."""

    branch: int
    tokens: Int32s  # [k]
    logprobs: Float32s | None  # [k]
    ranks: Int32s | None  # [k]
    top_ids: Int32s | None  # [k, T]
    top_logprobs: Float32s | None  # [k, T]
    chosen_logprobs: Float32s | None  # [k, C]
    finish: FinishReason | None
    stop_token: int | None  # the stop id that ended the branch, if one did; it is the last of `tokens`
    cached: int  # prompt tokens found in the prefix cache
    queue_s: float
    compute_s: float
    drafted: int = 0  # tokens that were drafted for these
    accepted: int = 0  # those of the drafted tokens that stand among these
    prefill_s: float = 0.0  # part of compute_s: until the request's first token


class StepTokens(NamedTuple):
    """Holds one new token of each of R rows that go on, as columns of chunks of one token.

    The log-probability columns are None if no row wants any, and are as wide as the widest row wants.
    """

    streams: Int32s  # [R, 2] the name of each row's stream
    branches: Int32s  # [R]
    tokens: Int32s  # [R]
    cached: Int32s  # [R], as in GenerateChunk
    seconds: Float64s  # [R, 3] its queue_s, compute_s and prefill_s
    scored: Bools  # [R] whether the row wants log-probabilities
    widths: Int32s  # [R, 2] most probable tokens and chosen ids that the row wants; ABSENT without them
    logprobs: Float32s | None  # [R]
    ranks: Int32s | None  # [R]
    top_ids: Int32s | None  # [R, T]
    top_logprobs: Float32s | None  # [R, T]
    chosen_logprobs: Float32s | None  # [R, C]

    def rows(self, start: int, stop: int) -> "StepTokens":
        """Returns some of the rows, whose arrays are views."""
        return StepTokens._make(None if column is None else column[start:stop] for column in self)

    def chunks(self) -> Iterator[GenerateChunk]:
        """Yields each row as a chunk, whose arrays are views."""
        columns = (self.branches, self.cached, self.seconds, self.scored, self.widths)
        rows = zip(self.tokens[:, None], *(column.tolist() for column in columns), strict=True)
        for row, (token, branch, cached, (queue_s, compute_s, prefill_s), scored, widths) in enumerate(rows):
            logprobs = ranks = top_ids = top_logprobs = chosen = None
            if scored and self.logprobs is not None and self.ranks is not None:
                at, (n_top, n_chosen) = slice(row, row + 1), widths
                logprobs, ranks = self.logprobs[at], self.ranks[at]
                if n_top != ABSENT and self.top_ids is not None and self.top_logprobs is not None:
                    top_ids, top_logprobs = self.top_ids[at, :n_top], self.top_logprobs[at, :n_top]
                if n_chosen != ABSENT and self.chosen_logprobs is not None:
                    chosen = self.chosen_logprobs[at, :n_chosen]
            yield GenerateChunk(
                branch, token, logprobs, ranks, top_ids, top_logprobs, chosen, None, None,
                cached, queue_s, compute_s, 0, 0, prefill_s,
            )  # fmt: skip

    def chunk(self, row: int) -> GenerateChunk:
        """Returns a row as a chunk, whose arrays are views."""
        (found,) = self.rows(row, row + 1).chunks()
        return found
