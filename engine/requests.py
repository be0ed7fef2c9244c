"""What the engine is asked to do and what it answers: plain arrays, no objects per token.

Shape legend: P prompt or prefix tokens, N rows of a score job, M their tokens together, L labels, k tokens of a chunk,
W wanted tokens of all rows, T first tokens of the order, C chosen ids.
"""

from dataclasses import dataclass, field
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


class ErrorCode(StrEnum):
    """Why the engine failed a job. Closed: deployments maps each to a status."""

    INVALID_VALUE = "invalid_value"
    INVALID_TOKEN_ID = "invalid_token_id"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"  # could never fit the pool or the sampler's arena
    NONFINITE_LOGITS = "nonfinite_logits"
    STEP_FAILED = "step_failed"  # an exception in a step that this job was part of
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    QUARANTINED = "quarantined"  # by a replica, not by the engine: it ended others
    LOST = "lost"  # the engine ended, or hangs, with this job in its hands


class EngineError(Exception):
    """A job failed. `field` names the input at fault where there is one; the message may be shown to a client.
    `accepted`: the job had been taken, and its cost was counted."""

    def __init__(self, code: ErrorCode, message: str, field: str | None = None) -> None:
        super().__init__(code, message, field)  # all three, so that it survives pickling
        self.code = code
        self.message = message
        self.field = field
        self.accepted = False

    def __str__(self) -> str:
        return self.message


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class RowStatus:
    """Values of `ScoreResult.status` and `LikelihoodResult.status`."""

    OK = 0
    NONFINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Label log-probabilities after each of N rows, row i being `prefix + ids[starts[i]:starts[i + 1]]`.

    The prefix is computed once. `full` asks for log-softmax over the whole vocabulary; otherwise over the labels only,
    which needs only the labels' rows of the head.
    """

    request_id: str
    prefix: Int32s  # [P], may be empty
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1], starts[0] == 0, starts[N] == M; a row is empty only if the prefix is not
    labels: Int32s  # [L], distinct
    full: bool = True
    salt: str = ""  # prefix-cache domain
    priority: int = 0  # lower is earlier
    tenant: str = ""
    remaining_s: float | None = None  # until the deadline, from submission
    isolated: bool = False  # share no step with another job
    already_admitted: bool = (
        False  # the queue takes it, full or not: it was counted before (`Engine.check_room`, a lost replica)
    )


class ScoreResult(NamedTuple):
    label_logprobs: Float32s  # [N, L]
    status: UInt8s  # [N], RowStatus
    cached: Int32s  # [N] tokens of the row whose keys and values already existed
    queue_s: float
    compute_s: float
    head_s: float  # part of compute_s: steps behind the last layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodRequest:
    """Log-probabilities of given tokens: of the last `wanted[i]` tokens of row i, each after all tokens before it. Raw.

    Row i is `prefix + own`, its own tokens being the first `shared[i]` of row i - 1's own and then
    `ids[starts[i]:starts[i + 1]]`. Prefix and shared tokens are computed once.

    Logits exist only where a token is computed, so what stands before a wanted token is never taken from the prefix
    cache: the cache serves the prefix alone, and the token before a row's first wanted one must be its own and not
    shared. A row's last token is read and not computed.
    """

    request_id: str
    prefix: Int32s  # [P], may be empty
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1], starts[0] == 0, starts[N] == M
    shared: Int32s  # [N], shared[0] == 0
    wanted: Int32s  # [N], >= 1
    top: int = 0  # how many of the first tokens of the order are told beside each wanted one
    chosen: Int32s = field(default_factory=lambda: np.empty(0, np.int32))  # [C] ids told beside each wanted one
    keep: bool = False  # one row without a prefix: what it computed stays, where a generation finds it
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    remaining_s: float | None = None
    isolated: bool = False
    already_admitted: bool = False


class LikelihoodResult(NamedTuple):
    """W wanted tokens, row after row. Values of a row that is not OK may be NaN."""

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
    head_s: float  # part of compute_s: steps behind the last layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, `params.n` branches. `emitted[b]` are tokens that branch b already has (a resumed stream): the engine
    continues exactly where it was and `params.max_tokens` still counts from the start.

    A chunk holds at least `every` tokens, unless it is its branch's last. A isolated job with `isolated_tokens` is
    isolated only
    until each of its branches has so many new tokens or has ended.
    """

    request_id: str
    prompt: Int32s  # [P], P >= 1
    params: SamplingParams
    seed: int  # u64, drawn by the caller if the request gave none
    emitted: tuple[Int32s, ...] = ()
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    remaining_s: float | None = None
    isolated: bool = False
    already_admitted: bool = False
    isolated_tokens: int = 0
    every: int = 1
    metadata: dict[str, str] = field(default_factory=dict)


class GenerateChunk(NamedTuple):
    """Consecutive new tokens of one branch. Log-probability fields are None unless the job asked for them."""

    branch: int
    tokens: Int32s  # [k]
    logprobs: Float32s | None  # [k]
    ranks: Int32s | None  # [k]
    top_ids: Int32s | None  # [k, N]
    top_logprobs: Float32s | None  # [k, N]
    chosen_logprobs: Float32s | None  # [k, C]
    finish: FinishReason | None
    stop_token: int | None  # the stop id that ended the branch, if one did; it is the last of `tokens`
    cached: int  # prompt tokens found in the prefix tree
    queue_s: float
    compute_s: float
    drafted: int = 0  # tokens that were drafted for these
    accepted: int = 0  # of them, those that stand among these
    prefill_s: float = 0.0  # part of compute_s: until the job's first token
