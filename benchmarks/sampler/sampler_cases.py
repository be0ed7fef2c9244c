"""Defines the sampler's benchmark cases: logits, parameters and target times.

`flat`: standard normal noise; at temperature 0.8, top-p 0.9 keeps about half of the vocabulary. `peaked`: the same,
with 48 tokens a row raised to between 14.4 and 19.2, so that top-p 0.9 keeps some of these alone, fewer than 64.
Shape legend: R rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from gpu_sampler.sampling_params import SamplingParams

TEMPERATURE = 0.8
TOP_K, TOP_P = 50, 0.9
ROWS = (1, 8, 32, 64, 256, 1024)
TARGET_ROWS = (1, 32, 256, 1024)
HIGH_TOKENS = 48
N_TOP = 20
SEEN = 250  # tokens in the prompt, and as many generated
Shape = Literal["peaked", "flat"]
_WHICH_TOKENS = 10_007  # prime: strides of ids that differ from row to row


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCase:
    """Defines one row of the table. `targets_us` are for 1, 32, 256 and 1,024 rows of 151,936 bf16 logits."""

    name: str
    kind: Literal["sample", "given"] = "sample"  # given: log-probabilities of given logits
    shapes: tuple[Shape, ...] = ("peaked",)
    options: Callable[[int, int], dict[str, Any]]
    """(row, V) -> fields of SamplingParams."""
    history: bool = False  # the row has seen 2 x SEEN tokens
    targets_us: dict[Shape, tuple[float, ...]]
    peers: str = ""  # key into peers.PEERS

    def target(self, shape: Shape, rows: int, vocab_size: int, dtype: torch.dtype) -> float | None:
        targets = self.targets_us.get(shape)
        if targets is None or rows not in TARGET_ROWS or (vocab_size, dtype) != (151_936, torch.bfloat16):
            return None
        return targets[TARGET_ROWS.index(rows)]

    def params(self, row: int, vocab_size: int) -> SamplingParams:
        return SamplingParams(**self.options(row, vocab_size))

    def prompt(self, row: int, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return ids(row, SEEN, vocab_size, 1) if self.history else np.array([row % vocab_size], np.int32)

    def emitted(self, row: int, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return ids(row, SEEN, vocab_size, 2) if self.history else np.zeros(0, np.int32)


def ids(row: int, count: int, vocab_size: int, salt: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns i32 [count] distinct ids, different for every row and salt."""
    start = (row * 613 + salt * 7919) % vocab_size
    step = _WHICH_TOKENS if vocab_size % _WHICH_TOKENS else 1
    return ((start + step * np.arange(min(count, vocab_size), dtype=np.int64)) % vocab_size).astype(np.int32)


def fill(logits_RV: torch.Tensor, shape: Shape, seed: int) -> None:
    """Draws logits of any float type in place; NaN and infinities do not occur."""
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    for first in range(0, len(logits_RV), 64):  # float32 of a part at a time
        part_RV = logits_RV[first : first + 64]
        noise_RV = torch.randn((len(part_RV), vocab_size), generator=generator, device=device)
        if shape == "peaked":
            count = min(HIGH_TOKENS, vocab_size)
            at = torch.randint(vocab_size, (len(part_RV), count), generator=generator, device=device)
            above = torch.rand((len(part_RV), count), generator=generator, device=device)
            noise_RV.scatter_(1, at, TEMPERATURE * (18 + 6 * above))
        part_RV.copy_(noise_RV)


def nucleus_size(logits_RV: torch.Tensor, temperature: float = TEMPERATURE, top_p: float = TOP_P) -> int:
    """Returns how many tokens top-p alone keeps: the median of up to 8 rows."""
    probs_RV = torch.softmax(logits_RV[:8].float() / temperature, 1).sort(1, descending=True).values
    before_RV = probs_RV.cumsum(1) - probs_RV
    return int((before_RV < top_p).sum(1).median())


def _sampled(**options: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda row, vocab_size: {"temperature": TEMPERATURE, **options}


def _chosen(row: int, vocab_size: int) -> dict[str, Any]:
    return {"temperature": TEMPERATURE, "logprob_token_ids": tuple(ids(row, 8, vocab_size, 3).tolist())}


def _everything(row: int, vocab_size: int) -> dict[str, Any]:
    bias = tuple((token, 0.5) for token in ids(row, 4, vocab_size, 4).tolist())
    filters = {"top_k": TOP_K, "top_p": TOP_P, "min_p": 0.01, "logit_bias": bias, "logprobs": N_TOP, "max_tokens": 512}
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
    return {**_chosen(row, vocab_size), **filters, **penalties}


_BOTH: tuple[Shape, ...] = ("peaked", "flat")
_FILTERS: dict[str, Any] = {"top_k": TOP_K, "top_p": TOP_P}
_K_P, _P_PEAKED, _P_FLAT = (20, 25, 55, 170), (20, 25, 60, 190), (30, 45, 130, 420)
CASES: tuple[SamplerCase, ...] = (
    SamplerCase(name="greedy", options=lambda row, vocab_size: {"temperature": 0.0}, targets_us={}, peers="greedy"),
    SamplerCase(
        name="temp",
        shapes=_BOTH,
        options=_sampled(logprobs=0),
        targets_us={"peaked": (12, 16, 40, 120), "flat": (12, 16, 40, 120)},
        peers="temp",
    ),
    SamplerCase(name="topk50_topp.9", shapes=_BOTH, options=_sampled(**_FILTERS), targets_us={}, peers="topk_topp"),
    SamplerCase(
        name="topk50_topp.9+20",
        shapes=_BOTH,
        options=_sampled(**_FILTERS, logprobs=N_TOP),
        targets_us={"peaked": _K_P, "flat": _K_P},
    ),
    SamplerCase(
        name="topp.9",
        shapes=_BOTH,
        options=_sampled(top_p=TOP_P),
        targets_us={"peaked": _P_PEAKED, "flat": _P_FLAT},
        peers="topp",
    ),
    SamplerCase(
        name="topp.9+20",
        shapes=_BOTH,
        options=_sampled(top_p=TOP_P, logprobs=N_TOP),
        targets_us={"peaked": _P_PEAKED, "flat": _P_FLAT},
    ),
    SamplerCase(name="all", options=_everything, history=True, targets_us={"peaked": (30, 40, 80, 260)}),
    SamplerCase(
        name="logprobs20",
        kind="given",
        options=_sampled(),
        targets_us={"peaked": (18, 22, 50, 150)},
        peers="logprobs",
    ),
    SamplerCase(name="token_ids8", options=_chosen, targets_us={}, peers="token_ids"),
)
