"""Makes millions of speculated tokens by the kernels: rows that say the same few tokens again and again, at new
positions.

Everything stays on the device but the counts. Shape legend: B rows, L tokens of a row and round, K draft steps,
V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from gpu_sampler.output import LaunchPlan, VerifyOutput
from gpu_sampler.spec_decode import DraftMethod, Proposal, ProposalKind, VerifyRules
from gpu_sampler.state.host_state import SamplingState
from gpu_sampler.state.layout import Word
from gpu_sampler.triton_sampler import TritonSampler
from tests.support.draws import DISTRIBUTION_ALPHA
from tests.support.speculation import Chain, DistributionCheck, Drafter, Float64s, Int64s, seeds_of
from tests.support.statistics import chi_square, total_variation, total_variation_bound

ROUND = 1 << 10  # positions from one round to the next: more than a round can take
MAX_CELLS = 1 << 17  # of a joint distribution


class ManySpoken(NamedTuple):
    """Holds what B rows have said in all rounds."""

    counts: Int64s  # [V] * L: how often each sequence of first tokens
    full: Int64s  # [V] * (K + 1): the same of first runs that were accepted whole; none where that is too many cells
    outside: int  # sequences with a token that the vocabulary does not have
    accepted: float  # mean drafts of a run

    @property
    def draws(self) -> int:
        """Tokens said."""
        return int(self.counts.sum() + self.outside) * self.counts.ndim


class Speakers:
    """Rows 1 to B, whose state is set back after each round but for their positions: penalties and bad words begin
    anew, noise does not come again. Tests plant faults by what they override."""

    def __init__(self, chain: Chain, rows: int, device: str, start: int = 0) -> None:
        there = torch.device(device)
        self.chain, self.device = chain, there
        self.state = SamplingState(num_slots=rows + 1, vocab_size=chain.vocab_size)
        self.sampler = TritonSampler(self.state, there, processed=False)
        for slot, seed in enumerate(seeds_of(rows, start), start=1):
            self.state.admit(slot, chain.params, chain.prompt, seed=seed)
            self.sampler.note(slot)
        self.sampler.apply()
        self.slots = np.arange(1, rows + 1)
        self.plan = self.sampler.plan(self.slots, LaunchPlan(()))
        self.target_VV = torch.tensor(chain.target_VV, device=there)
        self.drafter_VV = torch.tensor(chain.drafter_VV, device=there)
        self.generator = torch.Generator(there).manual_seed(start + 1)
        self._kept = self.sampler.device_state.words.clone()

    def begin(self, round_: int) -> None:
        device_state = self.sampler.device_state
        device_state.words.copy_(self._kept)
        device_state.table[1:, Word.POSITION] += round_ * ROUND

    def propose(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> Proposal:
        """Drafts behind the last tokens, or V for none."""
        ids, columns, q_logits = [], [], []
        for step in range(steps):
            z_BV = self.drafter_VV[last_B]
            if drafter == "n-gram":
                drawn = ((last_B + 1) % self.chain.vocab_size).to(torch.int32)
            elif drafter == "dense":
                q_logits.append(z_BV)
                noise = -torch.empty_like(z_BV).exponential_(generator=self.generator).log()
                drawn = (z_BV / self.chain.params.temperature + noise).argmax(1).to(torch.int32)
            else:
                method: DraftMethod = "greedy" if drafter == "greedy" else "probabilistic"
                draft = self.sampler.draft(z_BV, self.slots, step, method, rules)
                drawn = draft.ids
                columns.append(draft)
            ids.append(drawn)
            last_B = drawn.clamp(min=0).to(torch.int64)
        ids_BK = torch.stack(ids, 1)
        kinds = {"sparse": ProposalKind.SPARSE, "dense": ProposalKind.DENSE}
        kind = torch.full((len(ids_BK),), kinds.get(drafter, ProposalKind.ONE_HOT), dtype=torch.uint8).to(self.device)
        if drafter == "dense":
            return Proposal(ids_BK, kind, q_logits=torch.stack(q_logits, 1))
        if drafter == "sparse":
            q_ids, q_probs = (torch.stack([column[at] for column in columns], 1) for at in (1, 2))
            return Proposal(ids_BK, kind, q_ids, q_probs)
        return Proposal(ids_BK, kind)

    def target_logprobs(self, behind_BK: torch.Tensor) -> torch.Tensor:
        """[B, K + 1, V] the target's logits behind each token."""
        return self.target_VV[behind_BK]

    def run(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> VerifyOutput:
        proposal = self.propose(last_B, steps, drafter, rules)
        behind_BK = torch.cat([last_B[:, None], proposal.draft_ids.clamp(min=0).to(torch.int64)], 1)
        logits_RV = self.target_logprobs(behind_BK).reshape(-1, self.chain.vocab_size)
        return self.sampler.verify(logits_RV, self.slots, proposal, rules, self.plan)


def speak(
    speakers: Speakers, *, rounds: int, length: int, steps: int, drafter: Drafter, rules: VerifyRules
) -> ManySpoken:
    """The rows say `length` tokens in each of `rounds` rounds, by runs of `steps` drafts."""
    size, rows, device = speakers.chain.vocab_size, len(speakers.slots), speakers.device
    counts = _Cells(size, length, device)
    full = _Cells(size, steps + 1, device) if size ** (steps + 1) <= MAX_CELLS else None
    accepted = torch.zeros((), dtype=torch.int64, device=device)
    for round_ in range(rounds):
        speakers.begin(round_)
        said = torch.full((rows, length * (steps + 1)), -1, dtype=torch.int64, device=device)
        done = torch.zeros(rows, dtype=torch.int64, device=device)
        last = torch.full_like(done, size)
        for turn in range(length):  # each says at least one token
            out = speakers.run(last, steps, drafter, rules)
            tokens, emitted = out.tokens.to(torch.int64), out.counts.to(torch.int64)
            said.scatter_(1, done[:, None] + torch.arange(steps + 1, device=device), tokens)
            last = tokens.gather(1, emitted[:, None] - 1)[:, 0].clamp(min=0)
            done += emitted
            accepted += (emitted - 1).sum()
            if turn == 0 and full is not None:
                full.add(torch.where((emitted == steps + 1)[:, None], tokens, -1))
        counts.add(said[:, :length])
    none = np.zeros(0, np.int64)
    mean = int(accepted) / (rows * rounds * length)
    return ManySpoken(counts.found(), none if full is None else full.found(), counts.outside(), mean)


class _Cells:
    """How often each sequence of L tokens was said, on the device; and those with a token that is none."""

    def __init__(self, size: int, length: int, device: torch.device) -> None:
        self._size, self._length = size, length
        self._counts = torch.zeros(size**length + 1, dtype=torch.int64, device=device)
        self._weights = size ** torch.arange(length - 1, -1, -1, device=device)

    def add(self, tokens_BL: torch.Tensor) -> None:
        inside = ((tokens_BL >= 0) & (tokens_BL < self._size)).all(1)
        cells = torch.where(inside, (tokens_BL * self._weights).sum(1), len(self._counts) - 1)
        self._counts.scatter_add_(0, cells, torch.ones_like(cells))

    def found(self) -> Int64s:
        counts: Int64s = self._counts[:-1].cpu().numpy().reshape((self._size,) * self._length)
        return counts

    def outside(self) -> int:
        return int(self._counts[-1])


class ManyRunsCheck(NamedTuple):
    distribution: DistributionCheck
    distance: float  # total variation of the joint distribution over its bound, at most 1 for a right sampler
    resolved: float  # any distribution further off than this total variation has a distance above 1

    @property
    def passes(self) -> bool:
        return self.distribution.least > DISTRIBUTION_ALPHA and self.distance < 1


def check_many_runs(chain: Chain, spoken: ManySpoken) -> ManyRunsCheck:
    """Checks counts like `speculation.check_distribution`, and also the total variation of the joint distribution."""
    length, distribution = spoken.counts.ndim, chain.distribution(spoken.counts.ndim)
    bound = total_variation_bound(distribution, int(spoken.counts.sum()), DISTRIBUTION_ALPHA)
    if spoken.outside:
        return ManyRunsCheck(DistributionCheck(0.0, (), (), 1.0), float("inf"), 2 * bound)
    marginals = tuple(_against(spoken.counts, distribution, (at,)) for at in range(length))
    pairs = tuple(_against(spoken.counts, distribution, (at, at + 1)) for at in range(length - 1))
    found = DistributionCheck(
        _against(spoken.counts, distribution, range(length)), marginals, pairs, _bonus(chain, spoken.full)
    )
    return ManyRunsCheck(found, total_variation(spoken.counts, distribution) / bound, 2 * bound)


def _against(counts: Int64s, distribution: Float64s, axes: Iterable[int]) -> float:
    others = tuple(set(range(distribution.ndim)) - set(axes))
    return chi_square(counts.sum(axis=others), distribution.sum(axis=others)).p_value


def _bonus(chain: Chain, full: Int64s) -> float:
    """Over all fully accepted first runs, the last token given those before it."""
    if not full.sum():
        return 1.0
    distribution = chain.distribution(full.ndim)
    given = distribution / np.maximum(distribution.sum(axis=-1, keepdims=True), 1e-300)
    return chi_square(full, given * full.sum(axis=-1, keepdims=True) / full.sum()).p_value
