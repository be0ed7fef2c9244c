"""Defines the sections of a configuration file that `engine.config` does not define.

The string below a key is its description in docs/reference/configuration.md.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from deployments.protocol import MAX_MICRO_BATCH
from deployments.section import Name, Seconds, Section, matches
from engine.config import Costs, ModelConfig, Range
from scoring.prompts.templates import PRESETS, TemplateSpec

ORIGIN = re.compile(r"\*|https?://[^\s/?#]+")


def _check_origin(given: str) -> str:
    if not ORIGIN.fullmatch(given):
        raise ValueError("An origin must be `*`, or http:// or https:// with a host and without a path.")
    return given


Origin = Annotated[str, AfterValidator(_check_origin)]
FlagName = Annotated[
    str, matches(r"[a-z][a-z0-9_]{0,63}", "It must be of 1 to 64 lower-case letters, digits and `_`, a letter first.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs(ModelConfig):
    """Says which model every replica loads, and what clients call it."""

    served_name: Name | None = None
    """The name that clients use for the model. None: the last part of `path`."""
    tokenizer_path: str | None = None
    """The tokenizer's folder, where it is not the model's."""

    @property
    def name(self) -> str:
        last = PurePath(self.path).name
        return self.served_name or (last if last not in ("", "..") else Path(self.path).resolve().name)

    @property
    def root(self) -> str:
        """Where the model comes from, without the folders of this machine."""
        return PurePath(self.path).name if PurePath(self.path).is_absolute() else str(self.path)


class SamplingArgs(Section):
    """Sets the sampling fields that a request leaves out. None: the model's generation_config.json, else the API's
    default."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 is greedy."""
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Samples among this many most likely tokens; 0 or -1: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Samples among the most likely tokens that have this probability together."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Samples among the tokens with at least this part of the most likely token's probability."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Penalty on tokens of the prompt and the answer; 1 is none."""


class DeadlineArgs(Section):
    """Sets deadlines, in seconds from the first byte of a request. A client may only shorten them."""

    scoring_s: Seconds = 60.0
    """Deadline of scoring, rerank and decision requests."""
    generation_s: Seconds = 600.0
    """Deadline of completions and chat completions."""
    max_s: Seconds = 3600.0
    """Upper bound of every deadline, also of those that a client asks for."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("scoring_s", "generation_s"):
            if getattr(self, name) > self.max_s:
                raise ValueError(
                    f"`deadlines.{name}` must be at most `deadlines.max_s`, {self.max_s:g}. "
                    f"Given: {getattr(self, name):g}."
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionArgs(Costs):
    """Says when a request is refused with 429 instead of waiting."""

    max_inflight_requests: Annotated[int, Range(1, 1 << 20)] = 1024
    """Connection limit: requests that one ingress answers at the same time. With keys of several names, one name holds
    less than three times what is free: three quarters of them if no other name has requests."""
    max_inflight_body_bytes: Annotated[int, Range(1024, 1 << 40)] = 268_435_456
    """Connection limit: bytes of the bodies of these requests, until they are parsed. Names share them likewise."""
    max_wait_s: Annotated[float, Range(0, 86_400, open_low=True)] = 10.0
    """Ingress admission: an ingress refuses a request when the queue of every replica takes longer than this."""


class FanoutArgs(Section):
    """Says when one scoring request is split over several replicas, and when small ones are sent together."""

    shard_tokens: int = Field(default=16_384, ge=1, le=1 << 30)
    """Tokens of items, without their prefix, that are worth a replica of their own."""
    min_items: int = Field(default=64, ge=1, le=1 << 20)
    """Fewest items that a shard has."""
    max_prefix_fraction: float = Field(default=0.1, gt=0, le=1, allow_inf_nan=False)
    """Each shard computes the prefix again: it may be this part of the shard's tokens."""
    micro_batch_calls: int = Field(default=2, ge=0, le=1024)
    """A small request that finds so many calls of small ones under way from its ingress to its replica waits for one to
    return, and is sent in one call with those that wait too. 0: every request is a call of its own."""
    micro_batch_max_wait_s: float = Field(default=0.05, ge=0, le=5, allow_inf_nan=False)
    """A request waits no longer than this for others, nor, at the speed of the replica, for them to be computed."""
    micro_batch_request_tokens: int = Field(default=512, ge=1, le=1 << 30)
    """A request of more tokens is a call of its own."""
    micro_batch_max_tokens: int = Field(default=16_384, ge=1, le=1 << 30)
    """A micro-batch of so many tokens is sent without waiting."""
    micro_batch_max_requests: int = Field(default=64, ge=2, le=MAX_MICRO_BATCH)
    """A micro-batch of so many requests is sent without waiting."""


class RouterArgs(Section):
    """Configures how an ingress chooses replicas and reaches them."""

    prefix_tokens: int = Field(default=256, ge=32, le=1 << 20)
    """Requests that begin with the same tokens, this many, go to the same replica while the load is balanced."""
    max_imbalance_tokens: int = Field(default=16_384, ge=0, le=1 << 30)
    """A replica may have this many more queued tokens than 1.25 times the mean before others are preferred."""
    link: Literal["auto", "local", "off"] = "auto"
    """`auto`: calls travel over a socket between ingress and replica, at a fraction of the cost of a call through Ray:
    a Unix socket within a host, TCP between hosts. `local`: within a host alone. `off`: every call goes through Ray."""


class RetryArgs(Section):
    """Configures what an ingress does when a replica is lost, stops, or is full."""

    max_attempts: int = Field(default=3, ge=1, le=3)
    """How often one request is sent to a replica at most. Hand-offs from a replica that stops are not counted."""
    max_backoff_s: float = Field(default=0.05, ge=0, le=5)
    """Longest wait before the next attempt, in seconds; the wait is drawn at random."""
    budget_fraction: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    """Retry budget: retries may be this part of an ingress's requests. A request's first retry after a loss is not
    counted."""
    budget_min_retries: int = Field(default=10, ge=0, le=1 << 20)
    """Retry budget: further retries beyond `budget_fraction`."""
    budget_window_s: Seconds = 10.0
    """Retry budget: the time over which requests and retries are counted."""
    quarantine_s: Seconds = 3600.0
    """How long a request that ended two replicas is refused."""


class HealthArgs(Section):
    """Configures the canary request and health checks."""

    period_s: Seconds = 5.0
    """Time between two canaries of a replica."""
    timeout_s: Seconds = 5.0
    """A canary that takes longer has failed."""
    min_replicas: int = Field(default=1, ge=1, le=4096)
    """Replicas that must have passed a canary within two periods for /readyz to answer 200."""
    step_timeout_s: Seconds = 10.0
    """A step that takes longer than this counts as stalled: its requests are failed, and Serve restarts the replica."""
    check_period_s: Seconds = 2.0
    """Time between two of Serve's health checks; three failures in a row replace the replica."""
    check_timeout_s: Seconds = 4.0
    """A health check that takes longer has failed."""
    tolerance_nats: float = Field(default=0.02, gt=0, le=10)
    """How far the canary's log-probabilities may differ from those at start-up."""


class DrainArgs(Section):
    """Configures how replicas and ingresses stop."""

    handoff_s: float = Field(default=10.0, ge=0, le=3600)
    """How long a replica that stops goes on before it hands its generations to others."""
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """How long a replica may take to stop beyond `handoff_s`."""
    ingress_grace_s: float = Field(default=10.0, ge=-86_400, le=3600)
    """How long an ingress may take to stop beyond `deadlines.max_s`; negative where streams may be cut."""
    stream_grace_s: float | None = Field(default=None, ge=0, le=86_400)
    """How long an ingress that stops goes on with its streams before they end with the error `draining`. None: to their
    ends."""


class StreamArgs(Section):
    """Configures how answers are streamed."""

    header_after_s: Seconds = 2.0
    """How long the status line waits for the first token, so that an early failure has a status of its own."""
    keep_alive_s: Seconds = 15.0
    """Time without an event after which a comment is sent to keep the connection open."""
    max_buffer_bytes: int = Field(default=1_048_576, ge=1024, le=1 << 30)
    """Bytes that are written and not yet read by the client; beyond this the client is disconnected."""
    read_timeout_s: Seconds = 60.0
    """A client that has read nothing of what was written for this long is disconnected, whether it streams or not."""


class TruncationArgs(Section):
    """Says what happens to a scoring prompt that is longer than the model allows."""

    policy: Literal["item", "error"] = "item"
    """`item`: the item is cut from its end. `error`: the item is refused."""


class ChatArgs(Section):
    """Configures how messages become a prompt. A request cannot bring a template of its own."""

    template_file: str | None = None
    """A file with a Jinja template, in place of the model's own."""
    template_flags: tuple[FlagName, ...] | None = None
    """Names of `chat_template_kwargs` that requests may set, each of 1 to 64 lower-case letters, digits and `_`. None:
    every name that the chat template mentions."""
    expose_template: bool = True
    """Whether /tokenizer_info shows the template."""
    render_timeout_s: Seconds = 2.0
    """A template that takes longer for one request has failed."""


class TemplateArgs(Section):
    """Defines a prompt template: a preset, or texts of its own (docs/guides/prompt-templates.md)."""

    preset: (
        Literal["plain", "builtin", "qwen3_reranker", "mxbai_rerank_v2", "bge_reranker_v2_gemma", "ctxl", "zerank"]
        | None
    ) = None
    """A template that comes with the service."""
    prefix: str | None = None
    """Template of what all items share."""
    item: str | None = None
    """Template of one item."""
    suffix: str | None = None
    """Template of what follows each item."""
    labels: tuple[str, ...] | None = Field(default=None, max_length=256)
    """The answers of the model; rerank reads the first as yes. None: the preset's."""
    defaults: dict[Literal["instruction", "system"], str] = Field(default_factory=dict)
    """Values that a request may leave out."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        own = [name for name in ("prefix", "item", "suffix") if getattr(self, name) is not None]
        if self.preset and own:
            raise ValueError(f"`{own[0]}` must be absent beside `preset`. Given: both.")
        if not self.preset and not own:
            raise ValueError("`preset`, or `prefix`, `item` and `suffix`, must be given. Given: neither.")
        return self

    def spec(self) -> TemplateSpec:
        parts = ("prefix", "item", "suffix", "labels")
        given = {name: value for name in parts if (value := getattr(self, name)) is not None}
        base = PRESETS[self.preset] if self.preset else TemplateSpec()
        return replace(base, **given, defaults=dict(base.defaults) | {str(k): v for k, v in self.defaults.items()})


class RerankArgs(Section):
    """Configures the rerank routes."""

    template: Name | None = None
    """A name of `templates` or a preset, with two labels, the first for yes, or one, whose logit is the score; a
    model with a sequence head needs no labels. None: `builtin` for the built-in model, else a prompt that the model's
    repository proves (sentence-transformers' files, a chat template with the roles query and document); otherwise the
    routes answer 404."""
    classifier_from_token: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=2)
    """Tokens whose logits are the score, as vLLM's `hf_overrides` spells them: no and yes, or the only one. They take
    the place of the labels of the template, or of the repository's prompt."""
    method: Literal["from_2_way_softmax", "no_post_processing"] | None = None
    """How these tokens become the score: the sigmoid of yes minus no, or of the only token's logit."""
    activation: Literal["none", "sigmoid", "softmax"] | None = None
    """Turns the model's number into a relevance score. `softmax` is over the logits of the template's two labels, and
    equals `sigmoid` of their difference. None: as the model's repository says, else `sigmoid`."""
    return_documents: bool | None = None
    """Whether answers contain the documents, where a request does not say. None: as the client's own service does
    (Jina, vLLM and SGLang return them; Cohere, Voyage, Mixedbread and text-embeddings-inference do not)."""

    @model_validator(mode="after")
    def _whole_override(self) -> Self:
        tokens = {"from_2_way_softmax": 2, "no_post_processing": 1}.get(self.method or "", 0)
        if tokens != len(self.classifier_from_token or ()):
            raise ValueError(
                "`rerank.classifier_from_token` must be two tokens with `rerank.method: from_2_way_softmax`, one with "
                f"no_post_processing, and absent without a method. Given: {len(self.classifier_from_token or ())} with "
                f"{self.method or 'no method'}."
            )
        return self


class DecisionArgs(Section):
    """Configures how /v1/decisions puts its questions to the model."""

    layout: Literal["auto", "chat", "plain", "builtin"] = "auto"
    """`auto`: the built-in model's own form, else the tokenizer's chat template, else plain text."""
    min_label_mass: float = Field(default=0.0, ge=0, le=1)
    """A question whose answers have less probability together is answered with a refusal."""


class WireArgs(Section):
    """Configures how request bodies are read and refused."""

    strict: bool = False
    """Unknown fields are refused with 422 instead of listed in a response header."""
    errors: Literal["assay", "openai"] = "assay"
    """`openai`: a bad value has status 400, as with OpenAI and vLLM, in place of 422. Codes stay the same."""


class HttpArgs(Section):
    """Configures the HTTP layer's own resources."""

    tokenizer_threads: int = Field(default=2, ge=1, le=256)
    """Threads of one ingress that tokenize and render templates."""
    cors_origins: tuple[Origin, ...] = Field(default=(), max_length=64)
    """Origins of web pages that may read answers, such as https://app.example.com; `*` is all of them. None: browsers
    keep answers from pages of other origins."""


class MetricsArgs(Section):
    """Configures /metrics, which merges the metrics of all processes."""

    timeout_s: Seconds = 1.0
    """A process that has not answered within this time is counted as missing."""
    cache_s: float = Field(default=0.5, ge=0, le=60)
    """How long an answer is served again without a new scrape."""


class DeploymentArgs(Section):
    """Says how many actors a deployment has, and what Ray reserves for each. CPUs and GPUs are Ray's logical ones."""

    count: int = Field(default=1, ge=1, le=4096)
    """Number of actors; the fewest with autoscaling."""
    num_cpus: float = Field(default=0.1, ge=0, le=1024)
    """Logical CPUs reserved for each actor."""
    num_gpus: float = Field(default=0, ge=0, le=64)
    """Logical GPUs reserved for each actor."""


class AutoscalingArgs(Section):
    """Scales replicas between `replica.count` and `max_replicas`, by queued work and by utilization."""

    max_replicas: int | None = Field(default=None, ge=1, le=4096)
    """Largest number of replicas; `replica.count` is the smallest. None: no autoscaling."""
    target_drain_s: float = Field(default=2.0, gt=0, le=3600, allow_inf_nan=False)
    """Queued work should be computed in this time."""
    target_utilization: float = Field(default=0.8, gt=0, le=1, allow_inf_nan=False)
    """Target utilization of each replica: of the step thread's time, or of the KV cache."""
    upscale_delay_s: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    """Replicas are added when more have been needed for this long."""
    downscale_delay_s: float = Field(default=600.0, ge=0, le=86_400, allow_inf_nan=False)
    """Replicas are removed when fewer have been needed for this long."""
    look_back_period_s: float = Field(default=30.0, gt=10, le=3600, allow_inf_nan=False)
    """Metrics are averaged over this time. Replicas report every 10 s."""
