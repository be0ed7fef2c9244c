"""Defines what an operator chooses for one replica's engine. Every option has one definition, here.

The classes are plain dataclasses, which `deployments.config` uses as the sections `model`, `engine`, `sampler`,
`speculation` and `admission` of a configuration file. The string below a field is its description in
docs/reference/configuration.md, and an annotated `Range` or `Pattern` is its constraint.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from gpu_sampler.spec_decode import MAX_DRAFTS, DraftMethod, Rule, VerifyRules

MAX_RUNNING_BOUND = 1024
ARCHITECTURES = "FLASHINFER_CUDA_ARCH_LIST"  # names GPUs to compile for; part of the name of FlashInfer's folder
MAX_NGRAM = 8
MIN_PREFILL_GRAPH_TOKENS, MAX_PREFILL_GRAPH_TOKENS = 32, 8192
MIN_COMPARED_SLOTS = 16  # hold the sequences that a start-up with `numerics: invariant` compares


class Range(NamedTuple):
    """States which numbers an option may have, with both ends included unless `open_low` or `open_high` is set."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def allows(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (self.high is None or (value < self.high if self.open_high else value <= self.high))

    def __str__(self) -> str:
        if self.high is None:
            return f"{'>' if self.open_low else '>='} {_number(self.low)}"
        ends = f"{_number(self.low)}, {_number(self.high)}"
        return f"in {'(' if self.open_low else '['}{ends}{')' if self.open_high else ']'}"


class Pattern(NamedTuple):
    """States which texts an option may have: those that the regular expression matches as a whole."""

    expression: str

    def allows(self, value: str | Path) -> bool:
        return re.fullmatch(self.expression, str(value)) is not None

    def __str__(self) -> str:
        return f"text that matches `{self.expression}`"


def check_constraints(section: str, options: Any) -> None:
    """Checks the annotated constraints of a dataclass; None is allowed wherever the type allows it.

    Args:
        section: name of the configuration section, for the message.
        options: an instance of one of the classes below.

    Raises:
        ValueError: names the first option that breaks its constraint, its value and what is allowed.
    """
    for name, allowed in constraints(type(options)).items():
        value = getattr(options, name)
        if value is not None and not allowed.allows(value):
            raise ValueError(f"`{section}.{name}` must be {allowed}. Given: {value}.")


def constraints(kind: type[Any]) -> dict[str, Range | Pattern]:
    """Returns the annotated constraints of a dataclass by the name of the field."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Range | Pattern):
                found[name] = extra
    return found


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if power >= 20 and value == 1 << power else f"{value:g}"


Revision = Annotated[str | None, Pattern("[0-9a-f]{40}")]
TextOrPath = Annotated[str | Path, Pattern(".+")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Says which model to load."""

    path: TextOrPath = "builtin"
    """`builtin`, `builtin-classifier`, a folder, or a repository id that is in the local cache at `revision`. `toy` is
    for tests and needs ASSAY_TEST_FAULTS=1."""
    revision: Revision = None
    """The commit of a repository id, 40 hexadecimal digits. A repository id needs it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on a CPU, else the checkpoint's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one, else the CPU."""
    max_model_len: Annotated[int | None, Range(2, 1 << 24)] = None
    """Tokens of prompt and answer together. None: the model's own limit."""
    head: Literal["auto", "lm", "sequence", "token", "pooled"] | Path = "auto"
    """The head that the model is served with. `auto`: that of the architecture in config.json, and `pooled` for a
    folder of sentence-transformers with a Pooling module. `lm`: the language-model head. `sequence`: the head of a
    sequence classifier or reward model. `token`: the head of a token classifier or process-reward model. `pooled`:
    none, for embeddings. Else a YAML or JSON file that declares a head, relative to the model's folder."""
    pooling: Literal["auto", "cls", "mean", "last"] = "auto"
    """With `head: pooled`: how the hidden states of a text become its vector. `auto`: as the folder's files of
    sentence-transformers say."""
    embedding_dimensions: tuple[int, ...] = ()
    """With `head: pooled`: the lengths to which vectors may be cut, for a model that was trained so (Matryoshka) and
    whose config.json has no `matryoshka_dimensions`."""
    random_weights: bool = False
    """For benchmarks: weights are drawn at random and only config.json is read."""

    def __post_init__(self) -> None:
        check_constraints("model", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Configures speculative decoding. It changes how long answers take; a rule says whether it changes them."""

    method: Literal["none", "draft_model", "ngram"] = "none"
    """`draft_model`: a small model proposes tokens. `ngram`: proposes the tokens that followed an earlier occurrence of
    the last tokens in the same sequence."""
    draft: Annotated[str | Path | None, Pattern(".+")] = None
    """The draft model: a folder, or a repository id in the local cache, with the target's vocabulary; `builtin` for the
    built-in model."""
    draft_revision: Revision = None
    """The commit of the draft's repository id. A repository id needs it."""
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)] = 4
    """Tokens drafted for each sequence and step."""
    draft_sample_method: DraftMethod = "probabilistic"
    """`probabilistic`: drafts are sampled from the draft model's distribution. `greedy`: drafts are its most likely
    tokens."""
    rejection_sample_method: Rule = "standard"
    """How drafts are verified for requests without a `seed`. `synthetic` is for benchmarks: its answers follow no
    distribution of the model."""
    seeded_rejection_sample_method: Rule = "strict"
    """How drafts are verified for requests with a `seed`. `strict` gives the tokens that they get without
    speculation."""
    synthetic_acceptance_rates: tuple[float, ...] = ()
    """With a rule `synthetic`: one acceptance rate in [0, 1] a position, given that the drafts before it were
    accepted."""
    ngram_tokens: Annotated[int, Range(1, MAX_NGRAM)] = 2
    """How many last tokens must occur earlier in the sequence for `ngram` to propose."""
    adaptive: bool = False
    """Drafts only while that is measured to be faster."""

    def __post_init__(self) -> None:
        check_constraints("speculation", self)
        if (self.method == "draft_model") != (self.draft is not None):
            given = "none" if self.draft is None else f"{self.draft} with method {self.method}"
            raise ValueError(
                f"`speculation.draft` must be given with method draft_model, and only then. Given: {given}."
            )
        self._check_rates()

    def _check_rates(self) -> None:
        field, rates = "`speculation.synthetic_acceptance_rates`", self.synthetic_acceptance_rates
        if not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"{field} must be in [0, 1]. Given: {rates}.")
        if not self.synthetic:
            if rates:
                raise ValueError(f"{field} must be absent unless a rule is synthetic. Given: {len(rates)} rates.")
        elif len(rates) != self.num_speculative_tokens:
            raise ValueError(f"{field} must be {self.num_speculative_tokens} rates. Given: {len(rates)}.")

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
    """Says what a generated token is taken to cost, in prompt tokens."""

    decode_token_cost: Annotated[float, Range(0, 1024)] = 4.0
    """A generated token costs a replica as much as this many prompt tokens."""
    expected_tokens: Annotated[int, Range(1, 1 << 20)] = 512
    """An answer is expected to have no more tokens than this, whatever `max_tokens` allows."""

    def __post_init__(self) -> None:
        check_constraints("admission", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """Configures how tokens are sampled and what log-probabilities mean."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities of the model's own distribution, or of the one after temperature, penalties and filters."""
    backend: Literal["auto", "triton", "flashinfer", "numpy"] = "auto"
    """`auto`: Triton kernels on a GPU, else NumPy."""
    overlay_entries: Annotated[int, Range(0, 1 << 31)] = 1 << 20
    """Room for the logit biases and allowed or banned tokens of all running sequences together."""

    def __post_init__(self) -> None:
        check_constraints("sampler", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Configures how one replica forms and runs steps: the section `engine` of a configuration file."""

    max_running: Annotated[int, Range(1, MAX_RUNNING_BOUND)] = 256
    """Sequences that generate at the same time."""
    kv_slots: Annotated[int | None, Range(2)] = None
    """Size of the KV cache in tokens; one slot is padding. None: from the free memory. With `numerics: invariant` at
    least 16."""
    kv_memory_fraction: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.85
    """Part of the device's memory that weights, activations and the KV cache may take together. GPU only."""
    token_budget: Annotated[int, Range(2, 1 << 20)] = 16_384
    """New tokens of a prefill or scoring step when nothing decodes."""
    decode_gap_s: Annotated[float, Range(0, 10, open_low=True)] = 0.040
    """Running sequences wait at most this time and one step for their next token; where four decode steps take longer,
    at most as long as these and one step. Such a step is cut to about the same time."""
    max_step_s: Annotated[float | None, Range(0, 10, open_low=True)] = None
    """A prefill or scoring step takes about this time at most, because a request that arrives meanwhile waits for its
    end. None: 0.1 on a CPU and 0.4 on a GPU, or eight times what a step takes beside its tokens. While requests of
    several API keys come, steps of every kind take 0.006 on a CPU and 0.1 on a GPU at most, or twice what a step takes
    beside its tokens."""
    cpu_priority: Literal["normal", "idle"] = "normal"
    """CPU only. `idle`: steps run on the cores that other threads leave free, so that HTTP goes first. For a machine
    that runs nothing but the service."""
    admission_tokens: Annotated[int, Range(1, 1 << 20)] = 64
    """KV cache slots reserved beyond the prompt when a request is admitted."""
    max_queued_tokens: Annotated[int | None, Range(1, 1 << 40)] = None
    """Replica admission: a request is answered 429 where more tokens than these are served before its end, those of its
    own key and at most as many of each other key; an empty queue takes any request. None: what the replica computes in
    8 s at the measured rate, and 262,144 until that is known."""
    prefix_cache: bool = True
    """Reuses the keys and values of prompts that begin alike."""
    compile: bool = True
    """Compiles the decoder layers with torch.compile. GPU only."""
    fuse_projections: bool | None = None
    """Computes the projections of q, k and v as one matrix product, and those of gate and up. None: on a GPU. On a CPU
    the products apart take less time."""
    restrict_last_layer: bool = True
    """Computes what follows attention in the last layer for the tokens alone whose logits are needed."""
    graphs: bool = True
    """Runs decode steps as CUDA graphs. GPU only."""
    max_graph_batch_size: Annotated[int, Range(2, MAX_RUNNING_BOUND)] = 256
    """Sequences of the largest decode graph."""
    prefill_graph_tokens: Annotated[int, Range(0, MAX_PREFILL_GRAPH_TOKENS)] = 8192
    """On a GPU with `graphs`: prefill and scoring steps of up to this many tokens run as CUDA graphs too, and small
    loads are cut into such steps. 0: none; else at least 32."""
    skinny_gemm: bool = True
    """On a GPU with `graphs`: linear layers of steps with up to 16 sequences run in kernels that read each weight
    once."""
    fused_norms: bool = True
    """On a CPU: RMS norms are one operation where that gives the same bits."""
    onednn_linear: bool = True
    """On a CPU: linear layers in float32 are computed by oneDNN, small ones in steps of more than 128 rows, which takes
    less time, and gives a row of a large one the same bits in any number of rows."""
    trace_base: bool = True
    """On a CPU: steps of up to 128 tokens run the model's operations without its modules, with the same bits. Start-up
    takes a second or two more."""
    numerics: Literal["fast", "invariant"] = "fast"
    """`invariant`: a token's numbers have the same bits whatever else is in the step, however its prompt was chunked or
    cached, on any replica of the same kind of GPU, at a cost in speed. `fast`: kernels are chosen by the size of a
    step, and near-ties can flip with it."""
    seed: Annotated[int, Range(0, 1 << 63, open_high=True)] = 0
    """Seed of the start-up checks. Nothing else uses it."""

    def __post_init__(self) -> None:
        check_constraints("engine", self)
        # Graphs exist for 32, 64, 128 and 256 tokens and one more for each further 256; a step is padded to the next
        # one. Each costs start-up three eager steps, and 1 MiB a kind of layer on the device and on the host.
        if 0 < (tokens := self.prefill_graph_tokens) < MIN_PREFILL_GRAPH_TOKENS:
            raise ValueError(
                f"`engine.prefill_graph_tokens` must be 0 or >= {MIN_PREFILL_GRAPH_TOKENS}. Given: {tokens}."
            )
        if self.numerics == "invariant" and self.kv_slots is not None and self.kv_slots < MIN_COMPARED_SLOTS:
            raise ValueError(
                f"`engine.kv_slots` must be >= {MIN_COMPARED_SLOTS} with `numerics: invariant`, whose sequences are "
                f"compared at start-up. Given: {self.kv_slots}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Everything that one replica's engine is configured with, from several sections of a configuration file."""

    sampler: SamplerConfig = SamplerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    costs: Costs = Costs()
