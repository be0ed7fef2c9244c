"""Decodes many small rows with speculation, and computes their distribution, which verification is compared with.

The target and the drafter are tables: the logits of the next token by the last one. Shape legend: V vocabulary, N rows,
L tokens of each, K draft steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, ProposalKind, VerifyRules
from tests.support.distribution import enumerate_distribution
from tests.support.statistics import chi_square

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Drafter = Literal["n-gram", "greedy", "sparse", "dense"]
DRAFTERS: tuple[Drafter, ...] = ("n-gram", "greedy", "sparse", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A target, a drafter, and how the target is drawn from."""

    target_VV: Float32s  # [V + 1, V]: by the last token; the last row is the first position's
    drafter_VV: Float32s
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return int(self.target_VV.shape[1])

    def distribution(self, length: int) -> Float64s:
        """[V] * length: the probability of each sequence of the first tokens, by enumeration."""
        distribution = np.ones(())
        for step in range(length):
            shape = (self.vocab_size,) * step
            rows = np.stack([self._next(outputs) for outputs in np.ndindex(*shape)])
            distribution = distribution[..., None] * rows.reshape(*shape, self.vocab_size)
        return distribution

    def _next(self, outputs: tuple[int, ...]) -> Float64s:
        return enumerate_distribution(self.target_VV[outputs[-1] if outputs else -1], self.params, self.prompt, outputs)


def chain(size: int, seed: int, apart: float = 0.7, spread: float = 1.2, **params: Any) -> Chain:
    """A drafter that is off by noise of `apart`."""
    rng = np.random.default_rng([seed, size])
    target = (np.round(rng.normal(0, spread, (size + 1, size)) * 8) / 8).astype(np.float32)
    drafter = (target + rng.normal(0, apart, target.shape)).astype(np.float32)
    params.setdefault("max_tokens", 64)
    return Chain(target_VV=target, drafter_VV=drafter, params=SamplingParams(**params))


class Spoken(NamedTuple):
    """Holds what N rows have said."""

    tokens: Int64s  # [N, L]
    runs: list[tuple[Int64s, Int64s, Int64s]]  # of each verify step: the rows in it, their counts, their tokens [K + 1]

    @property
    def accepted(self) -> float:
        """The mean number of accepted drafts a run."""
        return float(np.concatenate([counts for _, counts, _ in self.runs]).mean() - 1)


Make = Callable[[int, int, LogprobsMode], Sampler]


def reference_sampler(slots: int, vocab_size: int, mode: LogprobsMode = "raw_logprobs") -> Sampler:
    return Sampler(num_slots=slots, vocab_size=vocab_size, logprobs_mode=mode, backend="numpy")


def seeds_of(count: int, start: int) -> list[int]:
    found = np.random.default_rng([start, 31]).integers(0, 2**64, count, np.uint64, endpoint=False)
    return [int(seed) for seed in found]


def speculate(
    chain: Chain,
    *,
    rows: int,
    length: int,
    steps: int,
    drafter: Drafter,
    rules: VerifyRules,
    start: int = 0,
    make: Make = reference_sampler,
) -> Spoken:
    """`rows` rows from seeds that depend on `start` say `length` tokens each, in as many runs of `steps` drafts as that
    takes."""
    sampler = make(rows + 1, chain.vocab_size, "raw_logprobs")
    for slot, seed in enumerate(seeds_of(rows, start), start=1):
        sampler.admit(slot, chain.params, chain.prompt, seed=seed)
    rng = np.random.default_rng([start, 32])
    tokens, done = np.full((rows, length + steps + 1), -1, np.int64), np.zeros(rows, np.int64)
    runs = []
    while len(members := np.flatnonzero(done < length)):
        last = np.where(done[members] > 0, tokens[members, done[members] - 1], chain.vocab_size)
        proposal = propose(sampler, chain, members + 1, last, steps, drafter, rules, rng)
        behind = np.concatenate([last[:, None], proposal.draft_ids], axis=1).astype(np.int64)
        logits = chain.target_VV[behind].reshape(-1, chain.vocab_size)
        output = sampler.fetch(
            sampler.verify(_there(sampler, logits), members + 1, _there_all(sampler, proposal), rules)
        )
        found = output.result()
        for step in range(steps + 1):
            emits = found.counts > step
            tokens[members[emits], done[members[emits]] + step] = found.tokens[emits, step]
        done[members] += found.counts
        runs.append((members, found.counts.astype(np.int64), found.tokens.astype(np.int64)))
    return Spoken(tokens[:, :length], runs)


def propose(
    sampler: Sampler,
    chain: Chain,
    slots: Int64s,
    last: Int64s,
    steps: int,
    drafter: Drafter,
    rules: VerifyRules,
    rng: np.random.Generator,
) -> Proposal:
    """Drafts behind `last` [N], as numpy arrays. `n-gram` drafts tell nothing of the row's own noise."""
    rows, size = len(slots), chain.vocab_size
    ids = np.full((rows, steps), -1, np.int32)
    q_ids = np.full((rows, steps, PROPOSAL_IDS), -1, np.int32)
    q_probs = np.zeros((rows, steps, PROPOSAL_IDS), np.float32)
    q_logits = np.zeros((rows, steps, size), np.float32)
    for step in range(steps):
        z = chain.drafter_VV[last]
        if drafter == "n-gram":
            ids[:, step] = (last + 1) % size
        elif drafter == "dense":
            q_logits[:, step] = z
            heated = z / max(chain.params.temperature, 1e-6) + rng.gumbel(size=z.shape)
            ids[:, step] = heated.argmax(axis=1)
        else:
            method: Any = "greedy" if drafter == "greedy" else "probabilistic"
            drawn = sampler.draft(_there(sampler, z), slots, step, method, rules)
            ids[:, step], q_ids[:, step], q_probs[:, step] = (_here(part) for part in drawn)
        last = ids[:, step].astype(np.int64)
    kinds = {"sparse": ProposalKind.SPARSE, "dense": ProposalKind.DENSE}
    kind = np.full(rows, kinds.get(drafter, ProposalKind.ONE_HOT), np.uint8)
    if drafter == "dense":
        return Proposal(ids, kind, q_logits=q_logits)
    return Proposal(ids, kind, q_ids, q_probs) if drafter == "sparse" else Proposal(ids, kind)


def plain(chain: Chain, *, rows: int, length: int, start: int = 0, make: Make = reference_sampler) -> Int64s:
    """[N, L] the tokens that the same rows say without drafts."""
    sampler = make(rows + 1, chain.vocab_size, "raw_logprobs")
    for slot, seed in enumerate(seeds_of(rows, start), start=1):
        sampler.admit(slot, chain.params, chain.prompt, seed=seed)
    tokens = np.full((rows, length + 1), chain.vocab_size, np.int64)
    for step in range(length):
        logits = _there(sampler, chain.target_VV[tokens[:, step - 1]])
        tokens[:, step] = sampler.fetch(sampler.sample(logits, range(1, rows + 1))).result().tokens
    return tokens[:, :length]


class DistributionCheck(NamedTuple):
    """p-values of what was said against the enumerated distribution."""

    joint: float  # of all L tokens
    marginals: tuple[float, ...]  # of each token
    pairs: tuple[float, ...]  # of neighbours
    bonus: float  # of the token behind a fully accepted first run, given those before it

    @property
    def least(self) -> float:
        return min(self.joint, *self.marginals, *self.pairs, self.bonus)


def check_distribution(chain: Chain, spoken: Spoken) -> DistributionCheck:
    """Chi-square tests of the joint distribution, of every marginal, of neighbouring pairs and of the bonus token."""
    length = spoken.tokens.shape[1]
    distribution = chain.distribution(length)
    marginals = tuple(_against(spoken.tokens[:, [at]], distribution, (at,)) for at in range(length))
    pairs = tuple(_against(spoken.tokens[:, at : at + 2], distribution, (at, at + 1)) for at in range(length - 1))
    return DistributionCheck(
        _against(spoken.tokens, distribution, tuple(range(length))), marginals, pairs, _bonus(chain, spoken)
    )


def _against(tokens: Int64s, distribution: Float64s, axes: tuple[int, ...]) -> float:
    others = tuple(axis for axis in range(distribution.ndim) if axis not in axes)
    distribution = distribution.sum(axis=others)
    if (tokens < 0).any() or (tokens >= distribution.shape[0]).any():
        return 0.0
    counts = np.zeros(distribution.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    return chi_square(counts, distribution).p_value


def _bonus(chain: Chain, spoken: Spoken) -> float:
    """Over all fully accepted first runs, the last token given those before it: bins are (before, token), with
    the number of each `before` as it was found."""
    _, counts, tokens = spoken.runs[0]
    full = tokens[counts == tokens.shape[1]]
    if not len(full):
        return 1.0
    distribution = chain.distribution(tokens.shape[1])
    given = distribution / np.maximum(distribution.sum(axis=-1, keepdims=True), 1e-300)
    before, found = np.zeros(distribution.shape[:-1]), np.zeros(distribution.shape)
    np.add.at(before, tuple(full[:, :-1].T), 1)
    np.add.at(found, tuple(full.T), 1)
    return chi_square(found, given * before[..., None] / len(full)).p_value


def with_params(chain: Chain, **changes: Any) -> Chain:
    return replace(chain, params=replace(chain.params, **changes))


def _there(sampler: Sampler, array: Any) -> Any:
    """Converts it to the sampler's form; a copy, which is the sampler's from then on."""
    return torch.tensor(array).to(sampler.device)


def _there_all(sampler: Sampler, proposal: Proposal) -> Proposal:
    return Proposal(*(None if part is None else _there(sampler, part) for part in proposal))


def _here(part: Any) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = part.cpu().numpy() if isinstance(part, torch.Tensor) else np.asarray(part)
    return found
