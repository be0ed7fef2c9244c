"""Sampler: state by slot, and one call a step that turns logits into tokens and log-probabilities; of a speculated run,
`verify` for as many tokens as the target agrees to.

On the CPU every row is the reference's. On a device every row is the kernels' (`triton_sampler.py`), but for those that
FlashInfer may draw and was chosen for; which, is decided row by row from the row's own parameters, never by its
batch-mates.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backend import Backend, choose
from gpu_sampler.output import LaunchPlan, OutputWords, RowFlag, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.reference import rejection_sample as draft_reference
from gpu_sampler.reference import rejection_sample as verify_reference
from gpu_sampler.reference import sample as reference
from gpu_sampler.reference.token_counts import update_token_counts
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams
from gpu_sampler.spec_decode import DEFAULT_RULES, MAX_DRAFTS, Draft, DraftMethod, Proposal, VerifyRules, check_proposal
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag

Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
BRANCHES: Final = ("greedy", "plain", "candidates", "nucleus", "flashinfer")
Output = TypeVar("Output", SampleOutput, VerifyOutput)
FLAGS: Final = tuple(str(flag.name).lower() for flag in RowFlag)


class SamplerStats(NamedTuple):
    """Rows ever sampled by branch, and flags ever raised: closed sets, for metrics."""

    rows: dict[str, int]
    flags: dict[str, int]


class Sampler:
    """One thread's sampler. `num_slots` counts the padding slot 0."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        logprobs_mode: LogprobsMode = "raw_logprobs",
        backend: Backend = "auto",
        overlay_entries: int = 1 << 20,
        limits: SamplingLimits | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.state = SamplingState(
            num_slots=num_slots, vocab_size=vocab_size, overlay_entries=overlay_entries, limits=limits
        )
        self._processed = logprobs_mode == "processed_logprobs"
        self._branches = np.zeros(num_slots, np.int8)  # by slot, into BRANCHES
        self._rows, self._flags = Counter[str](), Counter[str]()
        self._planned: _Planned | None = None  # the last step, until a slot changes
        self._triton: OnDevice | None = None
        if (choice := choose(backend, self.device)).rows == "triton":
            from gpu_sampler.triton_sampler import TritonSampler  # a CPU machine has no Triton

            self._triton = TritonSampler(self.state, self.device, choice=choice, processed=self._processed)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Ids,
        *,
        seed: int,
        branch: int = 0,
        output_ids: Sequence[int] | Ids = (),
    ) -> None:
        """See `SamplingState.admit`, whose errors it raises. A resumed row passes the tokens it already has."""
        self.state.admit(slot, params, prompt_ids, seed=seed, branch=branch, output_ids=output_ids)
        self._note(slot)

    def stage(self, slot: int, **changes: Any) -> None:
        """See `SamplingState.stage`."""
        self.state.stage(slot, **changes)
        self._note(slot)

    def _note(self, slot: int) -> None:
        self._planned = None
        self._branches[slot] = BRANCHES.index(reference.branch(self.state, slot))
        if self._triton is not None:
            self._triton.note(slot)

    def release(self, slot: int) -> None:
        self.state.release(slot)
        self._planned = None
        self._branches[slot] = 0

    def warm_up(
        self,
        rows: int,
        progress: Callable[[str], None],
        *,
        drafts: int = 0,
        rules: VerifyRules = DEFAULT_RULES,
        dense: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Compiles what a step of up to `rows` rows of logits of `dtype` may need and takes its memory; `progress` gets
        a line a part. With `drafts`, also for verify steps of as many drafts a row under `rules`; `dense`: some
        proposals will be dense."""
        if self._triton is not None:
            self._triton.warm_up(rows, dtype, progress)
            if drafts:
                self._triton.warm_up_verify(rows, dtype, drafts, rules, progress, dense=dense)

    def plan_rows(self, slots: Slots) -> LaunchPlan:
        """The branch of each row and the launches of the step, from the host's mirror alone."""
        rows = np.asarray(slots, np.int64)
        if self._planned is None or not np.array_equal(rows, self._planned.slots):
            self._planned = _Planned(rows.copy(), self._plan(rows))
        return self._planned.plan

    def _plan(self, rows: npt.NDArray[np.int64]) -> LaunchPlan:
        codes = self._branches[rows]
        found = ((name, np.flatnonzero(codes == code)) for code, name in enumerate(BRANCHES))
        branches = tuple((name, members) for name, members in found if len(members))
        wants = (self.state.flags[rows] & np.uint32(SlotFlag.WANTS_LOGPROBS)) != 0
        n_top = int(self.state.n_top[rows[wants]].max()) if wants.any() else None
        n_chosen = int(self.state.n_chosen[rows[wants]].max()) if wants.any() else 0
        plan = LaunchPlan(branches, n_top=n_top, n_chosen=n_chosen)
        return plan if self._triton is None else self._triton.plan(rows, plan)

    def sample(self, logits: Any, slots: Slots) -> SampleOutput:
        """One token a row: logits [R, V] (a tensor of any float type and stride, or an array), slots [R].

        Advances each slot's position and counts its token. No content of the logits raises: a row's flags tell. A slot
        other than 0 stands in `slots` once. On a device the logits are the sampler's from here on: it writes into them.
        """
        rows = self._checked(logits, slots)
        plan = self.plan_rows(rows)
        for name, members in plan.branches:
            self._rows[name] += len(members)
        if self._triton is None:
            return self._by_reference(logits, rows)
        self._triton.apply()
        return self.launch(logits, self._triton.slots(rows), plan)

    def verify(self, logits: Any, slots: Slots, proposal: Proposal, rules: VerifyRules = DEFAULT_RULES) -> VerifyOutput:
        """Of each of B slots the drafts that `rules` accept and one token more: logits [B (K + 1), V], request by
        request, row i of a request behind its first i drafts; its rows behind the last draft are not looked at.

        The slots' positions advance by the counts, their tokens are counted, and a run without drafts gives what
        `sample` gives, bit for bit. No content of the logits or the proposal raises. ValueError for shapes. Slots and
        the logits' ownership as in `sample`.
        """
        drafts = check_proposal(proposal, len(slots), self.vocab_size)
        rows = self._checked(logits, slots, drafts + 1)
        for name, members in self.plan_rows(rows).branches:
            self._rows[name] += len(members)
        if self._triton is not None:
            self._triton.apply()
            return self._triton.verify(logits, rows, proposal, rules, self.plan_rows(rows))
        self.state.apply()
        own, host = rows.astype(np.int32), Proposal(*map(_host_array, proposal))
        output = verify_reference.verify(_host_rows(logits), self.state, own, host, rules, self._processed)
        verify_reference.advance(self.state, own, output)
        return output

    def draft(
        self, logits: Any, slots: Slots, offset: int, method: DraftMethod, rules: VerifyRules = DEFAULT_RULES
    ) -> Draft:
        """Draft `offset` (0 first) of each slot's run, from the drafter's logits [B, V] behind the drafts before it.

        `probabilistic` draws from the drafter's first 64 tokens that the row's filters keep, with DRAFT noise, and for
        rows that `rules` put under `strict` as the row itself will draw, with its own noise; `greedy`, and rows that
        are greedy themselves, take the first token. Changes nothing of a slot but its drafts.
        """
        rows = self._checked(logits, slots)
        if not 0 <= offset < MAX_DRAFTS:
            raise ValueError(f"`offset` must be in [0, {MAX_DRAFTS}). Given: {offset}.")
        if self._triton is not None:
            self._triton.apply()
            return self._triton.draft(logits, rows, offset, method, rules)
        return draft_reference.draft(_host_rows(logits), self.state, rows.astype(np.int32), offset, method, rules)

    def prepare_drafts(self, slots: Slots) -> bool:
        """Whether `launch_draft` serves these slots: on a device, and none has an overlay or a mask. If so, brings what
        was staged."""
        rows = np.asarray(slots, np.int64)
        if self._triton is None or not self._triton.bare(rows):
            return False
        self._triton.apply()
        return True

    def launch_draft(
        self, logits: torch.Tensor, slots: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        """The launches of `draft` alone, on a device: slots i32 [B] there, that `prepare_drafts` lets through, or 0.
        Can be captured in a CUDA graph, once it has run for as many rows."""
        if self._triton is None:
            raise ValueError(f"`launch_draft` needs a device. Given: {self.device}.")
        return self._triton.launch_draft(logits, slots, offset, method, rules)

    def _checked(self, logits: Any, slots: Slots, times: int = 1) -> npt.NDArray[np.int64]:
        """The slots; ValueError unless there are `times` rows of logits for each of them."""
        rows = np.asarray(slots, np.int64)
        if tuple(logits.shape) != (len(rows) * times, self.vocab_size):
            raise ValueError(f"got logits {tuple(logits.shape)}, expected ({len(rows) * times}, {self.vocab_size})")
        if len(rows) and rows.view(np.uint64).max() >= self.state.num_slots:  # as which negative ones are large
            raise ValueError(f"`slots` must be in [0, {self.state.num_slots}). Given: {rows.min()} to {rows.max()}.")
        return rows

    def launch(self, logits: torch.Tensor, slots: torch.Tensor, plan: LaunchPlan) -> SampleOutput:
        """The launches of `sample` alone, on a device: slots i32 [R] there. Can be captured in a CUDA graph; the host's
        mirror of the positions is not advanced."""
        if self._triton is None:
            raise ValueError(f"`launch` needs a device. Given: {self.device}.")
        return self._triton.launch(logits, slots, plan)

    def fetch(self, output: Output) -> "Fetched[Output]":
        """The output on its way to the host: call `result` when it is needed."""
        return Fetched(output, self._flags)

    def stats(self) -> SamplerStats:
        return SamplerStats({name: self._rows[name] for name in BRANCHES}, {name: self._flags[name] for name in FLAGS})

    def _by_reference(self, logits: Any, slots: npt.NDArray[np.int64]) -> SampleOutput:
        self.state.apply()
        output = reference.sample(_host_rows(logits), self.state, slots.astype(np.int32), self._processed)
        update_token_counts(self.state, slots.astype(np.int32), output.tokens)
        return output


class OnDevice(Protocol):
    """What `Sampler` needs of `TritonSampler`."""

    def note(self, slot: int) -> None: ...

    def plan(self, rows: npt.NDArray[np.int64], plan: LaunchPlan) -> LaunchPlan: ...

    def apply(self) -> None: ...

    def slots(self, slots_R: npt.NDArray[np.int64]) -> torch.Tensor: ...

    def launch(self, logits_RV: torch.Tensor, slots_R: torch.Tensor, plan: LaunchPlan) -> SampleOutput: ...

    def verify(
        self,
        logits_RV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        proposal: Proposal,
        rules: VerifyRules,
        plan: LaunchPlan,
    ) -> VerifyOutput: ...

    def draft(
        self,
        logits_BV: torch.Tensor,
        slots_B: npt.NDArray[np.int64],
        offset: int,
        method: DraftMethod,
        rules: VerifyRules,
    ) -> Draft: ...

    def bare(self, slots_B: npt.NDArray[np.int64]) -> bool: ...

    def launch_draft(
        self, logits_BV: torch.Tensor, slots_B: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft: ...

    def warm_up(self, rows: int, dtype: torch.dtype, progress: Callable[[str], None]) -> None: ...

    def warm_up_verify(
        self,
        rows: int,
        dtype: torch.dtype,
        drafts: int,
        rules: VerifyRules,
        progress: Callable[[str], None],
        *,
        dense: bool,
    ) -> None: ...


class _Planned(NamedTuple):
    slots: npt.NDArray[np.int64]
    plan: LaunchPlan


class Fetched(Generic[Output]):
    """A copy to pinned memory behind the work that makes it, and the event that ends it; immediate on the CPU."""

    def __init__(self, output: Output, flags: Counter[str]) -> None:
        self._event: Any = None
        self._counts = flags
        self._output: Any = output
        if isinstance(output.tokens, torch.Tensor):
            if isinstance(output, VerifyOutput):
                parts = VerifyWords.of(output)
                self._output = parts.on(_to_host(parts.words)).split()
            else:
                words = OutputWords.of(output)
                self._output = words._replace(words=_to_host(words.words)).arrays()
            if output.tokens.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def result(self) -> Output:
        """Numpy arrays; waits for the device. Counts the flags once."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        arrays = (x.numpy() if isinstance(x, torch.Tensor) else x for x in self._output)
        output: Output = type(self._output)(*arrays)
        if output.flags.any():
            for name, flag in zip(FLAGS, RowFlag, strict=True):
                self._counts[name] += int(np.count_nonzero(output.flags & int(flag)))
        return output


def _host_array(array: Any) -> Any:
    """On the host, of a type that numpy has."""
    if not isinstance(array, torch.Tensor):
        return array
    return (array.to(torch.float32) if array.is_floating_point() else array).detach().cpu().numpy()


def _host_rows(logits: Any) -> npt.NDArray[np.float32]:
    """float32 [R, V] on the host; a copy only where type, place or stride asks for one."""
    if isinstance(logits, torch.Tensor):
        logits = logits.detach().to("cpu", torch.float32).numpy()
    return np.ascontiguousarray(logits, np.float32)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
