"""Sampler: state by slot, and one call a step that turns logits into tokens and log-probabilities.

On the CPU every row is the reference's. On a device the rows that `DeviceSampler` knows stay there and the others are
brought to the reference; which, is decided row by row from the row's own parameters, never by its batch-mates.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.device_sampler import DeviceSampler, device_branch
from gpu_sampler.output import LaunchPlan, RowFlag, SampleOutput
from gpu_sampler.params import INVALID_TOKEN, SamplingLimits, SamplingParams
from gpu_sampler.reference import sample as reference
from gpu_sampler.reference.count_tokens import count_tokens
from gpu_sampler.state import Ids, SamplingState, SlotFlag

Slots = Sequence[int] | npt.NDArray[np.integer[Any]]
Backend = Literal["auto", "numpy", "torch"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
BRANCHES: Final = ("greedy", "plain", "candidates", "nucleus", "reference")
FLAGS: Final = tuple(str(flag.name).lower() for flag in RowFlag)
_REFERENCE: Final = BRANCHES.index("reference")


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
        chosen = backend if backend != "auto" else "torch" if self.device.type == "cuda" else "numpy"
        self._on_device = DeviceSampler(num_slots, vocab_size, self.device) if chosen == "torch" else None
        self._processed = logprobs_mode == "processed_logprobs"
        self._branches = np.zeros(num_slots, np.int8)  # by slot, into BRANCHES
        self._rows, self._flags = Counter[str](), Counter[str]()

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
        self._branches[slot] = BRANCHES.index(self._branch(slot, params))
        if self._on_device is not None and self._branches[slot] != _REFERENCE:
            self._on_device.stage(slot, params, seed, branch, len(output_ids))

    def release(self, slot: int) -> None:
        self.state.release(slot)
        self._branches[slot] = 0

    def plan_rows(self, slots: Slots) -> LaunchPlan:
        """The branch of each row, from the host's mirror alone; branches that do not occur are left out."""
        codes = self._branches[np.asarray(slots, np.int64)]
        found = ((name, np.flatnonzero(codes == code)) for code, name in enumerate(BRANCHES))
        return LaunchPlan(tuple((name, rows) for name, rows in found if len(rows)))

    def sample(self, logits: Any, slots: Slots) -> SampleOutput:
        """One token a row: logits [R, V] (a tensor of any float type and stride, or an array), slots [R].

        Advances each slot's position and counts its token. No content of the logits raises: a row's flags tell. A slot
        other than 0 stands in `slots` once.
        """
        rows = np.asarray(slots, np.int64)
        if tuple(logits.shape) != (len(rows), self.vocab_size):
            raise ValueError(f"got logits {tuple(logits.shape)}, expected ({len(rows)}, {self.vocab_size})")
        if len(rows) and (rows.min() < 0 or rows.max() >= self.state.num_slots):
            raise ValueError(f"`slots` must be in [0, {self.state.num_slots}). Given: {rows.min()} to {rows.max()}.")
        self.state.apply()
        plan = self.plan_rows(rows)
        for name, members in plan.branches:
            self._rows[name] += len(members)
        if self._on_device is None:
            return self._by_reference(logits, rows)
        return self._on_device_first(logits, rows, plan, self._on_device)

    def fetch(self, output: SampleOutput) -> "Fetched":
        """The output on its way to the host: call `result` when it is needed."""
        return Fetched(output, self._flags)

    def stats(self) -> SamplerStats:
        return SamplerStats({name: self._rows[name] for name in BRANCHES}, {name: self._flags[name] for name in FLAGS})

    def _branch(self, slot: int, params: SamplingParams) -> str:
        if self._on_device is None:
            return reference.branch(self.state, slot)
        wants = bool(self.state.flags[slot] & SlotFlag.WANTS_LOGPROBS)
        return (None if wants and self._processed else device_branch(params)) or "reference"

    def _by_reference(self, logits: Any, slots: npt.NDArray[np.int64]) -> SampleOutput:
        output = reference.sample(_host_rows(logits), self.state, slots.astype(np.int32), self._processed)
        count_tokens(self.state, slots.astype(np.int32), output.tokens)
        return output

    def _on_device_first(
        self, logits: torch.Tensor, slots: npt.NDArray[np.int64], plan: LaunchPlan, device: DeviceSampler
    ) -> SampleOutput:
        device.apply()
        elsewhere = self._branches[slots] == _REFERENCE
        if elsewhere.all():
            return _moved(self._by_reference(logits, slots), self.device)
        here = np.flatnonzero(~elsewhere)
        own = logits if len(here) == len(slots) else logits[torch.from_numpy(here).to(self.device)]
        output = self._sample_here(own, slots[here], plan, device)
        if len(here) == len(slots):
            return output
        there = np.flatnonzero(elsewhere)
        other = self._by_reference(logits[torch.from_numpy(there).to(self.device)], slots[there])
        return _interleave(output, here, _moved(other, self.device), there)

    def _sample_here(
        self, logits: torch.Tensor, slots: npt.NDArray[np.int64], plan: LaunchPlan, device: DeviceSampler
    ) -> SampleOutput:
        wants = (self.state.flags[slots] & np.uint32(SlotFlag.WANTS_LOGPROBS)) != 0
        n_top = int(self.state.n_top[slots].max()) if wants.any() else None
        most = int(self.state.n_chosen[slots].max()) if wants.any() else 0
        chosen = torch.from_numpy(self.state.chosen_ids[slots, :most]).to(self.device) if most else None
        own = LaunchPlan(tuple(part for part in plan.branches if part[0] != "reference"))
        drawn = device.sample(logits, slots, own, n_top=n_top, chosen_RL=chosen)
        self.state.position[slots] += (slots > 0).astype(np.int32)  # the mirror follows
        return drawn.output if n_top is None else _trimmed(drawn.output, self.state.n_top[slots])


class Fetched:
    """A copy to pinned memory behind the work that makes it, and the event that ends it; immediate on the CPU."""

    def __init__(self, output: SampleOutput, flags: Counter[str]) -> None:
        self._event: Any = None
        self._counts = flags
        self._output = output
        if isinstance(output.tokens, torch.Tensor):
            self._output = SampleOutput(*(None if x is None else _to_host(x) for x in output))
            if output.tokens.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def result(self) -> SampleOutput:
        """Numpy arrays; waits for the device. Counts the flags once."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        output = SampleOutput(*(x.numpy() if isinstance(x, torch.Tensor) else x for x in self._output))
        if output.flags.any():
            for name, flag in zip(FLAGS, RowFlag, strict=True):
                self._counts[name] += int(np.count_nonzero(output.flags & int(flag)))
        return output


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


def _moved(output: SampleOutput, device: torch.device) -> SampleOutput:
    as_tensors = (None if x is None else torch.from_numpy(_signed(x)).to(device) for x in output)
    return SampleOutput(*as_tensors)


def _signed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array.view(np.int32) if array.dtype == np.uint32 else array  # flags: not every op knows uint32


def _trimmed(output: SampleOutput, n_top: npt.NDArray[np.int16]) -> SampleOutput:
    """Pads each row's top-N beyond its own N."""
    if output.top_ids is None or output.top_logprobs is None or (n_top == output.top_ids.shape[1]).all():
        return output
    columns = torch.arange(output.top_ids.shape[1], device=output.top_ids.device)
    beyond = columns >= torch.from_numpy(n_top.astype(np.int64)).to(output.top_ids.device)[:, None]
    return output._replace(
        top_ids=output.top_ids.masked_fill(beyond, INVALID_TOKEN),
        top_logprobs=output.top_logprobs.masked_fill(beyond, -torch.inf),
    )


_PADDING: Final = SampleOutput(INVALID_TOKEN, -torch.inf, 0, INVALID_TOKEN, -torch.inf, -torch.inf, 0)


def _interleave(
    a: SampleOutput, at_a: npt.NDArray[np.int64], b: SampleOutput, at_b: npt.NDArray[np.int64]
) -> SampleOutput:
    """One output of the rows of both, each field as wide as the wider one."""
    fields: list[torch.Tensor | None] = []
    for left, right, padding in zip(a, b, _PADDING, strict=True):
        given = left if left is not None else right
        if given is None:
            fields.append(None)
            continue
        width = [max(x.shape[1] for x in (left, right) if x is not None)] if given.ndim == 2 else []
        out = torch.full((len(at_a) + len(at_b), *width), padding, dtype=given.dtype, device=given.device)
        for part, at in ((left, at_a), (right, at_b)):
            if part is not None:
                rows = torch.from_numpy(at).to(given.device)
                out[(rows, slice(0, part.shape[1])) if width else rows] = part
        fields.append(out)
    return SampleOutput(*fields)
