"""Workspace: the buffers that the kernels of one step hand each other, kept from step to step.

Shape legend: R rows, G groups of 128 ids, D draws tried at once.
"""

from functools import partial
from typing import Final

import torch

from gpu_sampler.reference.row_stats import GROUP

TILE_GROUPS: Final = 8  # groups that a warp reads at once
JUDGE_TILES: Final = 4  # tiles of a part that `judge_draws` sums up; its sums depend on both
LIST: Final = 512  # tokens of the total order that `select` lists
SCRATCH: Final = 2048  # tokens that it sorts for them
DRAWS: Final = 4  # draws of a wide nucleus that one read judges
PLACES_MORE: Final = 2  # than parts: ties in a draw's own tile, and the share of the side list
ROW_INTS: Final = 8
ROW_FLOATS: Final = 8


class Workspace:
    """Buffers for at most `rows` rows of `vocab_size` logits: about 61 KB a row at V = 151,936."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, alone: bool = False) -> None:
        """`alone`: for rows that nothing is drawn from, which read no side list."""
        self.rows, self.vocab_size = rows, vocab_size
        self.groups = -(-vocab_size // GROUP)
        self.tiles = -(-self.groups // TILE_GROUPS)
        floats = partial(torch.empty, dtype=torch.float32, device=device)
        ints = partial(torch.empty, dtype=torch.int32, device=device)
        self.maxima = floats(rows, self.groups)
        self.sums = floats(rows, self.groups)
        self.raw_maxima = floats(rows, self.groups)
        self.raw_sums = floats(rows, self.groups)
        zeros = ints if alone else partial(torch.zeros, dtype=torch.int32, device=device)
        self.side_len = zeros(rows)
        self.side_bad = zeros(rows)
        self.nothing = zeros(rows)  # the lengths of side lists where there are none
        self.picked = ints(1 if alone else 2, rows, LIST)  # the second ones for lists of the raw order
        self.keys = torch.empty(1 if alone else 2, rows, SCRATCH, dtype=torch.int64, device=device)
        self.ints = ints(rows, ROW_INTS)
        self.floats = floats(rows, ROW_FLOATS)
        self.queue = ints(1 + rows)  # how many rows wait to be judged, and which
        self.draw_ids = ints(rows, DRAWS)
        self.draw_values = floats(rows, DRAWS)
        self.ahead_parts = ints(rows, self.tiles)
        self.parts = -(-self.tiles // JUDGE_TILES)
        self.ahead_mass = floats(rows, self.parts + PLACES_MORE, DRAWS)
        self.ahead_count = ints(rows, self.parts + PLACES_MORE, DRAWS)
