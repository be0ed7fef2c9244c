"""Which model there is, how a replica makes its steps, and how tokens are drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from deployments.sections.base import Name, Section
from deployments.settings import SamplingDefaults
from engine.config import ModelConfig


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
    """Gate 2: a replica with more waiting answers 429; an empty queue takes any request. None: what it works off in
    eight seconds, as measured."""
    prefix_cache: bool = True
    compile: bool = True
    graphs: bool = True
    largest_graph: int = 256
    small_step_tokens: int = 4096
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
