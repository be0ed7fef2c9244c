"""Millions of draws of the compiled kernels against the enumerated distribution, and the independence of what they
draw.

Each test prints what it resolves: see `ManyCheck`. Thresholds are DISTRIBUTION_ALPHA, seeds are fixed.
"""

import numpy as np
import pytest
import torch

from gpu_sampler.reference.filters import CANDIDATES
from gpu_sampler.sampling_params import SamplingParams
from tests.support.cases import (
    BAD_WORDS,
    BIAS,
    EVERYTHING,
    FILTERED_PAIR,
    OUTPUTS,
    PAIR,
    PROMPT,
    coarse_logits,
    flat,
    raised,
)
from tests.support.cases import case as case_of
from tests.support.draws import DISTRIBUTION_ALPHA, DrawRow, LawCase, rows_of
from tests.support.many import Batch, check_many, joint_p_value, lagged

pytestmark = pytest.mark.gpu
ROWS, STEPS = 4096, 1024
V, WIDE_V = 333, 4096  # three groups, the last not full; 32 groups
PENALTIES = {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": 0.25}
ALLOWED = tuple(token for token in range(V) if token % 4 != 1)
TIED_AT_P = np.where(np.arange(V) % 83 == 4, np.float32(0.5), np.float32(-np.inf))  # four equal tokens

CASES: dict[str, LawCase] = {
    "plain": case_of(coarse_logits(V, 1)),
    "cold": case_of(coarse_logits(V, 2), temperature=0.3),
    "hot": case_of(coarse_logits(V, 3, 2.5), temperature=1.7),
    "top-k": case_of(coarse_logits(V, 4), top_k=50),
    "top-k over a list": case_of(coarse_logits(V, 5, 0.3), top_k=300),
    "ties at k": case_of(flat(V), top_k=41),
    "top-p": case_of(coarse_logits(V, 6), top_p=0.8),
    "ties at p": case_of(TIED_AT_P, top_p=0.5),
    "min-p": case_of(coarse_logits(V, 7), min_p=0.1),
    "top-k, top-p and min-p": case_of(coarse_logits(V, 8), temperature=1.3, top_k=60, top_p=0.9, min_p=0.05),
    "penalties": case_of(raised(coarse_logits(V, 9), (*PROMPT, *OUTPUTS), 4.0), **PENALTIES),
    "bias and bans": case_of(raised(coarse_logits(V, 10), (8, 12), 4.0), logit_bias=BIAS, bad_words_ids=BAD_WORDS),
    "penalties and top-p": case_of(raised(coarse_logits(V, 11), (*PROMPT, *OUTPUTS), 4.0), top_p=0.8, **PENALTIES),
    "allowed ids": case_of(coarse_logits(V, 12), allowed_token_ids=ALLOWED, top_p=0.95),
    # The position would lift the bans of `min_tokens` between the steps.
    "everything": case_of(
        raised(coarse_logits(V, 13), (*PROMPT, *OUTPUTS), 3.0),
        **EVERYTHING | {"min_tokens": 0, "top_k": 60, "allowed_token_ids": ALLOWED},
    ),
    "wide plain": case_of(coarse_logits(WIDE_V, 14)),
    "huge nucleus": case_of(coarse_logits(WIDE_V, 15, 0.3), top_p=0.9),
    "huge nucleus of equals": case_of(flat(WIDE_V), top_p=0.75),  # 3,072 tokens have less than 0.75 before them
    "wide min-p": case_of(coarse_logits(WIDE_V, 16, 0.3), min_p=0.25),
    "huge nucleus and min-p": case_of(coarse_logits(WIDE_V, 17, 0.5), top_p=0.9, min_p=0.1),
    "huge nucleus, penalties": case_of(raised(coarse_logits(WIDE_V, 18, 0.3), PROMPT, 5.0), top_p=0.9, **PENALTIES),
}


@pytest.mark.parametrize("name", CASES)
def test_four_million_draws_have_the_distribution(name: str) -> None:
    case = CASES[name]
    dtype = torch.bfloat16 if len(case.logits_V) == WIDE_V else torch.float32  # both hold these logits exactly
    found = check_many(case, Batch(rows_of(case, ROWS, 21), dtype=dtype).draws(STEPS))
    print(f"{name}: {ROWS * STEPS} draws, {found}")
    assert found.passes


def test_nuclei_called_huge_are_too_wide_to_list() -> None:
    for name, case in CASES.items():
        if "huge" in name or name == "wide min-p":
            assert np.count_nonzero(case.distribution()) > 4 * CANDIDATES


ROUTES = pytest.mark.parametrize("case", [PAIR, FILTERED_PAIR], ids=["two-level", "candidates"])


@ROUTES
def test_positions_are_independent(case: LawCase) -> None:
    tokens_SR = Batch(rows_of(case, ROWS, 22)).draws(STEPS)
    for lag in (1, 2, 3 << 5, 512):
        assert joint_p_value(case, *lagged(tokens_SR[: STEPS - STEPS % (2 * lag)], lag)) > DISTRIBUTION_ALPHA, lag


@ROUTES
def test_rows_of_consecutive_seeds_are_independent(case: LawCase) -> None:
    tokens_SR = Batch([DrawRow(case, seed) for seed in range(ROWS)]).draws(STEPS)
    for lag in (1, 2, 128):
        assert joint_p_value(case, *lagged(tokens_SR.T.contiguous(), lag)) > DISTRIBUTION_ALPHA, lag


@ROUTES
@pytest.mark.parametrize("step", [1, 1 << 16, 1 << 32, 1 << 63])
def test_adjacent_seeds_are_independent(case: LawCase, step: int) -> None:
    rows = rows_of(case, ROWS // 2, 23)
    others = [row._replace(seed=(row.seed + step) % 2**64) for row in rows]
    first_SR, second_SR = torch.split(Batch([*rows, *others]).draws(STEPS), ROWS // 2, dim=1)
    assert joint_p_value(case, first_SR, second_SR) > DISTRIBUTION_ALPHA


@ROUTES
@pytest.mark.parametrize("branch", [1, 127])
def test_branches_of_one_request_are_independent(case: LawCase, branch: int) -> None:
    rows = rows_of(case, ROWS // 2, 24)
    others = [row._replace(branch=branch) for row in rows]
    first_SR, second_SR = torch.split(Batch([*rows, *others]).draws(STEPS), ROWS // 2, dim=1)
    assert joint_p_value(case, first_SR, second_SR) > DISTRIBUTION_ALPHA
    assert (
        joint_p_value(case, first_SR[branch:], second_SR[: STEPS - branch]) > DISTRIBUTION_ALPHA
    )  # nor a later position


def test_groups_and_places_in_them_are_independent() -> None:
    """Places 0 to 4 of each of 32 groups have the distribution of the pair."""
    logits_V = np.full(32 * 128, -np.inf, np.float32)
    logits_V.reshape(32, 128)[:, :5] = PAIR.logits_V
    case = LawCase(logits_V=logits_V, params=SamplingParams())
    tokens_SR = Batch(rows_of(case, ROWS, 25), dtype=torch.bfloat16).draws(STEPS)
    found = check_many(case, tokens_SR)
    print(f"groups and places: {found}")
    assert found.passes  # the distribution is the product of both
    groups_SR, places_SR = tokens_SR // 128, tokens_SR % 128
    flat_groups = LawCase(logits_V=np.zeros(32, np.float32), params=SamplingParams())
    for lag in (1, 2):
        assert joint_p_value(PAIR, *lagged(places_SR, lag)) > DISTRIBUTION_ALPHA
        assert joint_p_value(flat_groups, *lagged(groups_SR, lag)) > DISTRIBUTION_ALPHA


@pytest.mark.parametrize("name", ["plain", "huge nucleus", "penalties and top-p"])
def test_replayed_graph_draws_what_launches_draw(name: str) -> None:
    case = CASES[name]
    launched, replayed = (Batch(rows_of(case, 256, 26)).draws(64, replayed=replayed) for replayed in (False, True))
    assert torch.equal(launched, replayed)
