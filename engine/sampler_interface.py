"""RowSampler: what the step loop needs of a sampler. `gpu_sampler.sampler.Sampler` is the real one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from engine.config import EngineConfig
from engine.model.interface import CausalLM
from engine.requests import Int32s
from gpu_sampler.output import SampleOutput, VerifyOutput
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams
from gpu_sampler.spec_decode import DEFAULT_RULES, Draft, DraftMethod, Proposal, VerifyRules

Output = TypeVar("Output", SampleOutput, VerifyOutput)
Told = TypeVar("Told", SampleOutput, VerifyOutput, covariant=True)


class Fetched(Protocol[Told]):
    """A result on its way to the host."""

    def result(self) -> Told:
        """Numpy arrays; waits for the device."""
        ...


class RowSampler(Protocol):
    """State by request slot; see kernels.md for what a row means. Called by the step thread only."""

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Int32s,
        *,
        seed: int,
        branch: int = 0,
        output_ids: Sequence[int] | Int32s = (),
    ) -> None: ...

    def release(self, slot: int) -> None: ...

    def sample(self, logits: Any, slots: Any) -> SampleOutput: ...

    def draft(self, logits: Any, slots: Any, offset: int, method: DraftMethod, rules: VerifyRules) -> Draft:
        """Draft `offset` of each row's run, from a draft model's rows [B, V]."""
        ...

    def prepare_drafts(self, slots: Any) -> bool:
        """Whether `launch_draft` serves these rows; if so, all that was staged is where it reads it."""
        ...

    def launch_draft(
        self, logits: torch.Tensor, slots: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        """`draft` of slots i32 [B] on the device, as part of a CUDA graph."""
        ...

    def verify(self, logits: Any, slots: Any, proposal: Proposal, rules: VerifyRules) -> VerifyOutput:
        """Of target rows [B (K + 1), V], row after row of the step."""
        ...

    def fetch(self, output: Output) -> Fetched[Output]: ...

    def stats(self) -> Any: ...

    def warm_up(
        self,
        rows: int,
        progress: Callable[[str], None],
        *,
        drafts: int = 0,
        rules: VerifyRules = DEFAULT_RULES,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Compiles what steps of up to `rows` rows of logits of `dtype` need, and with `drafts` those that verify as
        many of each."""
        ...


def make_sampler(model: CausalLM, config: EngineConfig, limits: SamplingLimits) -> RowSampler:
    """The real sampler, one slot a row and the dummy."""
    return Sampler(
        num_slots=config.max_running + 1,
        vocab_size=model.vocab_size,
        device=model.device,
        logprobs_mode=config.sampler.logprobs_mode,
        backend=config.sampler.backend,
        overlay_entries=config.sampler.overlay_entries,
        limits=limits,
    )
