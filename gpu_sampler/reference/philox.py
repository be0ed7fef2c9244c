"""Generates Philox4x32-10 and the noise made of it (Salmon, Moraes, Dror, Shaw 2011: "Parallel random numbers: as easy
as 1, 2, 3").

A number is addressed, never drawn in order:

    key      the request's 64-bit seed
    counter  c0 = id >> 2, c1 = output position, c2 = purpose << 16 | round, c3 = branch

The id is that of a token or group, and its low two bits choose one of the four words. `round` separates draws that one
purpose repeats at one position. `branch` separates the n samples of one request. Slot, row, batch size and replica do
not enter, so a request's tokens do not depend on them.
"""

from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

RNG_VERSION: Final = 2
"""Version of the mapping from (seed, position, logits) to a token: noise, total order, GROUP, routes, their limits."""

UInt32s = npt.NDArray[np.uint32]
Float32s = npt.NDArray[np.float32]
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.float32(1 / 65536)
LARGEST_U: Final = np.float32(1 - 2**-24)


class Purpose(IntEnum):
    """Names what a number is for; no two purposes share a number.

    The residual's numbers differ from those that drafted or accepted: a shared number would make likelier what it
    decided before.
    """

    SAMPLE_GROUP = 0  # the group of a two-level draw; round: the draw's number under rejection, else 0
    SAMPLE_TOKEN = 1  # the token of a draw; round as above
    DRAFT_GROUP = 2  # reserved
    DRAFT_TOKEN = 3  # a draft; round: its offset in the run, for a position after a rejection is drafted again
    ACCEPT = 4  # whether a draft is accepted, one number a position at id 0; round as for DRAFT_TOKEN
    RESID_GROUP = 5  # the group of a draw from the residual; round 0
    RESID_TOKEN = 6  # the token of a draw from the residual; round 0


def philox4x32(seed: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> tuple[UInt32s, UInt32s, UInt32s, UInt32s]:
    """Runs ten rounds on counters that broadcast with each other and the u64 `seed`; returns four u32 words."""
    key = np.asarray(seed, np.uint64)
    k0, k1 = (key & _LOW).astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    x0, x1, x2, x3, k0, k1 = np.broadcast_arrays(*(np.asarray(c).astype(np.uint32) for c in (c0, c1, c2, c3)), k0, k1)
    with np.errstate(over="ignore"):
        for step in range(10):
            if step:
                k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
            a = x0.astype(np.uint64) * _MULTIPLIERS[0]
            b = x2.astype(np.uint64) * _MULTIPLIERS[1]
            x0, x1, x2, x3 = (
                (b >> np.uint64(32)).astype(np.uint32) ^ x1 ^ k0,
                b.astype(np.uint32),
                (a >> np.uint64(32)).astype(np.uint32) ^ x3 ^ k1,
                a.astype(np.uint32),
            )
    return x0, x1, x2, x3


def words(seed: Any, ids: Any, position: Any, purpose: Purpose, round_: Any = 0, branch: Any = 0) -> UInt32s:
    """Returns the u32 word of each id: the counter takes id >> 2, and the low two bits choose one of four words."""
    ids = np.asarray(ids, np.int64)
    c2 = (np.asarray(int(purpose) << 16, np.uint32)) | np.asarray(round_, np.uint32)
    four = philox4x32(seed, ids >> 2, position, c2, branch)
    return np.choose(np.broadcast_to(ids & 3, four[0].shape), four)


def uniform(word: UInt32s) -> Float32s:
    """Returns (word + 0.5) / 2^32 in float32, from two halves for full precision of small values; at most 1 - 2^-24."""
    high = (word >> np.uint32(16)).astype(np.float32)
    low = (word & np.uint32(0xFFFF)).astype(np.float32)
    u = high * _HALF + (low + np.float32(0.5)) * (_HALF * _HALF)
    return np.minimum(u, LARGEST_U)


def log1p(x: Float32s) -> Float32s:
    """Returns float32 log(1 + x) by Kahan's identity, relative error about 2e-7, by the kernels' arithmetic."""
    y = np.float32(1) + x
    exact = y == np.float32(1)
    safe = np.where(exact, np.float32(2), y)
    return np.where(exact, x, np.log(safe) * (x / (safe - np.float32(1)))).astype(np.float32)


def gumbel(word: UInt32s) -> Float32s:
    """Returns standard Gumbel noise in [-2.82, 22.87]: -ln(-ln(1 - u))."""
    noise: Float32s = -np.log(-log1p(-uniform(word)))
    return noise
