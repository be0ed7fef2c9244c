"""Log-probability ops on arrays and tensors: against float64, with flags, and with ids that are in no vocabulary."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.logprobs import _log_sums, chosen_logprobs, label_logprobs, token_logprobs, topk_logprobs
from gpu_sampler.output import RowFlag
from gpu_sampler.reference.filters import first, rank
from gpu_sampler.reference.logprobs import processed_view, raw_view
from gpu_sampler.sampling_params import INVALID_TOKEN

Float32s = npt.NDArray[np.float32]
KINDS: dict[str, Callable[[Float32s], Any]] = {
    "numpy": lambda z: z,
    "read-only numpy": lambda z: frozen(z),
    "strided numpy": lambda z: np.repeat(z, 3, axis=1)[:, ::3],
    "tensor": torch.from_numpy,
    "strided tensor": lambda z: torch.from_numpy(np.ascontiguousarray(z.T)).T,
}
V = 111
BAD_IDS = [-1, V, 2**31 - 1, -(2**31)]
KIND = pytest.mark.parametrize("kind", KINDS)


def frozen(z: Float32s) -> Float32s:
    z = z.copy()
    z.flags.writeable = False
    return z


def logits(rows: int = 5, size: int = V) -> Float32s:
    return (np.random.default_rng(size).normal(0, 4, (rows, size)) * 8).round().astype(np.float32) / np.float32(8)


def log_softmax(z_RV: Float32s) -> npt.NDArray[np.float64]:
    z = z_RV.astype(np.float64)
    best = z.max(1, keepdims=True)
    found: npt.NDArray[np.float64] = z - best - np.log(np.exp(z - best).sum(1, keepdims=True))
    return found


@KIND
def test_chosen_logprobs_are_those_of_a_float64_log_softmax(kind: str) -> None:
    z, ids = logits(), np.array([[0, 110, 5], [1, 1, 2], [3, 4, 5], [9, 8, 7], [0, 0, 0]])
    found, flags = chosen_logprobs(KINDS[kind](z), ids)
    np.testing.assert_allclose(np.asarray(found), np.take_along_axis(log_softmax(z), ids, 1), atol=2e-6)
    same, _ = chosen_logprobs(KINDS[kind](z), frozen_ids([0, 110, 5]))
    np.testing.assert_allclose(np.asarray(same), log_softmax(z)[:, [0, 110, 5]], atol=2e-6)
    assert isinstance(found, torch.Tensor) is ("tensor" in kind)
    assert not np.asarray(flags).any()


def frozen_ids(ids: list[int]) -> npt.NDArray[np.int32]:
    array = np.array(ids, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_float_type_is_summed_in_float64(dtype: torch.dtype) -> None:
    z = torch.from_numpy(logits()).to(dtype)
    found, flags = chosen_logprobs(z, torch.arange(V))
    assert found.dtype == torch.float32 and flags.dtype == torch.int32
    np.testing.assert_allclose(found.numpy(), log_softmax(z.float().numpy()), atol=2e-6)


@KIND
def test_sampled_token_and_its_rank_follow_the_total_order(kind: str) -> None:
    z = logits(7)
    z[3] = 1.0
    tokens = np.array([0, 110, 5, 17, 3, INVALID_TOKEN, 9])
    found, _, ranks = token_logprobs(KINDS[kind](z), tokens)
    expected = [rank(row, token) if token >= 0 else 0 for row, token in zip(z, tokens.tolist(), strict=True)]
    assert np.asarray(ranks).tolist() == expected and expected[3] == 18
    exact = log_softmax(z)[np.arange(7), tokens]
    exact[5] = -np.inf
    np.testing.assert_allclose(np.asarray(found)[:, 0], exact, atol=2e-6)


@KIND
@pytest.mark.parametrize("n", [0, 1, 20, 111, 112, 256])
def test_top_n_is_the_head_of_the_total_order_and_padded(kind: str, n: int) -> None:
    z = logits()
    z[1] = -np.inf
    z[2, 5:] = -np.inf
    ids, values = topk_logprobs(KINDS[kind](z), n)
    for i in range(len(z)):
        order = [token for token in first(z[i], n).tolist() if z[i, token] > -np.inf]
        assert np.asarray(ids)[i].tolist() == order + [INVALID_TOKEN] * (n - len(order))
        if order:
            np.testing.assert_allclose(
                np.asarray(values)[i, : len(order)], log_softmax(z[i : i + 1])[0, order], atol=2e-6
            )
        assert (np.asarray(values)[i, len(order) :] == -np.inf).all()


@pytest.mark.parametrize("labels", [1, 2, 9, 70, V])
def test_label_logprobs_are_over_the_labels_alone_and_each_row_by_itself(labels: int) -> None:
    z = logits(40)[:, :labels]
    z[3, 0] = -np.inf if labels > 1 else 0
    found = label_logprobs(torch.from_numpy(z))
    np.testing.assert_allclose(found.numpy(), log_softmax(z), rtol=2e-7, atol=1e-7)
    for some in (slice(7, 8), slice(5, 36)):
        assert torch.equal(label_logprobs(torch.from_numpy(z[some])), found[some])
    assert torch.equal(label_logprobs(torch.from_numpy(np.asfortranarray(z))), found)


def test_unsound_labels_are_nan_throughout_and_leave_their_neighbours_bitwise_alone() -> None:
    good, bad = (torch.from_numpy(logits(6)[:, :4].copy()) for _ in range(2))
    bad[0, 3], bad[2, 1], bad[4] = torch.nan, torch.inf, -torch.inf
    clean, found = label_logprobs(good), label_logprobs(bad)
    assert found[[0, 2, 4]].isnan().all()
    assert torch.equal(found[[1, 3, 5]], clean[[1, 3, 5]])


@KIND
def test_flags_tell_of_bad_rows_and_leave_their_neighbours_bitwise_alone(kind: str) -> None:
    good, bad = logits(6), logits(6)
    bad[0, 3] = np.nan
    bad[2, 4] = np.inf
    bad[4] = -np.inf
    bad[5] = np.nan
    ids = np.arange(V)
    clean, _ = chosen_logprobs(KINDS[kind](good), ids)
    values, flags = map(np.asarray, chosen_logprobs(KINDS[kind](bad), ids))
    assert flags.dtype == np.int32
    both = RowFlag.BAD_VALUE | RowFlag.NO_TOKEN
    assert flags.tolist() == [RowFlag.BAD_VALUE, 0, RowFlag.BAD_VALUE, 0, RowFlag.NO_TOKEN, both]
    assert not np.isnan(values).any() and values[0, 3] == values[2, 4] == -np.inf
    assert (values[4:] == -np.inf).all()
    assert values[[1, 3]].tobytes() == np.asarray(clean)[[1, 3]].tobytes()


@pytest.mark.risk("S4")
@KIND
@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_in_no_vocabulary_read_nothing_and_give_minus_inf(kind: str, bad: int) -> None:
    """Canary rows on both sides hold values that would show if they were read, and are unchanged afterwards."""
    buffer = np.full((5, V), 1e30, np.float32)
    buffer[2] = logits(1)[0]
    before, row = buffer.copy(), KINDS[kind](buffer)[2:3]
    ids = np.array([0, bad, V - 1])
    exact = log_softmax(buffer[2:3])[0]
    chosen = np.asarray(chosen_logprobs(row, ids)[0])[0]
    assert chosen[1] == -np.inf
    np.testing.assert_allclose(chosen[[0, 2]], exact[[0, -1]], atol=2e-6)
    token, _, ranks = token_logprobs(row, np.array([bad]))
    assert np.asarray(token).tolist() == [[-np.inf]] and np.asarray(ranks).tolist() == [0]
    np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize("size", [1, 17, V, 300])
def test_raw_view_of_the_sampler_agrees_with_the_ops_on_their_own(size: int) -> None:
    z = logits(9, size)
    z[8] = 0
    ids = np.arange(-1, size + 1)
    alone, _ = chosen_logprobs(z, ids)
    for i, row in enumerate(z):
        np.testing.assert_allclose(raw_view(row).logprobs(ids), alone[i], rtol=2e-7, atol=1e-9)
        assert raw_view(row).top(size + 3)[0].tolist() == topk_logprobs(z, size + 3)[0][i].tolist()


def test_processed_view_renormalises_over_the_kept_tokens() -> None:
    z, kept = np.array([2, 1, 0, -1, 3], np.float32), np.array([4, 0, 1])
    view = processed_view(z, 0.5, kept)
    exact = np.full(5, -np.inf)
    exact[kept] = log_softmax((z[None, kept] * 2).astype(np.float32))[0]
    np.testing.assert_allclose(view.logprobs(np.arange(5)), exact, atol=1e-6)
    assert view.top(6)[0].tolist() == [4, 0, 1, 2, 3, INVALID_TOKEN]  # removed tokens keep their places
    assert (view.top(6)[1][3:] == -np.inf).all()
    assert [view.rank(token) for token in (4, 0, 1)] == [1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 2.0])
def test_smallest_finite_logits_of_a_masking_model_report_minus_inf_or_less_than_anything(temperature: float) -> None:
    z = np.array([np.finfo(np.float32).min, 0, 1, np.finfo(np.float32).max, -np.inf], np.float32)
    for row in (z, z[:3]):
        found = processed_view(row, temperature, None).logprobs(np.arange(len(row)))
        assert not np.isnan(found).any() and found.max() <= 0 and found[0] < -1e38
        assert np.exp(found.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_no_rows_give_no_rows() -> None:
    none = np.empty((0, V), np.float32)
    assert chosen_logprobs(none, np.arange(3))[0].shape == (0, 3)
    assert label_logprobs(torch.from_numpy(none)).shape == (0, V)
    assert topk_logprobs(none, 4)[0].shape == (0, 4)


def column_by_column(z_RV: torch.Tensor) -> torch.Tensor:
    """The planted fault: rows side by side are summed along the columns, a row alone pairwise."""
    rows = np.asfortranarray(z_RV.numpy())
    return torch.from_numpy(np.log(np.exp(rows).sum(axis=1, keepdims=True)))


def rows_that_depend_on_others(log_sums: Callable[[torch.Tensor], torch.Tensor], size: int) -> int:
    """Finds those of 33 rows whose sum has other bits alone, in another order, or stored column by column."""
    z = torch.from_numpy(np.random.default_rng(size).normal(0, 6, (33, size)))
    together = log_sums(z)
    alone = torch.cat([log_sums(row[None]) for row in z])
    turned = log_sums(z.T.contiguous().T)
    mixed = log_sums(z.flip(0)).flip(0)
    return int(((together != alone) | (together != turned) | (together != mixed)).sum())


@pytest.mark.parametrize("size", [1, 3, 17, V, 2003, 32003])
def test_a_row_has_the_same_bits_alone_beside_others_and_at_any_stride(size: int) -> None:
    assert rows_that_depend_on_others(_log_sums, size) == 0


def test_a_sum_whose_order_depends_on_the_number_of_rows_is_caught() -> None:
    assert rows_that_depend_on_others(column_by_column, 2003) > 0
