"""The total order of a row: value descending, then id ascending, as one uint64 per token, larger first.

The order is taken of fp32 values before temperature. It is strict, so top-k, rank, argmax and the mass before a token
each have one answer. Shape legend: R rows, V vocabulary, C first tokens of the order.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_SIGN = np.uint32(0x80000000)
_ID_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Cleaned(NamedTuple):
    values_RV: Float32s  # NaN and +inf as -inf
    bad_R: npt.NDArray[np.bool_]  # there was one


def clean(logits_RV: Float32s) -> Cleaned:
    """NaN and +inf count as -inf, and the row is marked."""
    good_RV = logits_RV < np.inf
    if good_RV.all():
        return Cleaned(logits_RV, np.zeros(len(logits_RV), np.bool_))
    return Cleaned(np.where(good_RV, logits_RV, np.float32(-np.inf)), ~good_RV.all(axis=1))


def keys_of(values: Float32s, ids: npt.NDArray[np.integer]) -> UInt64s:
    """Order-preserving bits of the value (-0 as +0) << 32 | ~id; the arguments broadcast. No NaN."""
    bits = (values + np.float32(0)).view(np.uint32)
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint64)
    keys: UInt64s = (ordered << _HALF) | (_ID_MASK - ids.astype(np.uint64))
    return keys


def row_keys(values_RV: Float32s) -> UInt64s:
    """[R, V] keys of whole rows."""
    return keys_of(np.ascontiguousarray(values_RV), np.arange(values_RV.shape[1], dtype=np.uint64))


def ids_of(keys: UInt64s) -> Int64s:
    return (_ID_MASK - (keys & _ID_MASK)).astype(np.int64)


def values_of(keys: UInt64s) -> Float32s:
    ordered = (keys >> _HALF).astype(np.uint32)
    return np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered).view(np.float32)


class First(NamedTuple):
    """The first C tokens of the total order."""

    ids_RC: Int64s
    values_RC: Float32s  # -inf beyond the last finite one


def first_of_order(keys_RV: UInt64s, count: int) -> First:
    """The first `count` (at most V) tokens; keys are unique, so a partition is exact under any pattern of ties."""
    size = keys_RV.shape[1]
    if 0 < count < size:
        keys_RV = np.partition(keys_RV, size - count, axis=1)[:, size - count :]
    keys_RC = np.ascontiguousarray(np.sort(keys_RV, axis=1)[:, ::-1][:, : max(count, 0)])
    return First(ids_of(keys_RC), values_of(keys_RC))
