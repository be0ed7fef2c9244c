"""AppArgs: everything an operator chooses, as the `args` of a Serve config file. A bad value refuses to start."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from deployments.limits import Limits, WireLimits
from deployments.settings import (
    ApiSettings,
    ChatSettings,
    Deadlines,
    DecisionSettings,
    RerankSettings,
    SamplingDefaults,
    StreamSettings,
)
from deployments.speculation import SpeculationArgs
from engine.config import EngineConfig, ModelConfig
from gpu_sampler.params import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingLimits
from scoring.decisions import MAX_CODES
from scoring.limits import ScoringLimits
from scoring.templates import PRESETS, TemplateSpec

T = TypeVar("T", WireLimits, SamplingLimits, ScoringLimits)

# What the sampler and the engine are built for: no option goes beyond.
HARD_LIMITS = {"max_logprobs": MAX_TOP_LOGPROBS, "max_logprob_token_ids": MAX_LOGPROB_TOKEN_IDS, "max_labels": 256}
HARD_LIMITS |= {"max_choices": MAX_CODES, "max_levels": MAX_CODES}
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
MAX_TEMPLATE_CHARS = 1 << 20
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error: a typing mistake must not silently mean the default."""

    # "model" is a fine name for a section; pydantic would otherwise keep `model_` names to itself.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


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
    """Running rows wait no longer than this for their next token."""
    admission_tokens: int = 64
    max_queued_tokens: int | None = None
    """Gate 2: a replica with more waiting answers 429. An empty queue takes any request."""
    prefix_cache: bool = True
    compile: bool = True
    graphs: bool = True
    largest_graph: int = 256
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
    """Gate 0: what one ingress has in flight before it refuses with 429."""

    max_inflight_requests: int = Field(default=1024, ge=1, le=1 << 20)
    max_inflight_body_bytes: int = Field(default=268_435_456, ge=1024, le=1 << 40)


class FanoutArgs(Section):
    """When one scoring request is shared out over several replicas."""

    shard_tokens: int = Field(default=16_384, ge=1, le=1 << 30)
    """Tokens of rows, without their prefix, that are worth a replica of their own."""
    min_items: int = Field(default=64, ge=1, le=1 << 20)
    """A replica is asked for no fewer items than this."""
    max_prefix_share: float = Field(default=0.1, gt=0, le=1, allow_inf_nan=False)
    """Each block computes the prefix again: it may be this part of the block's tokens."""


class RouterArgs(Section):
    """How an ingress chooses replicas."""

    prefix_tokens: int = Field(default=256, ge=32, le=1 << 20)
    """Requests that begin with the same so many tokens go to the same replica while the load is balanced."""
    slack_tokens: int = Field(default=16_384, ge=0, le=1 << 30)
    """A replica may have this much more queued than 1.25 times the mean before others are preferred."""


class RetryArgs(Section):
    """What an ingress does when a replica is lost or full before anything was answered."""

    attempts: int = Field(default=2, ge=1, le=3)
    """How often one request is sent to a replica at most."""
    wait_s: float = Field(default=0.05, ge=0, le=5)
    """Up to so long before the next attempt, drawn at random."""


class HealthArgs(Section):
    """The canary and what follows from it."""

    period_s: Seconds = 5.0
    timeout_s: Seconds = 5.0
    """A canary that takes longer has failed."""
    min_replicas: int = Field(default=1, ge=1, le=4096)
    """Replicas that must have passed within two periods for /readyz to answer 200."""
    stall_s: Seconds = 10.0
    """The step thread must turn this often; else Serve restarts the replica."""
    tolerance_nats: float = Field(default=0.02, gt=0, le=10)
    """How far the canary's log-probabilities may move from those at start-up."""


class DrainArgs(Section):
    """What a replica that is told to stop may still take."""

    handoff_s: float = Field(default=10.0, ge=0, le=3600)
    grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Beyond `handoff_s`, for a replica."""
    ingress_grace_s: float = Field(default=10.0, ge=-86_400, le=3600)
    """Beyond `deadlines.max_s`, for an ingress; negative where streams may be cut."""


class StreamArgs(Section):
    """How answers are streamed."""

    header_after_s: Seconds = 2.0
    keep_alive_s: Seconds = 15.0
    max_buffer_bytes: int = Field(default=1_048_576, ge=1024, le=1 << 30)
    """Written by us and not yet taken by the client; then it is taken for gone."""


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


class WireArgs(Section):
    """How bodies are read."""

    strict: bool = False
    """Unknown fields are refused with 422 instead of named in a header."""


class HttpArgs(Section):
    """The HTTP layer's own resources."""

    tokenizer_threads: int = Field(default=2, ge=1, le=256)


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


class AppArgs(Section):
    """The `args` of a Serve config file."""

    model: ModelArgs = ModelArgs()
    engine: EngineArgs = EngineArgs()
    sampler: SamplerArgs = SamplerArgs()
    sampling: SamplingArgs = SamplingArgs()
    speculation: SpeculationArgs = SpeculationArgs()
    limits: dict[str, int] = Field(default_factory=dict)
    """Bounds by name that differ from the defaults of deployments.limits; /v1/models shows them all."""
    deadlines: DeadlineArgs = DeadlineArgs()
    admission: AdmissionArgs = AdmissionArgs()
    fanout: FanoutArgs = FanoutArgs()
    router: RouterArgs = RouterArgs()
    retry: RetryArgs = RetryArgs()
    health: HealthArgs = HealthArgs()
    drain: DrainArgs = DrainArgs()
    stream: StreamArgs = StreamArgs()
    truncation: TruncationArgs = TruncationArgs()
    chat: ChatArgs = ChatArgs()
    templates: dict[Name, TemplateArgs] = Field(default_factory=dict, max_length=64)
    rerank: RerankArgs = RerankArgs()
    decisions: DecisionArgs = DecisionArgs()
    wire: WireArgs = WireArgs()
    http: HttpArgs = HttpArgs()
    metrics: MetricsArgs = MetricsArgs()
    ingress: DeploymentArgs = DeploymentArgs()
    replica: DeploymentArgs = DeploymentArgs(num_cpus=1)

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, given: dict[str, int]) -> dict[str, int]:
        known = Limits().flat()
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"`limits.{name}` must be one of {', '.join(sorted(known))}.")
            most = HARD_LIMITS.get(name, 1 << 40)
            if not 1 <= value <= most:
                raise ValueError(f"`limits.{name}` must be in [1, {most}]. Given: {value}.")
        return given

    @model_validator(mode="after")
    def _engine_bounds(self) -> Self:
        self.engine_config()  # the engine states its own bounds: ValueError names field, value and range
        return self

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            **self.engine.model_dump(),
            logprobs_mode=self.sampler.logprobs_mode,
            sampler_backend=self.sampler.backend,
            overlay_entries=self.sampler.overlay_entries,
            speculation=self.speculation.config(),
        )

    def all_limits(self) -> Limits:
        def part(kind: type[T]) -> T:
            names = {item.name for item in fields(kind)}
            return kind(**{name: value for name, value in self.limits.items() if name in names})

        return Limits(wire=part(WireLimits), sampling=part(SamplingLimits), scoring=part(ScoringLimits))

    def _decision_settings(self) -> DecisionSettings:
        layout = self.decisions.layout
        if layout == "auto" and self.model.path == "builtin":
            layout = "builtin"
        return DecisionSettings(layout=layout, min_label_mass=self.decisions.min_label_mass)

    def api_settings(self, sampling: SamplingDefaults, versions: dict[str, str]) -> ApiSettings:
        """For the HTTP layer. `sampling` are the model's own defaults, `versions` of this process's packages."""
        sections: dict[str, Any] = self.admission.model_dump() | self.http.model_dump()
        return ApiSettings(
            limits=self.all_limits(),
            deadlines=Deadlines(**self.deadlines.model_dump()),
            stream=StreamSettings(**self.stream.model_dump()),
            sampling=self.sampling.over(sampling),
            chat=self.chat.settings(),
            truncation=self.truncation.policy,
            templates={name: given.spec() for name, given in self.templates.items()},
            rerank=RerankSettings(
                template=self.rerank.template or ("builtin" if self.model.path == "builtin" else None),
                return_documents=self.rerank.return_documents,
            ),
            decisions=self._decision_settings(),
            synthetic=self.speculation.config().synthetic,
            strict=self.wire.strict,
            versions=versions,
            **sections,
        )
