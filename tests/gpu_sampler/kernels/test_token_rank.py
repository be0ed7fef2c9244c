"""`token_rank`: ranks of tokens, with masks and side lists, against numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.kernels.softmax_stats import softmax_stats
from gpu_sampler.kernels.token_rank import token_rank
from gpu_sampler.output import OutputWords
from gpu_sampler.reference.filters import clean, rank
from gpu_sampler.workspace import RANKING, VALUE
from tests.support.wide import wide_rows

SIZES = [700, 3001, *(pytest.param(size, marks=pytest.mark.gpu) for size in (32_003, 151_936, 262_144))]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("processed", [True, False])
def test_ranks_are_places_in_the_order_of_the_mode(device: str, size: int, processed: bool) -> None:
    """Each row counts what comes before a token; a row that has nothing to count keeps its rank."""
    sampler, rows, whole = wide_rows(device, size, torch.float32)
    rows, work = rows._replace(processed=processed), rows.work
    state, rng = sampler.state, np.random.default_rng([size, 3])
    order = whole
    if not processed:  # what stands in the logits and, of the side list, in `side_raw`
        order = clean(rows.logits.cpu().numpy())[0].copy()
        raw = rows.state.side_raw.cpu().numpy()
        for slot in range(1, 7):
            first, length = int(state.overlay_start[slot]), int(state.overlay_len[slot])
            order[slot - 1, state.overlay(slot).ids] = raw[first : first + length]
        softmax_stats(rows, masked=True)
    picked = [rng.choice(np.flatnonzero(row > -np.inf)) for row in order]
    picked[2] = int(state.overlay(3).ids[7])
    out = OutputWords.empty(6, 0, 0, torch.device(device)).split()
    ranks: Any = out.ranks
    ranks.fill_(1)
    out.tokens.copy_(torch.tensor(picked, dtype=torch.int32))
    for row, token in enumerate(picked):
        work.ints[row, RANKING.value] = int(row != 4)
        work.floats[row, VALUE.value] = float(order[row, token])
    token_rank(rows, out)
    expected = [rank(row, int(token)) for row, token in zip(order, picked, strict=True)]
    expected[4] = 1
    assert ranks.tolist() == expected
