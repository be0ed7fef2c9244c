"""Holds the buffers that the kernels of one step pass to each other, and names the words of each row in them.

Shape legend: R rows, V vocabulary, G groups of 128 ids, D draws that one read judges.
"""

from functools import partial
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_sampler.reference.softmax_stats import GROUP
from gpu_sampler.state.device_state import SlotState, StatelessRows

TILE_GROUPS: Final = 8  # groups that a warp reads together
REJECTION_TILES: Final = 4  # tiles of a part that `nucleus_rejection` sums up; its sums depend on both
LIST: Final = 512  # tokens of the total order that `sample` lists
SCRATCH: Final = 2048  # tokens that it sorts for them
DRAWS: Final = 4  # draws of a wide nucleus that one read judges
PLACES_MORE: Final = 2  # than parts: ties in a draw's own tile, and the share of the side list
ROW_INTS: Final = 8
ROW_FLOATS: Final = 8


class Workspace:
    """Holds buffers for at most `rows` rows of `vocab_size` logits, about 61 KB a row at V = 151,936.

    Statistics: `maxima`, `sums`, `raw_maxima`, `raw_sums` f32 [R, G]. Side lists: `side_len`, `side_bad` i32 [R], and
    `nothing` i32 [R], the zeros that stand for their lengths where there are none. Lists: `picked` i32 [2, R, LIST] and
    `keys` i64 [2, R, SCRATCH], the second ones for the raw order. Words of a row: `ints` i32 [R, 8] and `floats` f32
    [R, 8]. Draws of a wide nucleus: `queue` i32 [1 + R], `draw_ids` and `draw_values` [R, D], and what comes before
    each of them, `ahead_mass` f32 and `ahead_count` i32 [R, parts + 2, D]. Scoring: `ahead_parts` i32 [R, tiles].
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, scoring: bool = False) -> None:
        """Allocates the buffers. With `scoring`, rows are never drawn from and have no side list."""
        self.rows, self.vocab_size = rows, vocab_size
        self.groups = -(-vocab_size // GROUP)
        self.padded_groups = max(4, triton.next_power_of_2(self.groups))  # a call of Philox gives four numbers
        self.tiles = -(-self.groups // TILE_GROUPS)
        floats = partial(torch.empty, dtype=torch.float32, device=device)
        ints = partial(torch.empty, dtype=torch.int32, device=device)
        self.maxima = floats(rows, self.groups)
        self.sums = floats(rows, self.groups)
        self.raw_maxima = floats(rows, self.groups)
        self.raw_sums = floats(rows, self.groups)
        zeros = ints if scoring else partial(torch.zeros, dtype=torch.int32, device=device)
        self.side_len = zeros(rows)
        self.side_bad = zeros(rows)
        self.nothing = zeros(rows)  # the lengths of side lists where there are none
        self.picked = ints(1 if scoring else 2, rows, LIST)  # the second ones for lists of the raw order
        self.keys = torch.empty(1 if scoring else 2, rows, SCRATCH, dtype=torch.int64, device=device)
        self.ints = ints(rows, ROW_INTS)
        self.floats = floats(rows, ROW_FLOATS)
        self.queue = ints(1 + rows)  # how many rows wait to be judged, and which
        self.draw_ids = ints(rows, DRAWS)
        self.draw_values = floats(rows, DRAWS)
        self.ahead_parts = ints(rows, self.tiles)
        self.parts = -(-self.tiles // REJECTION_TILES)
        self.ahead_mass = floats(rows, self.parts + PLACES_MORE, DRAWS)
        self.ahead_count = ints(rows, self.parts + PLACES_MORE, DRAWS)

    def clear_side_lists(self) -> None:
        """Empties the side lists, for a step whose rows have masks and no overlay."""
        self.side_len.zero_()
        self.side_bad.zero_()


class LogitRows(NamedTuple):
    """The rows that the kernels of one step read, as every launcher takes them."""

    logits: torch.Tensor  # [R, V] bf16, fp16 or f32 with contiguous rows
    slots: torch.Tensor  # i32 [R], each row's slot in `state`
    state: SlotState | StatelessRows
    work: Workspace  # for at least R rows
    side: bool  # some row has a side list or an allow mask
    processed: bool  # log-probabilities are those after all filters

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Kernel arguments: logits, row_stride, slots, table, masks (None without side lists), mask_words."""
        masks = self.state.masks if self.side else None
        words = 0 if masks is None else masks.shape[1]
        return self.logits, self.logits.stride(0), self.slots, self.state.table, masks, words


N_DRAWS: tl.constexpr = tl.constexpr(DRAWS)
MORE_PLACES: tl.constexpr = tl.constexpr(PLACES_MORE)
INTS: tl.constexpr = tl.constexpr(ROW_INTS)
FLOATS: tl.constexpr = tl.constexpr(ROW_FLOATS)

PENDING: tl.constexpr = tl.constexpr(0)  # PENDING_*: what `nucleus_fallback` has to do
RANKING: tl.constexpr = tl.constexpr(1)  # COUNT_AHEAD or FINISH: what `token_rank` has to do
AT: tl.constexpr = tl.constexpr(2)  # the output position that was drawn
NO_DRAW: tl.constexpr = tl.constexpr(3)  # 1: nothing is drawn; verification reads the next three and MASS
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
PENDING_REJECTION: tl.constexpr = tl.constexpr(1)  # DRAWS draws wait for the mass before them
PENDING_SCAN: tl.constexpr = tl.constexpr(2)  # more tokens stay than a list holds: walk the whole row
PENDING_MASS: tl.constexpr = tl.constexpr(3)  # the token is known; processed log-probabilities need the kept mass

NOTHING_RANKED: tl.constexpr = tl.constexpr(0)
COUNT_AHEAD: tl.constexpr = tl.constexpr(1)  # VALUE is the token's: count what comes before it
FINISH: tl.constexpr = tl.constexpr(2)  # all that is said of the token
