"""What the kernels of a step hand each other about a row, in the workspace: which integer and which number is which."""

import triton.language as tl

from gpu_sampler.workspace import DRAWS, PLACES_MORE, ROW_FLOATS, ROW_INTS

N_DRAWS: tl.constexpr = tl.constexpr(DRAWS)
MORE_PLACES: tl.constexpr = tl.constexpr(PLACES_MORE)
INTS: tl.constexpr = tl.constexpr(ROW_INTS)
FLOATS: tl.constexpr = tl.constexpr(ROW_FLOATS)

PENDING: tl.constexpr = tl.constexpr(0)  # what `settle` has to do
RANKING: tl.constexpr = tl.constexpr(1)  # 1: `count_ahead` has to count the token's rank
AT: tl.constexpr = tl.constexpr(2)  # the output position that was drawn
BEST: tl.constexpr = tl.constexpr(0)  # M of the values drawn by
TOTAL: tl.constexpr = tl.constexpr(1)  # Z at the row's temperature
REPORT_BEST: tl.constexpr = tl.constexpr(2)  # M and Z of the values reported
REPORT_TOTAL: tl.constexpr = tl.constexpr(3)
VALUE: tl.constexpr = tl.constexpr(4)  # the token's value in the order that ranks count in

NOTHING_PENDING: tl.constexpr = tl.constexpr(0)
JUDGE: tl.constexpr = tl.constexpr(1)  # DRAWS draws wait for the mass before them
SCAN: tl.constexpr = tl.constexpr(2)  # more tokens stay than a list holds: walk the whole row
DRAWN: tl.constexpr = tl.constexpr(3)  # the token is known; processed log-probabilities need the kept mass
