"""AppArgs: everything an operator chooses, as the `args` of a Serve config file. A bad value refuses to start."""

from dataclasses import fields
from typing import Any, Self, TypeVar

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
    EngineArgs,
    FanoutArgs,
    HealthArgs,
    HttpArgs,
    MetricsArgs,
    ModelArgs,
    Name,
    RerankArgs,
    RetryArgs,
    RouterArgs,
    SamplerArgs,
    SamplingArgs,
    Section,
    SpeculationArgs,
    StreamArgs,
    TemplateArgs,
    TruncationArgs,
    WireArgs,
)
from deployments.limits import Limits, WireLimits
from deployments.settings import (
    ApiSettings,
    Deadlines,
    DecisionSettings,
    RerankSettings,
    SamplingDefaults,
    StreamSettings,
)
from engine.config import Costs, EngineConfig
from gpu_sampler.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingLimits
from scoring.decisions import MAX_CODES
from scoring.errors import ScoringLimits

__all__ = [
    "HARD_LIMITS",
    "AdmissionArgs",
    "AppArgs",
    "DrainArgs",
    "FanoutArgs",
    "HealthArgs",
    "MetricsArgs",
    "RetryArgs",
    "RouterArgs",
]
T = TypeVar("T", WireLimits, SamplingLimits, ScoringLimits)

# What the sampler and the engine are built for: no option goes beyond.
HARD_LIMITS = {"max_logprobs": MAX_TOP_LOGPROBS, "max_logprob_token_ids": MAX_LOGPROB_TOKEN_IDS, "max_labels": 256}
HARD_LIMITS |= {"max_choices": MAX_CODES, "max_levels": MAX_CODES}


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
            most = HARD_LIMITS.get(name, 1 << 40)
            if not 1 <= value <= most:
                raise ValueError(f"`limits.{name}` must be in [1, {most}]. Given: {value}.")
        return given

    @model_validator(mode="after")
    def _engine_bounds(self) -> Self:
        self.engine_config()  # the engine states its own bounds: ValueError names field, value and range
        return self

    @model_validator(mode="after")
    def _room_to_scale(self) -> Self:
        most = self.autoscaling.max_replicas
        if most is not None and most < self.replica.count:
            raise ValueError(
                f"`autoscaling.max_replicas` must be at least `replica.count`, {self.replica.count}. Given: {most}."
            )
        return self

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            **self.engine.model_dump(),
            logprobs_mode=self.sampler.logprobs_mode,
            sampler_backend=self.sampler.backend,
            overlay_entries=self.sampler.overlay_entries,
            speculation=self.speculation.config(),
            costs=self.costs(),
        )

    def costs(self) -> Costs:
        return Costs(decode_token_cost=self.admission.decode_token_cost, expected_tokens=self.admission.expected_tokens)

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
        gate = self.admission.model_dump(include={"max_inflight_requests", "max_inflight_body_bytes"})
        sections: dict[str, Any] = gate | self.http.model_dump()
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
