"""What the kernels of a step hand each other about a row, in the workspace: which integer and which number is which."""

import triton
import triton.language as tl

from gpu_sampler.workspace import DRAWS, PLACES_MORE, ROW_FLOATS, ROW_INTS

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
