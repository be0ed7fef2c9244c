"""Computes attention so that a token's bits do not depend on its step (`engine.numerics: invariant`).

`engine.kernels.invariant_attention` says how. A step's tiles are laid out on the host once; the plan of a captured step
lies in its buffers alone.
"""

import logging
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from engine.attention.flashinfer_backend import PagedStep
from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, AttentionStep
from engine.attention.plans import AttentionParams, GraphBuffers, GraphDecoder, Sequences
from engine.batch.input_batch import InputBatch
from engine.kernels.invariant_attention import (
    BLOCK,
    MAX_DIM,
    SINGLE,
    WIDE,
    Heads,
    Parts,
    TileForm,
    Tiles,
    invariant_attention,
    parts_of,
    single_form,
    tokens_of_tile,
)
from engine.requests import Int32s

log = logging.getLogger(__name__)

BUSY: Final = 264  # programs that keep a device busy: two on each of 132 multiprocessors
MAX_PARTS_BYTES: Final = 1 << 26  # of the partial sums of a step whose contexts are shared among programs
ALIGNED: Final = 16  # of a stored head dim


class InvariantAttention:
    """Implements `AttentionBackend` on one device."""

    cascade_ratio: float | None = None  # a shared context in two levels would merge its parts in another order
    min_cascade_context: int | None = None

    def __init__(self, device: torch.device, max_model_len: int) -> None:
        self.device, self.max_model_len, self.parts = device, max_model_len, parts_of(max_model_len)
        self._alike: dict[tuple[AttentionParams, torch.dtype], bool] = {}

    def stored_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Returns one dim for both."""
        dim = -(-max(key_dim, value_dim) // ALIGNED) * ALIGNED
        if dim > MAX_DIM:
            raise ValueError(f"its heads have {dim} dims; attention with `engine.numerics: invariant` takes {MAX_DIM}")
        return dim, dim

    def plan(self, batch: InputBatch) -> AttentionStep:
        return _InvariantStep(self, batch)

    def rotated_together(self, tokens: int) -> int:
        """Returns one number for all steps: bits depend on it."""
        return 8

    def append(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes k and v [T, G, D] to `slots`, i32 [T]."""
        places = slots.long()
        keys[:, 0].index_copy_(0, places, k)
        values[:, 0].index_copy_(0, places, v)

    def graph_bounds(self, layers: Iterable[AttentionParams], rows: int, longest: int) -> tuple[int, ...]:
        """Returns one bound: programs without a part end before they read any key."""
        return (longest,)

    def graph_decoder(self, params: AttentionParams, buffers: GraphBuffers, rows: int, longest: int) -> GraphDecoder:
        """Makes what attends in a captured step of single tokens; see `CapturableBackend`."""
        return _InvariantDecoder(self, params, buffers, rows, longest)

    def graph_sequences(self, params: AttentionParams, tokens: int) -> int:
        """Returns `tokens`: no step has too many sequences."""
        return tokens

    def graph_prefiller(
        self, params: AttentionParams, buffers: GraphBuffers, queries: torch.Tensor, tokens: int
    ) -> GraphDecoder:
        """Makes what attends in a captured step of sequences of any number of tokens; see `CapturableBackend`."""
        return _InvariantPrefiller(self, params, buffers, len(queries) - 1, tokens)

    def named_by_graph(self, tokens: int) -> object:
        """Returns nothing: a graph names the buffers alone."""
        return None

    def _programs(self, params: AttentionParams, tokens: int, tiles: int, longest: int) -> int:
        """Returns how many programs share a context: one where their partial sums would be too large."""
        sums = 4 * self.parts.count(longest) * tokens * params.heads * params.dim
        return max(1, BUSY // max(1, tiles * params.kv_heads)) if sums <= MAX_PARTS_BYTES else 1

    def run(
        self, params: AttentionParams, tiles: Tiles, longest: int, q: torch.Tensor, cache: Any, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends with q [T, H, D]; see `invariant_attention`. `longest`: tokens that a sequence attends to at most."""
        heads = Heads(
            params.scale,
            params.softcap if params.softcap != NO_SOFTCAP else 0.0,
            params.window if params.window != NO_WINDOW else 0,
        )
        count = len(q) if tiles.first is None else len(tiles.first)
        programs = self._programs(params, len(q), count, longest)
        form = WIDE
        if tiles.first is None and self._sum_alike(params, q.dtype, heads):
            form = single_form(count * params.kv_heads)
        keys, values = cache
        return invariant_attention(
            q, keys, values, tiles, heads, parts=self.parts, longest=longest, programs=programs, form=form, out_THD=out
        )

    def _sum_alike(self, params: AttentionParams, dtype: torch.dtype, heads: Heads) -> bool:
        """Tells whether tiles of few rows have been seen to have the bits of wide ones in layers of these parameters.
        The first step, which is not captured, tries them."""
        key = params, dtype
        if key not in self._alike:
            self._alike[key] = tiles_sum_alike(params, dtype, heads, self.parts, self.device)
            if not self._alike[key]:
                log.info("Attention of single tokens has wide tiles: those of few rows round in another way.")
        return self._alike[key]


class _InvariantStep(PagedStep):
    """Attends in one eager step."""

    def __init__(self, backend: InvariantAttention, batch: InputBatch) -> None:
        super().__init__(backend.append, batch.write_slots_i32, backend.rotated_together(batch.num_tokens))
        self._backend, self._batch = backend, batch
        self._longest = int(batch.kv_indptr.diff().max())
        self._tiles: dict[int, Tiles] = {}  # by the tokens of a tile

    def planned_run(self, params: AttentionParams) -> Any:
        size = tokens_of_tile(params.heads, params.kv_heads)
        if size not in self._tiles:
            self._tiles[size] = tiles_of(self._batch, size)
        tiles = self._tiles[size]

        def run(q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
            found = self._backend.run(params, tiles, self._longest, q, cache, out)
            return found if return_lse else out

        return run


class _InvariantDecoder:
    """Implements `GraphDecoder`: each row is a tile."""

    def __init__(
        self, backend: InvariantAttention, params: AttentionParams, buffers: GraphBuffers, rows: int, longest: int
    ) -> None:
        self._backend, self._params, self._longest = backend, params, longest
        self._tiles = Tiles(None, None, None, buffers.indptr[: rows + 1], buffers.indices)
        self.run: Any = self._run
        self.can_replan = True

    def plan(self, params: AttentionParams, sequences: Sequences) -> None:
        """Copies what the rows attend to into the buffers."""
        self._tiles.kv_indptr.copy_(sequences.kv_indptr, non_blocking=True)
        self._tiles.kv_indices[: len(sequences.kv_indices)].copy_(sequences.kv_indices)

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Does nothing: the buffers hold what rows attend to."""

    def _run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        found = self._backend.run(self._params, self._tiles, self._longest, q, cache, out)
        return found if return_lse else out


class _InvariantPrefiller:
    """Implements `GraphDecoder` for sequences of any number of tokens. Tiles that a step does not need are those of one
    more sequence, which is empty."""

    can_replan = False

    def __init__(
        self, backend: InvariantAttention, params: AttentionParams, buffers: GraphBuffers, sequences: int, tokens: int
    ) -> None:
        self._backend, self._params, self._sequences, self._tokens = backend, params, sequences, tokens
        self._size = tokens_of_tile(params.heads, params.kv_heads)
        self._most, ends = sequences + tokens // self._size, sequences + 2
        self._plan = torch.zeros(2 * (self._most + ends), dtype=torch.int32, device=buffers.indptr.device)
        sequence, first, qo_indptr, kv_indptr = torch.split(self._plan, [self._most, self._most, ends, ends])
        self._tiles = Tiles(sequence, first, qo_indptr, kv_indptr, buffers.indices)
        self.run: Any = self._run

    def plan(self, params: AttentionParams, sequences: Sequences) -> None:
        """Copies the tiles, and what they attend to, to where the kernel reads them."""
        queries, attended = (np.append(one.numpy(), one[-1:]) for one in (sequences.qo_indptr, sequences.kv_indptr))
        sequence, first = tiles_between(sequences.qo_indptr.numpy(), self._size)
        missing = self._most - len(first)
        host = [
            np.append(sequence, np.full(missing, self._sequences)),
            np.append(first, np.full(missing, self._tokens)),
        ]
        planned = torch.from_numpy(np.concatenate([*host, queries, attended]).astype(np.int32, copy=False))
        self._plan.copy_(planned.pin_memory() if self._plan.is_cuda else planned, non_blocking=True)
        self._tiles.kv_indices[: len(sequences.kv_indices)].copy_(sequences.kv_indices)

    def replan(self, kv_indptr: torch.Tensor) -> None:
        """Is not called."""
        raise NotImplementedError

    def _run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        longest = self._backend.max_model_len
        found = self._backend.run(self._params, self._tiles, longest, q, cache, out)
        return found if return_lse else out


def tiles_sum_alike(
    params: AttentionParams, dtype: torch.dtype, heads: Heads, parts: Parts, device: torch.device
) -> bool:
    """Returns whether random single tokens, with contexts of many lengths, have the same bits by tiles of all forms.
    Those of few rows take groups of no more heads.

    Args:
        params: The layers' heads.
        dtype: The type of queries, keys and values.
        heads: How the layers attend.
        parts: Where contexts are cut.
        device: Where.
    """
    if params.heads // params.kv_heads > min(form.rows for form in SINGLE.values()):
        return False
    cut = parts.short
    lengths = [*range(1, 2 * BLOCK + 2), cut - 1, cut, cut + 1, 2 * cut, 2 * cut + BLOCK + 1]
    generator = torch.Generator(device).manual_seed(0)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    stored = int(ends[-1])
    keys, values = (
        torch.randn((stored, 1, params.kv_heads, params.dim), generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    q = torch.randn((len(lengths), params.heads, params.dim), generator=generator, device=device).to(dtype)
    tiles = Tiles(None, None, None, ends.to(device), torch.arange(stored, dtype=torch.int32, device=device))

    def by(form: TileForm) -> tuple[torch.Tensor, torch.Tensor]:
        return invariant_attention(q, keys, values, tiles, heads, parts=parts, longest=max(lengths), form=form)

    wide = by(WIDE)
    return all(all(map(torch.equal, wide, by(form))) for form in SINGLE.values())


def tiles_between(starts: Int32s, size: int) -> tuple[Int32s, Int32s]:
    """Returns the sequence of each tile and its first token: a tile holds up to `size` neighbouring tokens of one.

    Args:
        starts: [S + 1] where each sequence begins, and where the last ends.
        size: The tokens of a tile.
    """
    counts = -(-np.diff(starts) // size)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(len(sequence), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return sequence, starts[sequence] + size * within


def tiles_of(batch: InputBatch, size: int) -> Tiles:
    """Returns the tiles of a step."""
    starts = batch.qo_indptr.numpy()
    sequence, first = tiles_between(starts, size)
    device = batch.kv_indices.device
    host = np.concatenate([sequence, first, starts, batch.kv_indptr.numpy()]).astype(np.int32, copy=False)
    moved = torch.from_numpy(host).to(device, non_blocking=True)
    tiles, indptr = len(sequence), len(starts)
    sequence_of, first_of, qo_indptr, kv_indptr = torch.split(moved, [tiles, tiles, indptr, indptr])
    return Tiles(sequence_of, first_of, qo_indptr, kv_indptr, batch.kv_indices)
