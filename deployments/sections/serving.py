"""How requests are taken in, sent to replicas, watched over and answered."""

from typing import Self

from pydantic import Field, model_validator

from deployments.messages import MOST_IN_CONVOY
from deployments.sections.base import Seconds, Section


class DeadlineArgs(Section):
    """Seconds from the first byte of a request; a client may only shorten them."""

    scoring_s: Seconds = 60.0
    generation_s: Seconds = 600.0
    max_s: Seconds = 3600.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("scoring_s", "generation_s"):
            if getattr(self, name) > self.max_s:
                raise ValueError(
                    f"`deadlines.{name}` must be at most `deadlines.max_s`, {self.max_s:g}. "
                    f"Given: {getattr(self, name):g}."
                )
        return self


class AdmissionArgs(Section):
    """When a request is refused with 429 instead of waiting."""

    max_inflight_requests: int = Field(default=1024, ge=1, le=1 << 20)
    """Gate 0: what one ingress has in flight, with the next option."""
    max_inflight_body_bytes: int = Field(default=268_435_456, ge=1024, le=1 << 40)
    max_wait_s: Seconds = 10.0
    """Gate 1: an ingress sends nothing to replicas all of whose queues take longer than this."""
    decode_token_cost: float = Field(default=4.0, ge=0, le=1024, allow_inf_nan=False)
    """A generated token costs a replica as much as so many that are read."""
    expected_tokens: int = Field(default=512, ge=1, le=1 << 20)
    """An answer is taken to be no longer than this, whatever `max_tokens` allows."""


class FanoutArgs(Section):
    """When one scoring request is shared out over several replicas, and when small ones go to one in company."""

    shard_tokens: int = Field(default=16_384, ge=1, le=1 << 30)
    """Tokens of rows, without their prefix, that are worth a replica of their own."""
    min_items: int = Field(default=64, ge=1, le=1 << 20)
    """A replica is asked for no fewer items than this."""
    max_prefix_share: float = Field(default=0.1, gt=0, le=1, allow_inf_nan=False)
    """Each block computes the prefix again: it may be this part of the block's tokens."""
    convoy_calls: int = Field(default=2, ge=0, le=1024)
    """A small request that finds so many calls of small ones under way from its ingress to its replica waits for one to
    return, and travels with those that wait too. 0: every request is a call of its own."""
    convoy_most_s: float = Field(default=0.05, ge=0, le=5, allow_inf_nan=False)
    """Nobody waits longer than this for company to come, nor, at the speed of the replica, to be computed."""
    convoy_task_tokens: int = Field(default=512, ge=1, le=1 << 30)
    """A request of more tokens goes alone."""
    convoy_tokens: int = Field(default=16_384, ge=1, le=1 << 30)
    """A convoy of as many tokens leaves at once."""
    convoy_tasks: int = Field(default=64, ge=2, le=MOST_IN_CONVOY)
    """And one of as many requests."""


class RouterArgs(Section):
    """How an ingress chooses replicas."""

    prefix_tokens: int = Field(default=256, ge=32, le=1 << 20)
    """Requests that begin with the same so many tokens go to the same replica while the load is balanced."""
    slack_tokens: int = Field(default=16_384, ge=0, le=1 << 30)
    """A replica may have this much more queued than 1.25 times the mean before others are preferred."""


class RetryArgs(Section):
    """What an ingress does when a replica is lost, told to stop, or full."""

    attempts: int = Field(default=3, ge=1, le=3)
    """How often one request is sent to a replica at most; hand-offs from a replica that stops are not counted."""
    wait_s: float = Field(default=0.05, ge=0, le=5)
    """Up to so long before the next attempt, drawn at random."""
    share: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    """Retries may be this part of an ingress's requests; a request's first one after a loss is not counted."""
    spare: int = Field(default=10, ge=0, le=1 << 20)
    """And so many more."""
    window_s: Seconds = 10.0
    """Over so long."""
    quarantine_s: Seconds = 3600.0
    """How long a request that ended two replicas is refused."""


class HealthArgs(Section):
    """The canary and what follows from it."""

    period_s: Seconds = 5.0
    timeout_s: Seconds = 5.0
    """A canary that takes longer has failed."""
    min_replicas: int = Field(default=1, ge=1, le=4096)
    """Replicas that must have passed within two periods for /readyz to answer 200."""
    stall_s: Seconds = 10.0
    """The step thread must turn this often; else its callers are answered, and Serve restarts the replica."""
    check_period_s: Seconds = 2.0
    """How often Serve asks a replica for its health; three bad answers in a row replace it."""
    check_timeout_s: Seconds = 5.0
    """No answer for so long is a bad one."""
    tolerance_nats: float = Field(default=0.02, gt=0, le=10)
    """How far the canary's log-probabilities may move from those at start-up."""


class DrainArgs(Section):
    """What a replica that is told to stop may still take."""

    handoff_s: float = Field(default=10.0, ge=0, le=3600)
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Beyond `handoff_s`, for a replica."""
    ingress_grace_s: float = Field(default=10.0, ge=-86_400, le=3600)
    """Beyond `deadlines.max_s`, for an ingress; negative where streams may be cut."""
    stream_grace_s: float | None = Field(default=None, ge=0, le=86_400)
    """How long an ingress that is told to stop goes on with its streams before they end with the error `draining`.
    None: to their ends."""


class StreamArgs(Section):
    """How answers are streamed."""

    header_after_s: Seconds = 2.0
    keep_alive_s: Seconds = 15.0
    max_buffer_bytes: int = Field(default=1_048_576, ge=1024, le=1 << 30)
    """Written by us and not yet taken by the client; then it is taken for gone."""
    stall_s: Seconds = 60.0
    """A client that has taken nothing of what we wrote for so long is gone."""


class WireArgs(Section):
    """How bodies are read."""

    strict: bool = False
    """Unknown fields are refused with 422 instead of named in a header."""


class HttpArgs(Section):
    """The HTTP layer's own resources."""

    tokenizer_threads: int = Field(default=2, ge=1, le=256)


class MetricsArgs(Section):
    """The merged scrape."""

    timeout_s: Seconds = 1.0
    """A process that has not answered by then is counted as missing."""
    cache_s: float = Field(default=0.5, ge=0, le=60)


class DeploymentArgs(Section):
    """How many actors, and what Ray reserves for each. CPUs and GPUs are Ray's logical ones."""

    count: int = Field(default=1, ge=1, le=4096)
    num_cpus: float = Field(default=0.1, ge=0, le=1024)
    num_gpus: float = Field(default=0, ge=0, le=64)
