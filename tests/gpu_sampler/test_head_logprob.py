"""Target log-probability and rank from hidden rows and a head, against materialised logits; ids are checked first."""

import numpy as np
import pytest

from gpu_sampler.reference.head_logprob import head_logprob
from gpu_sampler.reference.label_scores import head_logits
from gpu_sampler.reference.order import first

N, D = 17, 9


@pytest.mark.parametrize("vocab_size", [1, 3, 111, 300])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 4.0)])
def test_logprobs_and_ranks_are_those_of_the_materialised_head(vocab_size: int, scale: float, softcap: float) -> None:
    rng = np.random.default_rng(vocab_size)
    hidden = rng.normal(0, 1, (N, D)).astype(np.float32)
    head = rng.normal(0, 1, (vocab_size, D)).astype(np.float32)
    bias = rng.normal(0, 1, vocab_size).astype(np.float32)
    targets = rng.integers(0, vocab_size, N)
    targets[:2] = (0, vocab_size - 1)
    found = head_logprob(hidden, head, targets, bias, scale, softcap)
    z = head_logits(hidden, head, bias, scale, softcap)
    log_sums = np.log(np.exp(z).sum(1))
    np.testing.assert_allclose(found.log_sums, log_sums, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.logprobs, z[np.arange(N), targets] - log_sums, atol=1e-6)
    for i, target in enumerate(targets.tolist()):
        assert first(z[i].astype(np.float32), vocab_size)[found.ranks[i] - 1] == target


def test_tied_targets_rank_by_their_ids() -> None:
    head = np.ones((5, 3), np.float32)
    found = head_logprob(np.ones((5, 3), np.float32), head, np.arange(5))
    assert found.ranks.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found.logprobs, np.log(0.2), rtol=1e-6)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_target_outside_of_the_vocabulary_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"`targets` must be in \[0, 5\)"):
        head_logprob(np.ones((2, 3), np.float32), np.ones((5, 3), np.float32), np.array([0, bad]))


def test_no_rows_give_no_rows() -> None:
    found = head_logprob(np.empty((0, 3), np.float32), np.ones((5, 3), np.float32), np.empty(0, np.int64))
    assert [len(part) for part in found] == [0, 0, 0]
