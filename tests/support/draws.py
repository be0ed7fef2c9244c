"""Makes many draws by the reference or the kernels, and compares them with their distribution.

Shape legend: R rows, V vocabulary, S steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.backend import Backend
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from tests.support.distribution import enumerate_distribution
from tests.support.statistics import (
    ChiSquare,
    chi_square,
    mean_surprise,
    probability_transform,
    total_variation,
    total_variation_bound,
)

Int64s = npt.NDArray[np.int64]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
ROWS_AT_ONCE = 2048
MASKED_ROWS_AT_ONCE = 256  # a state has room for as many allow masks, unless it is asked for more
BINS = 32
DISTRIBUTION_ALPHA = 1e-4 / 512
"""Rejection threshold of one test: there are fewer than 512 statistical tests in the suite. Seeds are fixed, so that
this is the probability that a correct sampler had to be given another seed when the test was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawCase:
    """One next-token distribution: logits, parameters and the tokens before."""

    logits_V: npt.NDArray[np.float32]
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def distribution(self) -> npt.NDArray[np.float64]:
        return enumerate_distribution(self.logits_V, self.params, self.prompt, self.outputs)

    def with_params(self, **changes: Any) -> "LawCase":
        return replace(self, params=replace(self.params, **changes))


class DrawRow(NamedTuple):
    case: LawCase
    seed: int
    branch: int = 0


Draws = Callable[[Sequence[DrawRow], int], Int64s]
"""(rows, steps) -> [R, S] tokens of consecutive positions; the logits stay the same."""


def rows_of(case: LawCase, count: int, start: int = 0) -> list[DrawRow]:
    """`count` rows of one case with seeds that fill all 64 bits and depend on `start` only."""
    seeds = np.random.default_rng([start, 7]).integers(0, 2**64, count, np.uint64, endpoint=False)
    return [DrawRow(case, int(seed)) for seed in seeds]


def logits_of(rows: Sequence[DrawRow], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[R, V] on the CPU."""
    return torch.from_numpy(np.stack([row.case.logits_V for row in rows])).to(dtype)


class Reported(NamedTuple):
    """Holds what the reference said of R rows; arrays with no columns where nothing was asked for."""

    tokens: npt.NDArray[np.int32]  # [R]
    logprobs: npt.NDArray[np.float32]  # [R]
    ranks: npt.NDArray[np.int32]  # [R]
    top_ids: npt.NDArray[np.int32]  # [R, N]
    top_logprobs: npt.NDArray[np.float32]  # [R, N]
    chosen_logprobs: npt.NDArray[np.float32]  # [R, C]
    flags: npt.NDArray[np.uint32]  # [R]


def _blocks(rows: Sequence[DrawRow]) -> Iterator[Sequence[DrawRow]]:
    """Cuts the rows into batches of as many as one sampler takes."""
    masked = any(row.case.params.allowed_token_ids is not None for row in rows)
    size = MASKED_ROWS_AT_ONCE if masked else ROWS_AT_ONCE
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def reference_reports(
    rows: Sequence[DrawRow], mode: LogprobsMode = "raw_logprobs", dtype: torch.dtype = torch.float32
) -> Reported:
    """One step of the reference sampler."""
    blocks = []
    for block in _blocks(rows):
        sampler, slots = _admit(block, mode)
        output = sampler.sample(logits_of(block, dtype), slots)
        blocks.append([np.empty((len(block), 0)) if part is None else np.asarray(part) for part in output])
    return Reported(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))


def reference_draws(rows: Sequence[DrawRow], steps: int = 1) -> Int64s:
    """[R, S] tokens from the reference sampler."""
    blocks = []
    for block in _blocks(rows):
        sampler, slots = _admit(block, "raw_logprobs")
        logits = logits_of(block)
        blocks.append(np.stack([np.asarray(sampler.sample(logits, slots).tokens, np.int64) for _ in range(steps)], 1))
    return np.concatenate(blocks)


def _admit(
    rows: Sequence[DrawRow], mode: LogprobsMode, device: str = "cpu", backend: Backend = "numpy"
) -> tuple[Sampler, Int64s]:
    vocab_size = len(rows[0].case.logits_V)
    sampler = Sampler(
        num_slots=len(rows) + 1, vocab_size=vocab_size, device=device, logprobs_mode=mode, backend=backend
    )
    for slot, row in enumerate(rows, start=1):
        prompt = np.array(row.case.prompt, np.int32)
        outputs = np.array(row.case.outputs, np.int32)
        sampler.admit(slot, row.case.params, prompt, seed=row.seed, branch=row.branch, output_ids=outputs)
    return sampler, np.arange(1, len(rows) + 1)


def kernel_draws(rows: Sequence[DrawRow], steps: int = 1, device: str | None = None) -> Int64s:
    """[R, S] tokens from the kernels, compiled or (without a GPU, where TRITON_INTERPRET is set) interpreted."""
    there = device or ("cuda" if torch.cuda.is_available() else "cpu")
    blocks = []
    for block in _blocks(rows):
        sampler, slots = _admit(block, "raw_logprobs", there, "triton")
        logits = logits_of(block).to(there)
        drawn = [sampler.sample(logits.clone(), slots).tokens for _ in range(steps)]
        blocks.append(torch.stack(drawn, 1).cpu().numpy().astype(np.int64))
    return np.concatenate(blocks)


def against_distribution(case: LawCase, tokens: Int64s) -> ChiSquare:
    """Chi-square of draws from one case against its enumerated distribution."""
    probs_V = case.distribution()
    if (tokens < 0).any() or (tokens >= len(probs_V)).any():
        return ChiSquare(float("inf"), 1, 0.0)
    return chi_square(np.bincount(tokens.ravel(), minlength=len(probs_V)), probs_V)


def against_joint_distribution(first: LawCase, second: LawCase, tokens_R2: Int64s) -> ChiSquare:
    """Chi-square of pairs against the product of two distributions: both marginals and their independence."""
    joint_VV = np.outer(first.distribution(), second.distribution())
    counts_VV = np.zeros_like(joint_VV)
    np.add.at(counts_VV, (tokens_R2[:, 0], tokens_R2[:, 1]), 1)
    return chi_square(counts_VV, joint_VV)


DRAWS = 4096


class Check(NamedTuple):
    p_value: float  # the least of three tests
    distance: float  # total variation over its bound, at most 1 for a right sampler


def check(case: LawCase, draws: Draws, start: int = 0, count: int = DRAWS) -> Check:
    """`count` draws of one case against its distribution: chi-square by token, chi-square by quantile of the
    distribution, and the mean of the log-probability, which is what a wrong temperature moves most."""
    tokens_R = draws(rows_of(case, count, start), 1)[:, 0]
    probs_V = case.distribution()
    by_token = against_distribution(case, tokens_R).p_value
    if by_token == 0:
        return Check(0.0, float("inf"))
    jitter = np.random.default_rng(start).random(count)
    places = probability_transform(tokens_R, np.broadcast_to(probs_V, (count, len(probs_V))), jitter)
    by_quantile = chi_square(np.histogram(places, BINS, (0, 1))[0], np.full(BINS, 1 / BINS)).p_value
    counts_V = np.bincount(tokens_R, minlength=len(probs_V))
    distance = total_variation(counts_V, probs_V) / total_variation_bound(probs_V, count, DISTRIBUTION_ALPHA)
    return Check(min(by_token, by_quantile, mean_surprise(counts_V, probs_V)), distance)
