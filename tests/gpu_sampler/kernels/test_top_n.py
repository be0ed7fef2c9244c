"""The first tokens of the total order as the kernels list them, on each route, against a stable sort."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.common import RowLogits, id_of, key, ordered, value_of
from gpu_sampler.kernels.top_n import first_of_order
from gpu_sampler.reference.filters import clean, first
from gpu_sampler.workspace import LIST, SCRATCH
from tests.support.edges import values

NO_KEY = -(2**63)
GROUP = 128
POISON = -7
NEEDS = (1, 2, 64, 256, 257)
_LIST: tl.constexpr = tl.constexpr(LIST)
Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


@triton.jit
def _list_kernel(
    logits, row_stride, maxima, side_ids, side, side_stride, lengths, masks, mask_rows, mask_words, picked, scratch,
    scratch_stride, needs, keys_out, counts, V, G,
    GROUPS: tl.constexpr, HALF: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    m = tl.load(maxima + r * G + groups, mask=groups < G, other=-float("inf"))
    row = RowLogits(
        logits + r * row_stride, side_ids + r * side_stride, side + r * side_stride if SIDE else None,
        tl.load(lengths + r), masks, tl.load(mask_rows + r), mask_words, V,
    )  # fmt: skip
    own = scratch + r * scratch_stride
    keys, count = first_of_order(row, m, picked + r * _LIST, own, tl.load(needs + r), GROUPS, HALF)
    tl.store(keys_out + r * _LIST + tl.arange(0, _LIST), keys)
    tl.store(counts + r, count)


@triton.jit
def _key_kernel(values, ids, keys, orders, back_values, back_ids, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    z = tl.load(values + at)
    found = key(z, tl.load(ids + at))
    tl.store(keys + at, found)
    tl.store(orders + at, ordered(z))
    tl.store(back_values + at, value_of(found))
    tl.store(back_ids + at, id_of(found))


@triton.jit
def _sort_kernel(keys, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.sort(tl.load(keys + at), descending=True))


class Rows(NamedTuple):
    """Holds what the kernel lists of: logits, with side entries and a mask taken out of them."""

    given_RV: torch.Tensor  # on the device; tokens of the side list stand there as -inf
    whole_RV: Float32s  # what is listed
    side_ids_RE: npt.NDArray[np.int32]
    side_RE: Float32s
    mask_V: npt.NDArray[np.bool_] | None


def rows_of(
    kinds: list[str], size: int, dtype: torch.dtype, device: str, *, side: int = 0, masked: bool = False
) -> Rows:
    rng = np.random.default_rng([size, side])
    drawn = torch.from_numpy(np.stack([values(kind, size, rng) for kind in kinds])).to(dtype)
    raw_RV = drawn.float().numpy()
    side_ids_RE = np.zeros((len(kinds), max(1, side)), np.int32)
    side_RE = np.full(side_ids_RE.shape, -np.inf, np.float32)
    whole_RV = clean(raw_RV)[0].copy()
    for row in range(len(kinds)) if side else ():
        side_ids_RE[row] = rng.choice(size, side, replace=False)
        side_RE[row, ::2] = raw_RV[row, side_ids_RE[row, ::2]] + np.float32(0.3)  # finer than bfloat16; others are bans
        side_RE[row] = clean(side_RE[row][None])[0][0]
        whole_RV[row, side_ids_RE[row]] = side_RE[row]
        drawn[row, side_ids_RE[row].tolist()] = -torch.inf
    mask_V = rng.random(size) < 0.5 if masked else None
    if mask_V is not None:
        whole_RV[:, ~mask_V] = -np.inf
        side_RE[~mask_V[side_ids_RE]] = -np.inf  # as `apply_logits_processors` leaves them
    return Rows(drawn.to(device), whole_RV, side_ids_RE, side_RE, mask_V)


def listed(rows: Rows, needs: list[int], *, side: bool) -> tuple[Int64s, list[int]]:
    """(keys [R, LIST], counts) from the kernel."""
    count, size = rows.given_RV.shape
    device, groups = rows.given_RV.device, -(-size // GROUP)
    held = clean(rows.given_RV.float().cpu().numpy())[0]
    mask = np.zeros(-(-size // 32) * 32, np.bool_)
    if rows.mask_V is not None:
        held[:, ~rows.mask_V] = -np.inf
        mask[:size] = rows.mask_V
    padded = np.full((count, groups * GROUP), np.float32(-np.inf))
    padded[:, :size] = held

    def on(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    keys = torch.full((count, LIST), POISON, dtype=torch.int64, device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    stride = SCRATCH + 16
    scratch = torch.full((count, stride), POISON, dtype=torch.int64, device=device)
    mask_words = np.packbits(mask, bitorder="little").view(np.int32)
    _list_kernel[(count,)](
        rows.given_RV,
        rows.given_RV.stride(0),
        on(padded.reshape(count, groups, GROUP).max(axis=2)),
        on(rows.side_ids_RE),
        on(rows.side_RE),
        rows.side_RE.shape[1],
        on(np.full(count, rows.side_RE.shape[1] * side, np.int32)),
        on(mask_words),
        on(np.full(count, -1 if rows.mask_V is None else 0, np.int32)),
        len(mask_words),
        torch.zeros((count, LIST), dtype=torch.int32, device=device),
        scratch,
        stride,
        on(np.array(needs, np.int32)),
        keys,
        counts,
        size,
        groups,
        GROUPS=max(4, triton.next_power_of_2(groups)),
        HALF=rows.given_RV.dtype == torch.bfloat16,
        SIDE=side,
        num_warps=8,
    )
    assert (scratch[:, SCRATCH:] == POISON).all()
    return keys.cpu().numpy(), counts.tolist()


def keys_of(z_V: Float32s, ids: Int64s) -> Int64s:
    """The reference of `row.key`, by numpy's view of float bits."""
    bits = np.where(z_V[ids] == 0, np.float32(0), z_V[ids]).view(np.int32)
    orders = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    return (orders << 32) | (ids ^ 0xFFFFFFFF)


def lists_agree(keys_RL: Int64s, counts: list[int], whole_RV: Float32s, needs: list[int]) -> bool:
    """The first `need` are the first of the order; what follows goes on in order and is in the row; then nothing."""
    for keys, count, z_V, need in zip(keys_RL, counts, whole_RV, needs, strict=True):
        finite = int(np.count_nonzero(z_V > -np.inf))
        order = keys_of(z_V, first(z_V, len(z_V))[:finite])
        shown = min(need, finite)
        if not shown <= count <= LIST or (keys[:shown] != order[:shown]).any():
            return False
        if (
            not np.isin(keys[:count], order).all()
            or (np.diff(keys[:count]) >= 0).any()
            or (keys[count:] != NO_KEY).any()
        ):
            return False
    return True


def gathered(z_V: Float32s, need: int) -> int:
    """How many keys the groups give that the group lemma picks: the route is a function of it."""
    padded = np.full(-(-len(z_V) // GROUP) * GROUP, np.float32(-np.inf))
    padded[: len(z_V)] = z_V
    groups = padded.reshape(-1, GROUP)
    maxima = groups.max(axis=1)
    picked = first(maxima, need)
    tau = maxima[picked[-1]] if len(picked) == need else np.float32(-3e38)
    return int((groups[picked] >= tau).sum())


KINDS = ["smooth", "tied", "coarse", "flat", "blocks", "one", "none", "bad", "all bad", "zeros", "almost flat"]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 129, 1111])
def test_first_tokens_are_those_of_a_stable_sort(device: str, size: int, dtype: torch.dtype) -> None:
    rows = rows_of(KINDS, size, dtype, device)
    needs = [NEEDS[row % len(NEEDS)] for row in range(len(KINDS))]
    keys, counts = listed(rows, needs, side=False)
    assert lists_agree(keys, counts, rows.whole_RV, needs)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(("side", "masked"), [(0, True), (40, False), (40, True)])
def test_side_list_and_mask_are_part_of_the_order(device: str, side: int, masked: bool) -> None:
    rows = rows_of(KINDS, 700, torch.bfloat16, device, side=side, masked=masked)
    needs = [NEEDS[::-1][row % len(NEEDS)] for row in range(len(KINDS))]
    keys, counts = listed(rows, needs, side=bool(side))
    assert lists_agree(keys, counts, rows.whole_RV, needs)


ROUTES: dict[str, tuple[str, int, int, int, int]] = {  # kind, size, need, and how many keys the groups give
    "a few keys are sorted as they come": ("smooth", 3001, 2, 2, LIST),
    "more are cut by value": ("smooth", 1500, 64, LIST + 1, SCRATCH),
    "more that are equal are cut by id": ("flat", 1500, 5, LIST + 1, SCRATCH),
    "more than the scratch list holds are found by their n-th key": ("smooth", 3001, 257, SCRATCH + 1, 3001),
    "equal ones as well": ("flat", 3001, 17, SCRATCH + 1, 3001),
    "some of them equal": ("tied", 3001, 256, SCRATCH + 1, 3001),
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("side", [0, 40])
@pytest.mark.parametrize("route", ROUTES)
def test_each_route_is_taken_and_right(device: str, route: str, side: int) -> None:
    kind, size, need, least, most = ROUTES[route]
    rows = rows_of([kind], size, torch.float32, device, side=side)
    in_groups = rows.given_RV.cpu().numpy()[0]
    assert least <= gathered(in_groups, need) <= most
    keys, found = listed(rows, [need], side=bool(side))
    assert lists_agree(keys, found, rows.whole_RV, [need])


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_of_the_groups_is_the_nth_largest_of_them_whatever_their_magnitudes(
    device: str, dtype: torch.dtype
) -> None:
    """A bound that is too low lists more keys than the groups give, one that is too high loses the first ones."""
    rng, needs, size = np.random.default_rng(5), [1, 2, 3, 5, 9, 16, 17, 40], 17 * GROUP
    signs, powers = rng.choice([-1.0, 1.0], (len(needs), size)), rng.uniform(-126, 128, (len(needs), size))
    drawn = torch.from_numpy((signs * 2.0**powers).astype(np.float32)).to(dtype)
    drawn[::2] = -drawn[::2].abs()  # a span of half of all floats, beside one of nearly all
    z_RV = clean(drawn.float().numpy())[0]
    rows = Rows(drawn.to(device), z_RV, np.zeros((len(needs), 1), np.int32), np.full_like(z_RV[:, :1], -np.inf), None)
    keys, counts = listed(rows, needs, side=False)
    assert lists_agree(keys, counts, z_RV, needs)
    expected = [gathered(z_V, need) for z_V, need in zip(z_RV, needs, strict=True)]
    assert min(expected) < LIST
    assert all(count == least for count, least in zip(counts, expected, strict=True) if least <= LIST)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [0, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3001, 32_003, 151_936, 262_144])
def test_first_tokens_of_long_rows(device: str, size: int, dtype: torch.dtype, side: int) -> None:
    kinds = [kind for kind in KINDS for _ in NEEDS]
    needs = list(NEEDS) * len(KINDS)
    rows = rows_of(kinds, size, dtype, device, side=side, masked=size == 32_003)
    keys, counts = listed(rows, needs, side=bool(side))
    assert lists_agree(keys, counts, rows.whole_RV, needs)


def test_order_with_ties_by_the_other_end_fails_the_same_check(device: str) -> None:
    rows = rows_of(["tied", "flat"], 300, torch.float32, device)
    keys, counts = listed(rows, [64, 64], side=False)
    assert lists_agree(keys, counts, rows.whole_RV, [64, 64])
    turned = keys ^ np.int64(0xFFFFFFFF)
    assert not lists_agree(turned, counts, rows.whole_RV, [64, 64])
    keys[0, 0] = keys[0, 1]
    assert not lists_agree(keys, counts, rows.whole_RV, [64, 64])


def test_key_orders_as_values_then_ids_and_gives_both_back(device: str) -> None:
    edge = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, -3.4e38, 1e-38, -1e-38]
    z = np.concatenate([edge, np.random.default_rng(2).normal(0, 1e3, 246)]).astype(np.float32)
    ids = np.random.default_rng(3).integers(0, 2**31 - 1, 256).astype(np.int32)
    ids[:4] = [0, 2**31 - 1, 1, 2]
    given = [torch.from_numpy(x).to(device) for x in (z, ids)]
    keys = torch.zeros(256, dtype=torch.int64, device=device)
    orders, back_ids = (torch.zeros(256, dtype=torch.int32, device=device) for _ in range(2))
    back = torch.zeros(256, device=device)
    _key_kernel[(1,)](*given, keys, orders, back, back_ids, 256)
    expected = np.lexsort((ids, -z.astype(np.float64)))
    assert (np.argsort(-keys.cpu().numpy().astype(object), kind="stable") == expected).all()
    assert (back.cpu().numpy() == z).all() and (back_ids.cpu().numpy() == ids).all()  # -0 comes back as 0


def test_sort_that_stands_in_for_tritons_own_gives_what_that_gives(device: str, their_sort: Any) -> None:
    drawn = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 64)
    drawn[:9] = [NO_KEY, NO_KEY, 0, -1, 2**63 - 1, 5, 5, 5, 4]
    keys = torch.from_numpy(drawn).to(device)
    own, theirs = torch.zeros_like(keys), torch.zeros_like(keys)
    _sort_kernel[(1,)](keys, own, 64)
    ours, tl.sort = tl.sort, their_sort
    try:
        _sort_kernel[(1,)](keys, theirs, 64)
    finally:
        tl.sort = ours
    assert torch.equal(own, theirs) and (own.cpu().numpy() == np.sort(drawn)[::-1]).all()
