"""EngineConfig: what the operator chooses for one replica's engine. Frozen; validated once, here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_sampler.spec_decode import MAX_DRAFTS, DraftMethod, Rule, VerifyRules

MAX_RUNNING_BOUND = 1024
MAX_NGRAM = 8
MIN_PREFILL_GRAPH_TOKENS, MAX_PREFILL_GRAPH_TOKENS = 32, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to load. `path` is "builtin", "toy" (needs ASSAY_TEST_FAULTS=1), a folder, or a repository id that is
    already in the local cache at the pinned `revision` (40 hexadecimal digits)."""

    path: str | Path = "builtin"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, else the checkpoint's
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None  # None: the model's own
    random_weights: bool = False  # config only, for benchmarks: weights are drawn, nothing is read


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Who drafts, how many tokens a run, and which drafts are kept (docs/speculation.md)."""

    method: Literal["none", "draft_model", "ngram"] = "none"
    draft: str | Path | None = None  # as ModelConfig.path; "builtin" is the built-in draft, for the built-in target
    draft_revision: str | None = None
    num_speculative_tokens: int = 4  # 1..8
    draft_sample_method: DraftMethod = "probabilistic"
    rejection_sample_method: Rule = "standard"  # of rows without a seed of the request's own
    seeded_rejection_sample_method: Rule = "strict"  # of rows with one
    synthetic_acceptance_rates: tuple[float, ...] = ()  # by position, each given that the ones before were accepted
    ngram_tokens: int = 2  # how many last tokens must have stood in the row before
    adaptive: bool = False  # drafts only while they pay

    def __post_init__(self) -> None:
        for name, most in (("num_speculative_tokens", MAX_DRAFTS), ("ngram_tokens", MAX_NGRAM)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"`speculation.{name}` must be in [1, {most}]. Given: {getattr(self, name)}.")
        if (self.method == "draft_model") != (self.draft is not None):
            given = "none" if self.draft is None else f"{self.draft} with method {self.method}"
            raise ValueError(
                f"`speculation.draft` must be given with method draft_model, and only then. Given: {given}."
            )
        self._check_rates()

    def _check_rates(self) -> None:
        field, rates = "`speculation.synthetic_acceptance_rates`", self.synthetic_acceptance_rates
        if not self.synthetic:
            if rates:
                raise ValueError(f"{field} must be absent unless a rule is synthetic. Given: {len(rates)} rates.")
            return
        if len(rates) != self.num_speculative_tokens:
            raise ValueError(f"{field} must be {self.num_speculative_tokens} rates. Given: {len(rates)}.")
        if not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"{field} must be in [0, 1]. Given: {rates}.")

    @property
    def rules(self) -> VerifyRules:
        return VerifyRules(
            rule=self.rejection_sample_method,
            seeded=self.seeded_rejection_sample_method,
            synthetic=self.synthetic_acceptance_rates,
        )

    @property
    def synthetic(self) -> bool:
        return "synthetic" in (self.rejection_sample_method, self.seeded_rejection_sample_method)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a generated token is taken to cost, in tokens that are read."""

    decode_token_cost: float = 4.0  # it holds a replica as long as about so many
    expected_tokens: int = 512  # most answers end before `max_tokens`

    def __post_init__(self) -> None:
        if not 0 <= self.decode_token_cost <= 1024:
            raise ValueError(f"`admission.decode_token_cost` must be in [0, 1024]. Given: {self.decode_token_cost}.")
        if not 1 <= self.expected_tokens <= 1 << 20:
            raise ValueError(f"`admission.expected_tokens` must be in [1, 2^20]. Given: {self.expected_tokens}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How steps are made. Token counts unless the name says otherwise."""

    max_running: int = 256  # generation rows at once, 1..1024
    kv_slots: int | None = None  # pool size in token slots; None: from free memory
    kv_memory_fraction: float = 0.85
    token_budget: int = 16_384  # new tokens of a prefill or score step when nothing decodes
    decode_gap_s: float = 0.040  # running rows wait no longer than this and one step, which is cut to about as long
    admission_tokens: int = 64  # reserved beyond the prompt when a request is admitted
    step_s: float | None = None  # a prefill or score step takes no longer than about this; None: as the device has it
    cpu_priority: Literal["normal", "idle"] = "normal"  # CPU only: idle computes on what cores others leave
    max_queued_tokens: int | None = None  # None: 8 s at the measured rate, and 262,144 until that is known
    prefix_cache: bool = True
    compile: bool = True  # CUDA only: regional compile
    fuse_projections: bool = True  # q, k, v as one product, and gate, up as one
    restrict_last_layer: bool = True  # the last layer's output is computed for the wanted rows alone
    skinny_kernels: bool = True  # CUDA only, with `graphs`: products of captured steps of few rows by our own kernel
    graphs: bool = True  # CUDA only: graphs for decode
    largest_graph: int = 256  # rows
    # CUDA only, with `graphs`: prefill and score steps of up to so many tokens, and no more than `token_budget`, are
    # graphs, too, and small loads are cut into such steps; 0: none. Up to 256 there are graphs of 32, 64, 128 and 256
    # tokens, beyond that one more for each 256. Each costs start-up three eager steps; they hold the largest one's
    # activations, in memory that decode graphs use as well, and 1 MiB a graph and kind of layer on the device and on
    # the host. A step is padded to the next one.
    prefill_graph_tokens: int = 4096
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    sampler_backend: Literal["auto", "triton", "flashinfer", "numpy"] = "auto"
    overlay_entries: int = 1 << 20
    seed: int = 0  # only start-up checks draw from it
    speculation: SpeculationConfig = SpeculationConfig()
    costs: Costs = Costs()

    def __post_init__(self) -> None:
        bounds = {
            "max_running": (1, MAX_RUNNING_BOUND),
            "token_budget": (2, 1 << 20),
            "admission_tokens": (1, 1 << 20),
            "largest_graph": (2, MAX_RUNNING_BOUND),
            "overlay_entries": (0, 1 << 31),
            "prefill_graph_tokens": (0, MAX_PREFILL_GRAPH_TOKENS),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"`engine.{name}` must be in [{low}, {high}]. Given: {getattr(self, name)}.")
        if self.max_queued_tokens is not None and not 1 <= self.max_queued_tokens <= 1 << 40:
            raise ValueError(f"`engine.max_queued_tokens` must be in [1, 2^40]. Given: {self.max_queued_tokens}.")
        if self.kv_slots is not None and self.kv_slots < 2:
            raise ValueError(f"`engine.kv_slots` must be >= 2 (slot 0 is padding). Given: {self.kv_slots}.")
        if 0 < (tokens := self.prefill_graph_tokens) < MIN_PREFILL_GRAPH_TOKENS:
            raise ValueError(
                f"`engine.prefill_graph_tokens` must be 0 or >= {MIN_PREFILL_GRAPH_TOKENS}. Given: {tokens}."
            )
        if not 0 < self.kv_memory_fraction < 1:
            raise ValueError(f"`engine.kv_memory_fraction` must be in (0, 1). Given: {self.kv_memory_fraction}.")
        for name, given in (("decode_gap_s", self.decode_gap_s), ("step_s", self.step_s)):
            if given is not None and not 0 < given <= 10:
                raise ValueError(f"`engine.{name}` must be in (0, 10]. Given: {given}.")
