"""Attends over paged keys and values so that a token's bits depend on what it attends to alone.

    o[t, h] = sum_a w_a v_a,  w = softmax over a of cap(scale q_th . k_a)         cap(z) = softcap tanh(z / softcap)
    lse[t, h] = log2 of the sum over a of e^cap(scale q_th . k_a)

The context of a sequence is cut at fixed positions: in parts, counted from position 0, and each part in blocks of BLOCK
tokens. A token's part is an online softmax over its blocks in order (Dao et al. 2022, "FlashAttention"), and its parts
are merged in order. Tokens that it does not see change no bit: a block of them adds zeros to its sums and leaves its
maximum. So it makes no difference which tokens share its tile, whether its context was computed in this step or
cached, and in how many chunks. The first parts are short: one row's context has several then, which programs share.
Later ones are longer, because a prompt's tiles merge every part.

Weights are summed by a matrix product with ones. It sums in the order in which the product with the values does,
however many warps share a tile.

Two launches compute that one sum. With one program a tile, it computes all parts. With several, each computes every so
many-th part, and the one that ends last merges the parts in order (split KV: Dao et al. 2023, "Flash-Decoding").

A tile is ROWS rows: neighbouring tokens of one sequence, each with the query heads of one group. Bytes: keys and values
of a sequence once for every tile.

Shape legend: T tokens, S sequences, H query heads, G key/value heads, H / G query heads of a group, D head dim, A
attended tokens, M rows of a tile, C tokens of a block, P parts.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.arrivals import arrivals
from gpu_sampler.kernels.common import captured_pdl_options, launch_dependents, wait_for_previous
from gpu_sampler.kernels.lm_head_logprob import INTERPRETED, LOG2_E

MAX_PARTS: Final = 128  # of a context; changing it changes bits
BLOCK: Final = 32  # tokens; changing it changes bits
MAX_DIM: Final = 256
ONES: tl.constexpr = tl.constexpr(16)  # columns of a product with ones: what matrix instructions take at least


class Parts(NamedTuple):
    """Says where contexts are cut, in multiples of BLOCK. All bits depend on it."""

    short: int = 128  # tokens of the first parts
    shorts: int = 12  # of these parts
    long: int = 384  # tokens of those after them; at least `short`

    def count(self, tokens: int) -> int:
        """Returns the parts of a context."""
        shorts = min(self.shorts, -(-tokens // self.short))
        return shorts + max(0, -(-(tokens - self.shorts * self.short) // self.long))


class TileForm(NamedTuple):
    """Says how a tile is computed."""

    rows: int
    warps: int
    stages: int


WIDE: Final = TileForm(64, 4, 5)  # what Hopper's matrix instructions take
# For tiles of one token, by how many tiles and groups of heads there are at least: several warps compute one sooner,
# but with one warp each, more are done. They sum in the order of wide ones where all matrix instructions of a device
# sum alike, as Hopper's do.
SINGLE: Final = {0: TileForm(16, 4, 4), 512: TileForm(16, 2, 3), 1024: TileForm(16, 1, 4)}


def single_form(tiles: int) -> TileForm:
    """Returns the form of tiles of one token; `tiles` counts them once for each group of heads."""
    return next(form for least, form in reversed(SINGLE.items()) if tiles >= least)


class Tiles(NamedTuple):
    """Names the tiles of a step, and what its sequences attend to; all i32 on the device. Where each sequence has one
    token, and so one tile, the first three may be absent."""

    sequence: torch.Tensor | None  # [tiles] the sequence of each
    first: torch.Tensor | None  # [tiles] its first token
    qo_indptr: torch.Tensor | None  # [S + 1]
    kv_indptr: torch.Tensor  # [S + 1]
    kv_indices: torch.Tensor  # [A]


class Heads(NamedTuple):
    """Says how layers attend."""

    scale: float
    softcap: float = 0.0  # 0: none
    window: int = 0  # the last tokens that a token sees, itself included; 0: all


@triton.jit
def _parts_before(place, SHORT: tl.constexpr, SHORTS: tl.constexpr, LONG: tl.constexpr):
    """Returns how many parts begin before a position."""
    return tl.minimum(tl.cdiv(place, SHORT), SHORTS + tl.cdiv(place - SHORT * SHORTS, LONG))


@triton.jit
def _begin_of_part(part, SHORT: tl.constexpr, SHORTS: tl.constexpr, LONG: tl.constexpr):
    """Returns the position at which a part begins."""
    return tl.maximum(part * SHORT, SHORT * SHORTS + (part - SHORTS) * LONG)


@triton.jit
def _factor(best, overall):
    """Returns the factor of a sum of largest score `best` in one of largest score `overall`; 0 for an empty sum."""
    return tl.where(best == -float("inf"), 0.0, tl.exp2(best - overall))


@triton.jit
def _merge(best_M, total_M, sum_MD, new_M, new_total_M, new_sum_MD):
    """Merges a part into what came before it. Multiply-adds are spelt out, and the compiler makes none of its own
    (`enable_fp_fusion`): every compiled variant rounds alike."""
    overall_M = tl.maximum(best_M, new_M)
    kept_M, added_M = _factor(best_M, overall_M), _factor(new_M, overall_M)
    total_M = tl.fma(total_M, kept_M, new_total_M * added_M)
    kept_MD = tl.broadcast_to(kept_M[:, None], sum_MD.shape)
    sum_MD = tl.fma(sum_MD, kept_MD, new_sum_MD * added_M[:, None])
    return overall_M, total_M, sum_MD


@triton.jit
def _attend_block(
    best_M, total_MO, sum_MD, q_MD, k_pool, v_pool, indices, g, kv_heads, place_M, start, end, scale, softcap, window,
    D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds the block at `start` to a part. Returns the part's largest score, f32 [M]; its sum of weights, in each
    column of f32 [M, ONES]; and its weighted sum of values, f32 [M, D]."""
    at_D, at_C = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    other_C = start + at_C
    inside_C = other_C < end
    slot_C = tl.load(indices + other_C, mask=inside_C, other=0).to(tl.int64)
    place_CD = (slot_C * kv_heads + g)[:, None] * D + at_D[None, :]
    there_CD = inside_C[:, None] & (at_D < D)[None, :]
    k_CD = tl.load(k_pool + place_CD, mask=there_CD, other=0.0)
    v_CD = tl.load(v_pool + place_CD, mask=there_CD, other=0.0)
    if UPCAST:
        k_CD, v_CD = k_CD.to(tl.float32), v_CD.to(tl.float32)
    z_MC = tl.dot(q_MD, tl.trans(k_CD), input_precision="ieee") * scale
    if CAPPED:
        z_MC = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(z_MC * (2.0 * LOG2_E) / softcap)))
    z_MC = z_MC * LOG2_E
    seen_MC = inside_C[None, :] & (other_C[None, :] <= place_M[:, None])
    seen_MC = seen_MC & ((window == 0) | (other_C[None, :] > place_M[:, None] - window))
    z_MC = tl.where(seen_MC, z_MC, -float("inf"))
    new_M = tl.maximum(best_M, tl.max(z_MC, axis=1))
    finite_M = tl.where(new_M == -float("inf"), 0.0, new_M)
    weight_MC = tl.exp2(z_MC - finite_M[:, None]).to(v_CD.dtype)
    kept_M = _factor(best_M, finite_M)
    ones_CO = tl.full([BLOCK, ONES], 1.0, v_CD.dtype)
    total_MO = tl.dot(weight_MC, ones_CO, total_MO * kept_M[:, None], input_precision="ieee")
    sum_MD = tl.dot(weight_MC, v_CD, sum_MD * kept_M[:, None], input_precision="ieee")
    return new_M, total_MO, sum_MD


@triton.jit(do_not_specialize=["window", "T"])
def _invariant_attention_kernel(
    q, T, q_row, q_head, k_pool, v_pool, tile_sequence, tile_first, qo_indptr, kv_indptr, kv_indices, out, lse, sums,
    of_sums, of_all, arrived, scale, softcap, window,
    GROUP: tl.constexpr, ROUND_GROUP: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, SHORT: tl.constexpr,
    SHORTS: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    CAPPED: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends with one tile of one group of heads. Grid (tiles, G), or with SPLIT (tiles, G, programs): programs
    without a part end immediately.

    Args:
        q: [T, H, D], read; `q_row` elements from one token to the next, `q_head` from one head to the next.
        k_pool: [slots, 1, G, D] contiguous, read; `v_pool` alike.
        tile_sequence: See `Tiles`; the four that follow alike. None: one token, one tile, one sequence.
        out: [T, H, D] contiguous, written.
        lse: f32 [T, H], written.
        sums: f32 [P, T, H, PADDED] with SPLIT, written and read: weighted sums of values.
        of_sums: f32 [2, P, T, H] likewise: largest scores, and sums of weights.
        of_all: P T H.
        arrived: i32, one for each tile and group, zeros before and after the launch.
        scale: Multiplies the scores.
        softcap: Bounds the scores, if CAPPED.
        window: The last tokens that a token sees; 0: all.
        GROUP: H / G; ROUND_GROUP is the next power of two.
        SHORT, SHORTS, LONG: See `Parts`.
        UPCAST: Whether the kernel runs in Triton's interpreter, which multiplies fp32 alone.
    """
    wait_for_previous(PDL)
    tile, g, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tile_sequence is None:
        sequence, first, qo_end = tile, tile, tile + 1
    else:
        sequence, first = tl.load(tile_sequence + tile), tl.load(tile_first + tile)
        qo_end = tl.load(qo_indptr + sequence + 1)
    kv_begin = tl.load(kv_indptr + sequence)
    before = tl.load(kv_indptr + sequence + 1) - kv_begin - qo_end  # added to a token's index: its position
    at_M = tl.arange(0, ROWS)
    token_M, head_M = first + at_M // ROUND_GROUP, at_M % ROUND_GROUP
    there_M = (token_M < qo_end) & (head_M < GROUP)
    place_M = before + token_M
    tile_end = before + tl.minimum(first + ROWS // ROUND_GROUP, qo_end)
    tile_begin = tl.where(window > 0, tl.maximum(before + first - window + 1, 0) // BLOCK * BLOCK, 0)
    first_part = _parts_before(tile_begin + 1, SHORT, SHORTS, LONG) - 1
    end_part = _parts_before(tile_end, SHORT, SHORTS, LONG)
    count = end_part - first_part
    if SPLIT:
        programs = tl.minimum(tl.num_programs(2), count)
        if tl.program_id(2) >= programs:
            return
    at_D = tl.arange(0, PADDED)
    stored_MD = there_M[:, None] & (at_D < D)[None, :]
    own_M = g * GROUP + head_M
    q_MD = q + token_M.to(tl.int64)[:, None] * q_row + own_M[:, None] * q_head + at_D[None, :]
    q_MD = tl.load(q_MD, mask=stored_MD, other=0.0)
    if UPCAST:
        q_MD = q_MD.to(tl.float32)
    indices = kv_indices + kv_begin
    nothing_M = tl.full([ROWS], -float("inf"), tl.float32)
    none_MO, none_MD = tl.zeros([ROWS, ONES], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    best_M, total_M, sum_MD = nothing_M, tl.zeros([ROWS], tl.float32), none_MD
    new_M, new_total_MO, new_sum_MD = nothing_M, none_MO, none_MD  # of a part
    at_head_M = token_M.to(tl.int64) * (kv_heads * GROUP) + own_M
    if SPLIT:
        heads_of_part = tl.cast(T, tl.int64) * (kv_heads * GROUP)
        for part in range(first_part + tl.program_id(2), end_part, programs):
            begin = tl.maximum(_begin_of_part(part, SHORT, SHORTS, LONG), tile_begin)
            end = tl.minimum(_begin_of_part(part + 1, SHORT, SHORTS, LONG), tile_end)
            new_M, new_total_MO, new_sum_MD = nothing_M, none_MO, none_MD
            for block in range(tl.cdiv(end - begin, BLOCK)):
                new_M, new_total_MO, new_sum_MD = _attend_block(
                    new_M, new_total_MO, new_sum_MD, q_MD, k_pool, v_pool, indices, g, kv_heads, place_M,
                    begin + block * BLOCK, tile_end, scale, softcap, window, D, PADDED, BLOCK, CAPPED, UPCAST,
                )  # fmt: skip
            at_part_M = at_head_M + (part - first_part) * heads_of_part
            tl.store(sums + at_part_M[:, None] * PADDED + at_D[None, :], new_sum_MD, mask=there_M[:, None])
            tl.store(of_sums + at_part_M, new_M, mask=there_M)
            tl.store(of_sums + of_all + at_part_M, tl.max(new_total_MO, axis=1), mask=there_M)
        launch_dependents(PDL)
        tl.debug_barrier()  # the parts are written before their program counts as arrived
        if tl.atomic_add(arrived + tile * kv_heads + g, 1, sem="acq_rel") < programs - 1:
            return
        tl.store(arrived + tile * kv_heads + g, 0)
        tl.debug_barrier()
        for other in range(count):
            at_part_M = at_head_M + other * heads_of_part
            best_M, total_M, sum_MD = _merge(
                best_M, total_M, sum_MD, tl.load(of_sums + at_part_M, mask=there_M, other=-float("inf")),
                tl.load(of_sums + of_all + at_part_M, mask=there_M, other=0.0),
                tl.load(sums + at_part_M[:, None] * PADDED + at_D[None, :], mask=there_M[:, None], other=0.0),
            )  # fmt: skip
    else:
        part = first_part
        end = _begin_of_part(part + 1, SHORT, SHORTS, LONG)
        for block in range(tl.cdiv(tile_end - tile_begin, BLOCK)):  # of all parts: loads run ahead from one to the next
            start = tile_begin + block * BLOCK
            if start == end:
                new_total_M = tl.max(new_total_MO, axis=1)
                best_M, total_M, sum_MD = _merge(best_M, total_M, sum_MD, new_M, new_total_M, new_sum_MD)
                new_M, new_total_MO, new_sum_MD = nothing_M, none_MO, none_MD
                part += 1
                end = _begin_of_part(part + 1, SHORT, SHORTS, LONG)
            new_M, new_total_MO, new_sum_MD = _attend_block(
                new_M, new_total_MO, new_sum_MD, q_MD, k_pool, v_pool, indices, g, kv_heads, place_M, start, tile_end,
                scale, softcap, window, D, PADDED, BLOCK, CAPPED, UPCAST,
            )  # fmt: skip
        launch_dependents(PDL)  # not sooner: waiting programs would stand between these
        new_total_M = tl.max(new_total_MO, axis=1)
        best_M, total_M, sum_MD = _merge(best_M, total_M, sum_MD, new_M, new_total_M, new_sum_MD)
    whole_MD = (sum_MD / total_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_head_M[:, None] * D + at_D[None, :], whole_MD, mask=stored_MD)
    tl.store(lse + at_head_M, best_M + tl.log2(total_M), mask=there_M)


def tokens_of_tile(heads: int, kv_heads: int) -> int:
    """Returns how many tokens a wide tile holds."""
    tokens: int = WIDE.rows // triton.next_power_of_2(heads // kv_heads)
    return tokens


def parts_of(max_model_len: int) -> Parts:
    """Returns where contexts are cut, which a model's longest decides: into MAX_PARTS parts at most."""
    parts = Parts()
    longs = MAX_PARTS - parts.shorts
    rest = max_model_len - parts.shorts * parts.short
    return parts._replace(long=max(parts.long, -(-rest // (longs * BLOCK)) * BLOCK))


def invariant_attention(
    q_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: Tiles,
    heads: Heads,
    *,
    parts: Parts,
    longest: int,
    programs: int = 1,
    form: TileForm = WIDE,
    out_THD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends with each token over its own position's context.

    It reads no value of the device on the host, so that a graph can capture it.

    Args:
        q_THD: [T, H, D] bf16, fp16 or fp32, each head's numbers contiguous.
        keys: [slots, 1, G, D] of the same type, contiguous.
        values: [slots, 1, G, D], likewise.
        tiles: The step's; a token is in one tile.
        heads: How the layer attends.
        parts: Where contexts are cut; the same for all steps.
        longest: Tokens that a sequence of this step attends to at most. No bit depends on it, nor on `programs`.
        programs: How many share a tile's context: few tokens want several, to fill the device.
        form: How tiles are computed, those with more than one token by `WIDE`.
        out_THD: Where the result goes; None: new memory.

    Returns:
        [T, H, D] in q's type, and the log-sum-exps f32 [T, H] in base 2; see `tests.support.layer_kernels`.

    Raises:
        ValueError: Shapes or types do not belong together.
    """
    _check(q_THD, keys, values, form.rows)
    (tokens, query_heads, dim), kv_heads, device = q_THD.shape, keys.shape[2], q_THD.device
    out = torch.empty((tokens, query_heads, dim), dtype=q_THD.dtype, device=device) if out_THD is None else out_THD
    lse = torch.empty((tokens, query_heads), device=device)
    count = len(tiles.kv_indptr) - 1 if tiles.first is None else len(tiles.first)
    group, padded = query_heads // kv_heads, max(16, triton.next_power_of_2(dim))
    most = parts.count(longest)
    programs = min(programs, most)
    if count:
        shape = (most, tokens, query_heads) if programs > 1 else (0,)
        sums = torch.empty((*shape, padded), device=device)
        of_sums = torch.empty((2, *shape), device=device)
        grid = (count, kv_heads, programs) if programs > 1 else (count, kv_heads)
        _invariant_attention_kernel[grid](
            q_THD, tokens, q_THD.stride(0), q_THD.stride(1), keys, values, *tiles, out, lse, sums, of_sums,
            most * tokens * query_heads, arrivals(device, count * kv_heads), *heads, GROUP=group,
            ROUND_GROUP=triton.next_power_of_2(group), D=dim, PADDED=padded, SHORT=parts.short, SHORTS=parts.shorts,
            LONG=parts.long, BLOCK=BLOCK, ROWS=form.rows, SPLIT=programs > 1, CAPPED=heads.softcap != 0.0,
            UPCAST=INTERPRETED,
            enable_fp_fusion=False, num_warps=form.warps, num_stages=form.stages,
            **captured_pdl_options(),
        )  # fmt: skip
    return out, lse


def _check(q_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: int) -> None:
    """Raises ValueError unless the arguments belong together."""
    shape = (len(keys), 1, keys.shape[2], q_THD.shape[2])
    group = q_THD.shape[1] // keys.shape[2]
    if q_THD.shape[1] % keys.shape[2] or group > rows or q_THD.shape[2] > MAX_DIM or q_THD.stride(2) != 1:
        raise ValueError(f"got q {tuple(q_THD.shape)} and {keys.shape[2]} key heads, expected [T, H, D <= {MAX_DIM}]")
    for name, pool in (("keys", keys), ("values", values)):
        if tuple(pool.shape) != shape or not pool.is_contiguous() or pool.dtype != q_THD.dtype:
            raise ValueError(f"got {name} {pool.dtype} {tuple(pool.shape)}, expected contiguous {q_THD.dtype} {shape}")
