"""Philox4x32-10 and the noise made of its words, vectorised in numpy.

Everything random in a request is keyed by its seed, its branch, the index of the token it produces and what the number
is for, and by nothing else: not by slot, row, batch or machine. A request continued elsewhere repeats the same noise.
Shape legend: R rows, N numbers of a row.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

RNG_VERSION = 1
"""Changes with anything that changes which token a seed gives: counters, purposes, GROUP, LISTED, order of operations.
"""

Float32s = npt.NDArray[np.float32]
UInt64s = npt.NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LARGEST_UNIFORM = np.float32(1.0 - 2.0**-24)


class Purpose(IntEnum):
    """What a number is for. Draft, acceptance and residual never share one."""

    SAMPLE_GROUP = 0
    SAMPLE_TOKEN = 1
    DRAFT_GROUP = 2
    DRAFT_TOKEN = 3
    ACCEPT = 4
    RESID_GROUP = 5
    RESID_TOKEN = 6


def philox_words(
    counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], seed: UInt64s
) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    """Four words in [0, 2^32) for each counter, whose words are in [0, 2^32); the five arguments broadcast. The low 32
    bits of the seed are the first key word.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = seed & _MASK, seed >> _HALF
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _MASK, (left >> _HALF) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(words: UInt64s) -> Float32s:
    """fp32 in (0, 1): (w + 0.5) / 2^32, assembled from two 16-bit halves so that small numbers keep all their bits, and
    clamped to 1 - 2^-24, since one would have infinite noise."""
    high = (words >> np.uint64(16)).astype(np.float32)
    low = (words & np.uint64(0xFFFF)).astype(np.float32)
    u: Float32s = high * np.float32(2.0**-16) + (low + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(u, _LARGEST_UNIFORM)


def log1p(x: Float32s) -> Float32s:
    """fp32 ln(1 + x) for x in (-1, 0], by Kahan's identity: the rounding of 1 + x cancels in x / ((1 + x) - 1).

    Goldberg, "What every computer scientist should know about floating-point arithmetic", 1991, theorem 4.
    """
    one = np.float32(1)
    rounded = one + x
    tiny = rounded == one
    rest = np.where(tiny, one, rounded - one)
    y: Float32s = np.where(tiny, x, np.log(np.ascontiguousarray(rounded)) * (x / rest))
    return y


def gumbels(words: UInt64s) -> Float32s:
    """fp32 Gumbel noise -ln(-ln(1 - u)) in [-2.82, 22.87]."""
    noise: Float32s = -np.log(-log1p(-uniforms(words)))
    return noise


class Noise:
    """The noise of R rows. `rounds` [R] is the round of a rejection or the offset in a draft run, 0 elsewhere."""

    def __init__(
        self,
        seeds_R: npt.NDArray[np.integer],
        positions_R: npt.NDArray[np.integer],
        branches_R: npt.NDArray[np.integer],
        rounds_R: npt.NDArray[np.integer] | int = 0,
    ) -> None:
        self._seeds_R1 = _column(seeds_R)
        self._positions_R1 = _column(positions_R) & _MASK
        self._branches_R1 = _column(branches_R) & _MASK
        self._rounds_R1 = _column(np.broadcast_to(np.asarray(rounds_R), np.shape(positions_R)))

    def of_blocks(self, purpose: Purpose, first_R: npt.NDArray[np.integer], count: int) -> Float32s:
        """[R, count] noise of the ids from `first` on, a multiple of 4 in each row: one counter for four ids."""
        blocks = np.arange(-(-count // 4), dtype=np.uint64)
        words = self._words(purpose, (_column(first_R) >> np.uint64(2)) + blocks)
        flat = np.stack(words, axis=-1).reshape(len(self._seeds_R1), -1)[:, :count]
        return gumbels(np.ascontiguousarray(flat))

    def of_ids(self, purpose: Purpose, ids_RN: npt.NDArray[np.integer]) -> Float32s:
        """[R, N] noise of any ids."""
        ids = ids_RN.astype(np.uint64)
        words = np.stack(self._words(purpose, ids >> np.uint64(2)), axis=-1)
        picked = np.take_along_axis(words, (ids & np.uint64(3)).astype(np.int64)[..., None], axis=-1)[..., 0]
        return gumbels(np.ascontiguousarray(picked))

    def _words(self, purpose: Purpose, blocks_RN: UInt64s) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
        """c0 id >> 2, c1 output position, c2 purpose << 16 | round, c3 branch."""
        what = np.uint64(int(purpose) << 16) | self._rounds_R1
        return philox_words((blocks_RN, self._positions_R1, what, self._branches_R1), self._seeds_R1)


def _column(values_R: npt.NDArray[np.integer]) -> UInt64s:
    return np.asarray(values_R).astype(np.uint64)[:, None]
