"""What the kernels of a step hand each other about a row, in the workspace: which integer and which number is which.

Workspace: the buffers that the kernels of one step hand each other, kept from step to step.

Shape legend: R rows, G groups of 128 ids, D draws tried at once.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from gpu_sampler.reference.softmax_stats import GROUP

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


N_DRAWS: tl.constexpr = tl.constexpr(DRAWS)
MORE_PLACES: tl.constexpr = tl.constexpr(PLACES_MORE)
INTS: tl.constexpr = tl.constexpr(ROW_INTS)
FLOATS: tl.constexpr = tl.constexpr(ROW_FLOATS)

PENDING: tl.constexpr = tl.constexpr(0)  # what `settle` has to do
RANKING: tl.constexpr = tl.constexpr(1)  # what `rank_drawn` has to do
AT: tl.constexpr = tl.constexpr(2)  # the output position that was drawn
LAW: tl.constexpr = tl.constexpr(3)  # 1: verification needs no draw but the law, as the next three and MASS give it
BOUND_LOW: tl.constexpr = tl.constexpr(4)  # the last kept key of the order, NO_KEY where all tokens stay
BOUND_HIGH: tl.constexpr = tl.constexpr(5)
LISTED: tl.constexpr = tl.constexpr(6)  # how many keys of the scratch list hold the kept ones; -1: they are in no list
SHOWN: tl.constexpr = tl.constexpr(7)  # how many of the first of the raw order stand in the second list of the row
BEST: tl.constexpr = tl.constexpr(0)  # M of the values drawn by
TOTAL: tl.constexpr = tl.constexpr(1)  # Z at the row's temperature
REPORT_BEST: tl.constexpr = tl.constexpr(2)  # M and Z of the values reported
REPORT_TOTAL: tl.constexpr = tl.constexpr(3)
VALUE: tl.constexpr = tl.constexpr(4)  # the token's value in the order that ranks count in
MASS: tl.constexpr = tl.constexpr(5)  # the sum over the kept tokens, as TOTAL is over all

NOTHING_PENDING: tl.constexpr = tl.constexpr(0)
JUDGE: tl.constexpr = tl.constexpr(1)  # DRAWS draws wait for the mass before them
SCAN: tl.constexpr = tl.constexpr(2)  # more tokens stay than a list holds: walk the whole row
DRAWN: tl.constexpr = tl.constexpr(3)  # the token is known; processed log-probabilities need the kept mass

NOTHING_RANKED: tl.constexpr = tl.constexpr(0)
COUNT_AHEAD: tl.constexpr = tl.constexpr(1)  # VALUE is the token's: count what comes before it
FINISH: tl.constexpr = tl.constexpr(2)  # all that is said of the token


@triton.jit
def store_bound(ints, bound):
    """`ints`: those of the row."""
    tl.store(ints + BOUND_LOW, (bound & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(ints + BOUND_HIGH, (bound >> 32).to(tl.int32))


@triton.jit
def load_bound(ints):
    """i64 key."""
    low = tl.load(ints + BOUND_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    return (tl.load(ints + BOUND_HIGH).to(tl.int64) << 32) | low
