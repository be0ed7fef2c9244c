"""What crosses between an ingress and a replica: one typed value each way, flat arrays inside.

Shape legend: P prefix tokens, N rows, M their tokens together, L labels, W wanted tokens of all rows, Q prompts,
B tokens of all prompts together, T first tokens of the order, C chosen ids.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.requests import Bools, ErrorCode, Float32s, GenerateChunk, Int32s, RowStatus, UInt8s
from gpu_sampler.sampling_params import SamplingParams

UInt64s = npt.NDArray[np.uint64]
MOST_IN_CONVOY = 256  # tasks


class Load(NamedTuple):
    """A replica's own view of its queue, carried by every reply so that nobody has to poll."""

    queued_tokens: int  # of cost: see deployments.routing.admission
    tokens_per_s: float  # at which they are worked off; 0 while unknown
    max_queued_tokens: int = 0  # a fuller queue takes nothing more; 0 where that is not told


class Route(NamedTuple):
    """Where a call is to go. Read by the router of the calling process; the replica has no use for it."""

    replicas: tuple[str, ...]  # unique ids, best first; whoever is not named comes after them
    ticket: int  # of the caller's `Loads`
    more: tuple[int, ...] = ()  # tickets of others that go with it


class Failure(NamedTuple):
    """A job that the replica refused or lost. A value and not an exception: it crosses processes unchanged."""

    code: ErrorCode
    message: str  # from a closed set: may be shown to a client
    field: str | None
    load: Load | None = None  # of a replica that was too busy
    accepted: bool = False  # the job had been taken before it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTask:
    """See engine.requests.ScoreRequest, which a replica makes of it without copying an array."""

    task_id: str
    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1]
    labels: Int32s  # [L]
    full: bool = True
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    remaining_s: float = 60.0
    isolated: bool = False
    accepted: bool = False  # a replica had taken it and was lost: counted at the door, it is not refused for room now
    whole: bool = False  # a failed row spoils the answer: rows after it need not be computed
    route: Route | None = None


class ScoreReply(NamedTuple):
    label_logprobs: Float32s  # [N, L]
    status: UInt8s  # [N]
    cached: Int32s  # [N]
    queue_s: float
    compute_s: float
    load: Load
    head_s: float = 0.0  # part of compute_s: behind the model's last layer

    @classmethod
    def blank(cls, task: ScoreTask) -> "ScoreReply":
        """A reply of the task's shape that answers no row."""
        rows = len(task.starts) - 1
        return cls(np.full((rows, len(task.labels)), np.nan, np.float32), *_unanswered(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelihoodTask:
    """See engine.requests.LikelihoodRequest, which a replica makes of it without copying an array."""

    task_id: str
    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [N + 1]
    shared: Int32s  # [N]
    wanted: Int32s  # [N]
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    remaining_s: float = 60.0
    isolated: bool = False
    accepted: bool = False  # as in ScoreTask
    whole: bool = False  # as in ScoreTask
    route: Route | None = None


class LikelihoodReply(NamedTuple):
    logprobs: Float32s  # [W]
    greedy: Bools  # [W]
    status: UInt8s  # [N]
    cached: Int32s  # [N]
    queue_s: float
    compute_s: float
    load: Load
    head_s: float = 0.0  # part of compute_s: behind the model's last layer

    @classmethod
    def blank(cls, task: LikelihoodTask) -> "LikelihoodReply":
        """A reply of the task's shape that answers no row."""
        wanted = int(task.wanted.sum(dtype=np.int64))
        return cls(np.full(wanted, np.nan, np.float32), np.zeros(wanted, np.bool_), *_unanswered(len(task.starts) - 1))


def _unanswered(rows: int) -> tuple[UInt8s, Int32s, float, float, Load]:
    """What follows the values in a reply; a row that nobody wrote is no answer."""
    return np.full(rows, RowStatus.NONFINITE, np.uint8), np.zeros(rows, np.int32), 0.0, 0.0, Load(0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convoy:
    """Small tasks that go to a replica in one call, each answered as if it came alone: a tuple of their replies."""

    tasks: tuple[ScoreTask | LikelihoodTask, ...]
    route: Route | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateTask:
    """Q prompts with the same parameters. Branch b of prompt q is choice q * params.n + b.

    With `prompt_top` each prompt's PromptScores come before its first token, with so many of the first tokens of the
    order and with `params.logprob_token_ids`; `prompt_only`: nothing comes after them.
    `every` and `isolated_tokens` are those of engine.requests.GenerateRequest.
    """

    task_id: str
    prompts: Int32s  # [B]
    starts: Int32s  # [Q + 1]
    params: SamplingParams
    seeds: UInt64s  # [Q]
    emitted: tuple[tuple[Int32s, ...], ...] = ()  # by prompt, by branch: tokens a resumed stream already has
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    remaining_s: float = 600.0
    isolated: bool = False
    isolated_tokens: int = 0
    accepted: bool = False  # as in ScoreTask
    every: int = 1
    epoch: int = 0  # a chunk of an older epoch is dropped
    route: Route | None = None
    prompt_top: int | None = None
    prompt_only: bool = False


class PromptScores(NamedTuple):
    """Raw log-probabilities of a prompt's tokens, its first one excepted, each after all before it."""

    logprobs: Float32s  # [P - 1]
    ranks: Int32s  # [P - 1]
    top_ids: Int32s  # [P - 1, T]
    top_logprobs: Float32s  # [P - 1, T]
    chosen_logprobs: Float32s  # [P - 1, C]
    queue_s: float
    compute_s: float

    @classmethod
    def of_one_token(cls) -> "PromptScores":
        """A prompt of one token has none."""
        floats, rows = np.empty(0, np.float32), np.empty((0, 0), np.float32)
        return cls(floats, floats.astype(np.int32), rows.astype(np.int32), rows, rows, 0.0, 0.0)


class PromptChunk(NamedTuple):
    """New tokens of one branch of prompt `prompt`, or the prompt's own scores, or its failure."""

    prompt: int
    chunk: GenerateChunk | PromptScores | Failure


class GenerateReply(NamedTuple):
    """What one step brought (streaming), or everything at once (unary: one chunk a branch, in order)."""

    chunks: tuple[PromptChunk, ...]
    epoch: int
    load: Load


class ModelCard(NamedTuple):
    """What an ingress must know of the model that its replicas serve."""

    name: str  # served name
    root: str  # where it came from: "builtin" or the repository id or folder name, never a full path
    revision: str | None
    vocab_size: int  # width of the logits
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    logprobs_mode: str
    versions: dict[str, str]


AnyTask = ScoreTask | LikelihoodTask | GenerateTask


class Backend(Protocol):
    """The replicas as a route sees them. `deployments.routing.dispatcher` is the real one; tests may use an engine in
    process.

    Every method raises `deployments.errors.ApiError` (deadline, no replica, overloaded, ...), never a Ray error.
    Cancelling the caller, or closing the iterator, cancels the work.
    """

    async def score(self, task: ScoreTask) -> ScoreReply: ...

    async def likelihood(self, task: LikelihoodTask) -> LikelihoodReply: ...

    async def generate(self, task: GenerateTask) -> GenerateReply: ...

    def stream(self, task: GenerateTask) -> AsyncIterator[GenerateReply]: ...

    async def card(self) -> ModelCard: ...

    def check_open(self, remaining_s: float) -> None:
        """Raises what any work would meet now, so that its body need not be read. `remaining_s`: of its deadline."""
        ...

    def readiness(self) -> dict[str, object]:
        """`status` ("ready", "starting", "unready", "draining"), `replicas_ready`, `replicas_total`, `canary_age_s`."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus text of every replica and every ingress, merged."""
        ...
