"""Reference of `apply_temperature`: writes rows as FlashInfer takes them, divided by temperature.

Shape legend: R rows of logits, P of them chosen, V vocabulary, S slots, W words (of a slot, of a mask), M allow masks,
E side entries.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_sampler.reference.softmax_stats import Float32s
from gpu_sampler.state.layout import Word

LARGEST: Final = np.finfo(np.float32).max
Int32s = npt.NDArray[np.int32]


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
