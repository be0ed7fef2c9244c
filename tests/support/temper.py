"""Makes random cases of `apply_temperature`: every feature in every case, and a record of what stands where.

Shape legend as in `gpu_sampler.reference.temperature`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.state.layout import Word

ROWS = 6
SLOTS = 5
TEMPERATURES = (0.0, 0.7, 1.0, 1.3, 0.01)  # by slot


class TemperArrays(NamedTuple):
    """The arguments of `apply_temperature`, in its order."""

    logits_RV: npt.NDArray[Any]
    rows_P: npt.NDArray[np.int32]
    slots_R: npt.NDArray[np.int32]
    side_len_R: npt.NDArray[np.int32]
    table_SW: npt.NDArray[np.int32]
    masks_MW: npt.NDArray[np.int32]
    side_ids_E: npt.NDArray[np.int32]
    side_processed_E: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperCase:
    """A case, and by row or slot what its tables encode."""

    logits_RV: npt.NDArray[np.float32]  # exact in bf16
    rows_P: npt.NDArray[np.int32]
    slots_R: npt.NDArray[np.int32]
    side_len_R: npt.NDArray[np.int32]
    table_SW: npt.NDArray[np.int32]
    masks_MW: npt.NDArray[np.int32]
    side_ids_E: npt.NDArray[np.int32]
    side_processed_E: npt.NDArray[np.float32]
    side: list[dict[int, float]]  # by row: token -> processed value
    allowed: list[npt.NDArray[np.bool_]]  # by slot, [V]
    temperatures: tuple[float, ...] = TEMPERATURES

    def arrays(self) -> TemperArrays:
        return TemperArrays(*(getattr(self, name) for name in TemperArrays._fields))

    def table_without_temperature(self) -> npt.NDArray[np.int32]:
        table_SW = self.table_SW.copy()
        table_SW[:, Word.TEMPERATURE] = np.float32(1).view(np.int32)
        return table_SW


def temper_case(size: int, seed: int) -> TemperCase:
    """Rows of `size` tokens: NaN and +inf among them, side lists of up to `size` entries with bans and a ban that
    stands twice, slots with and without an allow mask; places that name rows out of range, and one row twice."""
    rng = np.random.default_rng([seed, size])
    logits_RV = (np.round(rng.normal(0, 3, (ROWS, size)) * 8) / 8).astype(np.float32)
    logits_RV[rng.random((ROWS, size)) < 0.03] = np.nan
    logits_RV[rng.random((ROWS, size)) < 0.03] = np.inf
    if size > 16:
        logits_RV[0, 3], logits_RV[1, 5] = np.nan, np.inf
    slots_R = rng.permutation(np.arange(ROWS) % SLOTS).astype(np.int32)
    allowed = [rng.random(size) < 0.7 if slot % 2 else np.ones(size, np.bool_) for slot in range(SLOTS)]
    table_SW, masks_MW = _tables(allowed, size)
    starts = [int(table_SW[slot, Word.OVERLAY_START]) for slot in slots_R]
    side_ids_E = np.full(SLOTS * (size + 1), -1, np.int32)
    side_processed_E = np.full(len(side_ids_E), -np.inf, np.float32)
    side_len_R, side = np.zeros(ROWS, np.int32), []
    seen: set[int] = set()
    for row, slot in enumerate(slots_R.tolist()):
        entries = {} if row % 3 == 0 or slot in seen else _entries(rng, size)
        seen.add(slot)
        ids = list(entries)
        banned = [token for token, z in entries.items() if z == -np.inf][:1]
        logits_RV[row, ids] = -np.inf
        at = slice(starts[row], starts[row] + len(ids) + len(banned))
        side_ids_E[at] = ids + banned
        side_processed_E[at] = [entries[token] for token in ids] + [-np.inf] * len(banned)
        side_len_R[row] = len(ids) + len(banned)
        side.append(entries)
    return TemperCase(
        logits_RV=logits_RV,
        rows_P=np.array([4, 1, -1, 0, 5, 1, ROWS, 2], np.int32),
        slots_R=slots_R,
        side_len_R=side_len_R,
        table_SW=table_SW,
        masks_MW=masks_MW,
        side_ids_E=side_ids_E,
        side_processed_E=side_processed_E,
        side=side,
        allowed=allowed,
    )


def _entries(rng: np.random.Generator, size: int) -> dict[int, float]:
    tokens = rng.choice(size, rng.integers(1, size + 1), replace=False).tolist()
    values = np.where(rng.random(len(tokens)) < 0.3, -np.inf, rng.normal(0, 5, len(tokens))).astype(np.float32)
    return dict(zip(tokens, values.tolist(), strict=True))


def _tables(allowed: list[npt.NDArray[np.bool_]], size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(table [S, W], masks [M, ceil(V / 32)]): every second slot has a mask."""
    table_SW = np.zeros((SLOTS, Word.SLOT_WORDS), np.int32)
    table_SW[:, Word.TEMPERATURE] = np.array(TEMPERATURES, np.float32).view(np.int32)
    table_SW[:, Word.OVERLAY_START] = np.arange(SLOTS) * (size + 1)
    table_SW[:, Word.MASK_ROW] = -1
    masks: list[npt.NDArray[np.int32]] = []
    for slot in range(1, SLOTS, 2):
        table_SW[slot, Word.MASK_ROW] = len(masks)
        bits = np.zeros(-(-size // 32) * 32, np.bool_)
        bits[:size] = allowed[slot]
        masks.append(np.packbits(bits, bitorder="little").view(np.int32))
    return table_SW, np.stack(masks)
