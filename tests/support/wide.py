"""Makes rows whose nucleus is wider than a list, with masks and side lists, as `sample` leaves them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.kernels.logits_processors import apply_logits_processors
from gpu_sampler.kernels.sample import sample
from gpu_sampler.kernels.softmax_stats import softmax_stats
from gpu_sampler.output import OutputWords
from gpu_sampler.reference.filters import clean
from gpu_sampler.reference.logits_processors import apply_logits_processors as processed_by_reference
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.workspace import LogitRows
from tests.support.edges import LIMITS, values

KINDS = ("almost flat", "flat", "zeros", "tied", "almost flat", "flat")
ROWS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.75, "temperature": 0.7},
    {"top_p": 0.9, "side": True},
    {"top_p": 0.97, "side": True, "mask": True},
    {"top_p": 0.9, "mask": True, "temperature": 1.7},
    {"top_k": 5},  # nothing to judge
)


class WideRows(NamedTuple):
    sampler: Sampler  # row r is of slot r + 1
    rows: LogitRows  # logits as `apply_logits_processors` leaves them
    whole_RV: npt.NDArray[np.float32]  # what is drawn from, by the reference


def admitted(size: int, device: str, rng: np.random.Generator) -> Sampler:
    sampler = Sampler(num_slots=7, vocab_size=size, device=device, backend="triton", limits=LIMITS)
    for slot, given in enumerate(ROWS, start=1):
        asked = dict(given)
        if asked.pop("side", False):
            chosen = rng.choice(size, 30, replace=False).tolist()
            asked["logit_bias"] = tuple((token, float(token % 3) / 4) for token in chosen)
        if asked.pop("mask", False):
            asked["allowed_token_ids"] = tuple(np.flatnonzero(rng.random(size) < 0.8).tolist())
        sampler.admit(slot, SamplingParams(logprobs=1, **asked), [], seed=slot)
    return sampler


def wide_rows(device: str, size: int, dtype: torch.dtype) -> WideRows:
    """Behind `sample`, which has made draws of all rows but the last for `nucleus_rejection`."""
    rng = np.random.default_rng(size)
    sampler = admitted(size, device, rng)
    drawn = torch.from_numpy(np.stack([values(kind, size, rng) for kind in KINDS])).to(dtype)
    raw = clean(drawn.float().numpy())[0]
    whole = np.stack([processed_by_reference(row, sampler.state, slot) for slot, row in enumerate(raw, start=1)])
    on_device: Any = sampler._triton
    on_device.apply()
    device_state, work = on_device.device_state, on_device.reserve(6)
    logits, slots = drawn.to(device), torch.arange(1, 7, dtype=torch.int32, device=device)
    apply_logits_processors(logits, device_state, slots, work.side_len, work.side_bad)
    rows = LogitRows(logits, slots, device_state, work, side=True, processed=True)
    softmax_stats(rows, masked=True)
    out = OutputWords.empty(6, 1, 0, torch.device(device)).split()
    sample(rows, out)
    return WideRows(sampler, rows, whole)
