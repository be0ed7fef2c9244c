"""`rank_drawn`: ranks of tokens, with masks and side lists, against numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.kernels.softmax_stats import row_stats
from gpu_sampler.kernels.token_rank import rank_drawn
from gpu_sampler.kernels.workspace import RANKING, VALUE
from gpu_sampler.output import OutputWords
from gpu_sampler.reference.total_order import clean, rank
from tests.support.wide import wide_rows

SIZES = [700, 3001, *(pytest.param(size, marks=pytest.mark.gpu) for size in (32_003, 151_936, 262_144))]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processed", [True, False])
def test_ranks_are_places_in_the_order_of_the_mode(device: str, size: int, processed: bool) -> None:
    """Each row counts what comes before a token; a row that has nothing to count keeps its rank."""
    sampler, logits, slots, image, work, whole = wide_rows(device, size, torch.float32)
    state, rng = sampler.state, np.random.default_rng([size, 3])
    order = whole
    if not processed:  # what stands in the logits and, of the side list, in `side_raw`
        order = clean(logits.cpu().numpy())[0].copy()
        raw = image.side_raw.cpu().numpy()
        for slot in range(1, 7):
            first, length = int(state.overlay_start[slot]), int(state.overlay_len[slot])
            order[slot - 1, state.overlay(slot).ids] = raw[first : first + length]
        row_stats(logits, slots, image.table, image.masks, work, processed=False)
    picked = [rng.choice(np.flatnonzero(row > -np.inf)) for row in order]
    picked[2] = int(state.overlay(3).ids[7])
    out = OutputWords.empty(6, 0, 0, torch.device(device)).split()
    ranks: Any = out.ranks
    ranks.fill_(1)
    out.tokens.copy_(torch.tensor(picked, dtype=torch.int32))
    for row, token in enumerate(picked):
        work.ints[row, RANKING.value] = int(row != 4)
        work.floats[row, VALUE.value] = float(order[row, token])
    rank_drawn(logits, slots, image, work, out, side=True, processed=processed)
    expected = [rank(row, int(token)) for row, token in zip(order, picked, strict=True)]
    expected[4] = 1
    assert ranks.tolist() == expected
