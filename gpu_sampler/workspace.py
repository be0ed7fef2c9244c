"""Workspace: the buffers that the kernels of one step hand each other, kept from step to step.

Shape legend: R rows, G groups of 128 ids, D draws tried at once.
"""

from typing import Final

import torch

from gpu_sampler.reference.row_stats import GROUP

TILE_GROUPS: Final = 8  # groups that a program of `count_ahead` reads at once; its sums depend on it
LIST: Final = 512  # tokens of the total order that `select` lists
SCRATCH: Final = 2048  # tokens that it sorts for them
DRAWS: Final = 4  # draws of a wide nucleus that one read judges
ROW_INTS: Final = 8
ROW_FLOATS: Final = 8


class Workspace:
    """Buffers for at most `rows` rows of `vocab_size` logits. About 26 KB a row at V = 151,936, and 10 KB more where raw
    and processed statistics differ."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, alone: bool = False) -> None:
        """`alone`: for rows that nothing is drawn from, which read no side list."""
        self.rows, self.vocab_size = rows, vocab_size
        self.groups = -(-vocab_size // GROUP)
        self.tiles = -(-self.groups // TILE_GROUPS)
        floats = {"dtype": torch.float32, "device": device}
        ints = {"dtype": torch.int32, "device": device}
        self.maxima = torch.empty(rows, self.groups, **floats)
        self.sums = torch.empty(rows, self.groups, **floats)
        self.raw_maxima = torch.empty(rows, self.groups, **floats)
        self.raw_sums = torch.empty(rows, self.groups, **floats)
        zeros = torch.empty if alone else torch.zeros
        self.side_len = zeros(rows, **ints)
        self.side_bad = zeros(rows, **ints)
        self.nothing = zeros(rows, **ints)  # the lengths of side lists where there are none
        self.picked = torch.empty(rows, LIST, **ints)
        self.keys = torch.empty(rows, SCRATCH, dtype=torch.int64, device=device)
        self.ints = torch.empty(rows, ROW_INTS, **ints)
        self.floats = torch.empty(rows, ROW_FLOATS, **floats)
        self.draw_ids = torch.empty(rows, DRAWS, **ints)
        self.draw_values = torch.empty(rows, DRAWS, **floats)
        # One place more than tiles: the share of the side list.
        self.ahead_mass = torch.empty(rows, self.tiles + 1, DRAWS, **floats)
        self.ahead_count = torch.empty(rows, self.tiles + 1, DRAWS, **ints)
