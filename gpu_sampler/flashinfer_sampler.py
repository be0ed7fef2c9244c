"""Draws top-k and top-p rows by FlashInfer's kernels, and decides which rows of a step may be drawn so.

FlashInfer is optional and imported only where it is used. Its distribution is ours but for ties at the borders of the
filters: it compares values, so it keeps every token that ties with the last one inside top-p, where we keep those of
lowest id. Its noise knows nothing of a request's seed. Hence `eligible`, which looks at one row's own parameters and
never at its batch-mates.

Shape legend: R rows of the step, P of them FlashInfer's, V vocabulary.
"""

import secrets
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backend import check_installed
from gpu_sampler.kernels.temperature import apply_temperature
from gpu_sampler.output import Elsewhere, RowFlag, SampleOutput
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.startup_progress import StartupProgress, timed
from gpu_sampler.state.device_state import DeviceState
from gpu_sampler.state.host_state import SamplingState, SlotFlag

# Below it z / T as float32 rounds away a thousandth of a nat at z = 20. Slots keep temperatures as float32.
MIN_TEMPERATURE: Final = float(np.float32(1e-2))
# A round of its rejection takes one number of the row's sequence, and halves a bracket of float32 values in [0, 1] or
# better: there are some 150 rounds at most.
_NUMBERS_A_CALL: Final = 1024

_WARM_VOCABULARY: Final = 65_536


def eligible(params: SamplingParams, flags: SlotFlag, *, processed: bool) -> bool:
    """Returns whether FlashInfer may draw the row, where it is no position of a speculated run.

    It may not draw greedy rows; rows with an explicit seed; rows that report processed log-probabilities (they need the
    kept set); rows without top-k and top-p; min-p rows (its order of the filters is another); and temperatures below
    0.01. Raw log-probabilities, ranks, bias, penalties, bans and allowed ids do not matter: other kernels serve them,
    before and after.

    Args:
        params: the row's parameters.
        flags: the slot's flags.
        processed: log-probabilities are those after the filters.
    """
    if flags & (SlotFlag.GREEDY | SlotFlag.EXPLICIT_SEED):
        return False
    if processed and flags & SlotFlag.WANTS_LOGPROBS:
        return False
    if params.min_p > 0 or params.temperature < MIN_TEMPERATURE:
        return False
    return params.top_k > 0 or params.top_p < 1


class FlashInferSampler:
    """Draws tokens on one device, for one thread.

    Seed and offset of the noise are device tensors of one element: numbers would be baked into a captured graph, whose
    replays would then repeat their noise. The offset advances on the device with every call, captured or not.
    """

    def __init__(self, device: torch.device, *, seed: int | None = None) -> None:
        """Draws a seed unless one is given, for tests; ValueError as in `check_installed`."""
        self.version = check_installed(device)
        import flashinfer.sampling

        self._lib: Any = flashinfer.sampling
        self.device = device
        drawn = secrets.randbits(63) if seed is None else seed
        self._seed = torch.tensor([drawn], dtype=torch.int64, device=device)
        self._offset = torch.zeros(1, dtype=torch.int64, device=device)

    def sample(self, z_RV: torch.Tensor, top_k_R: torch.Tensor | None, top_p_R: torch.Tensor) -> torch.Tensor:
        """Draws one token a row. The host waits for nothing.

        It takes twice the memory of `z_RV` for a while.

        Args:
            z_RV: f32 contiguous from `apply_temperature`, without NaN and +inf.
            top_k_R: i32, at least 1; None where no row has a top-k, which spares work.
            top_p_R: f32, 1 = off.

        Returns:
            i32 [R]. A row without a finite value gets some token of [0, V), which the caller drops.

        Raises:
            ValueError: a tensor is of a wrong kind.
        """
        self._check(z_RV, top_k_R, top_p_R)
        noise = {"seed": self._seed, "offset": self._offset}
        if top_k_R is None:
            tokens_R = self._lib.top_p_sampling_from_probs(torch.softmax(z_RV, 1), top_p_R, **noise)
        else:
            tokens_R = self._lib.top_k_top_p_sampling_from_logits(
                z_RV, top_k_R, top_p_R, filter_apply_order="top_k_first", **noise
            )
        self._offset += _NUMBERS_A_CALL
        return tokens_R  # type: ignore[no-any-return]

    def warm_up(self, progress: StartupProgress) -> None:
        """Draws by both paths once.

        At first use on a machine FlashInfer compiles its modules, which takes minutes.
        """
        z_RV = torch.zeros((2, _WARM_VOCABULARY), device=self.device)
        top_k_R = torch.full((2,), 2, dtype=torch.int32, device=self.device)
        top_p_R = torch.full((2,), 0.5, device=self.device)
        for top_k, path in ((top_k_R, "top-k and top-p"), (None, "top-p")):
            with timed(f"sampler: FlashInfer {self.version}, {path}", progress):
                self.sample(z_RV, top_k, top_p_R)
                torch.cuda.synchronize(self.device)

    def _check(self, z_RV: torch.Tensor, top_k_R: torch.Tensor | None, top_p_R: torch.Tensor) -> None:
        if z_RV.ndim != 2 or z_RV.dtype != torch.float32 or not z_RV.is_contiguous():
            got = f"{z_RV.dtype} {tuple(z_RV.shape)}{'' if z_RV.is_contiguous() else ', not contiguous'}"
            raise ValueError(f"got z {got}, expected contiguous float32 (R, V)")
        rows = len(z_RV)
        for name, given, dtype in (("top_k", top_k_R, torch.int32), ("top_p", top_p_R, torch.float32)):
            if given is not None and (tuple(given.shape) != (rows,) or given.dtype != dtype):
                raise ValueError(f"got {name} {given.dtype} {tuple(given.shape)}, expected {dtype} ({rows},)")


Branches = tuple[tuple[str, npt.NDArray[np.int64]], ...]


class FlashInferRows:
    """Decides which rows of a step FlashInfer draws, and draws them."""

    def __init__(self, state: SamplingState, device: torch.device, *, processed: bool) -> None:
        self._state = state
        self._device = device
        self._processed = processed
        self._sampler = FlashInferSampler(device)
        self.warm_up = self._sampler.warm_up
        self._eligible = np.zeros(state.num_slots, np.bool_)  # by slot
        self._prepared: Prepared | None = None

    def note(self, slot: int) -> None:
        """Reads what the host's mirror says of a slot that changed."""
        state = self._state
        params = SamplingParams(
            temperature=float(state.temperature[slot]),
            top_k=int(state.top_k[slot]),
            top_p=float(state.top_p[slot]),
            min_p=float(state.min_p[slot]),
        )
        self._eligible[slot] = eligible(params, SlotFlag(int(state.flags[slot])), processed=self._processed)

    def taken(self, slots: npt.NDArray[np.int64], branches: Branches) -> tuple[Elsewhere, Branches] | None:
        """Returns the rows that FlashInfer draws, and the branches with them as one of their own; None if no rows."""
        may = self._eligible[slots]
        rows, at = np.flatnonzero(may), slots[may]
        if not len(rows):
            return None
        left = ((name, members[~may[members]]) for name, members in branches)
        away = Elsewhere(rows.astype(np.int32), self._state.top_k[at], self._state.top_p[at])
        return away, (*((name, members) for name, members in left if len(members)), ("flashinfer", rows))

    def prepare(self, away: Elsewhere, rows: int) -> "Prepared":
        """Returns the rows of a step as FlashInfer takes them; the rows of the last step copy nothing."""
        key = away.key + rows.to_bytes(4, "little")
        if self._prepared is None or self._prepared.key != key:
            flags = np.zeros(rows, np.int32)
            flags[away.rows] = 1
            with_top_k = away.top_k > 0  # a row's call depends on its own top-k alone, and never on its neighbours
            calls = tuple(
                _PreparedCall(has_top_k, *(self._there(part[rows]) for part in away))
                for has_top_k, rows in ((False, ~with_top_k), (True, with_top_k))
                if rows.any()
            )
            self._prepared = Prepared(key, self._there(flags), calls)
        return self._prepared

    def draw(
        self,
        prepared: "Prepared",
        logits_RV: torch.Tensor,
        slots_R: torch.Tensor,
        device_state: DeviceState,
        side_len_R: torch.Tensor,
        out: SampleOutput,
    ) -> None:
        """Writes the tokens of the rows into `out`; rows without a finite value keep INVALID_TOKEN."""
        for call in prepared.calls:
            z = apply_temperature(
                logits_RV,
                call.rows,
                slots_R,
                side_len_R,
                device_state.table,
                device_state.masks,
                device_state.side_ids,
                device_state.side_processed,
            )
            drawn = self._sampler.sample(z, call.top_k_P if call.has_top_k else None, call.top_p_P)
            at = call.rows.to(torch.int64)
            empty = (out.flags[at] & int(RowFlag.NO_TOKEN)) != 0
            out.tokens.index_copy_(0, at, drawn.to(torch.int32).masked_fill(empty, INVALID_TOKEN))

    def _there(self, array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(self._device, non_blocking=True)


class _PreparedCall(NamedTuple):
    has_top_k: bool
    rows: torch.Tensor  # i32 [P]
    top_k_P: torch.Tensor
    top_p_P: torch.Tensor


class Prepared(NamedTuple):
    key: bytes
    flags_R: torch.Tensor  # i32, 1 for a row that is FlashInfer's
    calls: tuple[_PreparedCall, ...]
