"""How requests are taken in, sent to replicas, watched over and answered.

What every section is made of.

The `autoscaling` section: when replicas are added and taken away (docs/kubernetes.md).

The `speculation` section: who drafts tokens for the model, and which drafts are kept (docs/speculation.md).

What text a model is asked in: templates, ranking, decisions, chats, and rows that are too long.

Which model there is, how a replica makes its steps, and how tokens are drawn.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.protocol import MAX_MICRO_BATCH
from deployments.settings import ChatSettings, SamplingDefaults
from engine.config import MAX_NGRAM, ModelConfig, SpeculationConfig
from gpu_sampler.spec_decode import MAX_DRAFTS
from scoring.templates import PRESETS, TemplateSpec

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error: a typing mistake must not silently mean the default."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class AutoscalingArgs(Section):
    """Between `replica.count` and `max_replicas`, by the work that waits and by how full the replicas are."""

    max_replicas: int | None = Field(default=None, ge=1, le=4096)
    """The most; `replica.count` is the fewest, so there is never none. None: off, always `replica.count`."""
    target_drain_s: float = Field(default=2.0, gt=0, le=3600, allow_inf_nan=False)
    """What waits shall be computed in this time."""
    target_busy: float = Field(default=0.8, gt=0, le=1, allow_inf_nan=False)
    """How much of each replica shall be in use: time of the step thread, or slots of the KV pool."""
    upscale_delay_s: float = Field(default=30.0, ge=0, le=86_400, allow_inf_nan=False)
    """More replicas must have been wanted for so long."""
    downscale_delay_s: float = Field(default=600.0, ge=0, le=86_400, allow_inf_nan=False)
    """Fewer replicas must have been wanted for so long."""
    look_back_s: float = Field(default=30.0, gt=10, le=3600, allow_inf_nan=False)
    """Figures are averages over this time. Replicas report every 10 s."""


Rate = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RuleName = Literal["strict", "standard", "block", "synthetic"]


class SpeculationArgs(Section):
    """Speculative decoding. It changes the time that answers take, and what they hold only where a rule says so."""

    method: Literal["none", "draft_model", "ngram"] = "none"
    """`draft_model`: a small model runs ahead. `ngram`: what followed the last tokens when they stood in the row
    before."""
    draft: str | None = Field(default=None, min_length=1)
    """The draft model: a folder, or a repository id in the local cache, with the target's vocabulary; "builtin" for
    the built-in model."""
    draft_revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Needed for a repository id."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_DRAFTS)
    """Tokens drafted for each row and step."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """`probabilistic`: drawn from the draft model's own distribution; `greedy`: its most likely token."""
    rejection_sample_method: RuleName = "standard"
    """Of rows whose request has no `seed`. `synthetic` is for benchmarks: its answers follow no law."""
    seeded_rejection_sample_method: RuleName = "strict"
    """Of rows whose request has a `seed`. Under `strict` they get the tokens that they get without speculation."""
    synthetic_acceptance_rates: tuple[Rate, ...] = ()
    """With a rule `synthetic`: one rate a position, given that the drafts before were accepted."""
    ngram_tokens: int = Field(default=2, ge=1, le=MAX_NGRAM)
    """How many last tokens must have stood in the row before."""
    adaptive: bool = False
    """Drafts only while that is measured to be faster."""

    @field_validator("draft_sample_method", mode="before")
    @classmethod
    def _known_by_another_name(cls, given: object) -> object:
        if given == "gumbel":
            raise ValueError(
                "`speculation.draft_sample_method` must be greedy or probabilistic. Given: gumbel, which is called "
                "`probabilistic` here."
            )
        return given

    def config(self) -> SpeculationConfig:
        """ValueError, naming field, value and range, for what does not go together."""
        return SpeculationConfig(**self.model_dump())


FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
MAX_TEMPLATE_CHARS = 1 << 20


class TruncationArgs(Section):
    """What happens to a scoring row that is longer than the model."""

    policy: Literal["item", "error"] = "item"


class TemplateArgs(Section):
    """A prompt template: a preset, or texts of your own; see docs/templates.md."""

    preset: Literal["plain", "builtin", "qwen3_reranker"] | None = None
    prefix: str | None = None
    item: str | None = None
    suffix: str | None = None
    labels: tuple[str, ...] | None = Field(default=None, max_length=256)
    """What the model answers; rerank reads the first as yes. None: the preset's."""
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
    """The rerank routes."""

    template: Name | None = None
    """A name of `templates` or a preset, with two labels, the first for yes. None: `builtin` for the built-in model,
    `qwen3_reranker` where the tokenizer has its control tokens; otherwise the routes answer 404."""
    return_documents: bool = False
    """Where a request does not say."""


class DecisionArgs(Section):
    """How /v1/decisions puts its questions to the model."""

    layout: Literal["auto", "chat", "plain", "builtin"] = "auto"
    """`auto`: the built-in model's own form, else the tokenizer's chat template, else plain text."""
    min_label_mass: float = Field(default=0.0, ge=0, le=1)
    """A question whose answers together have less probability is answered with a refusal."""


class ChatArgs(Section):
    """How messages become a prompt. The template is the model's own, or a file's: a request never brings one."""

    template_file: str | None = None
    """A Jinja template in place of the model's own."""
    template_flags: tuple[FlagName, ...] = ()
    """Names of `chat_template_kwargs` that requests may set, to true or false."""
    expose_template: bool = True
    """Whether /tokenizer_info shows the template."""
    render_s: Seconds = 2.0
    """A template that takes longer for one request has failed."""

    def settings(self) -> ChatSettings:
        return ChatSettings(
            template=None if self.template_file is None else _template_text(Path(self.template_file)),
            template_flags=self.template_flags,
            render_s=self.render_s,
            expose_template=self.expose_template,
        )


def _template_text(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`chat.template_file` must be a readable text file. {type(error).__name__}.") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"`chat.template_file` must be at most {MAX_TEMPLATE_CHARS} characters. Given: {len(text)}.")
    return text


class ModelArgs(Section):
    """Which model every replica loads."""

    path: str = Field(default="builtin", min_length=1)
    """"builtin", a folder, or a repository id in the local cache; "toy" only with ASSAY_TEST_FAULTS=1."""
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Needed for a repository id."""
    served_name: Name | None = None
    """What clients call it. None: the last part of `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2, le=1 << 24)
    """Tokens of prompt and answer together. None: the model's own."""
    random_weights: bool = False
    """For benchmarks: weights are drawn, only config.json is read."""
    tokenizer_path: str | None = None
    """A folder, where it is not the model's."""

    @property
    def name(self) -> str:
        return self.served_name or Path(self.path).name

    @property
    def root(self) -> str:
        """Where it came from: never a full path."""
        return Path(self.path).name if Path(self.path).is_absolute() else self.path

    def config(self) -> ModelConfig:
        return ModelConfig(
            path=self.path,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            random_weights=self.random_weights,
        )


class EngineArgs(Section):
    """How one replica makes its steps. Token counts unless the name says otherwise; see engine.config for bounds."""

    max_running: int = 256
    """Generation rows at once."""
    kv_slots: int | None = None
    """Token slots of the pool. None: from free memory."""
    kv_memory_fraction: float = 0.85
    token_budget: int = 16_384
    """New tokens of a prefill or scoring step when nothing decodes."""
    decode_gap_s: float = 0.040
    """Running rows wait no longer than this and one step for their next token; such a step is cut to about as long."""
    step_s: float | None = None
    """A prefill or scoring step takes no longer than about this: whoever arrives meanwhile waits for its end. None: 0.1
    on a CPU and 0.4 on a GPU."""
    cpu_priority: Literal["normal", "idle"] = "normal"
    """On a CPU device, idle: steps are computed on the cores that others leave, so that whoever answers, refuses and
    streams goes first. For a machine whose cores are all the service's own."""
    admission_tokens: int = 64
    max_queued_tokens: int | None = None
    """Replica admission: a replica with more waiting answers 429; an empty queue takes any request. None: what it works
    off in eight seconds, as measured."""
    prefix_cache: bool = True
    compile: bool = True
    graphs: bool = True
    largest_graph: int = 256
    prefill_graph_tokens: int = 4096
    """On a GPU with `graphs`, prefill and scoring steps of up to so many tokens are CUDA graphs, too, and small
    requests wait less. 0: none."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)


class SamplerArgs(Section):
    """How tokens are drawn and what log-probabilities mean."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    backend: Literal["auto", "triton", "flashinfer", "numpy"] = "auto"
    overlay_entries: int = 1 << 20


class SamplingArgs(Section):
    """Values of sampling fields that a request leaves out. None: the model's generation_config.json, else the
    contract's."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)

    def over(self, defaults: SamplingDefaults) -> SamplingDefaults:
        return replace(defaults, **self.model_dump(exclude_none=True))


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
    """Connection limit: what one ingress has in flight, with the next option."""
    max_inflight_body_bytes: int = Field(default=268_435_456, ge=1024, le=1 << 40)
    max_wait_s: Seconds = 10.0
    """Ingress admission: an ingress sends nothing to replicas all of whose queues take longer than this."""
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
