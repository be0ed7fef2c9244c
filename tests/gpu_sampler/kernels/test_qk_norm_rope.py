"""Norms, rotation and store of a few tokens against the float64 reference, and what a token's bits may depend on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.kernels.qk_norm_rope import Rotation, fits, qk_norm_rope
from tests.support import layer_kernels as reference

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LOST = 2.0**-17  # in float32, where the two products of a rotation cancel; of numbers about 1
EPS = 0.25  # large enough to be seen
SHAPES = ((1, 1, 1, 16), (17, 4, 2, 16), (5, 6, 2, 32), (3, 4, 2, 64), (2, 16, 8, 128), (2, 1, 1, 256))  # T, H, G, D
SPARE = 6  # slots of the pool beside a case's own

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # out, keys, values


class Case(NamedTuple):
    """Tokens as a product leaves them, with queries, keys and values side by side."""

    merged: torch.Tensor  # [T, (H + 2 G) D]
    angles: torch.Tensor  # [T, more than 2 D]: cosines, NaN, sines, NaN
    norms: torch.Tensor | None  # [2, D]: of queries and of keys
    slots: torch.Tensor
    heads: tuple[int, int, int]  # H, G, D
    pool: int  # slots
    eps: float = EPS

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, views of what is merged."""
        heads, kv_heads, dim = self.heads
        together = self.merged.view(len(self.merged), heads + 2 * kv_heads, dim)
        q, k, v = together.split((heads, kv_heads, kv_heads), dim=1)
        return q, k, v

    @property
    def rotation(self) -> Rotation:
        dim = self.heads[2]
        q_norm, k_norm = (None, None) if self.norms is None else self.norms
        return Rotation(self.angles[:, :dim], self.angles[:, dim + 8 : 2 * dim + 8], q_norm, k_norm, self.eps)

    def of_tokens(self, tokens: Sequence[int]) -> "Case":
        """Some of the tokens, in another order, each with its own slot."""
        at = list(tokens)
        return self._replace(merged=self.merged[at], angles=self.angles[at], slots=self.slots[at])


def case(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    normed: bool = True,
    angles_dtype: torch.dtype | None = None,
) -> Case:
    """The tables are no cosines and sines: their halves differ, and so an exchange of them is seen."""
    rng = np.random.default_rng([tokens, heads, kv_heads, dim])
    merged = rng.normal(0, 1, (tokens, (heads + 2 * kv_heads) * dim))
    angles = np.full((tokens, 2 * dim + 16), np.nan)
    angles[:, :dim], angles[:, dim + 8 : 2 * dim + 8] = rng.uniform(-1, 1, (2, tokens, dim))
    norms = rng.normal(1, 0.5, (2, dim))
    slots = rng.permutation(tokens + SPARE - 1)[:tokens] + 1  # slot 0 is that of padding
    made, turned, weights = (torch.from_numpy(one).to(device) for one in (merged, angles, norms))
    return Case(
        made.to(dtype),
        turned.to(angles_dtype or dtype),
        weights.to(dtype) if normed else None,
        torch.from_numpy(slots.astype(np.int32)).to(device),
        (heads, kv_heads, dim),
        tokens + SPARE,
    )


def rotated(
    given: Case, rotation: Rotation | None = None, parts: Sequence[torch.Tensor] | None = None, together: int = 1
) -> Found:
    """By the kernel, into a pool of NaN; with another rotation or other heads if they are given."""
    _, kv_heads, dim = given.heads
    merged = given.merged
    shape = (given.pool, 1, kv_heads, dim)
    keys, values = (torch.full(shape, torch.nan, dtype=merged.dtype, device=merged.device) for _ in range(2))
    q, k, v = parts or given.parts
    return qk_norm_rope(q, k, v, rotation or given.rotation, keys, values, given.slots, together), keys, values


def of_reference(given: Case) -> list[Any]:
    """float64 queries and keys."""
    cos, sin, *norms = (None if one is None else one.float().cpu().numpy() for one in given.rotation[:4])
    heads = (one.float().cpu().numpy() for one in given.parts[:2])
    assert cos is not None and sin is not None
    return [reference.qk_norm_rope(one, cos, sin, norm, given.eps) for one, norm in zip(heads, norms, strict=True)]


def assert_close(found: torch.Tensor, expected: Any) -> None:
    """Rounded once."""
    np.testing.assert_allclose(found.double().cpu(), expected, rtol=ROUNDING[found.dtype], atol=LOST)


def assert_rotated(given: Case, found: Found, expected: Sequence[Any] | None = None) -> None:
    """Equal to the reference, and nothing else is written."""
    out, keys, values = found
    queries, turned = of_reference(given) if expected is None else expected
    at = given.slots.long()
    assert out.is_contiguous() and out.dtype == given.merged.dtype and out.shape == queries.shape
    assert_close(out, queries)
    assert_close(keys[at, 0], turned)
    assert torch.equal(values[at, 0], given.parts[2])
    others = torch.ones(given.pool, dtype=torch.bool, device=out.device)
    others[at] = False
    assert keys[others].isnan().all() and values[others].isnan().all()


def same_tokens(some: Found, every: Found, case_of_some: Case, tokens: Sequence[int]) -> bool:
    """Whether tokens have the bits in `some` that they have in `every`."""
    at = case_of_some.slots.long()
    return torch.equal(some[0], every[0][list(tokens)]) and all(
        torch.equal(one[at], other[at]) for one, other in zip(some[1:], every[1:], strict=True)
    )


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_tokens_are_turned_as_by_the_reference_and_only_their_slots_are_written(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, normed: bool, device: str
) -> None:
    given = case(tokens, heads, kv_heads, dim, device, dtype, normed=normed)
    assert fits(*given.parts, torch.empty((1, 1, kv_heads, dim), dtype=dtype, device=device))
    for together in (1, 8):
        assert_rotated(given, rotated(given, together=together))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("angles_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_angles_and_norms_may_have_another_type(angles_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    given = case(3, 4, 2, 32, device, dtype, angles_dtype=angles_dtype)
    assert given.norms is not None
    for norms in (given.norms, given.norms.float()):
        assert_rotated(given._replace(norms=norms), rotated(given._replace(norms=norms)))


def test_strides_do_not_matter(device: str) -> None:
    """Heads and angles that lie alone, each in alternation, and tokens in NaN, shifted by an odd number."""
    given = case(5, 4, 2, 16, device)
    cos, sin, *more = given.rotation
    for angles in ((cos.contiguous(), sin), (cos, sin.contiguous())):
        assert_rotated(given, rotated(given, Rotation(*angles, *more)))  # type: ignore[arg-type]
    for alone in range(3):
        parts = [part.contiguous() if at == alone else part for at, part in enumerate(given.parts)]
        assert_rotated(given, rotated(given, parts=parts))
    width = given.merged.shape[1]
    wide = torch.full((5, width + 10), torch.nan, dtype=given.merged.dtype, device=device)
    wide[:, 3 : 3 + width] = given.merged
    shifted = given._replace(merged=wide[:, 3 : 3 + width])
    assert_rotated(shifted, rotated(shifted))


def test_a_head_of_zeros_stays_one(device: str) -> None:
    given = case(3, 4, 2, 16, device)
    for part in given.parts:
        part[1, 0] = 0
    found = rotated(given)
    assert_rotated(given, found)
    assert not found[0][1, 0].any() and not found[1][given.slots[1].long(), 0, 0].any()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("normed", [False, True])
def test_a_token_has_the_same_bits_beside_any_others_and_at_any_place(normed: bool, device: str) -> None:
    given = case(17, 4, 2, 16, device, normed=normed)
    for together in (1, 8):
        every = rotated(given, together=together)
        for tokens in ([3], [16, 0], [5, 4, 3, 2, 1], list(range(16, -1, -1)), [16, *range(16)]):
            some = given.of_tokens(tokens)
            assert same_tokens(rotated(some, together=together), every, some, tokens)


def test_padding_of_one_slot_disturbs_no_other(device: str) -> None:
    given = case(6, 4, 2, 16, device)
    without = rotated(given.of_tokens((0, 2, 4)))
    given.slots[[1, 3, 5]] = 0
    found = rotated(given)
    assert torch.equal(found[0][[0, 2, 4]], without[0])
    for one, other in zip(found[1:], without[1:], strict=True):
        assert torch.equal(one[1:].nan_to_num(7.0), other[1:].nan_to_num(7.0))
        assert other[0].isnan().all() and not one[0].isnan().any()


def test_a_head_of_nan_leaves_the_others_alone(device: str) -> None:
    given = case(4, 4, 2, 16, device)
    every = rotated(given)
    for part, head in zip(given.parts, (2, 1, 0), strict=True):
        part[1, head, 5] = torch.nan
    found = rotated(given)
    at = given.slots.long()
    for before, after, head in zip(
        (every[0], every[1][at, 0], every[2][at, 0]),
        (found[0], found[1][at, 0], found[2][at, 0]),
        (2, 1, 0),
        strict=True,
    ):
        others = torch.ones(before.shape[:2], dtype=torch.bool, device=device)
        others[1, head] = False
        assert torch.equal(after[others], before[others])
        assert after[1, head].isnan().any()
    assert found[0][1, 2].isnan().all() and found[1][at[1], 0, 1].isnan().all()  # their norm is NaN


def test_no_tokens_are_no_launch(device: str) -> None:
    out, keys, values = rotated(case(3, 4, 2, 16, device).of_tokens(()))
    assert out.shape == (0, 4, 16) and keys.isnan().all() and values.isnan().all()


def test_what_does_not_belong_together_is_named(device: str) -> None:
    given = case(3, 4, 2, 16, device)
    q, k, v = given.parts
    rotation, slots = given.rotation, given.slots
    cos, sin, q_norm, k_norm, _ = rotation
    assert q_norm is not None and k_norm is not None
    keys, values = (torch.zeros((9, 1, 2, 16), dtype=q.dtype, device=device) for _ in range(2))
    together: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "rotation": rotation,
        "keys": keys,
        "values": values,
        "slots": slots,
    }
    other_half = torch.float16
    narrow = torch.zeros((3, 2, 8), dtype=q.dtype, device=device)  # of a width that the kernel has not
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"q": q.float()}, "got q, k, v"),
        ({"q": q[0]}, "got q, k, v"),
        ({"k": k.to(other_half)}, "got q, k, v"),
        ({"v": v.to(other_half)}, "got q, k, v"),
        ({"q": q[:, ::2]}, "got q, k, v"),
        ({"k": k.transpose(1, 2).contiguous().transpose(1, 2)}, "got q, k, v"),
        ({"v": v[..., :8]}, "got q, k, v"),
        ({"q": narrow, "k": narrow, "v": narrow, "keys": keys[..., :8]}, "got q, k, v"),
        ({"keys": keys[:, 0]}, "got q, k, v"),
        ({"keys": keys.to(other_half)}, "got q, k, v"),
        ({"keys": keys[..., :8]}, "got q, k, v"),
        ({"k": k[:2]}, "expected k and v"),
        ({"k": k[:, :1]}, "expected k and v"),
        ({"v": v[:2]}, "expected k and v"),
        ({"keys": keys[:, :, :1]}, "expected k and v"),
        ({"keys": keys.expand(9, 2, 2, 16)}, "got keys"),
        ({"keys": keys[::2]}, "got keys"),
        ({"values": values[1:]}, "got values"),
        ({"values": values.float()}, "got values torch.float32"),
        ({"values": torch.cat((values, values), dim=3)[..., :16]}, "got values"),
        ({"rotation": rotation._replace(cos_TD=cos[:2])}, "got cos"),
        ({"rotation": rotation._replace(sin_TD=sin[:, :8])}, "got sin"),
        ({"rotation": rotation._replace(cos_TD=cos.T.contiguous().T)}, "got cos"),
        ({"rotation": rotation._replace(sin_TD=sin[None])}, "got sin"),
        ({"rotation": rotation._replace(q_norm_D=None)}, "got one norm"),
        ({"rotation": rotation._replace(k_norm_D=None)}, "got one norm"),
        ({"rotation": rotation._replace(q_norm_D=q_norm[:8])}, "got q_norm"),
        ({"rotation": rotation._replace(k_norm_D=torch.cat((k_norm, k_norm))[::2])}, "got k_norm"),
        ({"slots": slots.long()}, "got slots torch.int64"),
        ({"slots": slots[:2]}, r"got slots torch.int32 \(2,\)"),
        ({"slots": torch.cat((slots, slots))[::2]}, "got slots"),
        ({"slots": slots.to("meta")}, "got tensors on .*meta"),
        ({"rotation": rotation._replace(cos_TD=cos.to("meta"))}, "got tensors on .*meta"),
        ({"rotation": rotation._replace(k_norm_D=k_norm.to("meta"))}, "got tensors on .*meta"),
        ({"values": values.to("meta")}, "got tensors on .*meta"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            qk_norm_rope(*(together | changed).values())
    assert not keys.any() and not values.any()


# Planted faults that the tests above must see


def halves_exchanged(given: Case) -> Found:
    half = given.heads[2] // 2
    q, k, v = given.parts
    return rotated(given, parts=[q.roll(half, 2), k.roll(half, 2), v])


def angles_of_the_other_half(given: Case) -> Found:
    half = given.heads[2] // 2
    cos, sin = (one.roll(half, 1) for one in given.rotation[:2])
    return rotated(given, given.rotation._replace(cos_TD=cos, sin_TD=sin))


def sine_negated(given: Case) -> Found:
    return rotated(given, given.rotation._replace(sin_TD=-given.rotation.sin_TD))


def norm_left_out(given: Case) -> Found:
    return rotated(given, given.rotation._replace(q_norm_D=None, k_norm_D=None))


def eps_left_out(given: Case) -> Found:
    return rotated(given, given.rotation._replace(eps=0.0))


def norm_of_keys_for_queries(given: Case) -> Found:
    return rotated(given, given.rotation._replace(q_norm_D=given.rotation.k_norm_D))


def norm_of_queries_for_keys(given: Case) -> Found:
    return rotated(given, given.rotation._replace(k_norm_D=given.rotation.q_norm_D))


def cosine_of_a_neighbour(given: Case) -> Found:
    return rotated(given, given.rotation._replace(cos_TD=given.rotation.cos_TD.roll(1, 0)))


def slot_of_a_neighbour(given: Case) -> Found:
    return rotated(given._replace(slots=given.slots.roll(1)))


def key_heads_exchanged(given: Case) -> Found:
    q, k, v = given.parts
    return rotated(given, parts=[q, k.flip(1), v])


def keys_and_values_exchanged(given: Case) -> Found:
    q, k, v = given.parts
    return rotated(given, parts=[q, v, k])


def one_slot_too_many(given: Case) -> Found:
    found = rotated(given)
    found[2][0] = 0
    return found


@pytest.mark.full(keep=4)
@pytest.mark.parametrize(
    "fault",
    [
        halves_exchanged,
        angles_of_the_other_half,
        sine_negated,
        norm_left_out,
        eps_left_out,
        norm_of_keys_for_queries,
        norm_of_queries_for_keys,
        cosine_of_a_neighbour,
        slot_of_a_neighbour,
        key_heads_exchanged,
        keys_and_values_exchanged,
        one_slot_too_many,
    ],
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_planted_fault_is_told_apart(fault: Callable[[Case], Found], dtype: torch.dtype, device: str) -> None:
    given = case(3, 4, 2, 16, device, dtype)
    assert_rotated(given, rotated(given))
    with pytest.raises(AssertionError):
        assert_rotated(given, fault(given))


# Compiled, at the sizes of decoder layers


SERVED = ((16, 8, 128), (32, 8, 128))


def on_device(given: Case) -> list[Any]:
    """float64 queries and keys, by torch, independent of the reference."""
    half = given.heads[2] // 2
    cos, sin, *norms = (None if one is None else one.double() for one in given.rotation[:4])
    assert cos is not None and sin is not None
    found: list[Any] = []
    for one, norm in zip(given.parts[:2], norms, strict=True):
        x = one.double()
        if norm is not None:
            x = x * (x.square().mean(2, keepdim=True) + given.eps).rsqrt() * norm
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=2)
        found.append((x * cos[:, None] + turned * sin[:, None]).cpu().numpy())
    return found


def test_the_numbers_of_the_device_are_those_of_the_reference(device: str) -> None:
    given = case(3, 4, 2, 16, device)
    for one, other in zip(on_device(given), of_reference(given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads", SERVED)
def test_served_sizes_are_right_and_keep_their_bits(
    heads: tuple[int, int, int], dtype: torch.dtype, normed: bool, device: str
) -> None:
    given = case(16, *heads, device, dtype, normed=normed)
    every = rotated(given)
    assert_rotated(given, every, on_device(given))
    order = np.random.default_rng(3).permutation(16).tolist()
    for count in (1, 2, 5, 16):
        for tokens in (range(count), range(16 - count, 16), order[:count]):
            some = given.of_tokens(tokens)
            found = rotated(some)
            assert_rotated(some, found, on_device(some))
            assert same_tokens(found, every, some, tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", SERVED)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_served_sizes_replay_with_other_contents(tokens: int, heads: tuple[int, int, int], device: str) -> None:
    given = case(tokens, *heads, device)
    blank = given._replace(
        merged=torch.zeros_like(given.merged), angles=torch.zeros_like(given.angles), slots=given.slots.roll(1)
    )
    rotated(blank)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotated(blank)
    for turn in range(3):
        other = given._replace(merged=given.merged.roll(turn, 1), slots=given.slots.roll(turn))
        blank.merged.copy_(other.merged)
        blank.angles.copy_(other.angles)
        blank.slots.copy_(other.slots)
        graph.replay()
        assert_rotated(other, found, on_device(other))
        alone = rotated(other)
        assert torch.equal(found[0], alone[0])
