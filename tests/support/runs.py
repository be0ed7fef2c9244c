"""Enumerates the distribution of one verified run without sampling error: every draft string, every way to accept,
every token behind it.

The rules' own functions decide; a uniform number enters as the two sides of its threshold with their probabilities.
Shape legend: V vocabulary, K draft steps.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference import rejection_sample
from gpu_sampler.reference.rejection_sample import residual

Float64s = npt.NDArray[np.float64]
Residual = Callable[[Float64s, Float64s, float], Float64s]


class Trees(NamedTuple):
    """Next-token distributions by what stands before: `p[i]` and `q[i]` are [V] * (i + 1), i the tokens before."""

    p: list[Float64s]  # K + 1 of them
    q: list[Float64s]  # K of them

    @property
    def steps(self) -> int:
        return len(self.q)

    @property
    def size(self) -> int:
        return int(self.p[0].shape[-1])

    def distribution(self) -> Float64s:
        """[V] * (K + 1): the target's own distribution."""
        distribution = self.p[0]
        for rows in self.p[1:]:
            distribution = distribution[..., None] * rows
        return distribution


class Faults(NamedTuple):
    """Holds what a faulty verifier does otherwise."""

    residual: Residual = residual
    ratios: Callable[[Float64s, Float64s], Float64s] = rejection_sample.ratios
    bonus_row: int = 0  # how far from its own row the bonus token is drawn


RIGHT = Faults()


class RunDistribution(NamedTuple):
    distribution: Float64s  # [V] * (K + 1): the run, and the target's own tokens behind it
    accepted: float  # the mean number of accepted drafts


def run_distribution(trees: Trees, rule: str, faults: Faults = RIGHT) -> RunDistribution:
    """By `standard` or `block`."""
    distribution, mean = np.zeros((trees.size,) * (trees.steps + 1)), 0.0
    for drafts in itertools.product(range(trees.size), repeat=trees.steps):
        p_kV = [trees.p[i][drafts[:i]] for i in range(trees.steps + 1)]
        q_kV = [trees.q[i][drafts[:i]] for i in range(trees.steps)]
        chance = float(np.prod([q_V[d] for q_V, d in zip(q_kV, drafts, strict=True)]))
        if chance == 0:
            continue
        for accepted, weight, share in _stops(p_kV, q_kV, drafts, rule, faults):
            mean += chance * share * accepted
            if accepted < trees.steps:
                last_V = faults.residual(p_kV[accepted], q_kV[accepted], weight)
                last_V = last_V if last_V.sum() > 0 else p_kV[accepted]
            else:
                last_V = p_kV[accepted + faults.bonus_row]
            _add(distribution, trees, drafts[:accepted], chance * share * last_V / last_V.sum())
    return RunDistribution(distribution, mean)


def _stops(
    p_kV: list[Float64s], q_kV: list[Float64s], drafts: tuple[int, ...], rule: str, faults: Faults
) -> Iterator[tuple[int, float, float]]:
    """(accepted, P, probability) of each outcome of the uniform numbers."""
    p_k, q_k = (np.array([x[d] for x, d in zip(rows, drafts, strict=False)]) for rows in (p_kV, q_kV))
    ratios_k = faults.ratios(p_k, q_k)
    if rule == "standard":
        chances_k, weights = np.minimum(1, ratios_k), np.ones(len(drafts) + 1)
    else:
        weights = rejection_sample.block_weights(ratios_k)
        masses = [residual(p_kV[i], q_kV[i], weights[i]).sum() for i in range(1, len(drafts))]
        chances_k = rejection_sample.block_chances(weights, np.array(masses))
    for below in itertools.product((True, False), repeat=len(drafts)):
        share = float(np.prod(np.where(below, chances_k, 1 - chances_k)))
        if share > 0:
            u_k = np.where(below, chances_k / 2, (1 + chances_k) / 2)
            decide = (
                rejection_sample.standard(ratios_k, u_k)
                if rule == "standard"
                else rejection_sample.block(chances_k, u_k)
            )
            yield decide, float(weights[decide]), share


def _add(distribution: Float64s, trees: Trees, accepted: tuple[int, ...], last_V: Float64s) -> None:
    """The run's probability, shared out over what the target says behind it."""
    found = last_V
    for step in range(len(accepted) + 1, trees.steps + 1):
        found = found[..., None] * trees.p[step][accepted]
    distribution[accepted] += found


def random_trees(size: int, steps: int, kind: str, seed: int) -> Trees:
    """Trees of `one-hot`, `sparse` or `dense` proposals, of q equal to p (`equal`), of q where p is 0 (`apart`) and of
    target and drafter with zeros of their own (`zeros`)."""
    rng = np.random.default_rng([seed, size, steps])
    p = [_rows(rng, size, i, 0.3 if kind == "zeros" else 0.0) for i in range(steps + 1)]
    if kind == "equal":
        return Trees(p, [rows.copy() for rows in p[:-1]])
    q = [_rows(rng, size, i, {"sparse": 0.5, "zeros": 0.3}.get(kind, 0.0)) for i in range(steps)]
    if kind == "one-hot":
        q = [(rows == rows.max(axis=-1, keepdims=True)).astype(np.float64) for rows in q]
    if kind == "apart":
        low = np.arange(size) < size // 2
        p = [_normal(np.where(low, 0.0, rows)) for rows in p]
        q = [_normal(np.where(low, rows, 0.0)) for rows in q]
    return Trees(p, q)


def _rows(rng: np.random.Generator, size: int, before: int, zeros: float) -> Float64s:
    """[V] * (before + 1); at least one token of each row has weight."""
    rows = rng.gamma(0.7, size=(size,) * (before + 1)) + 1e-3
    dropped = rng.random(rows.shape) < zeros
    dropped &= rows < rows.max(axis=-1, keepdims=True)
    return _normal(np.where(dropped, 0.0, rows))


def _normal(rows: Float64s) -> Float64s:
    found: Float64s = rows / rows.sum(axis=-1, keepdims=True)
    return found
