"""Turns logits into tokens and log-probabilities, for requests that hold slots.

`Sampler.sample` draws one token a row, and `Sampler.verify` as many tokens of a speculated run as the target accepts.
Both run these stages in order:

    logits processors (bias, bans, penalties) -> temperature -> min-p, top-k, top-p -> sample -> log-probabilities

On the CPU the numpy reference computes every row (`reference/sample.py`). On a device our kernels do
(`triton_sampler.py`), but for rows that FlashInfer may draw and was chosen for. A row's own parameters decide that,
never its batch-mates.

Shape legend: R rows, B requests, K draft steps, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backend import Backend, choose
from gpu_sampler.output import LaunchPlan, OutputWords, RowFlag, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.reference import rejection_sample as verify_reference
from gpu_sampler.reference import sample as reference
from gpu_sampler.reference.token_counts import update_token_counts
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams
from gpu_sampler.spec_decode import DEFAULT_RULES, MAX_DRAFTS, Draft, DraftMethod, Proposal, VerifyRules, check_proposal
from gpu_sampler.startup_progress import StartupProgress
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag

if TYPE_CHECKING:
    from gpu_sampler.triton_sampler import TritonSampler

log = logging.getLogger(__name__)
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
BRANCHES: Final = ("greedy", "plain", "candidates", "nucleus", "flashinfer")
Output = TypeVar("Output", SampleOutput, VerifyOutput)
FLAGS: Final = tuple(str(flag.name).lower() for flag in RowFlag)


class SamplerStats(NamedTuple):
    """Counts the rows sampled by branch and the flags raised since the start: closed sets, for metrics."""

    rows: dict[str, int]
    flags: dict[str, int]


class Sampler:
    """Samples for one thread; see the module for the stages."""

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
        """Allocates the state of all slots.

        Args:
            num_slots: slots, the padding slot 0 included.
            vocab_size: V, the width of the logits.
            device: where the logits lie.
            logprobs_mode: log-probabilities of the raw logits, or after all filters.
            backend: the code that draws; see `gpu_sampler.backend`.
            overlay_entries: entries that the overlays of all slots share.
            limits: bounds of request parameters.

        Raises:
            ValueError: `backend` cannot run on `device`.
        """
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.state = SamplingState(
            num_slots=num_slots, vocab_size=vocab_size, overlay_entries=overlay_entries, limits=limits
        )
        self._processed = logprobs_mode == "processed_logprobs"
        self._branches = np.zeros(num_slots, np.int8)  # by slot, into BRANCHES
        self._rows, self._flags = Counter[str](), Counter[str]()
        self._planned: _Planned | None = None  # the last step, until a slot changes
        self._triton: TritonSampler | None = None
        if (chosen := choose(backend, self.device)) != "numpy":
            from gpu_sampler import triton_sampler  # a CPU machine has no Triton

            self._triton = triton_sampler.TritonSampler(
                self.state, self.device, flashinfer=chosen == "flashinfer", processed=self._processed
            )

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
        """Sets every field of a slot; see `SamplingState.admit`. A resumed row passes the tokens it already has."""
        self.state.admit(slot, params, prompt_ids, seed=seed, branch=branch, output_ids=output_ids)
        self._note(slot)

    def stage(self, slot: int, **changes: Any) -> None:
        """Changes single numbers of a slot between steps; see `SamplingState.stage`."""
        self.state.stage(slot, **changes)
        self._note(slot)

    def _note(self, slot: int) -> None:
        self._planned = None
        self._branches[slot] = BRANCHES.index(reference.branch(self.state, slot))
        if self._triton is not None:
            self._triton.note(slot)

    def release(self, slot: int) -> None:
        """Frees a slot; see `SamplingState.release`."""
        self.state.release(slot)
        self._planned = None
        self._branches[slot] = 0

    def warm_up(
        self,
        rows: int,
        progress: StartupProgress,
        *,
        drafts: int = 0,
        rules: VerifyRules = DEFAULT_RULES,
        dense: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Compiles what steps may need, and takes their memory.

        Args:
            rows: the largest number of rows of a step.
            progress: is given each part as it is done.
            drafts: drafts a row of verify steps; 0 without speculation.
            rules: the rules of verify steps.
            dense: some proposals will be dense.
            dtype: the type of the logits.
        """
        if self._triton is None:
            return
        from gpu_sampler.kernel_cache import compiled_inside  # needs Triton

        with compiled_inside() as late:
            self._triton.warm_up(rows, dtype, progress)
            if drafts:
                self._triton.warm_up_verify(rows, dtype, drafts, rules, progress, dense=dense)
        if late:
            names = ", ".join(f"{name} ({count})" for name, count in Counter(late).items())
            log.warning("Triton's cache lacked %d kernels, which were compiled one by one: %s.", len(late), names)

    def plan_rows(self, slots: Slots) -> LaunchPlan:
        """Returns the branch of each row and the launches of the step, from the host's mirror of the state alone."""
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
        """Draws one token a row, advances each slot's position and counts its token.

        Args:
            logits: [R, V], a tensor of any float type and stride, or an array. On a device the sampler owns it from
                here on: it writes into it.
            slots: [R]; a slot other than 0 stands there once.

        Returns:
            Tokens, log-probabilities and flags; see SampleOutput. A row's flags report bad logits, which never raise.

        Raises:
            ValueError: the shapes or the slots are out of range.
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
        """Accepts drafts of each slot by `rules`, and draws one token more.

        Positions advance by the counts, and the tokens are counted. A run without drafts gives what `sample` gives, bit
        for bit.

        Args:
            logits: [B (K + 1), V], request by request. Row i of a request follows its first i drafts. Rows after the
                last draft are not read. Ownership as in `sample`.
            slots: [B].
            proposal: the drafts and what they were drawn from.
            rules: which drafts are accepted.

        Returns:
            Tokens, counts, log-probabilities and flags; see VerifyOutput. Bad values never raise.

        Raises:
            ValueError: the shapes or the slots are out of range.
        """
        drafts = check_proposal(proposal, len(slots), self.vocab_size)
        rows = self._checked(logits, slots, drafts + 1)
        self._rows.update(BRANCHES[code] for code in self._branches[rows].tolist())  # FlashInfer draws none of them
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
        """Draws draft `offset` of each slot's run, and changes nothing else of the slots.

        Args:
            logits: [B, V], the drafter's, after the drafts before this one.
            slots: [B].
            offset: the place in the run, 0 first.
            method: `probabilistic` draws from the drafter's first 64 tokens that the row's filters keep, with DRAFT
                noise. For rows that `rules` put under `strict` it draws as the row itself will, with its own noise.
                `greedy`, and greedy rows, take the first token.
            rules: the rules of the verify step.

        Raises:
            ValueError: a shape, a slot or `offset` is out of range.
        """
        rows = self._checked(logits, slots)
        if not 0 <= offset < MAX_DRAFTS:
            raise ValueError(f"`offset` must be in [0, {MAX_DRAFTS}). Given: {offset}.")
        if self._triton is not None:
            self._triton.apply()
            return self._triton.draft(logits, rows, offset, method, rules)
        return verify_reference.draft(_host_rows(logits), self.state, rows.astype(np.int32), offset, method, rules)

    def prepare_drafts(self, slots: Slots) -> bool:
        """Returns whether `launch_draft` serves these slots, and if so applies what was staged.

        It serves slots on a device that have neither an overlay nor a mask.
        """
        rows = np.asarray(slots, np.int64)
        if self._triton is None or not self._triton.bare(rows):
            return False
        self._triton.apply()
        return True

    def launch_draft(
        self, logits: torch.Tensor, slots: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        """Runs the launches of `draft` alone, for slots i32 [B] on the device that `prepare_drafts` accepts, or 0.

        A CUDA graph can capture it, once it has run for as many rows.
        """
        if self._triton is None:
            raise ValueError(f"`launch_draft` needs a device. Given: {self.device}.")
        return self._triton.launch_draft(logits, slots, offset, method, rules)

    def _checked(self, logits: Any, slots: Slots, times: int = 1) -> npt.NDArray[np.int64]:
        """Returns the slots; ValueError unless there are `times` rows of logits for each of them."""
        rows = np.asarray(slots, np.int64)
        if tuple(logits.shape) != (len(rows) * times, self.vocab_size):
            raise ValueError(f"got logits {tuple(logits.shape)}, expected ({len(rows) * times}, {self.vocab_size})")
        if len(rows) and rows.view(np.uint64).max() >= self.state.num_slots:  # negative ones become large
            raise ValueError(f"`slots` must be in [0, {self.state.num_slots}). Given: {rows.min()} to {rows.max()}.")
        return rows

    def launch(self, logits: torch.Tensor, slots: torch.Tensor, plan: LaunchPlan) -> SampleOutput:
        """Runs the launches of `sample` alone, for slots i32 [R] on the device.

        A CUDA graph can capture it. The host's mirror of the positions does not advance.
        """
        if self._triton is None:
            raise ValueError(f"`launch` needs a device. Given: {self.device}.")
        return self._triton.launch(logits, slots, plan)

    def fetch(self, output: Output) -> "Fetched[Output]":
        """Starts the copy of an output to the host: call `result` when it is needed."""
        return Fetched(output, self._flags)

    def stats(self) -> SamplerStats:
        """Returns the counts so far."""
        return SamplerStats({name: self._rows[name] for name in BRANCHES}, {name: self._flags[name] for name in FLAGS})

    def _by_reference(self, logits: Any, slots: npt.NDArray[np.int64]) -> SampleOutput:
        self.state.apply()
        output = reference.sample(_host_rows(logits), self.state, slots.astype(np.int32), self._processed)
        update_token_counts(self.state, slots.astype(np.int32), output.tokens)
        return output


class _Planned(NamedTuple):
    slots: npt.NDArray[np.int64]
    plan: LaunchPlan


class Fetched(Generic[Output]):
    """Copies an output to pinned memory after the work that makes it; immediate on the CPU."""

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
        """Waits for the device, counts the flags once, and returns numpy arrays."""
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
    """Returns an array on the host, of a type that numpy has."""
    if not isinstance(array, torch.Tensor):
        return array
    return (array.to(torch.float32) if array.is_floating_point() else array).detach().cpu().numpy()


def _host_rows(logits: Any) -> npt.NDArray[np.float32]:
    """Returns float32 [R, V] on the host; copies only where type, place or stride needs it."""
    if isinstance(logits, torch.Tensor):
        logits = logits.detach().to("cpu", torch.float32).numpy()
    return np.ascontiguousarray(logits, np.float32)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
