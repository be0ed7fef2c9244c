"""Defines AppArgs, the `args` of a Serve config file: everything that an operator chooses."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field, field_validator, model_validator

from deployments.auth.settings import AuthArgs
from deployments.config.sections import (
    AdmissionArgs,
    AutoscalingArgs,
    ChatArgs,
    DeadlineArgs,
    DecisionArgs,
    DeploymentArgs,
    DrainArgs,
    FanoutArgs,
    HealthArgs,
    HttpArgs,
    MetricsArgs,
    ModelArgs,
    RerankArgs,
    RetryArgs,
    RouterArgs,
    SamplingArgs,
    StreamArgs,
    TemplateArgs,
    TruncationArgs,
    WireArgs,
)
from deployments.config.settings import ApiSettings, ChatSettings, SamplingDefaults
from deployments.limits import Limits, WireLimits
from deployments.section import Name, Section, why_unreadable
from engine.config import EngineConfig, EngineOptions, SamplerConfig, SpeculationConfig
from gpu_sampler.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingLimits
from scoring.decisions import MAX_CODES
from scoring.errors import ScoringLimits

MAX_TEMPLATE_CHARS = 1 << 20
T = TypeVar("T", WireLimits, SamplingLimits, ScoringLimits)

# The sampler and the engine are built for these limits, and no configuration can raise them.
HARD_LIMITS = {"max_logprobs": MAX_TOP_LOGPROBS, "max_logprob_token_ids": MAX_LOGPROB_TOKEN_IDS, "max_labels": 256}
HARD_LIMITS |= {"max_choices": MAX_CODES, "max_levels": MAX_CODES}


class AppArgs(Section):
    """Holds the sections of a configuration. A bad value refuses to start, with its name and the allowed range."""

    model: ModelArgs = ModelArgs()
    engine: EngineOptions = EngineOptions()
    sampler: SamplerConfig = SamplerConfig()
    sampling: SamplingArgs = SamplingArgs()
    speculation: SpeculationConfig = SpeculationConfig()
    limits: dict[str, int] = Field(default_factory=dict)
    """Limits of requests that differ from the defaults. /v1/models shows all of them."""
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
    """Prompt templates by name."""
    rerank: RerankArgs = RerankArgs()
    decisions: DecisionArgs = DecisionArgs()
    auth: AuthArgs = AuthArgs()
    wire: WireArgs = WireArgs()
    http: HttpArgs = HttpArgs()
    metrics: MetricsArgs = MetricsArgs()
    ingress: DeploymentArgs = DeploymentArgs()
    replica: DeploymentArgs = DeploymentArgs(num_cpus=1)
    autoscaling: AutoscalingArgs = AutoscalingArgs()

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, given: dict[str, int]) -> dict[str, int]:
        known = Limits().flat()
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"`limits.{name}` must be one of {', '.join(sorted(known))}.")
            high = HARD_LIMITS.get(name, 1 << 40)
            if not 1 <= value <= high:
                raise ValueError(f"`limits.{name}` must be in [1, {high}]. Given: {value}.")
        return given

    @field_validator("speculation", mode="before")
    @classmethod
    def _known_by_another_name(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("draft_sample_method") == "gumbel":
            raise ValueError(
                "`speculation.draft_sample_method` must be greedy or probabilistic. Given: gumbel, which is called "
                "`probabilistic` here."
            )
        return given

    @model_validator(mode="after")
    def _room_to_scale(self) -> Self:
        high = self.autoscaling.max_replicas
        if high is not None and high < self.replica.count:
            raise ValueError(
                f"`autoscaling.max_replicas` must be at least `replica.count`, {self.replica.count}. Given: {high}."
            )
        return self

    @model_validator(mode="after")
    def _time_to_stop(self) -> Self:
        grace_s, longest_s = self.drain.ingress_grace_s, self.deadlines.max_s
        if longest_s + grace_s < 0:
            raise ValueError(
                f"`drain.ingress_grace_s` must be at least -`deadlines.max_s`, {-longest_s:g}. Given: {grace_s:g}."
            )
        return self

    def engine_config(self) -> EngineConfig:
        """Returns what a replica's engine is configured with."""
        return EngineConfig(
            **asdict(self.engine), sampler=self.sampler, speculation=self.speculation, costs=self.admission
        )

    def all_limits(self) -> Limits:
        """Returns every limit of requests: the defaults, with what `limits` sets."""

        def part(kind: type[T]) -> T:
            names = {item.name for item in fields(kind)}
            return kind(**{name: value for name, value in self.limits.items() if name in names})

        return Limits(wire=part(WireLimits), sampling=part(SamplingLimits), scoring=part(ScoringLimits))

    def api_settings(
        self, sampling: SamplingDefaults, versions: dict[str, str], model_folder: Path | None = None
    ) -> ApiSettings:
        """Returns what the HTTP layer is configured with.

        Args:
            sampling: the model's own defaults, which the section `sampling` overrides.
            versions: of the packages of this process.
            model_folder: the model's files, which may say how it ranks documents.

        Raises:
            ValueError: `chat.template_file` cannot be read, or `sampling` has a value that no request may have.
        """
        own_form = "builtin" if self.model.path == "builtin" else None
        layout = own_form or "auto" if self.decisions.layout == "auto" else self.decisions.layout
        return ApiSettings(
            limits=self.all_limits(),
            deadlines=self.deadlines,
            stream=self.stream,
            sampling=replace(sampling, **self.sampling.model_dump(exclude_none=True)).checked(),
            chat=ChatSettings(**self.chat.model_dump(), template=_template_text(self.chat.template_file)),
            truncation=self.truncation.policy,
            templates={name: given.spec() for name, given in self.templates.items()},
            rerank=self.rerank,
            rerank_preset=own_form,
            model_folder=model_folder,
            decisions=self.decisions.model_copy(update={"layout": layout}),
            synthetic=self.speculation.synthetic,
            openai_errors=self.wire.errors == "openai",
            strict=self.wire.strict,
            versions=versions,
            tokenizer_threads=self.http.tokenizer_threads,
            cors_origins=self.http.cors_origins,
            max_inflight_requests=self.admission.max_inflight_requests,
            max_inflight_body_bytes=self.admission.max_inflight_body_bytes,
        )


def _template_text(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`chat.template_file` must be a readable text file: {why_unreadable(error)}.") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"`chat.template_file` must be at most {MAX_TEMPLATE_CHARS} characters. Given: {len(text)}.")
    return text
