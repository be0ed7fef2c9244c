"""Label log-probabilities from the labels' rows of the head, against the whole head and a log-softmax."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler import logprobs as head
from gpu_sampler.reference.lm_head_logprob import head_logits, label_scores

N, D, V = 3, 17, 111
OPTIONS = [(1.0, 0.0), (0.25, 0.0), (1.0, 5.0), (3.0, 30.0)]


def hidden_and_head(seed: int = 0) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    hidden_ND, head_VD = rng.normal(0, 1, (N, D)), rng.normal(0, 1, (V, D))
    return hidden_ND.astype(np.float32), head_VD.astype(np.float32), rng.normal(0, 1, V).astype(np.float32)


def slow_logit(h: list[float], w: list[float], b: float, scale: float, softcap: float) -> float:
    z = scale * (math.fsum(x * y for x, y in zip(h, w, strict=True)) + b)
    return softcap * math.tanh(z / softcap) if softcap else z


@pytest.mark.parametrize(("scale", "softcap"), OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_head_logits_are_soft_capped_scaled_and_biased_dot_products(scale: float, softcap: float, biased: bool) -> None:
    hidden, head, bias = hidden_and_head()
    found = head_logits(hidden, head, bias if biased else None, scale, softcap)
    for i in range(N):
        for j in range(V):
            b = float(bias[j]) if biased else 0.0
            exact = slow_logit(hidden[i].tolist(), head[j].tolist(), b, scale, softcap)
            assert found[i, j] == pytest.approx(exact, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("labels", [[5], [5, 110], [0, 0, 3], list(range(V))])
@pytest.mark.parametrize(("scale", "softcap"), OPTIONS)
def test_scores_are_the_whole_softmax_renormalised_over_the_labels(
    labels: list[int], scale: float, softcap: float
) -> None:
    hidden, head, bias = hidden_and_head(1)
    z = head_logits(hidden, head, bias, scale, softcap)
    probs = np.exp(z - z.max(1, keepdims=True))[:, labels]
    found = label_scores(hidden, head[labels], bias[labels], scale, softcap)
    assert found.dtype == np.float32 and found.shape == (N, len(labels))
    np.testing.assert_allclose(found, np.log(probs / probs.sum(1, keepdims=True)), atol=2e-6)
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(1), 1, atol=1e-6)


def test_scores_of_far_apart_labels_neither_overflow_nor_become_nan() -> None:
    hidden = np.array([[1000.0]], np.float32)
    found = label_scores(hidden, np.array([[30.0], [-30.0]], np.float32))
    assert found.tolist() == [[0.0, -60_000.0]]


def test_no_rows_give_no_rows() -> None:
    assert label_scores(np.empty((0, D), np.float32), hidden_and_head()[1][:3]).shape == (0, 3)


def test_a_bad_row_scores_nothing_and_leaves_the_others_alone() -> None:
    hidden, weights, _ = hidden_and_head(2)
    alone = label_scores(hidden, weights[:3])
    hidden[1, 4] = np.nan
    found = label_scores(hidden, weights[:3])
    assert np.isneginf(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], alone[[0, 2]])


def test_a_banned_label_scores_nothing_and_takes_nothing() -> None:
    hidden, weights, bias = hidden_and_head(3)
    bias[1] = -np.inf
    found = label_scores(hidden, weights[:3], bias[:3])
    assert np.isneginf(found[:, 1]).all()
    np.testing.assert_allclose(found[:, [0, 2]], label_scores(hidden, weights[[0, 2]], bias[[0, 2]]), atol=1e-6)


def test_the_public_op_on_a_cpu_is_the_reference() -> None:
    hidden, weights, bias = hidden_and_head(4)
    tensors = (torch.from_numpy(hidden), torch.from_numpy(weights[:8]), torch.from_numpy(bias[:8]))
    found = head.label_scores(*tensors, 0.5, 3.0)
    np.testing.assert_array_equal(found.numpy(), label_scores(hidden, weights[:8], bias[:8], 0.5, 3.0))
