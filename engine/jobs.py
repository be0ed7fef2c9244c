"""What the engine is asked to do and what it answers: plain arrays, no objects per token.

Shape legend: P prompt or prefix tokens, N rows of a score job, M their tokens together, L labels, k tokens of a chunk.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.params import SamplingParams

Int32s = npt.NDArray[np.int32]
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


class EngineError(Exception):
    """A job failed. `field` names the input at fault where there is one; the message may be shown to a client."""

    def __init__(self, code: ErrorCode, message: str, field: str | None = None) -> None:
        super().__init__(code, message, field)  # all three, so that it survives pickling
        self.code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return self.message


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class RowStatus:
    """Values of `ScoreResult.status`."""

    OK = 0
    NONFINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreJob:
    """Label log-probabilities after each of N rows, row i being `prefix + ids[starts[i]:starts[i + 1]]`.

    The prefix is computed once. `full` asks for log-softmax over the whole vocabulary; otherwise over the labels only,
    which needs only the labels' rows of the head.
    """

    job_id: str
    prefix: Int32s  # [P], may be empty
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1], starts[0] == 0, starts[N] == M; a row is empty only if the prefix is not
    labels: Int32s  # [L], distinct
    full: bool = True
    salt: str = ""  # prefix-cache domain
    priority: int = 0  # lower is earlier
    tenant: str = ""
    remaining_s: float | None = None  # until the deadline, from submission
    solo: bool = False  # share no step with another job


class ScoreResult(NamedTuple):
    label_logprobs: Float32s  # [N, L]
    status: UInt8s  # [N], RowStatus
    cached: Int32s  # [N] tokens of the row whose keys and values already existed
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """One prompt, `params.n` branches. `emitted[b]` are tokens that branch b already has (a resumed stream): the engine
    continues exactly where it was and `params.max_tokens` still counts from the start."""

    job_id: str
    prompt: Int32s  # [P], P >= 1
    params: SamplingParams
    seed: int  # u64, drawn by the caller if the request gave none
    emitted: tuple[Int32s, ...] = ()
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    remaining_s: float | None = None
    solo: bool = False
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
