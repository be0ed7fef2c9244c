"""EncoderModel: runs an encoder of transformers over packed rows, and its sequence head if it has one.

Shape legend: R rows, T tokens of all rows, H hidden size, K labels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.model.encoder.attention import BIDIRECTIONAL
from engine.model.encoder.encoder_check import EncoderCheck
from engine.model.encoder.families import family_of, head_pooling, longest_row, segments_of
from engine.model.encoder.packed_rows import EncoderRow, PackedRows, pack_rows
from engine.model.heads.row_pooling import Pooling, pool_rows
from engine.model.optimize.onednn_linear import use_onednn
from engine.requests import Int32s
from gpu_sampler.startup_progress import StartupProgress, silent, timed


class EncodedRows(NamedTuple):
    """Holds what one pass gives."""

    hidden: torch.Tensor  # [T, H] last hidden states, in the model's dtype
    indptr: torch.Tensor  # i32 [R + 1], where each row starts, and T


class EncoderModel:
    """Runs rows of mixed lengths in one pass: no padding, no KV pool, and no row sees another.

    Making one compares packed rows with the library's own computation of each row by itself.
    """

    def __init__(
        self,
        module: Any,
        *,
        max_model_len: int | None = None,
        seed: int = 0,
        onednn_linear: bool = True,
        progress: StartupProgress = silent,
    ) -> None:
        """
        Args:
            module: A base model or a `*ForSequenceClassification` of transformers, on its device.
            max_model_len: Tokens of a row; None: as many as the model has positions for.
            seed: Draws the rows of the check.
            onednn_linear: Whether linear layers in float32 on a CPU are computed by oneDNN.
            progress: Receives the stages.

        Raises:
            UnsupportedModel: The model would be computed wrong, or not at all.
            ValueError: `max_model_len` is more than the model has positions for.
        """
        config = module.config
        self._family = family_of(config)
        self.max_model_len = longest_row(config, max_model_len)
        self.device: torch.device = module.device
        self.vocab_size = int(config.vocab_size)
        self.segments = segments_of(config)
        self._padding_id: int | None = config.pad_token_id if self._family.padded_positions else None
        self._base: Any = module.base_model.eval().requires_grad_(False)
        self.dtype: torch.dtype = self._base.dtype
        self._head, self._head_pooling = _sequence_head(module, self._family.head)
        if hasattr(self._base, "pooler"):
            self._base.pooler = None  # only a head reads it, which has it now
        check = EncoderCheck(self._base, self.max_model_len, self.segments, seed)
        if onednn_linear:
            use_onednn(self._base)
        if self._family.has_interface:
            self._base.set_attn_implementation(BIDIRECTIONAL)
        with timed("packing check", progress):
            check.run(lambda rows: self.encode(rows).hidden)

    @property
    def has_head(self) -> bool:
        """Whether the model has a sequence head."""
        return self._head is not None

    @torch.no_grad()
    def encode(self, rows: Sequence[EncoderRow]) -> EncodedRows:
        """Runs one pass.

        Raises:
            ValueError: There is no row, or one is empty, too long, or has an id or a segment that the model lacks.
        """
        self._check_rows(rows)
        packed: PackedRows = pack_rows(rows, self.device, self._padding_id)
        return EncodedRows(self._family.hidden(self._base, packed), packed.indptr)

    @torch.no_grad()
    def classify(self, rows: Sequence[EncoderRow]) -> torch.Tensor:
        """Returns the sequence head's logits, f32 [R, K], before any activation.

        Raises:
            RuntimeError: The model has no sequence head.
            ValueError: `encode` would raise it.
        """
        if self._head is None:
            raise RuntimeError(f"This {self._base.config.model_type} model has no sequence head.")
        logits: torch.Tensor = self._head(self.embed(rows, self._head_pooling))
        return logits

    @torch.no_grad()
    def embed(self, rows: Sequence[EncoderRow], pooling: Pooling) -> torch.Tensor:
        """Returns one vector for each row, f32 [R, H], not normalised.

        Raises:
            ValueError: `encode` would raise it.
        """
        return pool_rows(*self.encode(rows), pooling)

    def _check_rows(self, rows: Sequence[EncoderRow]) -> None:
        if not rows:
            raise ValueError("`rows` must hold at least 1 row. Given: 0.")
        for index, row in enumerate(rows):
            if not 1 <= len(row.ids) <= self.max_model_len:
                raise ValueError(
                    f"`rows[{index}].ids` must hold 1 to {self.max_model_len} tokens. Given: {len(row.ids)}."
                )
            if row.token_types is not None and len(row.token_types) != len(row.ids):
                raise ValueError(
                    f"`rows[{index}].token_types` must have one entry for each of {len(row.ids)} ids. "
                    f"Given: {len(row.token_types)}."
                )
        _check_range("ids", [row.ids for row in rows], self.vocab_size)
        _check_range("token_types", [row.token_types for row in rows], max(1, self.segments))


def _check_range(name: str, columns: Sequence[Int32s | None], bound: int) -> None:
    """Checks the values of all rows together, and looks for the row only where one is wrong."""
    given = [column for column in columns if column is not None]
    if not given or _in_range(np.concatenate(given), bound):
        return
    for index, column in enumerate(columns):
        if column is not None and not _in_range(column, bound):
            low, high = int(column.min()), int(column.max())
            raise ValueError(f"`rows[{index}].{name}` must be in [0, {bound - 1}]. Given: {low if low < 0 else high}.")


def _in_range(values: Int32s, bound: int) -> bool:
    return bool(values.min() >= 0 and values.max() < bound)


def _sequence_head(module: Any, build: Any) -> tuple[nn.Module | None, Pooling]:
    """Returns the layers of the sequence head in float32, and what they read."""
    if module is module.base_model:
        return None, Pooling.CLS
    head: nn.Module = build(module).float().eval().requires_grad_(False)
    return head, head_pooling(module.config)
