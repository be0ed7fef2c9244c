"""Drafts: their law is the q that they come with, and under `strict` they are what the row would draw."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, VerifyRules
from tests.support.cases import coarse_logits
from tests.support.draws import LAW_ALPHA
from tests.support.speculation import seeds_of
from tests.support.statistics import chi_square

ROWS = 2000
V = 200


def drafted(offset: int = 0, rules: VerifyRules = VerifyRules(), **params: Any) -> Any:  # noqa: B008
    sampler = Sampler(num_slots=ROWS + 1, vocab_size=V)
    for slot, seed in enumerate(seeds_of(ROWS, 3), start=1):
        sampler.admit(slot, SamplingParams(**params), [], seed=seed)
    logits = np.broadcast_to(coarse_logits(V, 5), (ROWS, V))
    return sampler.draft(logits, range(1, ROWS + 1), offset, "probabilistic", rules)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5, "top_k": 7}, {"top_p": 0.6}, {"min_p": 0.3}], ids=["plain", "k", "p", "min-p"]
)
def test_draft_has_the_law_that_it_comes_with(params: dict[str, Any]) -> None:
    ids, q_ids, q_probs = drafted(**params)
    assert (q_ids == q_ids[0]).all() and (q_probs == q_probs[0]).all()
    assert q_probs[0].sum() == pytest.approx(1, abs=1e-6)
    law = np.zeros(V)
    law[q_ids[0][q_ids[0] >= 0]] = q_probs[0][q_ids[0] >= 0]
    assert chi_square(np.bincount(ids, minlength=V), law / law.sum()).p_value > LAW_ALPHA
    assert (q_ids[0] >= 0).sum() == {"top_k": 7}.get(next(iter(params), ""), (q_ids[0] >= 0).sum())


def test_plain_draft_comes_from_the_first_64_tokens_of_the_order() -> None:
    _, q_ids, _ = drafted()
    assert q_ids[0].tolist() == np.argsort(-coarse_logits(V, 5), kind="stable")[:PROPOSAL_IDS].tolist()


def test_numbers_of_a_draft_depend_on_its_offset() -> None:
    """The position that is drafted at offset 1 now and at offset 0 by the next run has other numbers there."""
    sampler = Sampler(num_slots=ROWS + 1, vocab_size=V)
    logits = np.broadcast_to(coarse_logits(V, 5), (ROWS, V))
    for slot, seed in enumerate(seeds_of(ROWS, 3), start=1):
        sampler.admit(slot, SamplingParams(), [], seed=seed, output_ids=[4])
    later = sampler.draft(logits, range(1, ROWS + 1), 0, "probabilistic").ids
    assert np.mean(drafted(1).ids == later) < 0.2


def test_strict_draft_is_the_token_that_the_row_draws() -> None:
    params = {"top_p": 0.9, "seed": 5}
    sampler = Sampler(num_slots=2, vocab_size=V)
    logits = coarse_logits(V, 5)[None]
    for seed in range(20):
        sampler.admit(1, SamplingParams(**params), [], seed=seed)  # type: ignore[arg-type]
        ids, q_ids, q_probs = sampler.draft(logits, [1], 0, "probabilistic")
        assert ids[0] == sampler.sample(logits, [1]).tokens[0]
        assert q_ids[0, 0] == ids[0] and q_probs[0, 0] == 1 and (q_ids[0, 1:] == INVALID_TOKEN).all()


def test_greedy_drafts_and_drafts_of_greedy_rows_are_certain() -> None:
    sampler = Sampler(num_slots=3, vocab_size=V)
    logits = np.stack([coarse_logits(V, 5), coarse_logits(V, 6)])
    sampler.admit(1, SamplingParams(temperature=0), [], seed=1)
    sampler.admit(2, SamplingParams(), [], seed=1)
    for slots, method in (([1, 1], "probabilistic"), ([2, 2], "greedy")):
        ids, q_ids, q_probs = sampler.draft(logits, slots, 0, method)  # type: ignore[arg-type]
        assert ids.tolist() == logits.argmax(axis=1).tolist()
        assert q_ids[:, 0].tolist() == ids.tolist() and q_probs[:, 0].tolist() == [1, 1] and q_probs.sum() == 2


def test_draft_sees_the_drafts_before_it_and_changes_nothing_else() -> None:
    sampler = Sampler(num_slots=2, vocab_size=V)
    logits = np.zeros((1, V), np.float32)
    logits[0, [3, 4, 5]] = (4, 3.5, 3)
    sampler.admit(1, SamplingParams(temperature=0, presence_penalty=2.0, bad_words_ids=((3, 4),)), [], seed=1)
    before = sampler.state.table.copy()
    assert [int(sampler.draft(logits, [1], offset, "greedy").ids[0]) for offset in range(3)] == [3, 5, 4]
    assert int(sampler.draft(logits, [1], 1, "greedy").ids[0]) == 5  # a new run forgets what stood behind
    assert (sampler.state.table == before).all() and sampler.state.overlay_len[1] == 0


def test_row_without_a_finite_logit_has_no_draft() -> None:
    sampler = Sampler(num_slots=2, vocab_size=V)
    sampler.admit(1, SamplingParams(), [], seed=1)
    ids, q_ids, q_probs = sampler.draft(np.full((1, V), -np.inf, np.float32), [1], 0, "probabilistic")
    assert ids.tolist() == [INVALID_TOKEN] and (q_ids == INVALID_TOKEN).all() and not q_probs.any()


def test_offset_behind_the_longest_run_is_refused() -> None:
    sampler = Sampler(num_slots=2, vocab_size=V)
    with pytest.raises(ValueError, match=r"`offset` must be in \[0, 8\). Given: 8."):
        sampler.draft(np.zeros((1, V), np.float32), [0], 8, "greedy")


def test_the_reference_drafts_for_no_graph() -> None:
    sampler = Sampler(num_slots=2, vocab_size=V)
    assert not sampler.prepare_drafts([]) and not sampler.prepare_drafts([1])
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`launch_draft` needs a device. Given: cpu."):
        sampler.launch_draft(torch.zeros((1, V)), slots, 0, "greedy", VerifyRules())
