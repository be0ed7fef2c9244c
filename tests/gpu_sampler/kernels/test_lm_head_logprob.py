"""The fused LM head against its float64 twin, on the same 16-bit or float32 inputs.

Ranks, flags and is-greedy are compared exactly on inputs whose products are exact in float32, so that ties abound.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler import logprobs as head
from gpu_sampler.kernels import lm_head_logprob as module
from gpu_sampler.kernels.lm_head_logprob import TILES, head_logprob, rows_at_once
from gpu_sampler.output import RowFlag
from gpu_sampler.reference import lm_head_logprob as twins
from gpu_sampler.reference.lm_head_logprob import Rounding, TargetLogprobs, head_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells the interpreter of NaN and overflow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((1, 1, 1), (3, 3, 17), (17, 111, 64), (130, 300, 72))  # N, V, D: with descriptors where D is a multiple of 8
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.5, "softcap": 4.0},
    {"scale": 0.25, "round_logits": "bf16"},
    {"scale": 0.25, "round_logits": "fp16"},
)
Arrays = dict[str, npt.NDArray[Any]]
Twin = Callable[..., TargetLogprobs]
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, head, targets, bias


def exact_case(rows: int, vocab: int, width: int, step: float = 0.5, among: tuple[int, int] | None = None) -> Arrays:
    """Multiples of `step` from -2 to 2: every product and sum is exact in float32, and with the step of 0.5 many logits
    are equal. Targets are `among` these ids."""
    rng = np.random.default_rng([rows, vocab, width])
    shapes = ((rows, width), (vocab, width), (vocab,))
    hidden_ND, head_VD, bias_V = (rng.integers(-round(2 / step), round(2 / step) + 1, shape) * step for shape in shapes)
    low, high = among or (0, vocab)
    targets_N = rng.integers(low, high, rows)
    targets_N[:2] = (low, high - 1)[:rows]
    return {"hidden": hidden_ND, "head": head_VD, "targets": targets_N, "bias": bias_V}


def random_case(rows: int, vocab: int, width: int, seed: int = 0) -> Arrays:
    """Logits of standard deviation 3."""
    rng = np.random.default_rng([seed, rows, vocab, width])
    hidden_ND, head_VD = rng.normal(0, 1, (rows, width)), rng.normal(0, 3 / math.sqrt(width), (vocab, width))
    targets_N = rng.integers(0, vocab, rows)
    return {"hidden": hidden_ND, "head": head_VD, "targets": targets_N, "bias": rng.normal(0, 1, vocab)}


def on(device: str, case: Arrays, dtype: torch.dtype, gap: int = 0) -> Arguments:
    """The arguments as tensors; hidden and head stand in buffers with `gap` columns and rows of NaN around them."""

    def inside_nan(name: str) -> torch.Tensor:
        rows, width = case[name].shape
        whole = torch.full((rows + 2 * gap, width + gap), torch.nan, dtype=dtype, device=device)
        return whole[gap : gap + rows, :width].copy_(torch.from_numpy(case[name]))

    targets, bias = (torch.from_numpy(case[name]).to(device) for name in ("targets", "bias"))
    return inside_nan("hidden"), inside_nan("head"), targets, bias.float()


def of_twin(arguments: Arguments, options: dict[str, Any], twin: Twin = twins.head_logprob) -> TargetLogprobs:
    hidden, weights, targets, bias = arguments
    return twin(
        *(x.float().cpu().numpy() for x in (hidden, weights)), targets.cpu().numpy(), bias.cpu().numpy(), **options
    )


def assert_equals(found: TargetLogprobs, expected: TargetLogprobs, atol: float = 2e-5) -> None:
    found = TargetLogprobs(*(field.cpu().numpy() for field in found))
    np.testing.assert_array_equal(found.flags, expected.flags)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    np.testing.assert_array_equal(found.is_greedy, expected.is_greedy)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=2e-7, atol=atol)
    np.testing.assert_allclose(found.log_sums, expected.log_sums, rtol=2e-7, atol=atol)


def assert_same_bits(found: TargetLogprobs, expected: TargetLogprobs) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_everything_of_exact_products_is_that_of_the_twin(
    sizes: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    arguments = on(device, exact_case(*sizes, step=1 / 16 if "round_logits" in options else 0.5), dtype)
    assert_equals(head_logprob(*arguments, **options), of_twin(arguments, options))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_logits_of_any_size_are_rounded_like_stored_ones(to: Rounding, device: str) -> None:
    """A head of one column gives its own numbers: ties between neighbours, halves that are not normal, and overflow."""
    steps = np.arange(-40, 41)
    sizes = (2.0**-25, 2.0**-18 * 1.0009765625, 2.0**-9, 1 + 2.0**-9, 0.3, 1000.0, 65_520.0 / 40, 3.4e38 / 40)
    values = np.concatenate([steps * size for size in sizes]).astype(np.float32)[:, None]
    for weights in (values[np.abs(values[:, 0]) < 50], values):
        ones, ids, zeros = np.ones_like(weights), np.arange(len(weights)), np.zeros(len(weights))
        arguments = on(device, {"hidden": ones, "head": weights, "targets": ids, "bias": zeros}, torch.float32)
        assert_equals(head_logprob(*arguments, round_logits=to), of_twin(arguments, {"round_logits": to}))


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("bad", [None, 100, 300, 600, 799])
@pytest.mark.parametrize("among", [(0, 256), (256, 512), (512, 768), (768, 800)])
def test_tiles_without_a_target_count_like_those_with_one(among: tuple[int, int], bad: int | None, device: str) -> None:
    """Four tiles, the last of 32 ids: the targets of all rows lie in one, and a bad logit may lie in another."""
    arguments = on(device, exact_case(17, 800, 64, among=among), torch.bfloat16)
    if bad is not None:
        arguments[3][bad] = torch.nan
    assert_equals(head_logprob(*arguments), of_twin(arguments, {}))


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)])
def test_logprobs_of_random_rows_are_those_of_the_twin(
    dtype: torch.dtype, atol: float, options: dict[str, Any], device: str
) -> None:
    """Tensor cores do not round their sums to nearest: 16-bit inputs have five times the tolerance."""
    arguments = on(device, random_case(17, 515, 200), dtype)
    found, expected = head_logprob(*arguments, **options), of_twin(arguments, options)
    np.testing.assert_allclose(found.logprobs.cpu(), expected.logprobs, atol=atol)
    np.testing.assert_allclose(found.log_sums.cpu(), expected.log_sums, atol=atol)
    np.testing.assert_array_equal(found.flags.cpu(), 0)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_all_tokens_of_a_row_are_a_permutation(
    dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    """A target's logit computed otherwise than the logits beside it would shift a rank by one. Half of the head's rows
    are copies, and rounding makes more ties."""
    compiled = device == "cuda"
    vocab, width = (2003, 4096) if compiled else (300, 72)
    case = random_case(1, vocab, width)
    case["hidden"] = np.repeat(case["hidden"], vocab, 0)
    case["head"][vocab // 2 : 2 * (vocab // 2)] = case["head"][: vocab // 2]
    case["bias"][vocab // 2 : 2 * (vocab // 2)] = case["bias"][: vocab // 2]
    case["targets"] = np.arange(vocab)
    found = head_logprob(*on(device, case, dtype), **options)
    assert sorted(found.ranks.tolist()) == list(range(1, vocab + 1))
    first = found.ranks.tolist().index(1)
    assert found.is_greedy[first] and found.logprobs.argmax() == first  # the first of those that tie
    assert torch.equal(found.is_greedy, found.logprobs == found.logprobs.max())
    assert math.isclose(float(found.logprobs.double().exp().sum()), 1.0, abs_tol=2e-5)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("gap", [1, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype: torch.dtype, gap: int, device: str) -> None:
    """With a gap of 8 or 16 elements rows still come by descriptors, with one of 1 by pointers."""
    case = random_case(17, 300, 72)
    assert_same_bits(head_logprob(*on(device, case, dtype, gap)), head_logprob(*on(device, case, dtype)))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, device: str) -> None:
    hidden, weights, targets, bias = on(device, random_case(131, 300, 72), dtype)
    together = head_logprob(hidden, weights, targets, bias)
    order = torch.from_numpy(np.random.default_rng(1).permutation(131)).to(device)
    permuted = head_logprob(hidden[order], weights, targets[order], bias)
    assert_same_bits(permuted, TargetLogprobs(*(field[order] for field in together)))
    for row in (0, 77, 130):
        one = slice(row, row + 1)
        alone = head_logprob(hidden[one], weights, targets[one], bias)
        assert_same_bits(alone, TargetLogprobs(*(field[one] for field in together)))


def test_passes_over_the_rows_give_the_same_bits(device: str) -> None:
    arguments = on(device, random_case(300, 300, 64), torch.bfloat16)
    assert rows_at_once(300, TILES[torch.bfloat16], 1) == 128  # three passes
    assert_same_bits(head_logprob(*arguments, workspace=1), head_logprob(*arguments))


def test_a_bad_row_is_flagged_and_no_other_changes(device: str) -> None:
    hidden, weights, targets, bias = on(device, random_case(17, 300, 72), torch.bfloat16)
    alone = head_logprob(hidden, weights, targets, bias)
    hidden[3, 5], hidden[9, 7] = torch.nan, torch.inf
    found = head_logprob(hidden, weights, targets, bias)
    others = [row for row in range(17) if row not in (3, 9)]
    assert_same_bits(TargetLogprobs(*(x[others] for x in found)), TargetLogprobs(*(x[others] for x in alone)))
    assert found.flags[3] == RowFlag.BAD_VALUE | RowFlag.NO_TOKEN and found.logprobs[3] == -torch.inf
    assert found.flags[9] & RowFlag.BAD_VALUE  # +inf or -inf by the sign of the weight


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_count_as_nothing(bad: float, device: str) -> None:
    """One of them is some rows' target, and tokens before and after it are others'."""
    arguments = on(device, exact_case(17, 300, 64), torch.bfloat16)
    arguments[3][7] = bad
    arguments[2][2:5] = torch.tensor([7, 6, 299])
    assert_equals(head_logprob(*arguments), of_twin(arguments, {}))


@pytest.mark.parametrize("alive", [[], [299], [0, 17], list(range(256))])
def test_banned_tokens_take_nothing(alive: list[int], device: str) -> None:
    """Tiles without a finite logit, targets of -inf, and rows of nothing at all."""
    arguments = on(device, exact_case(17, 300, 64), torch.bfloat16)
    banned = torch.ones(300, dtype=torch.bool)
    banned[alive] = False
    arguments[3][banned.to(device)] = -torch.inf
    arguments[2][:3] = torch.tensor([299, 17, 5])
    assert_equals(head_logprob(*arguments), of_twin(arguments, {}))


@pytest.mark.parametrize("size", [3e38, -3e38, 1e9, -1e9])
def test_logits_near_the_largest_float_are_logits(size: float, device: str) -> None:
    """One of them, and a row of nothing else."""
    arguments = on(device, exact_case(17, 600, 64, among=(300, 512)), torch.bfloat16)
    arguments[3][7] = size
    assert_equals(head_logprob(*arguments), of_twin(arguments, {}))
    arguments[3][:] = size
    found = head_logprob(*arguments)
    assert torch.isfinite(found.logprobs).all() and not found.flags.any()
    np.testing.assert_allclose(found.log_sums.cpu(), size, rtol=1e-6)


def test_large_logits_lose_no_digits(device: str) -> None:
    case = exact_case(17, 300, 64)
    case["bias"] += 1000.0
    arguments = on(device, case, torch.bfloat16)
    np.testing.assert_allclose(head_logprob(*arguments).logprobs.cpu(), of_twin(arguments, {}).logprobs, atol=5e-5)


@pytest.mark.full(keep=2)
@pytest.mark.risk("S4")
@pytest.mark.parametrize("outside", [-1, 300, 2**31 - 1, 2**32 + 5, -(2**63)])
def test_targets_outside_of_the_vocabulary_read_nothing(outside: int, device: str) -> None:
    """NaN stands around the rows of the head."""
    hidden, weights, targets, bias = on(device, random_case(17, 300, 72), torch.bfloat16, gap=3)
    alone = head_logprob(hidden, weights, targets, bias)
    targets[[0, 11]] = outside
    found = head_logprob(hidden, weights, targets, bias)
    inside = [row for row in range(17) if row not in (0, 11)]
    assert_same_bits(TargetLogprobs(*(x[inside] for x in found)), TargetLogprobs(*(x[inside] for x in alone)))
    assert found.logprobs[[0, 11]].tolist() == [-math.inf] * 2 and found.ranks[[0, 11]].tolist() == [0, 0]
    assert not found.is_greedy[[0, 11]].any() and not found.flags.any()
    assert torch.equal(found.log_sums, alone.log_sums)


def test_no_rows_and_small_targets(device: str) -> None:
    hidden, weights, targets, bias = on(device, random_case(17, 111, 64), torch.bfloat16)
    assert [len(field) for field in head_logprob(hidden[:0], weights, targets[:0])] == [0] * 5
    int32 = head_logprob(hidden, weights, targets.to(torch.int32), bias.to(torch.bfloat16))
    assert_same_bits(int32, head_logprob(hidden, weights, targets, bias.to(torch.bfloat16).float()))


def test_arguments_that_do_not_belong_together_are_refused(device: str) -> None:
    hidden, weights, targets, bias = on(device, random_case(3, 17, 64), torch.bfloat16)
    for arguments, message in (
        ((hidden.double(), weights, targets), "got hidden torch.float64"),
        ((hidden.T, weights, targets), "got hidden"),
        ((hidden, weights.float(), targets), "got head torch.float32"),
        ((hidden, weights[:, :32], targets), "got head"),
        ((hidden, weights, targets[:2]), r"got targets torch.int64 \(2,\)"),
        ((hidden, weights, targets.float()), "got targets torch.float32"),
        ((hidden, weights[:0], targets), "into 0 tokens"),
        ((hidden, weights, targets, bias[:3]), r"got bias \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            head_logprob(*arguments)


def later_equals_too(*arguments: Any, **options: Any) -> TargetLogprobs:
    """`>=` where the order has `>`."""
    z = head_logits(arguments[0], arguments[1], arguments[3], 1.0, 0.0)
    at = z[np.arange(len(z)), arguments[2]]
    return twins.head_logprob(*arguments, **options)._replace(ranks=(z >= at[:, None]).sum(1))


def equals_by_descending_id(*arguments: Any, **options: Any) -> TargetLogprobs:
    z = head_logits(arguments[0], arguments[1], arguments[3], 1.0, 0.0)
    at = z[np.arange(len(z)), arguments[2]][:, None]
    later = (z == at) & (np.arange(z.shape[1]) > arguments[2][:, None])
    return twins.head_logprob(*arguments, **options)._replace(ranks=1 + ((z > at) | later).sum(1))


def without_the_last_tile(hidden: Any, weights: Any, targets: Any, bias: Any, **options: Any) -> TargetLogprobs:
    return twins.head_logprob(hidden, weights[:256], targets % 256, bias[:256], **options)


def with_zeros_of_the_padding(hidden: Any, weights: Any, targets: Any, bias: Any, **options: Any) -> TargetLogprobs:
    padding = ((0, 212), (0, 0))
    return twins.head_logprob(hidden, np.pad(weights, padding), targets, np.pad(bias, padding[0]), **options)


def without_bias(hidden: Any, weights: Any, targets: Any, bias: Any, **options: Any) -> TargetLogprobs:
    return twins.head_logprob(hidden, weights, targets, None, **options)


@pytest.mark.parametrize(
    "fault",
    [later_equals_too, equals_by_descending_id, without_the_last_tile, with_zeros_of_the_padding, without_bias],
)
def test_planted_fault_is_told_apart(fault: Twin, device: str) -> None:
    arguments = on(device, exact_case(130, 300, 64), torch.bfloat16)
    found = head_logprob(*arguments)
    assert_equals(found, of_twin(arguments, {}))
    with pytest.raises(AssertionError):
        assert_equals(found, of_twin(arguments, {}, fault))


@pytest.mark.parametrize(
    ("options", "without"),
    [(OPTIONS[1], {"scale": 0.5}), (OPTIONS[1], {"softcap": 4.0}), (OPTIONS[2], {"scale": 0.25})],
)
def test_step_left_out_is_told_apart(options: dict[str, Any], without: dict[str, Any], device: str) -> None:
    arguments = on(device, exact_case(17, 300, 64, step=1 / 16), torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_equals(head_logprob(*arguments, **without), of_twin(arguments, options))


@pytest.mark.parametrize("fault", ["_below", "finished"])
def test_fault_planted_in_the_kernel_is_caught(fault: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, where a kernel can be changed: ties before the target not counted; bias, scale and cap left out."""
    if device == "cuda":
        pytest.skip("compiled kernels are not changed while they run")
    monkeypatch.setattr(module, fault, lambda first, *_: first)
    arguments = on(device, exact_case(17, 800, 64, among=(512, 768)), torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_equals(head_logprob(*arguments), of_twin(arguments, {}))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab", "width"), [(4096, 262_144, 64), (20_000, 151_936, 64)])
def test_memory_beyond_inputs_stays_under_64_mib(rows: int, vocab: int, width: int) -> None:
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    head_logprob(hidden, weights, targets)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head_logprob(hidden, weights, targets)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_head_gives_the_logprobs_and_ranks_of_float64(dtype: torch.dtype) -> None:
    """N = 300, V = 32,003, D = 1,000. A rank may differ by as many logits as lie within the tolerance of the target."""
    arguments = on("cuda", random_case(300, 32_003, 1000), dtype)
    hidden, weights, targets, bias = arguments
    found = head.head_logprob(*arguments)
    z = hidden.double() @ weights.double().T + bias.double()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-4
    expected = z.log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.log_sums.double(), z.logsumexp(1), rtol=0, atol=tolerance)
    at = z.gather(1, targets[:, None])
    assert (found.ranks >= 1 + (z > at + tolerance).sum(1)).all() and (found.ranks <= (z > at - tolerance).sum(1)).all()
    best = head.head_logprob(hidden, weights, z.argmax(1), bias)
    assert (best.is_greedy == (best.ranks == 1)).all() and best.is_greedy.float().mean() > 0.98


@pytest.mark.gpu
def test_a_graph_replays_on_new_rows() -> None:
    first, second = (on("cuda", random_case(130, 515, 72, seed), torch.bfloat16) for seed in (0, 1))
    expected = head_logprob(*second)
    head_logprob(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = head_logprob(*first)
    for held, new in zip(first, second, strict=True):
        held.copy_(new)
    graph.replay()
    assert_same_bits(found, expected)


@pytest.mark.gpu
def test_targets_on_the_host_are_checked_and_moved() -> None:
    hidden, weights, targets, bias = on("cuda", random_case(17, 111, 64), torch.bfloat16)
    assert_same_bits(
        head.head_logprob(hidden, weights, targets.cpu(), bias), head_logprob(hidden, weights, targets, bias)
    )
    with pytest.raises(ValueError, match=r"`targets` must be in \[0, 111\)"):
        head.head_logprob(hidden, weights, targets.cpu() + 111, bias)
