"""Computes log-probabilities from hidden rows and the LM head, without the logits [N, V].

Shape legend: N rows, V vocabulary, D width of a hidden row, K a slice of it, T tiles of the vocabulary.

`head_logprob`: log-probability and rank of one target a row over the whole vocabulary.

    z[n, v] = cap(scale (h_n . w_v + b_v)), rounded     log_sum[n] = ln sum_v exp z[n, v]     NaN and +inf as -inf
    logprob[n] = z[n, t_n] - log_sum[n]                 rank[n] = 1 + |{v: z_v > z_t, or z_v = z_t and v < t}|
    cap(z) = softcap tanh(z / softcap), or z where softcap is 0

Three kernels. `_targets_kernel` computes z[n, t_n] first: it multiplies the head's rows of 128 targets as one tile, by
the same loop over D, the same instructions and the same epilogue as every other tile, and takes the diagonal. So it is
the number that the main loop finds at column t_n, bit for bit, and comparisons with it are exact. `_tiles_kernel`
multiplies every tile of rows x vocabulary and keeps three numbers a row and tile: the largest logit, the sum of
exponentials beside it, and how many logits come before the target, with two marks: one is bad, one is larger.
`_combine_kernel` adds them up. The tile and all reduction trees are one constant a type: no result depends on N.
Memory: 12 bytes a row and tile of the vocabulary, at most 48 MiB (rows beyond go through in further passes), and 8 a
row. Bytes: the hidden rows and the head once a group of row tiles, and the partial results twice.

| pointer | shape, type | |
|---|---|---|
| hidden, head | [N, D], [V, D] bf16, fp16 or f32, rows of any stride | read |
| bias | [V] of any float type | read |
| targets | i64 [N], any value: outside of [0, V) nothing is read through it | read |
| at | f32 [passed N padded to 128] logits of the targets | written, then read |
| peaks, totals, counts | f32, f32, i32 [T, passed N padded to 128] | written, then read |
| logprobs, log_sums, ranks, is_greedy, flags | f32, f32, i32, bool, i32 [N] | write |
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_sampler.output import RowFlag
from gpu_sampler.reference.lm_head_logprob import Rounding, TargetLogprobs

INTERPRETED = bool(triton.knobs.runtime.interpret)  # whose products of halves are not exact
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NO_ROUNDING: tl.constexpr = tl.constexpr(0)
BF16: tl.constexpr = tl.constexpr(1)
FP16: tl.constexpr = tl.constexpr(2)
_LARGEST_HALF: tl.constexpr = tl.constexpr(65504.0)


@triton.jit
def _slice(source, stride, ids, inside, first, start, D, DEPTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """Loads [ids, DEPTH] of a matrix, zeros outside: by its descriptor from row `first` on, or by pointers of `ids`."""
    if DESCRIBED:
        found = source.load([first, start])
    else:
        at_K = start + tl.arange(0, DEPTH)
        places = source + ids.to(tl.int64)[:, None] * stride + at_K[None, :]
        found = tl.load(places, mask=inside[:, None] & (at_K < D)[None, :], other=0.0)
    return found


@triton.jit
def products(
    hidden, hidden_stride, rows_N, first_row, head, head_stride, ids_V, known_V, first_id, N, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns hidden rows times rows of the head, f32 [ROWS, COLUMNS]; zeros outside of both."""
    sums_NV = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(tl.cdiv(D, DEPTH)):
        start = part * DEPTH
        h_NK = _slice(hidden, hidden_stride, rows_N, rows_N < N, first_row, start, D, DEPTH, HIDDEN_DESCRIBED)
        w_VK = _slice(head, head_stride, ids_V, known_V, first_id, start, D, DEPTH, HEAD_DESCRIBED)
        if UPCAST:
            h_NK, w_VK = h_NK.to(tl.float32), w_VK.to(tl.float32)
        sums_NV = tl.dot(h_NK, w_VK.T, sums_NV, input_precision="ieee")
    return sums_NV


@triton.jit
def _rounded(z, BITS: tl.constexpr):
    """Rounds z to nearest, ties to even, in a type with BITS fewer mantissa bits. A NaN would carry into the sign.

    By integers: the interpreter truncates to bf16, and values held as halves make ptxas serialise the products.
    """
    bits = z.to(tl.uint32, bitcast=True)
    bits = (bits + ((1 << (BITS - 1)) - 1) + ((bits >> BITS) & 1)) >> BITS << BITS
    return tl.where(z == z, bits.to(tl.float32, bitcast=True), z)


@triton.jit
def finished(
    products, bias, scale, softcap,
    BIASED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Returns f32 logits of products: bias, scale and cap, then the rounding of a head that stores 16-bit logits."""
    z = products
    if BIASED:
        z = z + bias
    if SCALED:
        z = z * scale
    if CAPPED:
        y = z / softcap
        e = tl.exp2(tl.abs(y) * (-2.0 * LOG2_E))  # at most 1, and NaN stays NaN
        tanh = (1.0 - e) / (1.0 + e)
        z = softcap * tl.where(y < 0, -tanh, tanh)
    if ROUNDED == BF16:
        z = _rounded(z, 16)
    if ROUNDED == FP16:
        small = (z + 0.75) - 0.75  # at 0.75 a float32 has the step of a half that is not normal, 2^-24
        z = tl.where(tl.abs(z) < 2.0**-14, small, _rounded(z, 13))
        z = tl.where(z > _LARGEST_HALF, float("inf"), tl.where(z < -_LARGEST_HALF, -float("inf"), z))
    return z


def check_head(hidden_ND: torch.Tensor, head_VD: torch.Tensor, bias_V: torch.Tensor | None) -> None:
    """Raises ValueError unless the rows, the head and its bias belong together."""
    for name, rows in (("hidden", hidden_ND), ("head", head_VD)):
        if rows.ndim != 2 or rows.dtype not in FLOATS or not rows.shape[1] or rows.stride(1) != 1:
            got = f"{rows.dtype} {tuple(rows.shape)} of strides {rows.stride()}"
            raise ValueError(f"got {name} {got}, expected bf16, fp16 or f32 (rows, width) with contiguous rows")
    if head_VD.shape[1] != hidden_ND.shape[1] or head_VD.dtype != hidden_ND.dtype:
        expected = f"{hidden_ND.dtype} (rows, {hidden_ND.shape[1]})"
        raise ValueError(f"got head {head_VD.dtype} {tuple(head_VD.shape)}, expected {expected} as hidden has")
    if head_VD.device != hidden_ND.device:
        raise ValueError(f"got head on {head_VD.device}, expected {hidden_ND.device} as hidden")
    if bias_V is not None and (
        bias_V.shape != head_VD.shape[:1] or not bias_V.is_contiguous() or bias_V.device != head_VD.device
    ):
        got = f"{tuple(bias_V.shape)} on {bias_V.device}"
        raise ValueError(f"got bias {got}, expected contiguous {tuple(head_VD.shape[:1])} on {head_VD.device}")


WORKSPACE = 48 << 20  # bytes of partial results held together
_BYTES = 12  # of partial results, a row and tile
_BAD: tl.constexpr = tl.constexpr(1 << 16)  # mark on a tile's count of at most 2^16 - 1: a logit was NaN or +inf
_HIGHER: tl.constexpr = tl.constexpr(1 << 17)  # mark: a logit is larger than the target's
_SMALLEST_NEGATIVE: tl.constexpr = tl.constexpr(-(2**31) + 1)  # bits of the f32 next below zero
_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))
_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_COMBINE_ROWS = 32
_ROUNDINGS = {None: NO_ROUNDING, "bf16": BF16, "fp16": FP16}


class HeadTile(NamedTuple):
    """Says how the product is cut. Results depend on rows, columns and depth; `columns` is a multiple of `rows`."""

    rows: int  # of hidden
    columns: int  # of the vocabulary
    depth: int  # elements of D in one step
    group: int  # row tiles that walk the vocabulary together, so that the L2 cache serves their hidden rows
    warps: int
    stages: int  # slices of D under way
    programs: int = 1  # resident on a multiprocessor
    bulk: bool = True  # tiles come by descriptors where rows stand at multiples of 16 bytes


HALF = HeadTile(128, 256, 64, group=16, warps=8, stages=4)
SINGLE = HeadTile(
    64, 128, 16, group=16, warps=8, stages=3, programs=2, bulk=False
)  # fp32 multiplies without tensor cores
TILES = {torch.bfloat16: HALF, torch.float16: HALF, torch.float32: SINGLE}


@triton.jit(do_not_specialize=["N"])
def _targets_kernel(
    hidden, hidden_stride, head, head_stride, bias, targets, at, N, V, D, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Computes the targets' logits: column j of the tile is the target of row j modulo ROWS. Grid (ceil(N / ROWS))."""
    first = tl.program_id(0) * ROWS
    rows_N = first + tl.arange(0, ROWS)
    own_V = tl.arange(0, COLUMNS) % ROWS
    ids_V = tl.load(targets + first + own_V, mask=first + own_V < N, other=-1)
    known_V = (ids_V >= 0) & (ids_V < V)
    z_NV = products(
        hidden, hidden_stride, rows_N, first, head, head_stride, ids_V, known_V, 0, N, D,
        ROWS, COLUMNS, DEPTH, False, False, UPCAST,
    )  # fmt: skip
    b_V = tl.load(bias + ids_V, mask=known_V, other=0.0).to(tl.float32) if BIASED else own_V
    z_NV = finished(z_NV, b_V[None, :], scale, softcap, BIASED, SCALED, CAPPED, ROUNDED)
    usable_NV = (z_NV < float("inf")) & known_V[None, :]
    diagonal_NV = tl.arange(0, ROWS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    at_N = tl.max(tl.where(diagonal_NV & usable_NV, z_NV, -float("inf")), axis=1)
    tl.store(at + rows_N, at_N, mask=rows_N < N)


@triton.jit
def _below(x):
    """Returns the largest f32 less than x; NaN for -inf."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0.0, bits - 1, tl.where(x < 0.0, bits + 1, _SMALLEST_NEGATIVE))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _statistics(z_NV, at_N, target_N, first_id, V, COLUMNS: tl.constexpr):
    """Returns a tile's peak, sum of exp(z - peak), and number of logits before the target with the two marks, by row.

    The first part is seven instructions a logit, for they stand between two tiles of products and nothing hides them.
    It serves full tiles that hold nothing bad (a NaN or an infinite peak makes the sum NaN) and no row's target: there
    the ids are all before a row's target or all after, so that the order is one comparison, with `at` or the number
    below.
    """
    peak_N = tl.max(z_NV, axis=1)
    total_N = tl.sum(tl.exp2((z_NV - peak_N[:, None]) * LOG2_E), axis=1)
    bound_N = tl.where(target_N < first_id, at_N, _below(at_N))
    count_N = tl.sum(tl.where(z_NV > bound_N[:, None], 1.0, 0.0), axis=1).to(tl.int32)
    held_N = (target_N >= first_id) & (target_N < first_id + COLUMNS)
    plain_N = (total_N == total_N) & (bound_N == bound_N) & (held_N == 0)
    if (tl.min(plain_N.to(tl.int32), axis=0) == 0) | (first_id + COLUMNS > V):
        ids_V = first_id + tl.arange(0, COLUMNS)
        usable_NV = z_NV < float("inf")  # NaN compares false too
        bad_N = tl.max(tl.where(usable_NV, 0, _BAD), axis=1)
        z_NV = tl.where(usable_NV & (ids_V < V)[None, :], z_NV, -float("inf"))
        peak_N = tl.max(z_NV, axis=1)
        shift_N = tl.where(peak_N > -float("inf"), peak_N, 0.0)
        total_N = tl.sum(tl.exp2((z_NV - shift_N[:, None]) * LOG2_E), axis=1)
        before_NV = (z_NV > at_N[:, None]) | ((z_NV == at_N[:, None]) & (ids_V[None, :] < target_N[:, None]))
        count_N = tl.sum(before_NV.to(tl.int32), axis=1) + bad_N
    return peak_N, total_N, count_N + tl.where(peak_N > at_N, _HIGHER, 0)


@triton.jit(do_not_specialize=["N"])
def _tiles_kernel(
    hidden, hidden_stride, head, head_stride, bias, targets, at, peaks, totals, counts, padded,
    N, V, D, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Stores the partial results of every tile. Grid: as many programs as the device runs together.

    Tiles go by groups of row tiles, down a group's row tiles before the next tile of the vocabulary, so that the head
    streams once a group.
    """
    row_tiles = tl.cdiv(N, ROWS)
    id_tiles = tl.cdiv(V, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * id_tiles, tl.num_programs(0)):
        first_of_group = tile // (GROUP * id_tiles) * GROUP
        height = tl.minimum(GROUP, row_tiles - first_of_group)
        inside_group = tile % (GROUP * id_tiles)
        first_row = (first_of_group + inside_group % height) * ROWS
        id_tile = inside_group // height
        rows_N = first_row + tl.arange(0, ROWS)
        ids_V = id_tile * COLUMNS + tl.arange(0, COLUMNS)
        z_NV = products(
            hidden, hidden_stride, rows_N, first_row, head, head_stride, ids_V, ids_V < V, id_tile * COLUMNS, N, D,
            ROWS, COLUMNS, DEPTH, HIDDEN_DESCRIBED, HEAD_DESCRIBED, UPCAST,
        )  # fmt: skip
        b_V = tl.load(bias + ids_V, mask=ids_V < V, other=0.0).to(tl.float32) if BIASED else ids_V
        z_NV = finished(z_NV, b_V[None, :], scale, softcap, BIASED, SCALED, CAPPED, ROUNDED)
        target_N = tl.load(targets + rows_N, mask=rows_N < N, other=-1).to(tl.int32)
        at_N = tl.load(at + rows_N, mask=rows_N < N, other=0.0)
        peak_N, total_N, count_N = _statistics(z_NV, at_N, target_N, id_tile * COLUMNS, V, COLUMNS)
        place_N = id_tile.to(tl.int64) * padded + rows_N
        tl.store(peaks + place_N, peak_N, mask=rows_N < N)
        tl.store(totals + place_N, total_N, mask=rows_N < N)
        tl.store(counts + place_N, count_N, mask=rows_N < N)


@triton.jit(do_not_specialize=["N"])
def _combine_kernel(
    peaks, totals, counts, padded, targets, at, logprobs, ranks, log_sums, is_greedy, flags, N, V, T,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Combines a row's T partial results in two passes: the peak, then sums and counts. Grid (ceil(N / ROWS))."""
    rows_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_N = rows_N < N
    peak_N = tl.full([ROWS], -float("inf"), tl.float32)
    for start in range(0, T, CHUNK):
        tiles_T = start + tl.arange(0, CHUNK)
        place_TN = tiles_T.to(tl.int64)[:, None] * padded + rows_N[None, :]
        inside_TN = (tiles_T < T)[:, None] & inside_N[None, :]
        peak_TN = tl.load(peaks + place_TN, mask=inside_TN, other=-float("inf"))
        peak_N = tl.maximum(peak_N, tl.max(peak_TN, axis=0))
    alive_N = peak_N > -float("inf")
    shift_N = tl.where(alive_N, peak_N, 0.0)

    total_N = tl.zeros([ROWS], tl.float32)
    before_N = tl.zeros([ROWS], tl.int32)
    marks_N = tl.zeros([ROWS], tl.int32)
    for start in range(0, T, CHUNK):
        tiles_T = start + tl.arange(0, CHUNK)
        place_TN = tiles_T.to(tl.int64)[:, None] * padded + rows_N[None, :]
        inside_TN = (tiles_T < T)[:, None] & inside_N[None, :]
        peak_TN = tl.load(peaks + place_TN, mask=inside_TN, other=-float("inf"))
        total_TN = tl.load(totals + place_TN, mask=inside_TN, other=0.0)
        count_TN = tl.load(counts + place_TN, mask=inside_TN, other=0)
        total_N += tl.sum(total_TN * tl.exp2((peak_TN - shift_N[None, :]) * LOG2_E), axis=0)
        before_N += tl.sum(count_TN % _BAD, axis=0)
        marks_N |= tl.max(count_TN & _BAD, axis=0) | tl.max(count_TN & _HIGHER, axis=0)

    target_N = tl.load(targets + rows_N, mask=inside_N, other=-1)
    at_N = tl.load(at + rows_N, mask=inside_N, other=-float("inf"))
    known_N = (target_N >= 0) & (target_N < V)
    log_total_N = tl.log2(tl.where(alive_N, total_N, 1.0)) * LN_2
    # From the peak, not from the log-sum: the difference of two large numbers would lose digits.
    logprob_N = at_N - shift_N - log_total_N
    greedy_N = known_N & alive_N & ((marks_N & _HIGHER) == 0)
    tl.store(logprobs + rows_N, logprob_N, mask=inside_N)
    tl.store(ranks + rows_N, tl.where(known_N, 1 + before_N, 0), mask=inside_N)
    tl.store(log_sums + rows_N, peak_N + log_total_N, mask=inside_N)
    tl.store(is_greedy + rows_N, greedy_N, mask=inside_N)
    bad_N = tl.where((marks_N & _BAD) != 0, _BAD_VALUE, 0)
    tl.store(flags + rows_N, bad_N | tl.where(alive_N, 0, _NO_TOKEN), mask=inside_N)


def head_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    round_logits: Rounding | None = None,
    *,
    workspace: int = WORKSPACE,
    tile: HeadTile | None = None,
) -> TargetLogprobs:
    """Scores one target a row; see `gpu_sampler.logprobs.head_logprob` for the arguments.

    It reads nothing back from the device, so that a CUDA graph can capture it. A target outside of [0, V) gives -inf
    and rank 0.

    Args:
        workspace: bound on the partial results in bytes; at least 128 rows go through in one pass.
        tile: how the product is cut, for tuning.

    Raises:
        ValueError: shapes, types or devices do not belong together.
    """
    check_head(hidden_ND, head_VD, bias_V)
    rows, (vocab, width), device = len(hidden_ND), head_VD.shape, hidden_ND.device
    _check_targets(targets_N, rows, vocab, device)
    tile = tile or TILES[hidden_ND.dtype]
    types = (torch.float32, torch.int32, torch.float32, torch.bool, torch.int32)
    found = TargetLogprobs(*(torch.empty(rows, dtype=dtype, device=device) for dtype in types))
    targets_N = targets_N.to(torch.int64).contiguous()
    id_tiles, step = triton.cdiv(vocab, tile.columns), rows_at_once(vocab, tile, workspace)
    padded = min(step, -(-rows // 128) * 128)
    at_N = torch.empty(padded, device=device)  # all passes use the same partial results
    peaks_TN, totals_TN = (torch.empty((id_tiles, padded), device=device) for _ in range(2))
    counts_TN = torch.empty((id_tiles, padded), dtype=torch.int32, device=device)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        hidden, targets = hidden_ND[part], targets_N[part]
        count = len(hidden)
        row_tiles = triton.cdiv(count, tile.rows)
        common = {
            "hidden_stride": hidden.stride(0), "head_stride": head_VD.stride(0), "bias": bias_V, "targets": targets,
            "at": at_N, "N": count, "V": vocab, "D": width, "scale": float(scale), "softcap": float(softcap),
            "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "UPCAST": INTERPRETED,
            "BIASED": bias_V is not None, "SCALED": scale != 1.0, "CAPPED": softcap != 0.0,
            "ROUNDED": _ROUNDINGS[round_logits], "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        _targets_kernel[(row_tiles,)](hidden=hidden, head=head_VD, **common)
        rows_of, head_of = _described(hidden, tile.rows, tile), _described(head_VD, tile.columns, tile)
        _tiles_kernel[(min(_multiprocessors(device) * tile.programs, row_tiles * id_tiles),)](
            hidden=rows_of, head=head_of, peaks=peaks_TN, totals=totals_TN, counts=counts_TN, padded=padded,
            GROUP=tile.group, HIDDEN_DESCRIBED=rows_of is not hidden, HEAD_DESCRIBED=head_of is not head_VD, **common,
        )  # fmt: skip
        _combine_kernel[(triton.cdiv(count, _COMBINE_ROWS),)](
            peaks_TN, totals_TN, counts_TN, padded, targets, at_N, *(field[part] for field in found), count, vocab,
            id_tiles, ROWS=_COMBINE_ROWS, CHUNK=128, num_warps=8,
        )  # fmt: skip
    return found


def rows_at_once(vocab: int, tile: HeadTile, workspace: int = WORKSPACE) -> int:
    """Returns the rows of one pass, a multiple of 128, whose partial results the workspace holds."""
    id_tiles = -(-vocab // tile.columns)
    return 128 * max(workspace // (_BYTES * id_tiles) // 128, 1)


def _check_targets(targets_N: torch.Tensor, rows: int, vocab: int, device: torch.device) -> None:
    if targets_N.shape != (rows,) or targets_N.dtype not in (torch.int32, torch.int64) or not vocab:
        got = f"targets {targets_N.dtype} {tuple(targets_N.shape)} into {vocab} tokens"
        raise ValueError(f"got {got}, expected int32 or int64 ({rows},) into at least one")
    if targets_N.device != device:
        raise ValueError(f"got targets on {targets_N.device}, expected {device} as hidden")


def _described(rows_ND: torch.Tensor, rows: int, tile: HeadTile) -> torch.Tensor | TensorDescriptor:
    """Returns a descriptor for bulk copies of [rows, depth] tiles; the rows themselves where none fits."""
    stride = rows_ND.stride(0)
    if not tile.bulk or rows_ND.data_ptr() % 16 or stride * rows_ND.element_size() % 16 or stride < rows_ND.shape[1]:
        return rows_ND
    return TensorDescriptor(rows_ND, list(rows_ND.shape), [stride, 1], [rows, tile.depth])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
