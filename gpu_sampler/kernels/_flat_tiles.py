"""An experiment of `head_logprob`: its tiles kernel as one loop over the slices of all tiles. Kept or deleted after the
run on a GPU; the statistics stand in a loop of none or one turn, for ptxas serialises the products around a branch."""

import triton
import triton.language as tl

from gpu_sampler.kernels._head import LOG2_E, finished

_BAD: tl.constexpr = tl.constexpr(1 << 16)
_HIGHER: tl.constexpr = tl.constexpr(1 << 17)
_LEAST_NEGATIVE: tl.constexpr = tl.constexpr(-(2**31) + 1)


@triton.jit
def _below(x):
    """The largest f32 less than x. NaN for -inf."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0.0, bits - 1, tl.where(x < 0.0, bits + 1, _LEAST_NEGATIVE))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _statistics(z_NV, at_N, target_N, first_id, V, COLUMNS: tl.constexpr):
    """What a tile adds to each row: its peak times log2(e), the sum of 2^(z log2(e) - that), and the number of logits
    before the target, with the two marks.

    The first part is six instructions a logit, for they stand between two tiles of products and nothing hides them. It
    serves full tiles that hold nothing bad (a NaN or an infinite peak makes the sum NaN) and no row's target: there the
    ids are all before a row's target or all after, so that the order is one comparison, with `at` or the number below.
    """
    peak_N = tl.max(z_NV, axis=1)
    shift_N = peak_N * LOG2_E
    total_N = tl.sum(tl.exp2(tl.fma(z_NV, LOG2_E, -shift_N[:, None])), axis=1)
    bound_N = tl.where(target_N < first_id, at_N, _below(at_N))
    count_N = tl.sum(tl.where(z_NV > bound_N[:, None], 1.0, 0.0), axis=1).to(tl.int32)
    held_N = (target_N >= first_id) & (target_N < first_id + COLUMNS)
    plain_N = (total_N == total_N) & (bound_N == bound_N) & (held_N == 0)
    careful = (tl.min(plain_N.to(tl.int32), axis=0) == 0) | (first_id + COLUMNS > V)
    for _ in range(careful.to(tl.int32)):
        ids_V = first_id + tl.arange(0, COLUMNS)
        usable_NV = z_NV < float("inf")  # NaN compares false too
        bad_N = tl.max(tl.where(usable_NV, 0, _BAD), axis=1)
        c_NV = tl.where(usable_NV & (ids_V < V)[None, :], z_NV, -float("inf"))
        peak_N = tl.max(c_NV, axis=1)
        shift_N = peak_N * LOG2_E
        safe_N = tl.where(peak_N > -float("inf"), shift_N, 0.0)
        total_N = tl.sum(tl.exp2(tl.fma(c_NV, LOG2_E, -safe_N[:, None])), axis=1)
        before_NV = (c_NV > at_N[:, None]) | ((c_NV == at_N[:, None]) & (ids_V[None, :] < target_N[:, None]))
        count_N = tl.sum(before_NV.to(tl.int32), axis=1) + bad_N
    return shift_N, total_N, count_N + tl.where(peak_N > at_N, _HIGHER, 0)


@triton.jit(do_not_specialize=["N"])
def _flat_tiles_kernel(
    hidden, hidden_stride, head, head_stride, bias, targets, at, peaks, totals, counts, padded,
    N, V, D, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Grid: as many programs as the device runs at once. Tiles go by groups of row tiles, down a group's row tiles
    before the next tile of the vocabulary, so that the head streams once a group."""
    row_tiles = tl.cdiv(N, ROWS)
    id_tiles = tl.cdiv(V, COLUMNS)
    slices = tl.cdiv(D, DEPTH)
    tiles = tl.cdiv(row_tiles * id_tiles - tl.program_id(0), tl.num_programs(0))
    tile = tl.program_id(0) - tl.num_programs(0)
    part = -1
    first_row = 0
    id_tile = 0
    sums_NV = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(tiles * slices):
        part = tl.where(part == slices - 1, 0, part + 1)
        if part == 0:
            tile += tl.num_programs(0)
            first_of_group = tile // (GROUP * id_tiles) * GROUP
            height = tl.minimum(GROUP, row_tiles - first_of_group)
            inside_group = tile % (GROUP * id_tiles)
            first_row = (first_of_group + inside_group % height) * ROWS
            id_tile = inside_group // height
        h_NK = hidden.load([first_row, part * DEPTH])
        w_VK = head.load([id_tile * COLUMNS, part * DEPTH])
        sums_NV = tl.dot(h_NK, w_VK.T, sums_NV, input_precision="ieee")
        if part == slices - 1:
            rows_N = first_row + tl.arange(0, ROWS)
            ids_V = id_tile * COLUMNS + tl.arange(0, COLUMNS)
            b_V = tl.load(bias + ids_V, mask=ids_V < V, other=0.0).to(tl.float32) if BIASED else ids_V
            z_NV = finished(sums_NV, b_V[None, :], scale, softcap, BIASED, SCALED, CAPPED, ROUNDED)
            target_N = tl.load(targets + rows_N, mask=rows_N < N, other=-1).to(tl.int32)
            at_N = tl.load(at + rows_N, mask=rows_N < N, other=0.0)
            peak_N, total_N, count_N = _statistics(z_NV, at_N, target_N, id_tile * COLUMNS, V, COLUMNS)
            place_N = tl.cast(id_tile, tl.int64) * padded + rows_N
            tl.store(peaks + place_N, peak_N, mask=rows_N < N)
            tl.store(totals + place_N, total_N, mask=rows_N < N)
            tl.store(counts + place_N, count_N, mask=rows_N < N)
            sums_NV = tl.zeros([ROWS, COLUMNS], tl.float32)
