"""Target log-probability and rank from hidden rows and a head, against materialised logits; ids are checked first."""

import math

import numpy as np
import pytest
import torch

from gpu_sampler import logprobs as head
from gpu_sampler.output import RowFlag
from gpu_sampler.reference.filters import first
from gpu_sampler.reference.lm_head_logprob import Rounding, head_logits, head_logprob, rounded

N, D = 17, 9


def _logit(h: list[float], w: list[float], b: float, scale: float, softcap: float) -> float:
    z = scale * (math.fsum(x * y for x, y in zip(h, w, strict=True)) + b)
    return softcap * math.tanh(z / softcap) if softcap else z


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 5.0), (3.0, 30.0)])
@pytest.mark.parametrize("biased", [False, True])
def test_head_logits_are_soft_capped_scaled_and_biased_dot_products(scale: float, softcap: float, biased: bool) -> None:
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(0, 1, (3, 17)).astype(np.float32), rng.normal(0, 1, (111, 17)).astype(np.float32)
    bias = rng.normal(0, 1, 111).astype(np.float32)
    found = head_logits(hidden, head, bias if biased else None, scale, softcap)
    for i, j in np.ndindex(found.shape):
        exact = _logit(hidden[i].tolist(), head[j].tolist(), float(bias[j]) if biased else 0.0, scale, softcap)
        assert found[i, j] == pytest.approx(exact, rel=1e-12, abs=1e-12)


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
    assert [len(part) for part in found] == [0] * 5


@pytest.mark.parametrize(("to", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounding_is_that_of_a_stored_logit(to: Rounding, dtype: torch.dtype) -> None:
    values = np.random.default_rng(1).normal(0, 30, 10_000).astype(np.float32)
    values[:9] = (np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1.00390625, 1.01171875)  # the last two are ties
    np.testing.assert_array_equal(rounded(values.astype(np.float64), to), torch.from_numpy(values).to(dtype).double())


def test_rounded_logits_tie_and_give_their_own_log_sum() -> None:
    weights = np.array([[1.0], [1.001], [0.5]], np.float32)
    found = head_logprob(np.ones((3, 1), np.float32), weights, np.arange(3), round_logits="bf16")
    assert found.ranks.tolist() == [1, 2, 3] and found.is_greedy.tolist() == [True, True, False]
    np.testing.assert_allclose(found.log_sums, np.log(2 * np.e + np.exp(0.5)), rtol=1e-12)


def test_bad_logits_count_as_nothing_and_flag_their_row_alone() -> None:
    hidden = np.array([[1.0, 0.0], [np.nan, 0.0], [0.0, 1.0], [-np.inf, 0.0]], np.float32)
    weights = np.array([[1.0, 0.0], [2.0, np.inf], [3.0, 0.0]], np.float32)
    found = head_logprob(hidden, weights, np.array([0, 0, 2, 0]))
    both = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN
    assert found.flags.tolist() == [RowFlag.BAD_VALUE, both, RowFlag.BAD_VALUE, both]
    # Token 1 is NaN in row 0 (0 x inf) and +inf in row 2.
    np.testing.assert_allclose(found.log_sums, [np.log(np.e + np.e**3), -np.inf, np.log(2), -np.inf])
    np.testing.assert_allclose(found.logprobs[[0, 2]], [1 - np.log(np.e + np.e**3), -np.log(2)], atol=1e-6)
    assert found.logprobs[[1, 3]].tolist() == [-np.inf, -np.inf]
    assert found.is_greedy.tolist() == [False, False, True, False] and found.ranks.tolist() == [2, 1, 2, 1]


def test_the_public_op_on_a_cpu_is_the_reference_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    hidden, weights, bias = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((N, D), (111, D), (111,)))
    targets = rng.integers(0, 111, N)
    monkeypatch.setattr(head, "_LOGITS_AT_ONCE", 500)
    tensors = torch.from_numpy(hidden), torch.from_numpy(weights), torch.from_numpy(targets), torch.from_numpy(bias)
    found = head.head_logprob(*tensors, 0.5, 4.0, "bf16")
    for part, reference in zip(found, head_logprob(hidden, weights, targets, bias, 0.5, 4.0, "bf16"), strict=True):
        np.testing.assert_allclose(part.numpy(), reference, rtol=1e-6)
    assert [part.dtype for part in found] == [torch.float32, torch.int32, torch.float32, torch.bool, torch.int32]
    assert [len(part) for part in head.head_logprob(tensors[0][:0], tensors[1], tensors[2][:0])] == [0] * 5
    with pytest.raises(ValueError, match=r"`targets` must be in \[0, 111\). Given: 0 to 111"):
        head.head_logprob(tensors[0][:2], tensors[1], torch.tensor([0, 111]))
