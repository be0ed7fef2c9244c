"""Makes rows on which kernels go wrong first: one for each edge of the values, of each filter and of each route.

Shape legend: R rows, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams
from tests.support.invariance import RowCase, admit

LIMITS = SamplingLimits(max_logprobs=256, max_allowed_token_ids=1 << 20)
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A row by the kind of its values (see `values`), and numbers of its slot that no request may ask for."""

    kind: str
    params: Mapping[str, Any]
    numbers: Mapping[str, float] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()  # as `logprob_token_ids`, but any integers


def values(kind: str, size: int, rng: np.random.Generator) -> Float32s:
    """[V]. All are exact in bfloat16, but for `smooth` and `almost flat`."""
    coarse = (rng.normal(0, 1.5, size) * 4).round() / 4
    found = {
        "smooth": rng.normal(0, 1.5, size),
        "almost flat": rng.normal(0, 0.05, size),
        "tied": (rng.normal(0, 0.6, size) * 2).round() / 2,
        "coarse": coarse,
        "flat": np.full(size, -1.25),
        "steep": coarse * 8,
        "huge": coarse * 2.0**124,
    }.get(kind, coarse).astype(np.float32)
    place = int(rng.integers(size))
    if kind == "blocks":
        found[np.arange(size) // 128 % 2 == 0] = -np.inf
        found[-1] = 0
    elif kind in ("one", "none"):
        found[:] = -np.inf
        found[place : place + (kind == "one")] = -3
    elif kind in ("nan", "inf"):
        found[place] = {"nan": np.nan, "inf": np.inf}[kind]
    elif kind == "bad":
        found[rng.random(size) < 0.4] = np.nan
        found[rng.random(size) < 0.2] = np.inf
        found[rng.random(size) < 0.2] = -np.inf
    elif kind == "all bad":
        found[:] = np.where(rng.random(size) < 0.5, np.nan, np.inf)
    elif kind == "zeros":
        found[:] = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    return found


def edges(size: int) -> dict[str, Edge]:
    """By name, for a vocabulary of `size`."""
    every_third, few = tuple(range(0, size, 3)), tuple(range(min(size, 9)))
    bias = tuple((token, (100.0, -100.0, 0.5)[token % 3]) for token in few)
    counted = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4}
    bans = {"bad_words_ids": ((size - 1,), (1 % size, 2 % size)), "stop_token_ids": few[:3], "min_tokens": 9}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "greedy, all equal": ("flat", {"temperature": 0, "logprobs": 3}),
        "greedy, ties at the top": ("tied", {"temperature": 0, "logprobs": 20}),
        "greedy, bad values": ("bad", {"temperature": 0, "logprobs": 2}),
        "greedy, overlay and mask": (
            "coarse",
            {"temperature": 0, "logit_bias": bias, "allowed_token_ids": every_third, "logprobs": 4},
        ),
        "greedy, nothing asked": ("smooth", {"temperature": 0}),
        "plain, all equal": ("flat", {"logprobs": 256}),
        "plain, both zeros": ("zeros", {"logprobs": 2}),
        "plain, -inf blocks": ("blocks", {"logprobs": 1}),
        "plain, one finite token": ("one", {"logprobs": 5}),
        "plain, none": ("none", {"logprobs": 5, "logprob_token_ids": (0,)}),
        "plain, NaN": ("nan", {"logprobs": 3, "temperature": 0.7}),
        "plain, +inf": ("inf", {"logprobs": 3}),
        "plain, bad values": ("bad", {"logprobs": 3, "temperature": 1.7}),
        "plain, bad values and mask": ("bad", {"logprobs": 3, "allowed_token_ids": every_third}),
        "plain, nothing good": ("all bad", {"logprobs": 3}),
        "plain, hottest": ("smooth", {"temperature": 2.0, "logprobs": 0}),
        "plain, coldest, ties": ("tied", {"temperature": 1e-5, "logprobs": 2}),
        "plain, steep": ("steep", {"logprobs": 20}),
        "plain, huge": ("huge", {"logprobs": 3}),
        "plain, bias of 100": ("smooth", {"logit_bias": bias, "logprobs": 12}),
        "plain, penalties on unseen ids": ("smooth", {**counted, "logprobs": 2}),
        "plain, mask": ("smooth", {"allowed_token_ids": every_third, "logprobs": 2, "temperature": 0.3}),
        "plain, nothing asked": ("smooth", {}),
        "top-k 1, ties": ("tied", {"top_k": 1, "logprobs": 1}),
        "top-k 64, ties": ("tied", {"top_k": 64, "logprobs": 20}),
        "top-k 256, all equal": ("flat", {"top_k": 256, "logprobs": 3}),
        "top-k 257, ties": ("tied", {"top_k": 257, "logprobs": 3}),
        "top-k 300 and top-p": ("almost flat", {"top_k": 300, "top_p": 0.9, "min_p": 0.1, "logprobs": 5}),
        "top-k of all": ("tied", {"top_k": size, "logprobs": 3}),
        "top-k of more than all": ("smooth", {"top_k": size + 1, "logprobs": 3, "temperature": 0.7}),
        "top-k and all others": (
            "coarse",
            {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3, "logit_bias": bias, **counted, **bans},
        ),
        "top-k, bad values": ("bad", {"top_k": 7, "logprobs": 9}),
        "top-p 1e-9": ("flat", {"top_p": 1e-9, "logprobs": 2}),
        "top-p almost 1": ("smooth", {"top_p": 1 - 2**-24, "logprobs": 2}),
        "top-p, all equal": ("flat", {"top_p": 0.75, "logprobs": 3}),
        "top-p, ties": ("tied", {"top_p": 0.5, "logprobs": 3, "temperature": 0.5}),
        "top-p, few": ("steep", {"top_p": 0.9, "logprobs": 3}),
        "top-p, coldest": ("coarse", {"top_p": 0.9, "temperature": 1e-5}),
        "top-p, one finite token": ("one", {"top_p": 0.9, "logprobs": 3}),
        "top-p, wide": ("almost flat", {"top_p": 0.95, "temperature": 1.7, "logprobs": 5}),
        "top-p, mask and overlay": (
            "almost flat",
            {"top_p": 0.9, "allowed_token_ids": every_third, "logit_bias": bias, "logprobs": 5},
        ),
        "top-p, wide, overlay": ("almost flat", {"top_p": 0.9, "logprobs": 2, **counted, **bans}),
        "top-p, bad values": ("bad", {"top_p": 0.9, "temperature": 2.0, "logprobs": 3}),
        "min-p 1, all equal": ("flat", {"min_p": 1.0, "logprobs": 2}),
        "min-p 1, ties": ("tied", {"min_p": 1.0, "logprobs": 2}),
        "min-p, wide": ("almost flat", {"min_p": 0.5, "logprobs": 2, "temperature": 0.3}),
        "min-p and top-p, wide": ("almost flat", {"min_p": 0.85, "top_p": 0.97, "logprobs": 2}),
    }
    named = {name: Edge(kind=kind, params=params) for name, (kind, params) in found.items()}
    hot, ids = {"temperature": 100.0}, (0, size - 1, 0, -1, size, 2**31 - 1, -(2**31))
    named["plain, T = 100"] = Edge(kind="smooth", params={"logprobs": 2}, numbers=hot)
    named["top-p, T = 100"] = Edge(kind="steep", params={"top_p": 0.9, "logprobs": 2}, numbers=hot)
    named["chosen ids out of range"] = Edge(kind="coarse", params={"logprob_token_ids": (0,)}, chosen=ids)
    named["chosen ids, overlay and mask"] = Edge(
        kind="coarse",
        params={"logprob_token_ids": (0,), "logit_bias": bias, "allowed_token_ids": every_third, "top_p": 0.9},
        chosen=ids,
    )
    return named


def edge_case(edge: Edge, size: int, seed: int) -> RowCase:
    """The row, somewhere in the life of a request with a prompt and a few tokens behind it."""
    rng = np.random.default_rng([seed, size])
    prompt, outputs = (tuple(rng.integers(0, size, count).tolist()) for count in (3, int(rng.integers(0, 5))))
    return RowCase(
        params=SamplingParams(**{"max_tokens": 16, **edge.params}),
        prompt=prompt,
        outputs=outputs,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        branch=int(rng.integers(0, 3)),
        logits_SV=values(edge.kind, size, rng)[None],
    )


def admit_edge(sampler: Sampler, slot: int, edge: Edge, case: RowCase) -> None:
    admit(sampler, slot, case)
    for name, number in edge.numbers.items():
        getattr(sampler.state, name)[slot] = number
    if edge.chosen:
        sampler.state.n_chosen[slot] = len(edge.chosen)
        sampler.state.chosen_ids[slot, : len(edge.chosen)] = edge.chosen


def pair_of_samplers(
    slots: int, size: int, device: str, mode: LogprobsMode, entries: int = 1 << 16
) -> tuple[Sampler, Sampler]:
    """(the kernels', the reference)."""
    common: dict[str, Any] = {
        "num_slots": slots,
        "vocab_size": size,
        "logprobs_mode": mode,
        "limits": LIMITS,
        "overlay_entries": entries,
    }
    return Sampler(device=device, backend="triton", **common), Sampler(device="cpu", backend="numpy", **common)


def as_given(rows_RV: Float32s, dtype: torch.dtype, device: str) -> Iterator[torch.Tensor]:
    """The rows as `dtype` on the device: dense, then as every second row of a buffer whose others are NaN."""
    dense = torch.from_numpy(rows_RV).to(dtype)
    yield dense.to(device)
    yield torch.stack([dense, torch.full_like(dense, torch.nan)], 1).flatten(0, 1).to(device)[::2]
