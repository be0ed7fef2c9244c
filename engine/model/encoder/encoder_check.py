"""EncoderCheck: refuses an encoder that packed rows would compute otherwise than the library computes each alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.model.compatibility import UnsupportedModel
from engine.model.encoder.packed_rows import EncoderRow
from engine.model.packing_check import EXACT_TOLERANCE, HALF_QUANTILE, HALF_TOLERANCE, LONGEST_CHECK

LENGTHS = (41, 3, 1, 130, 17, 257)  # of the rows: one alone, mixed, and beyond a block of a window


class EncoderCheck:
    """Compares one packed pass with the library's own attention over each row by itself.

    The reference is computed once, when this is made: before the model gets another attention.
    """

    def __init__(self, base: Any, max_model_len: int, segments: int, seed: int = 0) -> None:
        """
        Args:
            base: A base model of transformers with an attention of the library.
            max_model_len: Bounds the checked rows.
            segments: How many segments the model embeds, 0 for none.
            seed: Draws the rows' tokens.
        """
        self._base = base
        window = int(getattr(base.config, "sliding_window", None) or 0)
        most = min(max_model_len, LONGEST_CHECK.get(base.device.type, 1024))
        rng = np.random.default_rng(seed)
        self._rows = [
            _random_row(rng, length, base.config, segments)
            for length in sorted({min(length, most) for length in (*LENGTHS, 2 * window + 3)}, key=lambda one: one % 7)
        ]
        with torch.no_grad():
            self._reference = [self._alone(row, segments) for row in self._rows]

    def run(self, hidden: Callable[[Sequence[EncoderRow]], torch.Tensor]) -> float:
        """Runs the check; returns the largest difference, as a part of the largest |hidden state|.

        Args:
            hidden: Gives the hidden states [T, H] of packed rows.

        Raises:
            UnsupportedModel: The difference is too large.
        """
        got, wanted = hidden(self._rows).float(), torch.cat(self._reference).float()
        exact = self._base.dtype == torch.float32
        difference = (got - wanted).abs().amax(1) / wanted.abs().amax()
        every = exact or bool(difference.isnan().any())
        rows = torch.split(difference, [len(row.ids) for row in self._rows])  # most tokens are of long ones
        worst = float(torch.stack([row.max() if every else row.quantile(HALF_QUANTILE) for row in rows]).max())
        allowed = EXACT_TOLERANCE if exact else HALF_TOLERANCE
        if not worst <= allowed:  # NaN is neither
            raise UnsupportedModel(
                str(self._base.config.model_type),
                f"packed rows change its hidden states by {worst:.2g} of the largest one (allowed: {allowed:.2g}): "
                "rows would see each other, or its attention has a rule that this engine does not know",
            )
        return worst

    def _alone(self, row: EncoderRow, segments: int) -> torch.Tensor:
        """Returns the hidden states [n, H] of one row, by the library, which chooses the positions."""
        given = {"input_ids": _tensor(row.ids, self._base.device)}
        if segments and row.token_types is not None:
            given["token_type_ids"] = _tensor(row.token_types, self._base.device)
        mask = torch.ones_like(given["input_ids"])
        found: torch.Tensor = self._base(**given, attention_mask=mask).last_hidden_state[0]
        return found


def _random_row(rng: np.random.Generator, length: int, config: Any, segments: int) -> EncoderRow:
    """Draws a row with several segments, and with the padding token inside, which some models do not count."""
    ids = rng.integers(0, config.vocab_size, length).astype(np.int32)
    if config.pad_token_id is not None and length > 2:
        ids[length // 2] = config.pad_token_id
    types = np.sort(rng.integers(0, max(1, segments), length)).astype(np.int32)
    return EncoderRow(ids, types)


def _tensor(values: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).long().to(device)[None]
