"""The label kernels against their float64 twin, on the same 16-bit or float32 inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler import logprobs as head
from gpu_sampler.kernels.lm_head_logprob import branch, label_scores
from gpu_sampler.reference import lm_head_logprob as twins

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells the interpreter of NaN and overflow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"scale": 0.5, "softcap": 3.0})
BOTH_BRANCHES = (8, 33)  # labels


Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, head, bias


def case(rows: int, labels: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> Arguments:
    """Hidden rows, the labels' rows of the head and their bias: logits of standard deviation 3."""
    rng = np.random.default_rng([seed, rows, labels, width])
    hidden_ND, head_LD = rng.normal(0, 1, (rows, width)), rng.normal(0, 3 / np.sqrt(width), (labels, width))
    hidden, weights, bias = (torch.from_numpy(x).to(device) for x in (hidden_ND, head_LD, rng.normal(0, 1, labels)))
    return hidden.to(dtype), weights.to(dtype), bias.float()


def of_twin(arguments: Arguments, options: dict[str, Any]) -> Any:
    hidden, weights, bias = (x.float().cpu().numpy() for x in arguments)
    return twins.label_scores(hidden, weights, bias, **options)


def assert_close(found_NL: torch.Tensor, expected_NL: Any) -> None:
    np.testing.assert_allclose(found_NL.cpu(), expected_NL, rtol=2e-7, atol=2e-5)


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [1, 2, 3, 8, 16, 17, 33, 128])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (17, 200)])
def test_scores_are_those_of_the_twin(
    rows: int, width: int, labels: int, dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    arguments = case(rows, labels, width, dtype, device)
    assert_close(label_scores(*arguments, **options), of_twin(arguments, options))


def test_number_of_labels_alone_chooses_the_branch() -> None:
    assert [branch(labels) for labels in (1, 8, 16, 17, 128)] == ["products"] * 3 + ["dots"] * 2
    assert [branch(labels) for labels in BOTH_BRANCHES] == ["products", "dots"]


@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_a_width_of_several_slices_is_summed_whole(labels: int, device: str) -> None:
    arguments = case(3, labels, 3001, torch.bfloat16, device)
    assert_close(label_scores(*arguments), of_twin(arguments, {}))


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("gap", [1, 8, 16])
@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_strides_and_neighbours_do_not_matter(labels: int, width: int, gap: int, device: str) -> None:
    """Rows stand in NaN, shifted by the gap; and any row alone has the same bits."""
    hidden, weights, bias = case(17, labels, width, torch.bfloat16, device)
    together = label_scores(hidden, weights, bias)
    wide = torch.full((19, width + 2 * gap), torch.nan, dtype=torch.bfloat16, device=device)
    wide[1:18, gap : gap + width] = hidden
    assert torch.equal(label_scores(wide[1:18, gap : gap + width], weights, bias), together)
    for row in (0, 1, 16):
        assert torch.equal(label_scores(hidden[row : row + 1], weights, bias), together[row : row + 1])


@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_a_bad_row_scores_nothing_and_leaves_the_others_alone(labels: int, device: str) -> None:
    hidden, weights, bias = case(17, labels, 72, torch.bfloat16, device)
    alone = label_scores(hidden, weights, bias)
    hidden[4, 5] = torch.nan
    found = label_scores(hidden, weights, bias)
    assert torch.isneginf(found[4]).all()
    others = [row for row in range(17) if row != 4]
    assert torch.equal(found[others], alone[others])


@pytest.mark.parametrize("bad", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_banned_and_bad_labels_score_nothing_and_take_nothing(labels: int, bad: float, device: str) -> None:
    arguments = case(3, labels, 72, torch.bfloat16, device)
    arguments[2][1] = bad
    found = label_scores(*arguments)
    assert torch.isneginf(found[:, 1]).all() and (found[:, [0, 2]] > -torch.inf).all()
    assert_close(found, of_twin(arguments, {}))
    arguments[2][:] = bad
    assert torch.isneginf(label_scores(*arguments)).all()


@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_duplicate_labels_share(labels: int, device: str) -> None:
    hidden, weights, bias = case(3, labels, 72, torch.bfloat16, device)
    weights[1], bias[1] = weights[0], bias[0]
    found = label_scores(hidden, weights, bias)
    assert torch.equal(found[:, 0], found[:, 1])
    assert_close(found, of_twin((hidden, weights, bias), {}))


def bias_left_out(hidden: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return label_scores(hidden, weights)


def last_feature_left_out(hidden: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return label_scores(hidden[:, :-1].contiguous(), weights[:, :-1].contiguous(), bias)


def padding_in_the_sum(hidden: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    padding = weights.new_zeros(1, weights.shape[1])
    return label_scores(hidden, torch.cat([weights, padding]), torch.cat([bias, bias.new_zeros(1)]))[:, :-1]


def neighbour_scored(hidden: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return label_scores(hidden.roll(1, 0), weights, bias)


@pytest.mark.parametrize("fault", [bias_left_out, last_feature_left_out, padding_in_the_sum, neighbour_scored])
@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_planted_fault_is_told_apart(labels: int, fault: Callable[..., torch.Tensor], device: str) -> None:
    arguments = case(17, labels, 200, torch.bfloat16, device)
    with pytest.raises(AssertionError):
        assert_close(fault(*arguments), of_twin(arguments, {}))


def test_no_rows_and_arguments_that_do_not_belong_together(device: str) -> None:
    hidden, weights, bias = case(3, 129, 64, torch.bfloat16, device)
    assert label_scores(hidden[:0], weights[:8]).shape == (0, 8)
    for arguments, message in (
        ((hidden, weights, bias), "got 129 labels, expected 1 to 128"),
        ((hidden, weights[:0]), "got 0 labels"),
        ((hidden, weights[:8].float()), "got head torch.float32"),
        ((hidden.double(), weights[:8]), "got hidden torch.float64"),
        ((hidden[0], weights[:8]), "got hidden"),
        ((hidden, weights[:8], bias[:7]), r"got bias \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            label_scores(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("labels", BOTH_BRANCHES)
def test_a_graph_replays_on_new_rows(labels: int) -> None:
    first, second = (case(256, labels, 1024, torch.bfloat16, "cuda", seed) for seed in (0, 1))
    expected = head.label_scores(*second)
    head.label_scores(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = head.label_scores(*first)
    for held, new in zip(first, second, strict=True):
        held.copy_(new)
    graph.replay()
    assert torch.equal(found, expected)
    np.testing.assert_allclose(found.cpu(), of_twin(second, {}), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [2, 8, 16, 128])
def test_wide_rows_score_like_float64(labels: int, dtype: torch.dtype) -> None:
    hidden, weights, bias = case(256, labels, 4096, dtype, "cuda")
    expected = (hidden.double() @ weights.double().T + bias.double()).log_softmax(1)
    tolerance = 1e-4 if branch(labels) == "dots" and dtype != torch.float32 else 2e-5
    torch.testing.assert_close(label_scores(hidden, weights, bias).double(), expected, rtol=0, atol=tolerance)
