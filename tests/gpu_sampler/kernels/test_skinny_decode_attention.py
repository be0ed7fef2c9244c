"""Attention of a few single tokens against its float64 reference, and what a row's bits may depend on."""

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.kernels import skinny_decode_attention as kernels
from engine.kernels.skinny_decode_attention import CHUNK, PARTS, SplitKVWorkspace, skinny_decode_attention
from tests.support import layer_kernels as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)
LONG = PARTS * CHUNK + 3  # tokens: pieces of more than one chunk
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Case(NamedTuple):
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor

    def of_rows(self, rows: list[int]) -> "Case":
        """Some of the rows, in another order."""
        contexts = [self.indices[self.indptr[row] : self.indptr[row + 1]] for row in rows]
        ends = np.cumsum([0, *map(len, contexts)])
        indptr = torch.tensor(ends, dtype=torch.int32, device=self.q.device)
        return Case(self.q[rows], self.keys, self.values, indptr, torch.cat(contexts))


def case(
    lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Rows over slots in no order, some of them shared."""
    rng = np.random.default_rng([*lengths, heads, kv_heads, dim])
    slots = max(lengths) + 50
    q, k, v = (rng.normal(0, 1, (n, h, dim)) for n, h in ((len(lengths), heads), (slots, kv_heads), (slots, kv_heads)))
    indices = np.concatenate([rng.permutation(slots)[:length] for length in lengths]).astype(np.int32)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    queries, keys, values = (torch.from_numpy(one).to(device, dtype) for one in (q, k[:, None], v[:, None]))
    return Case(queries, keys, values, torch.from_numpy(indptr).to(device), torch.from_numpy(indices).to(device))


def room_of(given: Case, rows: int = 16, parts: int = PARTS) -> SplitKVWorkspace:
    return SplitKVWorkspace.of(
        rows, given.q.shape[1], given.keys.shape[2], given.q.shape[2], given.q.device, parts=parts
    )


def assert_attends(given: Case, found: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
    floats = (one.float().cpu().numpy() for one in given[:3])
    ints = (one.cpu().numpy() for one in given[3:])
    out, lse = reference.skinny_decode_attention(*floats, *ints, scale=0.3, **options)
    rounding = ROUNDING[given.q.dtype]
    np.testing.assert_allclose(found[0].double().cpu(), out, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(found[1].double().cpu(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (4, 2, 64), (8, 2, 32), (3, 1, 128), (16, 1, 256)])
def test_rows_attend_as_the_reference_does(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> None:
    given = case(LENGTHS, heads, kv_heads, dim, device, dtype)
    assert_attends(given, skinny_decode_attention(*given, room_of(given), scale=0.3))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("window", [1, CHUNK, CHUNK + 1, 1000])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_windows_and_soft_caps_are_those_of_the_reference(window: int, softcap: float, device: str) -> None:
    given = case(LENGTHS, 4, 2, 16, device)
    found = skinny_decode_attention(*given, room_of(given), scale=0.3, window=window, softcap=softcap)
    assert_attends(given, found, window=window, softcap=softcap)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("window", [0, LONG - CHUNK])
def test_contexts_of_more_chunks_than_parts_are_attended_to_whole(window: int, device: str) -> None:
    given = case((LONG, 3, 2 * LONG), 2, 1, 16, device)
    assert_attends(given, skinny_decode_attention(*given, room_of(given), scale=0.3, window=window), window=window)


def test_scores_far_apart_leave_the_largest(device: str) -> None:
    """Pieces whose largest scores are so far apart that the weights of all but one are zero."""
    given = case((5 * CHUNK, 2 * CHUNK), 2, 1, 16, device)
    given.keys.mul_(60)
    assert_attends(given, skinny_decode_attention(*given, room_of(given), scale=0.3))


def test_a_row_has_the_same_bits_beside_any_others_and_at_any_place(device: str) -> None:
    given = case((LONG, *LENGTHS), 4, 2, 16, device)
    out, lse = skinny_decode_attention(*given, room_of(given), scale=0.3)
    for rows in ([3], [6, 0], [5, 4, 3, 2, 1], [6, 5, 4, 3, 2, 1, 0]):
        some = given.of_rows(rows)
        found = skinny_decode_attention(*some, room_of(some), scale=0.3)
        assert torch.equal(found[0], out[rows]) and torch.equal(found[1], lse[rows])


@pytest.mark.full
def test_one_room_serves_launch_after_launch(device: str) -> None:
    given, other = case((LONG, *LENGTHS), 4, 2, 16, device), case(LENGTHS[::-1], 4, 2, 16, device)
    room = room_of(given)
    first = skinny_decode_attention(*given, room, scale=0.3)
    for _ in range(2):
        assert_attends(other, skinny_decode_attention(*other, room, scale=0.3))
        assert not room.arrived.any()
        again = skinny_decode_attention(*given, room, scale=0.3)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.gpu
def test_many_concurrent_launches_give_the_same_bits(device: str) -> None:
    """The last program of a row is another one each time."""
    given = case((20_000, 1, 700, 2_048, 33, 9_999, 64, 5_000), 16, 8, 128, device)
    room = room_of(given)
    first = skinny_decode_attention(*given, room, scale=0.1)
    for _ in range(200):
        again = skinny_decode_attention(*given, room, scale=0.1)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_strides_of_queries_and_an_output_of_the_callers_do_not_matter(device: str) -> None:
    given = case(LENGTHS, 4, 2, 16, device)
    out, _ = skinny_decode_attention(*given, room_of(given), scale=0.3)
    wide = torch.full((len(LENGTHS), 6, 40), torch.nan, dtype=given.q.dtype, device=device)
    wide[:, 1:5, 7:23] = given.q
    into = torch.empty_like(out)
    skinny_decode_attention(wide[:, 1:5, 7:23], *given[1:], room_of(given), scale=0.3, out_RHD=into)
    assert torch.equal(into, out)


def test_a_row_of_nan_and_free_slots_leave_the_others_alone(device: str) -> None:
    given = case(LENGTHS, 4, 2, 16, device)
    out, _ = skinny_decode_attention(*given, room_of(given), scale=0.3)
    given.q[2] = torch.nan
    unread = [slot for slot in range(len(given.keys)) if slot not in set(given.indices.tolist())]
    given.keys[unread], given.values[unread] = torch.nan, torch.nan
    found, _ = skinny_decode_attention(*given, room_of(given), scale=0.3)
    others = [row for row in range(len(LENGTHS)) if row != 2]
    assert found[2].isnan().all() and torch.equal(found[others], out[others])


def test_what_does_not_belong_together_is_named(device: str) -> None:
    given = case(LENGTHS, 4, 2, 16, device)
    room = room_of(given)
    with pytest.raises(ValueError, match="got q"):
        skinny_decode_attention(given.q.float(), *given[1:], room, scale=0.3)
    with pytest.raises(ValueError, match="got values"):
        skinny_decode_attention(*given[:2], given.values[1:], *given[3:], room, scale=0.3)
    with pytest.raises(ValueError, match="got indptr"):
        skinny_decode_attention(*given[:3], given.indptr[1:], given.indices, room, scale=0.3)
    with pytest.raises(ValueError, match="room for"):
        skinny_decode_attention(*given, room_of(given, rows=2), scale=0.3)
    assert (
        skinny_decode_attention(given.q[:0], *given[1:3], given.indptr[:1], given.indices, room, scale=0.3)[0].numel()
        == 0
    )


# Planted faults that the tests above must see


FAULTS = {
    "_seen": lambda theirs: lambda length, window: theirs(length, window + 1),
    "_weight": lambda theirs: lambda best, overall: theirs(overall, overall),
    "_capped": lambda theirs: lambda z, softcap, capped: theirs(z, softcap * 1.1, capped),
}


@pytest.mark.full(keep=1)
@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel is found again by what it was")
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_fails_the_same_check(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case((3 * CHUNK + 7, 5), 4, 2, 16, device)
    options: dict[str, Any] = {"window": 2 * CHUNK, "softcap": 1.5}
    assert_attends(given, skinny_decode_attention(*given, room_of(given), scale=0.3, **options), **options)
    monkeypatch.setattr(kernels, name, FAULTS[name](getattr(kernels, name)))
    with pytest.raises(AssertionError):
        assert_attends(given, skinny_decode_attention(*given, room_of(given), scale=0.3, **options), **options)


def test_a_cut_that_is_not_the_rows_own_fails_the_test_of_bits(device: str) -> None:
    """Splits like one by the number of rows. Pairs of tokens weigh alike and their values cancel, so that what a sum
    loses, which hangs on its order, is much of what is left."""
    given = case((LONG, *LENGTHS), 4, 2, 16, device)
    half = LONG // 2
    slots = given.indices[:LONG].long()
    given.values[slots[:half]] *= 100
    given.keys[slots[half : 2 * half]] = given.keys[slots[:half]]
    given.values[slots[half : 2 * half]] = -given.values[slots[:half]]
    out, _ = skinny_decode_attention(*given, room_of(given), scale=0.3)
    assert not torch.equal(skinny_decode_attention(*given, room_of(given, parts=PARTS // 4), scale=0.3)[0], out)
