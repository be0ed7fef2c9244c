"""Holds the reference of the kernel `apply_temperature`, which no CPU runs, and makes random cases of it: every feature
in every case, and a record of what stands where.

Shape legend: R rows of logits, P of them chosen, V vocabulary, S slots, W words (of a slot, of a mask), M allow masks,
E side entries.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.softmax_stats import Float32s
from gpu_sampler.state.layout import Word

ROWS = 6
SLOTS = 5
LARGEST: Final = np.finfo(np.float32).max
Int32s = npt.NDArray[np.int32]
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


def apply_temperature(
    logits_RV: npt.NDArray[Any],
    rows_P: Int32s,
    slots_R: Int32s,
    side_len_R: Int32s,
    table_SW: Int32s,
    masks_MW: Int32s,
    side_ids_E: Int32s,
    side_processed_E: Float32s,
) -> Float32s:
    """Returns f32 [P, V]: row p is logits row rows_P[p], z / T, with -inf for NaN, +inf and ids not allowed.

    The row's `side_len_R` entries from OVERLAY_START stand in the logits as -inf, and here with their processed values.
    Finite values stay finite. A greedy slot counts as T = 1; a row outside of [0, R) comes out as -inf.
    """
    out_PV = np.full((len(rows_P), logits_RV.shape[1]), -np.inf, np.float32)
    for out_V, row in zip(out_PV, rows_P.tolist(), strict=True):
        if not 0 <= row < len(logits_RV):
            continue
        words_W = table_SW[slots_R[row]]
        z_V = logits_RV[row].astype(np.float32)
        z_V[~(z_V < np.inf)] = -np.inf
        if words_W[Word.MASK_ROW] >= 0:
            z_V[~_allowed(masks_MW[words_W[Word.MASK_ROW]], len(z_V))] = -np.inf
        start = int(words_W[Word.OVERLAY_START])
        side = slice(start, start + int(side_len_R[row]))
        kept = side_processed_E[side] > -np.inf  # a token banned twice stands twice, both times as -inf
        z_V[side_ids_E[side][kept]] = side_processed_E[side][kept]
        temperature = words_W[Word.TEMPERATURE : Word.TEMPERATURE + 1].view(np.float32)[0]
        out_V[:] = tempered(z_V, temperature)
    return out_PV


def tempered(z_V: Float32s, temperature: np.float32) -> Float32s:
    """Returns z / T as the kernel rounds it: times the reciprocal, both float32, held inside the range."""
    inverse = np.float32(1) / temperature if temperature > 0 else np.float32(1)
    with np.errstate(over="ignore"):
        scaled_V = np.clip(z_V * inverse, -LARGEST, LARGEST)
    return np.where(z_V > -np.inf, scaled_V, -np.inf).astype(np.float32)


def _allowed(mask_W: Int32s, vocab_size: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(mask_W.view(np.uint8), count=vocab_size, bitorder="little").astype(np.bool_)
