"""Twin of `accept`: how many drafts of a run are accepted, by each rule, from probabilities in float64.

Shape legend: k drafts of one run, V vocabulary. p_k are the target's probabilities of the drafts, q_k the drafter's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.proposal import Proposal, ProposalKind
from gpu_sampler.reference.order import clean
from gpu_sampler.reference.philox import Purpose, uniform, words
from gpu_sampler.reference.row_stats import Float64s


class Run(NamedTuple):
    """One request's drafts, up to the first negative id."""

    drafts: tuple[int, ...]  # k
    kind: ProposalKind
    q_ids: npt.NDArray[np.int64] | None  # [k, N]
    q_probs: Float64s | None  # [k, N]
    q_logits: npt.NDArray[np.float32] | None  # [k, V]

    def q(self, step: int, vocab_size: int, temperature: float) -> Float64s:
        """[V]: what draft `step` was drawn from. Ids that the vocabulary does not have are left out."""
        q_V = np.zeros(vocab_size)
        if self.kind is ProposalKind.DENSE and self.q_logits is not None:
            z_V = clean(self.q_logits[step : step + 1])[0][0].astype(np.float64)
            if z_V.max() > -np.inf:
                q_V = np.exp((z_V - z_V.max()) / temperature)
                q_V /= q_V.sum()
        elif self.kind is ProposalKind.SPARSE and self.q_ids is not None and self.q_probs is not None:
            inside = (self.q_ids[step] >= 0) & (self.q_ids[step] < vocab_size)
            np.add.at(q_V, self.q_ids[step][inside], self.q_probs[step][inside])
        elif self.kind is ProposalKind.ONE_HOT and self.drafts[step] < vocab_size:
            q_V[self.drafts[step]] = 1.0
        return q_V


def run_of(proposal: Proposal, request: int) -> Run:
    """`proposal` is of numpy arrays."""
    kind = ProposalKind(int(proposal.kind[request]))
    ids = proposal.draft_ids[request].tolist()
    length = next((step for step, token in enumerate(ids) if token < 0), len(ids))
    length = 0 if kind is ProposalKind.NONE else length
    q_ids, q_probs, q_logits = proposal.q_ids, proposal.q_probs, proposal.q_logits
    return Run(
        tuple(ids[:length]),
        kind,
        None if q_ids is None else q_ids[request, :length].astype(np.int64),
        None if q_probs is None else q_probs[request, :length].astype(np.float64),
        None if q_logits is None else q_logits[request, :length].astype(np.float32),
    )


def uniforms(seed: np.uint64, position: int, branch: int, count: int) -> Float64s:
    """[k] the ACCEPT numbers of a run that begins at `position`. The round is the offset in the run: a position behind
    a rejection is drafted again by the next run, and must not meet the number that decided on the one before."""
    offsets = np.arange(count)
    return uniform(words(seed, np.zeros(count), position + offsets, Purpose.ACCEPT, offsets, branch)).astype(np.float64)


def ratios(p_k: Float64s, q_k: Float64s) -> Float64s:
    """p / q; 0 where q is 0, which no draft may have: a caller's error."""
    return np.divide(p_k, q_k, out=np.zeros(len(p_k)), where=q_k > 0)


def standard(ratios_k: Float64s, u_k: Float64s) -> int:
    """How many drafts before the first with u >= p / q."""
    refused = np.flatnonzero(u_k >= ratios_k)
    return int(refused[0]) if len(refused) else len(u_k)


def block_weights(ratios_k: Float64s) -> Float64s:
    """[k + 1] P_i: 1, then min(1, P_{i-1} p / q)."""
    weights = [1.0]
    for ratio in ratios_k:
        weights.append(min(1.0, weights[-1] * float(ratio)))
    return np.array(weights)


def block_chances(weights: Float64s, masses: Float64s) -> Float64s:
    """[k] h_1 to h_k: h_i = r_i / (r_i + 1 - P_i) from the residual masses r_1 to r_{k-1}, and h_k = P_k. 0 / 0 is 1:
    then the next index is accepted too."""
    if len(weights) == 1:
        return np.empty(0)
    over = masses + 1 - weights[1:-1]
    inner = np.divide(masses, over, out=np.ones(len(masses)), where=over > 0)
    return np.append(inner, weights[-1])


def block(chances_k: Float64s, u_k: Float64s) -> int:
    """The largest i with u_i <= h_i, 0 if there is none."""
    taken = np.flatnonzero(u_k <= chances_k)
    return int(taken[-1]) + 1 if len(taken) else 0


def matches(drafts_k: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts are the tokens that the rows draw themselves."""
    for step, (draft, token) in enumerate(zip(drafts_k, tokens, strict=False)):
        if draft != token or token == INVALID_TOKEN:
            return step
    return len(drafts_k)
