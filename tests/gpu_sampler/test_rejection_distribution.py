"""Tests that speculated rows have the distribution of rows without drafts: chi-square of the joint distribution of the
first tokens, of each, of neighbours and of the bonus token, over chains of several runs; and planted faults that the
same checks reject.

Three tokens by runs of two drafts end one run and begin another in every possible way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpu_sampler.reference import rejection_sample, sample
from gpu_sampler.reference.logits_processors import RowPosition
from gpu_sampler.reference.philox import Purpose, gumbel, uniform, words
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Rule, VerifyRules
from tests.support.draws import DISTRIBUTION_ALPHA
from tests.support.speculation import Chain, Drafter, chain, check_distribution, speculate, with_params

ROWS = 800
COUNTING: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.75, "presence_penalty": 0.5}
CASES: dict[str, Chain] = {
    "plain": chain(5, 1),
    "hot": chain(5, 2, temperature=1.7),
    "top-k": chain(5, 3, top_k=3),
    "top-p": chain(5, 4, top_p=0.8),
    "min-p": chain(5, 5, min_p=0.2),
    "penalties": chain(4, 6, **COUNTING),
    "penalties and top-k": chain(5, 7, top_k=3, top_p=0.9, **COUNTING),
    "bad words": chain(4, 8, bad_words_ids=((0, 1), (2, 2), (3, 0, 2)), logit_bias=((1, 0.5),)),
    "min tokens": chain(4, 9, min_tokens=2, stop_token_ids=(0,)),
}
GRID: tuple[tuple[str, Rule, Drafter], ...] = (
    ("plain", "standard", "n-gram"),
    ("plain", "standard", "sparse"),
    ("plain", "standard", "dense"),
    ("plain", "block", "greedy"),
    ("plain", "block", "sparse"),
    ("plain", "block", "dense"),
    ("hot", "standard", "greedy"),
    ("hot", "block", "dense"),
    ("top-k", "standard", "sparse"),
    ("top-k", "block", "dense"),
    ("top-p", "standard", "dense"),
    ("top-p", "block", "sparse"),
    ("min-p", "standard", "greedy"),
    ("min-p", "block", "sparse"),
    ("penalties", "standard", "sparse"),
    ("penalties", "block", "dense"),
    ("penalties and top-k", "standard", "greedy"),
    ("bad words", "block", "sparse"),
    ("min tokens", "standard", "sparse"),
)


@pytest.mark.full(keep=1)
@pytest.mark.risk("D3", figure="the distribution under speculation")
@pytest.mark.parametrize(("case", "rule", "drafter"), GRID)
def test_speculated_rows_have_the_distribution_of_plain_ones(case: str, rule: Rule, drafter: Drafter) -> None:
    spoken = speculate(CASES[case], rows=ROWS, length=3, steps=2, drafter=drafter, rules=VerifyRules(rule=rule))
    assert check_distribution(CASES[case], spoken).least > DISTRIBUTION_ALPHA


def shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual's numbers are those that the draft was drawn with."""

    def noise(row: Any, ids: Any, purpose: Purpose) -> Any:
        return gumbel(words(row.seed, ids, row.position, Purpose.DRAFT_TOKEN, 0, row.branch)).astype(np.float64)

    monkeypatch.setattr(rejection_sample, "_residual_noise", noise)


def accepted_by_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACCEPT numbers without the offset in the run: the next run meets those that decided on the last one."""

    def uniforms(seed: np.uint64, position: int, branch: int, count: int) -> Any:
        at = position + np.arange(count)
        return uniform(words(seed, np.zeros(count), at, Purpose.ACCEPT, 0, branch)).astype(np.float64)

    monkeypatch.setattr(rejection_sample, "uniforms", uniforms)


def without_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sample, "ratios", lambda p_k, q_k: p_k)


def without_p_i(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection_sample.residual
    monkeypatch.setattr(rejection_sample, "residual", lambda p_V, q_V, weight=1.0: right(p_V, q_V))


def residual_of_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sample, "residual", lambda p_V, q_V, weight=1.0: weight * p_V)


def bonus_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sample.draw

    def draw(rows: Any, indices: Any) -> Any:
        found = right(rows, [max(0, index - 1) for index in indices])
        found[indices] = found[[max(0, index - 1) for index in indices]]
        return found

    monkeypatch.setattr(rejection_sample, "draw", draw)


def rows_do_not_see_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties inside a run look at what stood before the run."""
    monkeypatch.setattr(rejection_sample, "RowPosition", lambda slot, offset=0, ahead=(): RowPosition(slot, offset, ()))


def repeated(p: tuple[float, ...], q: tuple[float, ...]) -> Chain:
    """The same target and the same drafter at every position."""
    rows = (np.log(np.tile(np.array(x), (len(p) + 1, 1))).astype(np.float32) for x in (p, q))
    return Chain(target_VV=next(rows), drafter_VV=next(rows), params=SamplingParams(max_tokens=64))


def far(case: Chain) -> Chain:
    """The case with a drafter that is often wrong, which faults show with."""
    other = chain(case.vocab_size, 77, apart=1.5)
    return Chain(target_VV=case.target_VV, drafter_VV=other.drafter_VV, params=case.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault, and rows that show it."""

    fault: Callable[[pytest.MonkeyPatch], None]
    chain: Chain
    rule: Rule = "standard"
    drafter: Drafter = "sparse"
    steps: int = 2
    rows: int = 1200
    length: int = 3

    def p_value(self) -> float:
        spoken = speculate(
            self.chain,
            rows=self.rows,
            length=self.length,
            steps=self.steps,
            drafter=self.drafter,
            rules=VerifyRules(rule=self.rule),
        )
        return check_distribution(self.chain, spoken).least


REPEATED = repeated((0.1, 0.45, 0.45), (0.6, 0.38, 0.02))
OFF = chain(3, 25, apart=2.5, spread=1.5)
PLAIN = far(CASES["plain"])
FAULTS = (
    Planted(fault=shared_noise, chain=REPEATED, steps=1, rows=3000),
    Planted(fault=accepted_by_position_alone, chain=OFF, rule="block", drafter="dense", steps=3, length=4),
    Planted(fault=without_q, chain=PLAIN),
    Planted(fault=without_q, chain=PLAIN, rule="block", drafter="dense"),
    Planted(fault=without_p_i, chain=PLAIN, rule="block", drafter="dense"),
    Planted(fault=residual_of_p, chain=PLAIN, drafter="dense"),
    Planted(fault=bonus_of_the_row_before, chain=PLAIN, rows=2400),
    Planted(fault=rows_do_not_see_drafts, chain=far(CASES["penalties"])),
)
each_fault = pytest.mark.parametrize("planted", FAULTS, ids=[f"{one.fault.__name__}-{one.rule}" for one in FAULTS])


@pytest.mark.full(keep=1)
@pytest.mark.risk("D3", planted=True)
@each_fault
def test_planted_fault_is_rejected(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fault(monkeypatch)
    assert planted.p_value() < DISTRIBUTION_ALPHA


@pytest.mark.full
@each_fault
def test_rows_that_show_the_fault_have_their_distribution_without_it(planted: Planted) -> None:
    assert planted.p_value() > DISTRIBUTION_ALPHA


def test_greedy_rows_say_the_same_with_drafts_of_any_kind() -> None:
    case = with_params(CASES["penalties"], temperature=0.0)
    for drafter in ("n-gram", "greedy", "sparse"):
        said = speculate(case, rows=2, length=12, steps=3, drafter=drafter, rules=VerifyRules()).tokens
        distribution = case.distribution(3)
        assert distribution[tuple(said[0, :3])] == 1
        assert (said == said[0]).all()
