"""Acceptance by enumeration: the distribution of a run is the target's to 1e-12, and block verification accepts no
less."""

from collections.abc import Sequence

import numpy as np
import pytest

from gpu_sampler.reference import rejection_sample
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import Proposal, ProposalKind
from tests.support.runs import Faults, Float64s, random_trees, run_distribution

KINDS = ("one-hot", "sparse", "dense", "equal", "apart", "zeros")
SIZES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3))
RULES = ("standard", "block")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_run_has_the_distribution_of_the_target(kind: str, rule: str) -> None:
    for size, steps in SIZES:
        for seed in range(2 if size == 4 else 4):
            trees = random_trees(size, steps, kind, seed)
            error = np.abs(run_distribution(trees, rule).distribution - trees.distribution()).max()
            assert error < 1e-12, (size, steps, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_at_least_as_many_drafts_as_standard(kind: str) -> None:
    gains = []
    for size, steps in SIZES:
        for seed in range(2 if size == 4 else 4):
            trees = random_trees(size, steps, kind, seed)
            gains.append(run_distribution(trees, "block").accepted - run_distribution(trees, "standard").accepted)
    assert min(gains) > -1e-12
    if kind in ("sparse", "dense"):  # and more, where some p / q is above 1
        assert max(gains) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_standard_accepts_the_sum_of_the_lesser_probabilities(rule: str) -> None:
    for seed in range(8):
        trees = random_trees(4, 1, "dense", seed)
        assert run_distribution(trees, rule).accepted == pytest.approx(
            np.minimum(trees.p[0], trees.q[0]).sum(), abs=1e-12
        )


def test_equal_distributions_accept_every_draft_and_distributions_apart_none() -> None:
    for rule in RULES:
        assert run_distribution(random_trees(4, 3, "equal", 1), rule).accepted == pytest.approx(3, abs=1e-12)
        assert run_distribution(random_trees(4, 3, "apart", 1), rule).accepted == 0


def without_weight(p_V: Float64s, q_V: Float64s, weight: float) -> Float64s:
    """The fault: P_i left out of the residual of block verification."""
    return np.maximum(p_V - q_V, 0.0)


def without_q(p_V: Float64s, q_V: Float64s, weight: float) -> Float64s:
    """The fault: q left out of the residual."""
    return weight * p_V


def p_alone(p_k: Float64s, q_k: Float64s) -> Float64s:
    """The fault: drafts accepted with probability p, q left out."""
    return p_k


FAULTS: Sequence[tuple[str, Faults]] = (
    ("block", Faults(residual=without_weight)),
    ("standard", Faults(residual=without_q)),
    ("block", Faults(residual=without_q)),
    ("standard", Faults(ratios=p_alone)),
    ("block", Faults(ratios=p_alone)),
    ("standard", Faults(bonus_row=-1)),
    ("block", Faults(bonus_row=-1)),
)
NAMES = ("no P in block", "no q in residual", "no q in block residual", "no q", "no q in block", "bonus", "block bonus")


@pytest.mark.parametrize(("rule", "faults"), FAULTS, ids=NAMES)
def test_planted_fault_moves_the_distribution(rule: str, faults: Faults) -> None:
    trees = random_trees(3, 2, "dense", 0)
    assert np.abs(run_distribution(trees, rule, faults).distribution - trees.distribution()).max() > 1e-3


def test_run_ends_at_the_first_negative_id_and_a_row_without_proposal_has_none() -> None:
    ids = np.array([[3, -1, 4], [-1, 5, 6], [1, 2, 3], [1, 2, -7], [9, 9, 9]], np.int32)
    kind = np.array([1, 1, 1, 1, ProposalKind.NONE], np.uint8)
    runs = [rejection_sample.run_of(Proposal(ids, kind), index).drafts for index in range(5)]
    assert runs == [(3,), (), (1, 2, 3), (1, 2), ()]


def test_one_hot_sparse_and_dense_proposals_are_spread_over_the_vocabulary() -> None:
    ids, q_ids = np.array([[2, 99]], np.int32), np.full((1, 2, 64), INVALID_TOKEN, np.int32)
    q_probs = np.zeros((1, 2, 64), np.float32)
    q_ids[0, :, :3], q_probs[0, :, :3] = (2, 0, 99), (0.5, 0.25, 0.25)
    z = np.array([[[0, np.nan, 1, -np.inf, np.inf], [-np.inf] * 5]], np.float32)

    def q(kind: ProposalKind, step: int) -> list[float]:
        run = rejection_sample.run_of(Proposal(ids, np.array([kind], np.uint8), q_ids, q_probs, z), 0)
        found: list[float] = run.q(step, 5, 0.5).round(6).tolist()
        return found

    assert q(ProposalKind.ONE_HOT, 0) == [0, 0, 1, 0, 0]
    assert q(ProposalKind.ONE_HOT, 1) == [0] * 5  # an id that the vocabulary does not have
    assert q(ProposalKind.SPARSE, 0) == [0.25, 0, 0.5, 0, 0]
    assert q(ProposalKind.DENSE, 0) == [0.119203, 0, 0.880797, 0, 0]
    assert q(ProposalKind.DENSE, 1) == [0] * 5


def test_zero_over_zero_is_accepted_and_a_draft_that_q_does_not_have_is_not() -> None:
    assert rejection_sample.block_chances(np.ones(3), np.zeros(1)).tolist() == [1, 1]
    assert rejection_sample.ratios(np.array([0.5, 0.0]), np.zeros(2)).tolist() == [0, 0]
    assert rejection_sample.standard(np.zeros(1), np.full(1, 1e-12)) == 0
    assert rejection_sample.block_chances(np.ones(1), np.empty(0)).tolist() == []


def test_numbers_of_a_run_depend_on_where_it_began() -> None:
    """A position behind a rejection is judged again, with another number; no other place in a run has its own."""
    first, second = (rejection_sample.uniforms(np.uint64(7), at, 0, 4) for at in (10, 11))
    assert not np.isin(first, second).any()
    assert rejection_sample.uniforms(np.uint64(7), 10, 0, 2).tolist() == first[:2].tolist()
    assert not np.isin(first, rejection_sample.uniforms(np.uint64(7), 10, 1, 4)).any()
