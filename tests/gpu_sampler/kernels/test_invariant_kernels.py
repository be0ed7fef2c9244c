"""Products, norms and attention whose rows do not depend on the rows beside them: against float64, and bit by bit."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.attention import invariant_backend
from engine.attention.invariant_backend import InvariantAttention, tiles_sum_alike
from engine.attention.plans import AttentionParams
from engine.kernels import invariant_attention as attention_kernel
from engine.kernels.invariant_attention import (
    BLOCK,
    SINGLE,
    WIDE,
    Heads,
    Parts,
    TileForm,
    Tiles,
    invariant_attention,
    parts_of,
    tokens_of_tile,
)
from engine.kernels.invariant_gemm import EXACT_TILES, MANY, SMALL, TILES, bf16_terms, invariant_gemm
from engine.kernels.rms_norm import rms_norm
from tests.support import layer_kernels as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-17, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
PARTS = Parts(BLOCK, 2, 2 * BLOCK)
HALVES = slice(400), slice(400, 800)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, shape)).to(device, dtype)


def as_floats(tensor: torch.Tensor) -> Any:
    return tensor.float().cpu().numpy()


# Products


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "width"), [(3, 5, 7), (70, 33, 600), (1, 40, 1024), (129, 3, 16)])
def test_products_are_those_of_the_reference(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: str
) -> None:
    x, weight = normal((rows, width), 0, dtype, device), normal((columns, width), 1, dtype, device) / width**0.5
    bias = normal((columns,), 2, dtype, device)
    wanted = reference.skinny_gemm(*map(as_floats, (x, weight, bias)))
    whole = invariant_gemm(x, weight, bias)
    for tile in (SMALL, *TILES.values()) if dtype != torch.float32 else (None,):
        found = invariant_gemm(x, weight, bias, tile=tile)
        assert found.dtype == dtype and torch.equal(found, whole)
        np.testing.assert_allclose(found.double().cpu(), wanted, rtol=ROUNDING[dtype], atol=4 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype: torch.dtype, device: str) -> None:
    x, weight = normal((70, 600), 3, dtype, device), normal((33, 600), 4, dtype, device)
    whole = invariant_gemm(x, weight)
    for first, last in ((0, 1), (5, 9), (63, 65), (69, 70)):
        assert torch.equal(invariant_gemm(x[first:last], weight), whole[first:last])
    assert torch.equal(invariant_gemm(x[:4], weight[[7, 30]]), whole[:4][:, [7, 30]]), "nor does a column"


def test_a_sum_that_is_cut_by_the_number_of_rows_is_found(device: str) -> None:
    """The planted fault: one row is summed in two pieces, as libraries do."""
    x, weight = normal((70, 800), 3, torch.float32, device), normal((33, 800), 4, torch.float32, device)
    whole = invariant_gemm(x, weight)
    first, second = (invariant_gemm(x[:1, part].contiguous(), weight[:, part].contiguous()) for part in HALVES)
    assert not torch.equal(first + second, whole[:1])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_residual_is_added_to_the_rounded_product(dtype: torch.dtype, device: str) -> None:
    x, weight, residual = (
        normal(shape, i, dtype, device) for i, shape in enumerate([(2, 9, 70), (33, 70), (2, 9, 33)])
    )
    alone = invariant_gemm(x, weight)
    found = invariant_gemm(x, weight, None, residual)
    np.testing.assert_allclose(found.double().cpu(), (residual + alone).double().cpu(), rtol=2 * ROUNDING[dtype])
    assert torch.equal(invariant_gemm(x[:, 2:5], weight, None, residual[:, 2:5]), found[:, 2:5])
    with pytest.raises(ValueError, match="expected the result's form"):
        invariant_gemm(x, weight, None, residual[:1])


def test_a_product_goes_where_it_is_wanted(device: str) -> None:
    x, weight = normal((3, 70), 5, torch.float32, device), normal((33, 70), 6, torch.bfloat16, device)
    out = torch.zeros((4, 33), device=device)
    invariant_gemm(x, weight, out=out[:3])
    assert torch.equal(out[:3], invariant_gemm(x, weight)) and not out[3].any()
    for wrong in (out, out[:, :3], torch.zeros((3, 33), dtype=torch.int32, device=device)):
        with pytest.raises(ValueError, match="expected contiguous floats"):
            invariant_gemm(x, weight, out=wrong)


def test_three_terms_of_bf16_are_the_whole_of_a_float32_number(device: str) -> None:
    x = normal((50, 30), 5, torch.float32, device) * torch.logspace(-6, 6, 30, device=device)
    assert torch.equal(bf16_terms(x).double().sum(0), x.double())


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_float32_rows_keep_their_bits_beside_halves(dtype: torch.dtype, device: str) -> None:
    """One term of a row, or two, would be off by 4e-3 and 1e-5 of the largest product."""
    x, weight = normal((5, 200), 5, torch.float32, device), normal((9, 200), 6, dtype, device)
    found = invariant_gemm(x, weight)
    wanted = reference.skinny_gemm(as_floats(x), as_floats(weight))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().cpu(), wanted, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 6), None), ((3, 4), (5, 4), (4,))])
def test_shapes_that_do_not_belong_together_are_refused(shapes: Any, device: str) -> None:
    x, weight, bias = (None if shape is None else torch.zeros(shape, device=device) for shape in shapes)
    assert x is not None and weight is not None
    with pytest.raises(ValueError, match="expected"):
        invariant_gemm(x, weight, bias)


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_those_of_the_reference(offset: float, dtype: torch.dtype, device: str) -> None:
    x, weight = normal((2, 3, 100), 7, dtype, device), normal((100,), 8, dtype, device)
    wanted = reference.rms_norm(as_floats(x).reshape(6, 100), as_floats(weight), 1e-5, offset=offset).reshape(2, 3, 100)
    exact = rms_norm(x, weight, 1e-5, offset=offset, out_dtype=torch.float32)
    np.testing.assert_allclose(exact.double().cpu(), wanted, rtol=1e-5, atol=1e-6)
    for round_first in (True, False):
        found = rms_norm(x, weight, 1e-5, offset=offset, round_first=round_first)
        np.testing.assert_allclose(found.double().cpu(), wanted, rtol=4 * ROUNDING[dtype], atol=ROUNDING[dtype])
        assert torch.equal(rms_norm(x[1, 2:], weight, 1e-5, offset=offset, round_first=round_first), found[1, 2:])


# Attention


class Case(NamedTuple):
    """Holds sequences of some length over a scattered pool. Their last tokens are new."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    indices: Any
    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def tiles(self, sequences: list[tuple[int, int, int]]) -> Tiles:
        """Returns tiles over (sequence, length, new tokens), as a step holds them."""
        size = tokens_of_tile(self.q.shape[1], self.keys.shape[2])
        starts = np.concatenate(([0], np.cumsum([new for _, _, new in sequences])))
        tiles = [(at, first) for at in range(len(sequences)) for first in range(starts[at], starts[at + 1], size)]
        ends = np.cumsum(self.lengths)
        attended = [self.indices[ends[s] - self.lengths[s] :][:length] for s, length, _ in sequences]
        arrays = (
            [at for at, _ in tiles],
            [first for _, first in tiles],
            starts,
            np.concatenate(([0], np.cumsum([length for _, length, _ in sequences]))),
            np.concatenate(attended),
        )
        return Tiles(*(torch.from_numpy(np.asarray(one, np.int32)).to(self.q.device) for one in arrays))

    def rows(self, sequence: int, length: int, new: int) -> torch.Tensor:
        """Returns the queries of new tokens that end at `length` of a sequence."""
        end = sum(self.new[: sequence + 1]) - (self.lengths[sequence] - length)
        return self.q[end - new : end]


def case(dtype: torch.dtype, device: str, heads: int = 6, kv_heads: int = 2, dim: int = 20) -> Case:
    lengths, new = (4 * BLOCK + 70, 3, BLOCK), (90, 3, 1)
    slots = sum(lengths) + 1
    keys, values = (normal((slots, 1, kv_heads, dim), seed, dtype, device) for seed in (9, 10))
    indices = np.random.default_rng(11).permutation(np.arange(1, slots)).astype(np.int32)
    return Case(normal((sum(new), heads, dim), 12, dtype, device), keys, values, indices, lengths, new)


def attend(
    given: Case, sequences: list[tuple[int, int, int]], heads: Heads, programs: int = 1, form: TileForm = WIDE
) -> torch.Tensor:
    q = torch.cat([given.rows(*one) for one in sequences])
    longest = max(length for _, length, _ in sequences)
    tiles, pool = given.tiles(sequences), (given.keys, given.values)
    if all(new == 1 for _, _, new in sequences):
        tiles = tiles._replace(sequence=None, first=None, qo_indptr=None)
    return invariant_attention(q, *pool, tiles, heads, parts=PARTS, longest=longest, programs=programs, form=form)[0]


LAYERS = (Heads(0.3), Heads(0.3, window=70), Heads(0.3, softcap=5.0), Heads(0.3, 5.0, 3))


@pytest.mark.parametrize("heads", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_attention_is_that_of_the_reference(heads: Heads, dtype: torch.dtype, device: str) -> None:
    given = case(dtype, device)
    sequences = [(s, given.lengths[s], given.new[s]) for s in range(3)]
    found = attend(given, sequences, heads)
    assert torch.equal(attend(given, sequences, heads, programs=2), found)
    for form in SINGLE.values():
        last = attend(given, [(s, length, 1) for s, length, _ in sequences], heads, form=form)
        torch.testing.assert_close(last, found[np.cumsum(given.new) - 1], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    row = 0
    for s, length, new in sequences:
        own = given.indices[sum(given.lengths[:s]) :][:length]
        for token in range(new):
            attended = own[: length - new + token + 1]
            wanted, _ = reference.skinny_decode_attention(
                as_floats(given.q[row : row + 1]), as_floats(given.keys), as_floats(given.values),
                np.array([0, len(attended)], np.int32), attended, scale=heads.scale, softcap=heads.softcap,
                window=heads.window,
            )  # fmt: skip
            tolerance = 2 * ROUNDING[dtype]
            np.testing.assert_allclose(found[row].double().cpu(), wanted[0], rtol=tolerance, atol=tolerance)
            row += 1


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("heads", LAYERS[:2])
def test_a_token_attends_with_the_same_bits_in_any_step(heads: Heads, device: str) -> None:
    """Alone, in chunks of any size, beside others, and with its context shared among programs."""
    given = case(torch.bfloat16, device)
    longest, new = given.lengths[0], given.new[0]
    together = attend(given, [(1, 3, 3), (0, longest, new), (2, BLOCK, 1)], heads)[3 : 3 + new]
    for chunk in (1, 7, 50):
        for last in range(new, 0, -3 * chunk):
            first, end = max(0, last - chunk), longest - new + last
            for programs in (1, 2, 3):
                alone = attend(given, [(0, end, last - first)], heads, programs)
                assert torch.equal(alone, together[first:last])


def test_parts_that_follow_the_length_are_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a context is cut in as many parts as there are programs, as split-KV kernels do."""
    given = case(torch.float32, device)
    whole = attend(given, [(0, given.lengths[0], given.new[0])], LAYERS[0])
    monkeypatch.setattr("tests.gpu_sampler.kernels.test_invariant_kernels.PARTS", Parts(BLOCK, 4, 2 * BLOCK))
    alone = attend(given, [(0, given.lengths[0], 1)], LAYERS[0])
    assert not torch.equal(alone, whole[-1:])


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("off", [0.0, 2.0**-8])
def test_single_tokens_have_tiles_of_few_rows_where_these_have_the_same_bits(
    off: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: one form of them rounds in another way."""
    forms: list[TileForm] = []
    given = case(torch.bfloat16, device)
    heads, kv_heads, dim = given.q.shape[1], given.keys.shape[2], given.q.shape[2]
    few, several, many = SINGLE.values()

    def noting(*args: Any, form: TileForm, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        forms.append(form)
        wide, lse = invariant_attention(*args, **more)
        return wide + off * (form is many), lse

    monkeypatch.setattr(invariant_backend, "invariant_attention", noting)
    monkeypatch.setattr(attention_kernel, "SINGLE", {0: few, 2 * kv_heads: several, 3 * kv_heads: many})
    backend = InvariantAttention(torch.device(device), 500)
    params = AttentionParams(heads, kv_heads, dim, -1, 0.0, 0.3)
    tiles = given.tiles([(s, given.lengths[s], 1) for s in range(3)])
    single = tiles._replace(sequence=None, first=None, qo_indptr=None)
    q, out = given.q[:3], torch.empty_like(given.q[:3])
    for rows in (3, 2, 1):
        some = single._replace(kv_indptr=tiles.kv_indptr[: rows + 1])
        backend.run(params, some, 300, q[:rows], (given.keys, given.values), out[:rows])
    backend.run(params, tiles, 300, q, (given.keys, given.values), out)
    assert forms == [WIDE, few, several, many, *((WIDE,) * 3 if off else (many, several, few)), WIDE]


def test_groups_of_many_heads_have_wide_tiles_alone(device: str) -> None:
    seventeen = AttentionParams(34, 2, 16, -1, 0.0, 0.3)
    assert not tiles_sum_alike(seventeen, torch.float32, Heads(0.3), PARTS, torch.device(device))


def test_parts_are_whole_blocks_and_few() -> None:
    for longest in (1, 512, 16_384, 16_385, 40_960, 50_000, 131_072):
        parts = parts_of(longest)
        assert parts.short % BLOCK == parts.long % BLOCK == 0 and parts.long >= parts.short
        assert parts.count(longest) <= attention_kernel.MAX_PARTS
    assert [PARTS.count(tokens) for tokens in (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 200)] == [
        0, 1, 1, 2, 2, 3, 3, 5
    ]  # fmt: skip


# On a GPU, at served sizes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("columns", "width"), [(4096, 1024), (1024, 2048), (1024, 3072), (151_936, 1024), (4096, 12_288)]
)
def test_served_products_are_exact_and_keep_their_bits(columns: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal((300, width), 0, dtype, "cuda"), normal((columns, width), 1, dtype, "cuda") / width**0.5
    whole = invariant_gemm(x, weight, tile=TILES[MANY, MANY])
    wanted = (x.double() @ weight.double().T).cpu().numpy()
    np.testing.assert_allclose(whole.double().cpu(), wanted, rtol=2.0**-7, atol=2.0**-7)
    for rows in (1, 2, 16, 32, 63, 64, 65, 129, 256, 300):
        for tile in (None, *(tile for (most, _), tile in TILES.items() if rows <= most)):
            assert torch.equal(invariant_gemm(x[:rows], weight, tile=tile), whole[:rows])
            assert torch.equal(invariant_gemm(x[300 - rows :], weight, tile=tile), whole[300 - rows :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_served_heads_of_float32_rows_are_exact_and_keep_their_bits(dtype: torch.dtype) -> None:
    x, weight = normal((300, 1024), 0, torch.float32, "cuda"), normal((20_000, 1024), 1, dtype, "cuda") / 32
    whole = invariant_gemm(x, weight, tile=EXACT_TILES[MANY, MANY] if dtype == torch.bfloat16 else None)
    wanted = (x.double() @ weight.double().T).cpu().numpy()
    np.testing.assert_allclose(whole.double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    for rows in (1, 2, 16, 17, 33, 64, 65, 200):
        assert torch.equal(invariant_gemm(x[:rows], weight), whole[:rows])
        assert torch.equal(invariant_gemm(x[:rows], weight[5:9]), whole[:rows, 5:9])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (6, 2, 80), (8, 8, 64)])
@pytest.mark.parametrize("layer", LAYERS)
def test_served_attention_keeps_its_bits(heads: int, kv_heads: int, dim: int, layer: Heads) -> None:
    given = case(torch.bfloat16, "cuda", heads, kv_heads, dim)
    longest, new = given.lengths[0], given.new[0]
    together = attend(given, [(1, 3, 3), (0, longest, new), (2, BLOCK, 1)], layer)[3 : 3 + new]
    for last in range(new, 0, -7):
        for programs in (1, 2, 3):
            alone = attend(given, [(0, longest - new + last, 1)], layer, programs)
            assert torch.equal(alone, together[last - 1 : last])
        for form in SINGLE.values():
            assert torch.equal(attend(given, [(0, longest - new + last, 1)], layer, 1, form), together[last - 1 : last])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (6, 2, 80), (8, 8, 64)])
@pytest.mark.parametrize("layer", LAYERS)
def test_tiles_of_all_forms_sum_alike(heads: int, kv_heads: int, dim: int, layer: Heads) -> None:
    given = AttentionParams(heads, kv_heads, dim, layer.window, layer.softcap, layer.scale)
    assert tiles_sum_alike(given, torch.bfloat16, layer, Parts(), torch.device("cuda"))
