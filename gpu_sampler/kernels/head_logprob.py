"""`head_logprob`: log-probability and rank of one target a row through the LM head, without the logits [N, V].

    z[n, v] = cap(scale (h_n . w_v + b_v)), rounded     log_sum[n] = ln sum_v exp z[n, v]     NaN and +inf as -inf
    logprob[n] = z[n, t_n] - log_sum[n]                 rank[n] = 1 + |{v: z_v > z_t, or z_v = z_t and v < t}|

Three kernels. `_targets_kernel` computes z[n, t_n] first: the head's rows of 128 targets stand as one tile, multiplied
by the same loop over D, the same instructions and the same epilogue as every other tile, and the diagonal is taken. So
it is the number that the main loop finds at column t_n, bit for bit, and comparisons with it are exact. `_tiles_kernel`
multiplies every tile of rows x vocabulary and keeps three numbers a row and tile: the largest logit, the sum of
exponentials below it, and how many logits come before the target (together with how many are bad, times 2^16).
`_combine_kernel` adds them up. The tile and all reduction trees are one constant a type: no result depends on N.

Memory: 12 bytes a row and tile of the vocabulary, at most 48 MiB (rows beyond go through in further passes), and 8 a
row. Bytes: the hidden rows and the head once a group of row tiles, and the partial results twice.

Shape legend: N rows, V vocabulary, D width of a hidden row, K a slice of it, T tiles of the vocabulary.

| pointer | shape, type | |
|---|---|---|
| hidden, head | [N, D], [V, D] bf16, fp16 or f32, rows of any stride | read |
| bias | [V] of any float type | read |
| targets | i64 [N], any value: outside of [0, V) nothing is read through it | read |
| at | f32 [N] logits of the targets | written, then read |
| peaks, totals, counts | f32, f32, i32 [T, passed N padded to 128] | written, then read |
| logprobs, log_sums, ranks, is_greedy, flags | f32, f32, i32, bool, i32 [N] | write |
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_sampler.kernels.label_scores import (
    BF16,
    FP16,
    NO_ROUNDING,
    check_head,
    finished,
    natural_exp,
    natural_log,
)
from gpu_sampler.output import RowFlag

WORKSPACE = 48 << 20  # bytes of partial results at once
_BYTES = 12  # of partial results, a row and tile
_BAD: tl.constexpr = tl.constexpr(1 << 16)  # a tile counts its bad logits in the high half of its count
_BAD_VALUE: tl.constexpr = tl.constexpr(int(RowFlag.BAD_VALUE))
_NO_TOKEN: tl.constexpr = tl.constexpr(int(RowFlag.NO_TOKEN))
_COMBINE_ROWS = 32
_ROUNDINGS = {None: NO_ROUNDING, "bf16": BF16, "fp16": FP16}


class Tile(NamedTuple):
    """How the product is cut."""

    rows: int  # of hidden
    columns: int  # of the vocabulary
    depth: int  # of D at once
    group: int  # row tiles that walk the vocabulary together, so that the L2 cache serves their hidden rows
    warps: int
    stages: int  # slices of D under way


HALF = Tile(128, 256, 64, group=16, warps=8, stages=4)
SINGLE = Tile(64, 64, 32, group=16, warps=4, stages=2)  # fp32 products have no matrix instruction that is exact
TILES = {torch.bfloat16: HALF, torch.float16: HALF, torch.float32: SINGLE}


class TargetLogprobs(NamedTuple):
    """Tensors on the device of the hidden rows."""

    logprobs: torch.Tensor  # f32 [N]; -inf for a target outside of [0, V) and for one whose logit is -inf
    ranks: torch.Tensor  # i32 [N], 1-based place in the total order; 0 for a target outside of [0, V)
    log_sums: torch.Tensor  # f32 [N], log-sum-exp of the whole row, -inf where nothing is finite
    is_greedy: torch.Tensor  # bool [N], the target's logit is the row's largest
    flags: torch.Tensor  # i32 [N], RowFlag BAD_VALUE and NO_TOKEN


@triton.jit
def _slice(source, stride, ids, inside, first, start, D, DEPTH: tl.constexpr, DESCRIBED: tl.constexpr):
    """[ids, DEPTH] of a matrix, zeros outside: by its descriptor from row `first` on, or by the pointers of `ids`."""
    if DESCRIBED:
        found = source.load([first, start])
    else:
        at_K = start + tl.arange(0, DEPTH)
        places = source + ids.to(tl.int64)[:, None] * stride + at_K[None, :]
        found = tl.load(places, mask=inside[:, None] & (at_K < D)[None, :], other=0.0)
    return found


@triton.jit
def _products(
    hidden, hidden_stride, rows_N, first_row, head, head_stride, ids_V, known_V, first_id, N, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """f32 [ROWS, COLUMNS] of hidden rows times rows of the head: the one loop over D of this file."""
    sums_NV = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(0, tl.cdiv(D, DEPTH)):
        start = part * DEPTH
        h_NK = _slice(hidden, hidden_stride, rows_N, rows_N < N, first_row, start, D, DEPTH, HIDDEN_DESCRIBED)
        w_VK = _slice(head, head_stride, ids_V, known_V, first_id, start, D, DEPTH, HEAD_DESCRIBED)
        if UPCAST:
            h_NK, w_VK = h_NK.to(tl.float32), w_VK.to(tl.float32)
        sums_NV = tl.dot(h_NK, w_VK.T, sums_NV, input_precision="ieee")
    return sums_NV


@triton.jit(do_not_specialize=["N"])
def _targets_kernel(
    hidden, hidden_stride, head, head_stride, bias, targets, at, N, V, D, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS)). Column j of the tile is the target of row j, as often as it goes into COLUMNS."""
    first = tl.program_id(0) * ROWS
    rows_N = first + tl.arange(0, ROWS)
    own_V = tl.arange(0, COLUMNS) % ROWS
    ids_V = tl.load(targets + first + own_V, mask=first + own_V < N, other=-1)
    known_V = (ids_V >= 0) & (ids_V < V)
    z_NV = _products(
        hidden, hidden_stride, rows_N, first, head, head_stride, ids_V, known_V, 0, N, D,
        ROWS, COLUMNS, DEPTH, False, False, UPCAST,
    )  # fmt: skip
    b_V = tl.load(bias + ids_V, mask=known_V, other=0.0).to(tl.float32) if BIASED else own_V
    z_NV = finished(z_NV, b_V[None, :], scale, softcap, BIASED, CAPPED, ROUNDED)
    usable_NV = (z_NV < float("inf")) & known_V[None, :]
    diagonal_NV = tl.arange(0, ROWS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    at_N = tl.max(tl.where(diagonal_NV & usable_NV, z_NV, -float("inf")), axis=1)
    tl.store(at + rows_N, at_N, mask=rows_N < N)


@triton.jit(do_not_specialize=["N"])
def _tiles_kernel(
    hidden, hidden_stride, head, head_stride, bias, targets, at, peaks, totals, counts, padded,
    N, V, D, scale, softcap,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HIDDEN_DESCRIBED: tl.constexpr, HEAD_DESCRIBED: tl.constexpr, UPCAST: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Grid: as many programs as the device runs at once. Tiles go by groups of row tiles, down a group's row tiles
    before the next tile of the vocabulary, so that the head streams once a group."""
    row_tiles = tl.cdiv(N, ROWS)
    id_tiles = tl.cdiv(V, COLUMNS)
    for tile in tl.range(
        tl.program_id(0), row_tiles * id_tiles, tl.num_programs(0), flatten=HIDDEN_DESCRIBED and HEAD_DESCRIBED
    ):
        first_of_group = tile // (GROUP * id_tiles) * GROUP
        height = tl.minimum(GROUP, row_tiles - first_of_group)
        inside_group = tile % (GROUP * id_tiles)
        first_row = (first_of_group + inside_group % height) * ROWS
        id_tile = inside_group // height
        rows_N = first_row + tl.arange(0, ROWS)
        ids_V = id_tile * COLUMNS + tl.arange(0, COLUMNS)
        z_NV = _products(
            hidden, hidden_stride, rows_N, first_row, head, head_stride, ids_V, ids_V < V, id_tile * COLUMNS, N, D,
            ROWS, COLUMNS, DEPTH, HIDDEN_DESCRIBED, HEAD_DESCRIBED, UPCAST,
        )  # fmt: skip
        b_V = tl.load(bias + ids_V, mask=ids_V < V, other=0.0).to(tl.float32) if BIASED else ids_V
        z_NV = finished(z_NV, b_V[None, :], scale, softcap, BIASED, CAPPED, ROUNDED)
        usable_NV = z_NV < float("inf")  # NaN compares false too
        bad_NV = tl.where(usable_NV, 0, _BAD)
        z_NV = tl.where(usable_NV & (ids_V < V)[None, :], z_NV, -float("inf"))

        target_N = tl.load(targets + rows_N, mask=rows_N < N, other=-1)
        at_N = tl.load(at + rows_N, mask=rows_N < N, other=0.0)
        before_NV = (z_NV > at_N[:, None]) | ((z_NV == at_N[:, None]) & (ids_V[None, :] < target_N[:, None]))
        count_N = tl.sum(before_NV.to(tl.int32) + bad_NV, axis=1)
        peak_N = tl.max(z_NV, axis=1)
        shift_N = tl.where(peak_N > -float("inf"), peak_N, 0.0)
        total_N = tl.sum(natural_exp(z_NV - shift_N[:, None]), axis=1)

        place_N = id_tile.to(tl.int64) * padded + rows_N
        tl.store(peaks + place_N, peak_N, mask=rows_N < N)
        tl.store(totals + place_N, total_N, mask=rows_N < N)
        tl.store(counts + place_N, count_N, mask=rows_N < N)


@triton.jit(do_not_specialize=["N"])
def _combine_kernel(
    peaks, totals, counts, padded, targets, at, logprobs, ranks, log_sums, is_greedy, flags, N, V, T,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / ROWS)). Two passes over a row's T partial results: the largest logit, then sum and counts."""
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
    bad_N = tl.zeros([ROWS], tl.int32)
    for start in range(0, T, CHUNK):
        tiles_T = start + tl.arange(0, CHUNK)
        place_TN = tiles_T.to(tl.int64)[:, None] * padded + rows_N[None, :]
        inside_TN = (tiles_T < T)[:, None] & inside_N[None, :]
        peak_TN = tl.load(peaks + place_TN, mask=inside_TN, other=-float("inf"))
        total_TN = tl.load(totals + place_TN, mask=inside_TN, other=0.0)
        count_TN = tl.load(counts + place_TN, mask=inside_TN, other=0)
        total_N += tl.sum(total_TN * natural_exp(peak_TN - shift_N[None, :]), axis=0)
        before_N += tl.sum(count_TN % _BAD, axis=0)
        bad_N += tl.sum(count_TN // _BAD, axis=0)

    target_N = tl.load(targets + rows_N, mask=inside_N, other=-1)
    at_N = tl.load(at + rows_N, mask=inside_N, other=-float("inf"))
    known_N = (target_N >= 0) & (target_N < V)
    log_total_N = natural_log(tl.where(alive_N, total_N, 1.0))
    # Through the largest logit, not the log-sum: the difference of two large numbers would lose digits.
    tl.store(logprobs + rows_N, at_N - shift_N - log_total_N, mask=inside_N)
    tl.store(ranks + rows_N, tl.where(known_N, 1 + before_N, 0), mask=inside_N)
    tl.store(log_sums + rows_N, peak_N + log_total_N, mask=inside_N)
    tl.store(is_greedy + rows_N, known_N & alive_N & (at_N == peak_N), mask=inside_N)
    tl.store(flags + rows_N, tl.where(bad_N > 0, _BAD_VALUE, 0) | tl.where(alive_N, 0, _NO_TOKEN), mask=inside_N)


def head_logprob(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    round_logits: Literal["bf16", "fp16"] | None = None,
    *,
    workspace: int = WORKSPACE,
    tile: Tile | None = None,
) -> TargetLogprobs:
    """See `gpu_sampler.reference.head_logprob`; a target outside of [0, V) gives -inf and rank 0 here.

    ValueError for shapes, types or devices that do not belong together. `workspace` bounds the partial results in
    bytes (no less than one tile of rows takes). `tile` is for tuning. Reads no value of the device, so that a graph
    may capture it.
    """
    check_head(hidden_ND, head_VD, bias_V)
    rows, vocab = len(hidden_ND), len(head_VD)
    if targets_N.shape != (rows,) or targets_N.dtype not in (torch.int32, torch.int64) or not vocab:
        got = f"targets {targets_N.dtype} {tuple(targets_N.shape)} into {vocab} tokens"
        raise ValueError(f"got {got}, expected int32 or int64 ({rows},) into at least one")
    if targets_N.device != hidden_ND.device:
        raise ValueError(f"got targets on {targets_N.device}, expected {hidden_ND.device} as hidden")
    tile = tile or TILES[hidden_ND.dtype]
    found = _outputs(rows, hidden_ND.device)
    step = rows_at_once(vocab, tile, workspace)
    options = {"BIASED": bias_V is not None, "CAPPED": softcap != 0.0, "ROUNDED": _ROUNDINGS[round_logits]}
    targets_N = targets_N.to(torch.int64).contiguous()
    for first in range(0, rows, step):
        part = TargetLogprobs(*(field[first : first + step] for field in found))
        chosen = targets_N[first : first + step]
        _pass(hidden_ND[first : first + step], head_VD, bias_V, chosen, (float(scale), float(softcap)), tile, part, options)
    return found


def rows_at_once(vocab: int, tile: Tile, workspace: int = WORKSPACE) -> int:
    """Rows of one pass, a multiple of 128: what the workspace holds partial results of."""
    return max(workspace // (_BYTES * triton.cdiv(vocab, tile.columns)) // 128, 1) * 128


def _outputs(rows: int, device: torch.device) -> TargetLogprobs:
    types = (torch.float32, torch.int32, torch.float32, torch.bool, torch.int32)
    return TargetLogprobs(*(torch.empty(rows, dtype=dtype, device=device) for dtype in types))


def _pass(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    scales: tuple[float, float],
    tile: Tile,
    out: TargetLogprobs,
    options: dict[str, Any],
) -> None:
    """The three launches for rows whose partial results the workspace holds."""
    rows, (vocab, width) = len(hidden_ND), head_VD.shape
    tiles, padded = triton.cdiv(vocab, tile.columns), triton.cdiv(rows, 128) * 128
    device = hidden_ND.device
    at_N = torch.empty(rows, device=device)
    peaks_TN, totals_TN, counts_TN = (
        torch.empty((tiles, padded), dtype=dtype, device=device) for dtype in (torch.float32, torch.float32, torch.int32)
    )
    row_tiles = triton.cdiv(rows, tile.rows)
    strides = hidden_ND.stride(0), head_VD.stride(0)
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "num_warps": tile.warps, "num_stages": tile.stages}
    cut["UPCAST"] = not hidden_ND.is_cuda
    _targets_kernel[(row_tiles,)](
        hidden_ND, strides[0], head_VD, strides[1], bias_V, targets_N, at_N, rows, vocab, width, *scales, **cut, **options,
    )  # fmt: skip
    hidden, head = _described(hidden_ND, tile.rows, tile.depth), _described(head_VD, tile.columns, tile.depth)
    _tiles_kernel[(min(_programs(device), row_tiles * tiles),)](
        hidden_ND if hidden is None else hidden, strides[0], head_VD if head is None else head, strides[1],
        bias_V, targets_N, at_N, peaks_TN, totals_TN, counts_TN, padded, rows, vocab, width, *scales, **cut, **options,
        GROUP=tile.group, HIDDEN_DESCRIBED=hidden is not None, HEAD_DESCRIBED=head is not None,
    )  # fmt: skip
    _combine_kernel[(triton.cdiv(rows, _COMBINE_ROWS),)](
        peaks_TN, totals_TN, counts_TN, padded, targets_N, at_N, *out, rows, vocab, tiles,
        ROWS=_COMBINE_ROWS, CHUNK=128, num_warps=8,
    )  # fmt: skip


def _described(rows_ND: torch.Tensor, rows: int, depth: int) -> TensorDescriptor | None:
    """A descriptor for bulk copies of [rows, depth] tiles, None where the rows do not stand at multiples of 16 bytes."""
    if rows_ND.data_ptr() % 16 or rows_ND.stride(0) * rows_ND.element_size() % 16 or not rows_ND.stride(0):
        return None
    return TensorDescriptor(rows_ND, list(rows_ND.shape), list(rows_ND.stride()), [rows, depth])


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
