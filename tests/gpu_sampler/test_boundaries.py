"""Where a rule turns: exact ties at top_p, tokens drawn past max_tokens, logits at the ends of float32."""

import numpy as np
import pytest
import torch

from gpu_sampler.reference.softmax_stats import SoftmaxStats
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams

SIZES = range(2, 800, 2)


def wrong_nuclei() -> int:
    """Counts the rows of n equal tokens that do not keep exactly n / 2 at top_p = 1/2."""
    wrong = 0
    for size in SIZES:
        sampler = Sampler(num_slots=2, vocab_size=size, logprobs_mode="processed_logprobs")
        sampler.admit(1, SamplingParams(top_p=0.5, logprobs=0), [0], seed=size)
        output = sampler.sample(torch.zeros(1, size), [1])
        assert output.logprobs is not None
        wrong += bool(abs(output.logprobs[0] + np.log(size / 2)) > 1e-4 or output.tokens[0] >= size // 2)
    return wrong


def test_a_token_with_exactly_p_before_it_is_not_kept() -> None:
    assert wrong_nuclei() == 0


def test_a_total_that_was_rounded_by_a_logarithm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(stats: SoftmaxStats, temperature: float) -> float:
        return float(np.exp(stats.log_weights(stats.best, temperature)).sum())

    monkeypatch.setattr(SoftmaxStats, "total", rounded)
    assert wrong_nuclei() > 0


def test_tokens_past_max_tokens_cost_neither_their_row_nor_its_neighbour() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 111)).astype(np.float32))
    greedy_for_new = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=3)
    sampler = Sampler(num_slots=3, vocab_size=111, overlay_entries=6)
    for slot in (1, 2):
        sampler.admit(slot, greedy_for_new, [5], seed=slot)
    ids_before = None
    for _ in range(9):
        output = sampler.sample(logits, [1, 2])
        assert (output.tokens >= 0).all() and not output.flags.any()
        kept = sampler.state.overlay(2).ids.copy()
        if len(kept) == 3:
            assert ids_before is None or (kept == ids_before).all()
            ids_before = kept
    assert ids_before is not None
    for slot in (1, 2):
        sampler.release(slot)
    assert sampler.state._extent_allocator.free == 6


def test_logits_at_both_ends_of_float32_are_sampled_and_reported() -> None:
    largest = float(np.finfo(np.float32).max)
    sampler = Sampler(num_slots=2, vocab_size=17)
    sampler.admit(1, SamplingParams(logprobs=3, logprob_token_ids=(0, 1)), [0], seed=1)
    output = sampler.sample(torch.where(torch.arange(17) % 2 == 1, largest, -largest)[None], [1])
    assert output.tokens[0] % 2 == 1 and not output.flags.any()
    assert output.top_ids is not None and output.chosen_logprobs is not None
    assert output.top_ids[0].tolist() == [1, 3, 5]
    assert output.chosen_logprobs[0].tolist() == [-np.inf, pytest.approx(-np.log(8))]
