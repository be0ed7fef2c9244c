"""Generates Gumbel noise in the kernels, by the counters and the arithmetic of `reference/philox.py`.

`reference.philox.Purpose` explains the purposes. The four counter words are always given one by one: an integer offset
would change the stream with its width.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_sampler.reference.philox import LARGEST_U, Purpose

SAMPLE_GROUP: tl.constexpr = tl.constexpr(int(Purpose.SAMPLE_GROUP))
SAMPLE_TOKEN: tl.constexpr = tl.constexpr(int(Purpose.SAMPLE_TOKEN))
DRAFT_TOKEN: tl.constexpr = tl.constexpr(int(Purpose.DRAFT_TOKEN))
ACCEPT: tl.constexpr = tl.constexpr(int(Purpose.ACCEPT))
RESID_GROUP: tl.constexpr = tl.constexpr(int(Purpose.RESID_GROUP))
RESID_TOKEN: tl.constexpr = tl.constexpr(int(Purpose.RESID_TOKEN))
_LARGEST_U: tl.constexpr = tl.constexpr(float(LARGEST_U))


class NoiseKey(NamedTuple):
    """Addresses the noise of one row at one position of its output."""

    seed: Any  # u64
    position: Any  # i32, as the branch
    branch: Any


@triton.jit
def gumbel(ids, key, purpose, round_):
    """Returns f32 noise of i32 `ids` of any shape; `purpose` and `round_` are i32 scalars."""
    zero = ids * 0
    c2 = zero + ((purpose << 16) | round_)
    w0, w1, w2, w3 = tl.philox(key.seed, ids >> 2, zero + key.position, c2, zero + key.branch)
    low = ids & 3
    return noise_of(tl.where(low < 2, tl.where(low == 0, w0, w1), tl.where(low == 2, w2, w3)))


@triton.jit
def gumbel_from_0(COUNT: tl.constexpr, key, purpose, round_):
    """Returns the noise f32 [COUNT] of ids 0 to COUNT - 1, four ids a call of Philox."""
    blocks = tl.arange(0, COUNT // 4)
    zero = blocks * 0
    c2 = zero + ((purpose << 16) | round_)
    w0, w1, w2, w3 = tl.philox(key.seed, blocks, zero + key.position, c2, zero + key.branch)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [n, i, j] holds word 2 i + j
    return noise_of(tl.reshape(words, [COUNT]))


@triton.jit
def noise_of(word):
    """Returns -ln(-ln(1 - u)) with u of `uniform_of`, standard Gumbel noise."""
    return -tl.log(-log1p(-uniform_of(word)))


@triton.jit
def uniform_of(word):
    """Returns u = (word + 0.5) / 2^32 from two halves, so that small u keep full precision; at most 1 - 2^-24."""
    high = (word >> 16).to(tl.float32)
    low = (word & 0xFFFF).to(tl.float32)
    u = high * (1.0 / 65536.0) + (low + 0.5) * (1.0 / 65536.0 / 65536.0)
    return tl.minimum(u, _LARGEST_U)


@triton.jit
def uniforms(seed, positions, purpose, rounds, branch):
    """Returns f32 in [0, 1) of the shape of `positions` and `rounds`, for a purpose with one number a position."""
    zero = positions * 0
    word, _, _, _ = tl.philox(seed, zero, positions, rounds | (purpose << 16), zero + branch)
    return uniform_of(word)


@triton.jit
def log1p(x):
    """Returns ln(1 + x) for x in (-1, 0] by Kahan's identity, with a relative error of about 2e-7."""
    y = 1.0 + x
    exact = y == 1.0
    safe = tl.where(exact, 0.5, y)
    return tl.where(exact, x, tl.log(safe) * (x / (safe - 1.0)))
