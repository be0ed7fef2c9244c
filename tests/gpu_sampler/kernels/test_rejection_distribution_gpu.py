"""Millions of speculated tokens of the compiled kernels against the enumerated distribution of plain decoding: the
joint distribution of the first tokens, each token's, neighbours' and the bonus token's; and planted faults that the
same checks reject.

Three tokens by runs of two drafts end one run and begin another in every possible way. Thresholds are
DISTRIBUTION_ALPHA, seeds are fixed. ASSAY_P_VALUES names a file to which each case adds a line.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.spec_decode import Proposal, ProposalKind, Rule, VerifyRules
from gpu_sampler.state.layout import Word
from tests.support.draws import DISTRIBUTION_ALPHA
from tests.support.many_runs import ManyRunsCheck, ManySpoken, Speakers, check_many_runs, speak
from tests.support.planted import always_one, nothing_of_q, only_p, plant
from tests.support.speculation import Chain, Drafter, chain, seeds_of, speculate

ROWS, ROUNDS = 4096, 192  # 786,432 sequences: 2.4 million tokens where they are three long
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.75, "presence_penalty": 0.5}
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "penalties": PENALTIES,
    "hot, top-k, top-p and penalties": {"temperature": 1.7, "top_k": 4, "top_p": 0.9, **PENALTIES},
}
CHAINS: dict[str, Chain] = {name: chain(5, seed, **params) for seed, (name, params) in enumerate(PARAMS.items(), 1)}


def masked(seed: int, target: tuple[int, ...], drafter: tuple[int, ...], **params: Any) -> Chain:
    """Tokens that the target, or the drafter, never says."""
    made = chain(5, seed, **params)
    made.target_VV[:, target], made.drafter_VV[:, drafter] = -np.inf, -np.inf
    return made


def alike(made: Chain) -> Chain:
    return Chain(target_VV=made.target_VV, drafter_VV=made.target_VV, params=made.params)


def tied(seed: int) -> Chain:
    """Logits of two values, and a top-k that cuts through equals."""
    made = chain(5, seed, top_k=3)
    return Chain(target_VV=np.round(made.target_VV).clip(0, 1), drafter_VV=made.drafter_VV, params=made.params)


def huge(seed: int, **params: Any) -> Chain:
    """More tokens than a list holds, with the same distribution at every position."""
    rng = np.random.default_rng(seed)
    target = (np.round(rng.normal(0, 0.3, 4096) * 8) / 8).astype(np.float32)
    drafter = (target + rng.normal(0, 0.5, 4096)).astype(np.float32)
    tables = (np.broadcast_to(row, (4097, 4096)) for row in (target, drafter))
    return Chain(target_VV=next(tables), drafter_VV=next(tables), params=SamplingParams(max_tokens=64, **params))


EDGES: dict[str, Chain] = {
    "q = p": alike(CHAINS["plain"]),
    "q and p on different tokens": masked(21, target=(0, 1), drafter=(2, 3, 4)),
    "zeros of their own": masked(22, target=(0, 3), drafter=(1, 3)),
    "ties at k": tied(23),
}
WIDE: dict[str, Chain] = {  # three groups, the last not full; 64 named ids and others
    "wide": chain(333, 31, spread=0.7),
    "wide, top-p": chain(333, 32, spread=0.7, top_p=0.8),
    "wide, penalties": chain(333, 33, spread=0.7, **PENALTIES),
}
HUGE: dict[str, Chain] = {
    "huge": huge(41),
    "huge nucleus": huge(42, top_p=0.9),
    "huge nucleus and min-p": huge(43, top_p=0.95, min_p=0.2),
}
FAR = Chain(
    target_VV=CHAINS["plain"].target_VV, drafter_VV=chain(5, 77, apart=1.5).drafter_VV, params=CHAINS["plain"].params
)
RULES: tuple[Rule, ...] = ("standard", "block")
KINDS: tuple[Drafter, ...] = ("greedy", "sparse", "dense")
each_rule = pytest.mark.parametrize("rule", RULES)
each_kind = pytest.mark.parametrize("drafter", KINDS)


def said(speakers: Speakers, rule: Rule, drafter: Drafter, rounds: int = ROUNDS) -> tuple[ManySpoken, ManyRunsCheck]:
    """Three tokens by runs of two drafts; of a wide vocabulary two by runs of one, of a huge one the first."""
    size = speakers.chain.vocab_size
    length, steps = (3, 2) if size < 64 else (2, 1) if size < 1024 else (1, 1)
    rules = VerifyRules(rule=rule)
    spoken = speak(speakers, rounds=rounds, length=length, steps=steps, drafter=drafter, rules=rules)
    return spoken, check_many_runs(speakers.chain, spoken)


def reported(name: str, rule: Rule, drafter: Drafter, spoken: ManySpoken, found: ManyRunsCheck) -> None:
    """A line of p-values."""
    distribution = found.distribution
    line = {
        "case": name, "rule": rule, "drafter": drafter, "tokens": spoken.draws, "accepted": round(spoken.accepted, 3),
        "joint": distribution.joint, "each": min(distribution.marginals, default=None),
        "pairs": min(distribution.pairs, default=None),
        "bonus": distribution.bonus, "distance": round(found.distance, 3), "resolved": round(found.resolved, 6),
    }  # fmt: skip
    print(json.dumps(line))
    if path := os.environ.get("ASSAY_P_VALUES"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.gpu
@each_kind
@each_rule
@pytest.mark.parametrize("name", CHAINS)
def test_two_million_speculated_tokens_have_the_distribution(name: str, rule: Rule, drafter: Drafter) -> None:
    spoken, found = said(Speakers(CHAINS[name], ROWS, "cuda"), rule, drafter)
    reported(name, rule, drafter, spoken, found)
    assert found.passes and spoken.draws >= 2_000_000


@pytest.mark.gpu
@each_rule
def test_drafts_that_know_nothing_of_the_row_leave_the_distribution(rule: Rule) -> None:
    spoken, found = said(Speakers(CHAINS["plain"], ROWS, "cuda"), rule, "n-gram")
    reported("plain", rule, "n-gram", spoken, found)
    assert found.passes


@pytest.mark.gpu
@each_kind
@each_rule
@pytest.mark.parametrize("name", EDGES)
def test_edges_have_the_distribution(name: str, rule: Rule, drafter: Drafter) -> None:
    spoken, found = said(Speakers(EDGES[name], ROWS, "cuda"), rule, drafter)
    reported(name, rule, drafter, spoken, found)
    assert found.passes
    if name == "q = p" and drafter != "greedy":
        assert spoken.accepted > 1.99  # of two; rounding of q alone refuses any
    if name == "q and p on different tokens":
        assert spoken.accepted == 0


@pytest.mark.gpu
@each_kind
@each_rule
@pytest.mark.parametrize("name", WIDE)
def test_wide_rows_have_the_distribution(name: str, rule: Rule, drafter: Drafter) -> None:
    spoken, found = said(Speakers(WIDE[name], ROWS, "cuda"), rule, drafter, rounds=256)
    reported(name, rule, drafter, spoken, found)
    assert found.passes and spoken.draws >= 2_000_000


@pytest.mark.gpu
@each_kind
@each_rule
@pytest.mark.parametrize("name", HUGE)
def test_first_tokens_of_huge_nuclei_have_the_distribution(name: str, rule: Rule, drafter: Drafter) -> None:
    assert np.count_nonzero(HUGE[name].distribution(1)) > 4 * CANDIDATES
    spoken, found = said(Speakers(HUGE[name], ROWS, "cuda"), rule, drafter, rounds=512)
    reported(name, rule, drafter, spoken, found)
    assert found.passes and spoken.draws >= 2_000_000


class Ragged(Speakers):
    """Runs of no, one and two drafts, whatever they are; rows behind them hold anything."""

    def propose(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> Proposal:
        made = super().propose(last_B, steps, drafter, rules)
        self.left_out = torch.rand(made.draft_ids.shape, generator=self.generator, device=self.device) < 0.3
        return made._replace(draft_ids=made.draft_ids.masked_fill(self.left_out, INVALID_TOKEN))

    def target_logprobs(self, behind_BK: torch.Tensor) -> torch.Tensor:
        rows = super().target_logprobs(behind_BK)
        rows[:, 1:][self.left_out.cumsum(1) > 0] = torch.nan
        return rows


@pytest.mark.gpu
@each_kind
@each_rule
def test_padded_runs_have_the_distribution(rule: Rule, drafter: Drafter) -> None:
    spoken, found = said(Ragged(CHAINS["penalties"], ROWS, "cuda"), rule, drafter)
    reported("penalties, padded", rule, drafter, spoken, found)
    assert found.passes


class LostQ(Speakers):
    """Loses the distribution that drafts were drawn from: they count as certain."""

    def propose(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> Proposal:
        made = super().propose(last_B, steps, drafter, rules)
        return Proposal(made.draft_ids, torch.full_like(made.kind, int(ProposalKind.ONE_HOT)))


@pytest.mark.gpu
@each_rule
def test_drafts_whose_q_is_lost_leave_the_distribution_and_are_accepted_less(rule: Rule) -> None:
    kept, _ = said(Speakers(FAR, ROWS, "cuda"), rule, "sparse", rounds=24)
    spoken, found = said(LostQ(FAR, ROWS, "cuda"), rule, "sparse")
    reported("q lost", rule, "sparse", spoken, found)
    assert found.passes and spoken.accepted < 0.8 * kept.accepted


# Planted faults.


class SharedNoise(Speakers):
    """Drafts are drawn by the numbers that the residual will use."""

    def propose(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> Proposal:
        made = super().propose(last_B, steps, "sparse", rules)
        assert steps == 1 and made.q_ids is not None
        size = self.chain.vocab_size
        position = self.sampler.device_state.table[1:, Word.POSITION].cpu().numpy()[:, None]
        seeds = np.array(seeds_of(len(self.slots), 0), np.uint64)[:, None]
        noise = gumbel(words(seeds, np.arange(size)[None], position, Purpose.RESID_TOKEN))
        ids = (self.drafter_VV[last_B].cpu().numpy() + noise).argmax(1).astype(np.int32)
        return made._replace(draft_ids=torch.from_numpy(ids[:, None]).to(self.device))


class QNotScaled(Speakers):
    """q is taken at another temperature than drafts were drawn at."""

    def propose(self, last_B: torch.Tensor, steps: int, drafter: Drafter, rules: VerifyRules) -> Proposal:
        made = super().propose(last_B, steps, "dense", rules)
        assert made.q_logits is not None
        return made._replace(q_logits=0.7 * made.q_logits)


class BonusOfTheRowBefore(Speakers):
    def target_logprobs(self, behind_BK: torch.Tensor) -> torch.Tensor:
        rows = super().target_logprobs(behind_BK)
        rows[:, -1] = rows[:, -2]
        return rows


def right_kernels(monkeypatch: pytest.MonkeyPatch) -> None: ...


def without_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "share_of", nothing_of_q)


def without_q(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "ratio_of", only_p)


def without_p_i(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "weight_behind", always_one)


Plant = Callable[[pytest.MonkeyPatch], None]
REPEATED = Chain(
    target_VV=np.log(np.tile([0.1, 0.45, 0.45], (4, 1))).astype(np.float32),
    drafter_VV=np.log(np.tile([0.6, 0.38, 0.02], (4, 1))).astype(np.float32),
    params=SamplingParams(max_tokens=64),
)
FAULTS: tuple[tuple[str, type[Speakers], Plant, Chain, Rule, Drafter], ...] = (
    ("shared noise", SharedNoise, right_kernels, REPEATED, "standard", "sparse"),
    ("missing q", Speakers, without_q, FAR, "standard", "sparse"),
    ("missing q", Speakers, without_q, FAR, "block", "dense"),
    ("q not scaled", QNotScaled, right_kernels, FAR, "standard", "dense"),
    ("q not scaled", QNotScaled, right_kernels, FAR, "block", "dense"),
    ("wrong residual", Speakers, without_residual, FAR, "standard", "sparse"),
    ("wrong residual", Speakers, without_residual, FAR, "block", "dense"),
    ("residual without P", Speakers, without_p_i, FAR, "block", "sparse"),
    ("bonus of the row before", BonusOfTheRowBefore, right_kernels, FAR, "standard", "sparse"),
)


def planted(speakers: type[Speakers], made: Chain, rule: Rule, drafter: Drafter) -> tuple[ManySpoken, ManyRunsCheck]:
    """300,000 tokens."""
    steps, rules = 1 if made is REPEATED else 2, VerifyRules(rule=rule)
    spoken = speak(speakers(made, ROWS, "cuda"), rounds=24, length=3, steps=steps, drafter=drafter, rules=rules)
    return spoken, check_many_runs(made, spoken)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault[0]}, {fault[4]}, {fault[5]}" for fault in FAULTS])
def test_planted_fault_is_rejected(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, speakers, plant, made, rule, drafter = fault
    spoken, found = planted(Speakers, made, rule, drafter)
    reported(f"without: {name}", rule, drafter, spoken, found)
    assert found.passes
    plant(monkeypatch)
    spoken, found = planted(speakers, made, rule, drafter)
    reported(f"planted: {name}", rule, drafter, spoken, found)
    assert found.distribution.least < DISTRIBUTION_ALPHA


@pytest.mark.full
def test_first_round_is_what_the_reference_says(device: str) -> None:
    """Rows, their noise and the counting are those of `speculate`; the next round has other noise."""
    made, rules = CHAINS["penalties"], VerifyRules(rule="block")
    expected = speculate(made, rows=4, length=3, steps=2, drafter="sparse", rules=rules).tokens
    spoken = speak(Speakers(made, 4, device), rounds=2, length=3, steps=2, drafter="sparse", rules=rules)
    first = np.zeros(spoken.counts.shape, np.int64)
    np.add.at(first, tuple(expected.T), 1)
    second = spoken.counts - first
    assert spoken.outside == 0 and second.sum() == 4
    assert (second >= 0).all() and (second != first).any()
