"""Steps 1 and 2 of a row that has an overlay: bias, bans and the allow mask, then penalties.

Only entries of the overlay are computed; the rest of the row stays as it is. The patched value of an entry takes its
natural place in the row: it belongs to the group of its id in every later step, whatever the order of the entries.
Shape legend: E entries of an overlay, B tokens banned in this step, R rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COUNT_MASK = (1 << 29) - 1
EARLY_BIT = 1 << 29
"""Banned until the row has `min_tokens` tokens."""
PROMPT_BIT = 1 << 30
"""Occurs in the prompt."""


class RowOverlay(NamedTuple):
    ids_E: npt.NDArray[np.int32]  # distinct
    counts_E: npt.NDArray[np.int32]  # how often among the outputs, and the two bits above
    bias_E: npt.NDArray[np.float32]
    repetition: float
    frequency: float
    presence: float
    early: bool  # fewer than `min_tokens` tokens so far
    banned_B: npt.NDArray[np.int32]
    allowed_V: npt.NDArray[np.bool_] | None  # None: every token


def patch_rows(values_RV: npt.NDArray[np.float32], overlays: Sequence[RowOverlay]) -> npt.NDArray[np.bool_]:
    """Patches the rows in place; bool [R] whether a patched value left the fp32 range (+inf, taken as -inf).

    Entries are computed in float64 and rounded to fp32 once. Ids outside [0, V) are never read or written.
    """
    bad_R = np.zeros(len(values_RV), np.bool_)
    for row, overlay in enumerate(overlays):
        bad_R[row] = _patch_row(values_RV[row], overlay)
    return bad_R


def _patch_row(values_V: npt.NDArray[np.float32], overlay: RowOverlay) -> bool:
    size = len(values_V)
    inside = (overlay.ids_E >= 0) & (overlay.ids_E < size)
    ids, bits = overlay.ids_E[inside], overlay.counts_E[inside]
    z = _patched(values_V[ids].astype(np.float64) + overlay.bias_E[inside], bits, overlay)
    with np.errstate(over="ignore"):
        rounded = z.astype(np.float32)
    bad = ~(rounded < np.inf)
    values_V[ids] = np.where(bad, np.float32(-np.inf), rounded)
    if overlay.allowed_V is not None:
        values_V[~overlay.allowed_V] = -np.inf
    banned = overlay.banned_B
    values_V[banned[(banned >= 0) & (banned < size)]] = -np.inf
    return bool(bad.any())


def _patched(z: npt.NDArray[np.float64], bits: npt.NDArray[np.int32], overlay: RowOverlay) -> npt.NDArray[np.float64]:
    counts = bits & COUNT_MASK
    if overlay.early:
        z = np.where(bits & EARLY_BIT, -np.inf, z)
    seen = (counts > 0) | (bits & PROMPT_BIT != 0)
    z = np.where(seen, np.where(z > 0, z / overlay.repetition, z * overlay.repetition), z)
    return z - overlay.frequency * counts - overlay.presence * (counts > 0)
