"""The kernel of few rows against its float64 reference, on the same 16-bit or float32 inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.skinny_gemm import TILES, GemmTile, skinny_gemm, tile_of, tiles
from tests.support import layer_kernels as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a number, and of the sums
SMALL = GemmTile(columns=8, depth=16, warps=2, stages=2)
CUTS = (SMALL, GemmTile(16, 32, 4, 3), GemmTile(32, 16, 1, 4))

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, weight, bias


def case(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: str, *, gated: bool = False, biased: bool = True
) -> Arguments:
    rng = np.random.default_rng([rows, columns, width])
    count = 2 * columns if gated else columns
    x_MK, weight_NK = rng.normal(0, 1, (rows, width)), rng.normal(0, 1 / np.sqrt(width), (count, width))
    numbers = (x_MK, weight_NK, rng.normal(0, 1, count))
    x, weight, bias = (torch.from_numpy(one).to(device, dtype) for one in numbers)
    return x, weight, bias if biased else None


def of_reference(arguments: Arguments, gated: bool = False) -> Any:
    x, weight, bias = (None if one is None else one.float().cpu().numpy() for one in arguments)
    assert x is not None and weight is not None
    return reference.skinny_gemm(x, weight, bias, gated=gated)


def assert_close(found: torch.Tensor, expected: Any, lost: float = 2.0**-17) -> None:
    """Rounded once; what the sums themselves have `lost` is a part of numbers about 1."""
    rounding = ROUNDING[found.dtype]
    np.testing.assert_allclose(found.double().cpu(), expected, rtol=rounding, atol=min(rounding, lost))


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (2, 17, 16), (3, 8, 32), (5, 33, 200), (16, 7, 72)])
def test_products_are_those_of_the_reference(
    rows: int, columns: int, width: int, dtype: torch.dtype, biased: bool, gated: bool, device: str
) -> None:
    arguments = case(rows, columns, width, dtype, device, gated=gated, biased=biased)
    found = skinny_gemm(*arguments, gated=gated, tile=SMALL)
    assert found.dtype == dtype and found.shape == (rows, columns)
    assert_close(found, of_reference(arguments, gated))


@pytest.mark.parametrize("tile", CUTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(32, 128), (37, 136)])
def test_every_cut_gives_the_product(columns: int, width: int, gated: bool, tile: GemmTile, device: str) -> None:
    arguments = case(4, columns, width, torch.bfloat16, device, gated=gated)
    assert_close(skinny_gemm(*arguments, gated=gated, tile=tile), of_reference(arguments, gated))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("rows", range(1, 17))
def test_a_row_has_the_same_bits_beside_any_number_of_others(rows: int, device: str) -> None:
    x, weight, bias = case(16, 24, 200, torch.bfloat16, device)
    together = skinny_gemm(x, weight, bias, tile=SMALL)
    assert torch.equal(skinny_gemm(x[:rows], weight, bias, tile=SMALL), together[:rows])
    assert torch.equal(skinny_gemm(x[16 - rows :], weight, bias, tile=SMALL), together[16 - rows :])


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_at_any_place(gated: bool, device: str) -> None:
    x, weight, bias = case(16, 24, 200, torch.float16, device, gated=gated)
    together = skinny_gemm(x, weight, bias, gated=gated, tile=SMALL)
    order = torch.from_numpy(np.random.default_rng(3).permutation(16)).to(device)
    assert torch.equal(skinny_gemm(x[order], weight, bias, gated=gated, tile=SMALL), together[order])


def test_more_rows_than_a_program_has_are_multiplied_alike(device: str) -> None:
    x, weight, bias = case(35, 9, 64, torch.bfloat16, device)
    together = skinny_gemm(x, weight, bias, tile=SMALL)
    assert_close(together, of_reference((x, weight, bias)))
    assert torch.equal(skinny_gemm(x[17:18], weight, bias, tile=SMALL), together[17:18])


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("gap", [1, 8, 16])
@pytest.mark.parametrize("width", [64, 72])
def test_strides_and_neighbours_do_not_matter(width: int, gap: int, device: str) -> None:
    """Rows stand in NaN, shifted by the gap; or one number after another of a wider matrix."""
    x, weight, bias = case(5, 17, width, torch.bfloat16, device)
    together = skinny_gemm(x, weight, bias, tile=SMALL)
    wide = torch.full((7, width + 2 * gap), torch.nan, dtype=torch.bfloat16, device=device)
    wide[1:6, gap : gap + width] = x
    assert torch.equal(skinny_gemm(wide[1:6, gap : gap + width], weight, bias, tile=SMALL), together)
    assert torch.equal(skinny_gemm(x.T.contiguous().T, weight, bias, tile=SMALL), together)
    assert torch.equal(skinny_gemm(x[None, :, None], weight, bias, tile=SMALL), together[None, :, None])


def test_a_row_of_nan_leaves_the_others_alone(device: str) -> None:
    x, weight, bias = case(5, 17, 72, torch.bfloat16, device)
    alone = skinny_gemm(x, weight, bias, tile=SMALL)
    x[2, 5] = torch.nan
    found = skinny_gemm(x, weight, bias, tile=SMALL)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


@pytest.mark.parametrize("gate", [-200.0, 200.0])
def test_a_gate_far_from_zero_is_shut_or_open(gate: float, device: str) -> None:
    weight = torch.tensor([[gate], [3.0]], device=device)
    found = skinny_gemm(torch.ones((1, 1), device=device), weight, gated=True)
    assert found.tolist() == [[0.0 if gate < 0 else 600.0]]


def test_the_cut_is_chosen_by_the_shape_alone_and_fits_it(device: str) -> None:
    """Tests shapes of the table and others: the kernel's own tile gives the product."""
    assert all(tile_of(columns, width) == tile for (columns, width), tile in TILES.items())
    assert {tile_of(columns, 1040) for columns in (1, 40, 2049, 32769)} <= set(tiles())
    x, weight, bias = case(2, 40, 1040, torch.bfloat16, device)
    assert torch.equal(skinny_gemm(x, weight, bias), skinny_gemm(x, weight, bias, tile=tile_of(40, 1040)))
    assert_close(skinny_gemm(x, weight, bias), of_reference((x, weight, bias)))


def last_feature_left_out(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return skinny_gemm(x[:, :-1].contiguous(), weight[:, :-1].contiguous(), bias, gated=True)


def neighbour_multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return skinny_gemm(x.roll(1, 0), weight, bias, gated=True)


def bias_left_out(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return skinny_gemm(x, weight, gated=True)


def gate_and_gated_exchanged(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return skinny_gemm(x, weight.roll(len(weight) // 2, 0), bias.roll(len(bias) // 2), gated=True)


def rounded_before_the_gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    gate, up = skinny_gemm(x, weight, bias).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    "fault",
    [last_feature_left_out, neighbour_multiplied, bias_left_out, gate_and_gated_exchanged, rounded_before_the_gate],
)
def test_planted_fault_is_told_apart(fault: Callable[..., torch.Tensor], device: str) -> None:
    arguments = case(5, 17, 200, torch.bfloat16, device, gated=True)
    with pytest.raises(AssertionError):
        assert_close(fault(*arguments), of_reference(arguments, gated=True))


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_residual_has_the_bits_of_a_sum_of_its_own(dtype: torch.dtype, biased: bool, device: str) -> None:
    x, weight, bias = case(5, 33, 200, dtype, device, biased=biased)
    residual = torch.linspace(-3, 3, 5 * 33, device=device).reshape(5, 33).to(dtype)
    product = skinny_gemm(x, weight, bias, tile=SMALL)
    found = skinny_gemm(x, weight, bias, residual=residual, tile=SMALL)
    assert torch.equal(found, product + residual)
    assert not torch.equal(found, product + residual.roll(1, 0))
    wide = torch.full((5, 66), torch.nan, dtype=dtype, device=device)
    wide[:, ::2] = residual
    assert torch.equal(skinny_gemm(x, weight, bias, residual=wide[:, ::2], tile=SMALL), found)


def test_residuals_that_do_not_belong_to_a_product(device: str) -> None:
    x, weight, _ = case(3, 9, 64, torch.bfloat16, device)
    residual = x[:, :9].contiguous()
    for given, message in (
        (residual[:2], r"got residual torch.bfloat16 \(2, 9\)"),
        (residual.float(), "got residual torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            skinny_gemm(x, weight, residual=given)


STEP = 2.0**20  # which a float32 sum of it and 1 / STEP is: the small addend is gone


def told_by_the_order(rows: int, columns: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Products that the order of the sums decides: 1 / STEP with four warps, 0 with two.

    In a row's slices of 64 numbers, number 0 has STEP, 2 has its inverse and 4 has -STEP, in zeros. Two warps: all
    three are the first's, in this order, and the small one is gone beside the large one. Four: the large ones are the
    first's, whose sum is 0, and the small one is the third's. So neither the order in which the warps' sums are added
    matters, nor that of the numbers in a slice.
    """
    x = torch.zeros((rows, width), device=device, dtype=torch.bfloat16)
    for slice_, addend in ((0, STEP), (2, 1 / STEP), (4, -STEP)):
        x[:, 64 * slice_ + 7] = addend
    return x, torch.ones((columns, width), device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize(("columns", "width"), [(1024, 2048), (4096, 1024)])
def test_rows_are_summed_in_the_order_of_their_cut_beside_any_others(
    columns: int, width: int, device: str, weights: int = 32
) -> None:
    used = tile_of(columns, width)
    assert used.depth == 64 and used.warps in (2, 4), "the data are made for these"
    x, weight = told_by_the_order(16, weights, width, device)
    together = skinny_gemm(x, weight, tile=used)
    assert (together == (1 / STEP if used.warps == 4 else 0.0)).all()
    for rows in (1, 2, 5, 8):
        assert torch.equal(skinny_gemm(x[:rows], weight, tile=used), together[:rows])


@pytest.mark.parametrize(("columns", "width"), [(1024, 2048), (4096, 1024)])
def test_a_cut_by_the_number_of_rows_fails_the_test_of_their_order(
    columns: int, width: int, device: str, weights: int = 32
) -> None:
    used = tile_of(columns, width)
    x, weight = told_by_the_order(16, weights, width, device)
    other = used._replace(warps=6 - used.warps)
    alone = skinny_gemm(x[:1], weight, tile=other)
    assert not torch.equal(alone, skinny_gemm(x, weight, tile=used)[:1])
    assert (alone == (1 / STEP if other.warps == 4 else 0.0)).all()


def test_no_rows_and_arguments_that_do_not_belong_together(device: str) -> None:
    x, weight, bias = case(3, 9, 64, torch.bfloat16, device)
    assert skinny_gemm(x[:0], weight).shape == (0, 9)
    wrong: list[tuple[Any, str]] = [
        ((x, weight.float()), "got x torch.bfloat16"),
        ((x[:, :-1], weight), r"got x torch.bfloat16 \(3, 63\)"),
        ((x, weight.T), "got weight"),
        ((x, weight[:, ::2]), "got weight"),
        ((x, weight.double()), "got weight torch.float64"),
        ((x, weight, bias[:7]), r"got bias \(7,\)"),  # type: ignore[index]
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            skinny_gemm(*arguments)
    with pytest.raises(ValueError, match="weight of 9 rows"):
        skinny_gemm(x, weight, gated=True)


# Compiled, at the sizes of decoder layers


def served(columns: int, width: int, gated: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(columns + width)
    x = torch.randn((16, width), generator=generator, device="cuda")
    weight = torch.randn((2 * columns if gated else columns, width), generator=generator, device="cuda")
    return x.to(dtype), (weight / width**0.5).to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("columns", "width", "gated"),
    [(4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 12_288, False), (33_001, 1040, False)],
)
def test_served_sizes_are_exact_keep_their_bits_and_replay(
    columns: int, width: int, gated: bool, dtype: torch.dtype
) -> None:
    x, weight = served(columns, width, gated, dtype)
    together = skinny_gemm(x, weight, gated=gated)
    z = x.double() @ weight.double().T
    if gated:
        z = torch.nn.functional.silu(z[:, :columns]) * z[:, columns:]
    assert_close(together, z.cpu().numpy(), lost=2.0**-14)  # of thousands of terms, which the hardware cuts off
    for rows in range(1, 17):
        assert torch.equal(skinny_gemm(x[:rows], weight, gated=gated), together[:rows])
        assert torch.equal(skinny_gemm(x[16 - rows :], weight, gated=gated), together[16 - rows :])
    graph = torch.cuda.CUDAGraph()
    given = torch.zeros_like(x[:5])
    with torch.cuda.graph(graph):
        made = skinny_gemm(given, weight, gated=gated)
    given.copy_(x[3:8])
    graph.replay()
    assert torch.equal(made, together[3:8])


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "width"), [(1024, 2048), (1024, 3072), (4096, 4096), (4096, 12_288)])
def test_served_sizes_with_a_residual_have_the_bits_of_a_sum(columns: int, width: int) -> None:
    x, weight = served(columns, width, False, torch.bfloat16)
    residual = torch.randn((16, columns), device="cuda").bfloat16()
    for rows in (1, 2, 5, 16):
        found = skinny_gemm(x[:rows], weight, residual=residual[:rows])
        assert torch.equal(found, skinny_gemm(x[:rows], weight) + residual[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "width"), [(1024, 2048), (4096, 1024)])
def test_served_sizes_are_summed_in_the_order_of_their_cut(columns: int, width: int) -> None:
    test_rows_are_summed_in_the_order_of_their_cut_beside_any_others(columns, width, "cuda", weights=columns)
    test_a_cut_by_the_number_of_rows_fails_the_test_of_their_order(columns, width, "cuda", weights=columns)
