"""AloneImage: the state of rows that have no slot, for log-probabilities of given logits."""

from functools import lru_cache
from typing import NamedTuple

import torch

from gpu_sampler.state import SlotFlag
from gpu_sampler.words import Word

ALONE_ROWS = 4096  # that find their slots ready


class AloneImage(NamedTuple):
    """State for rows that have none: as stored rows of one slot at T = 1 that report and draw nothing."""

    table: torch.Tensor  # i32 [1, W]
    masks: torch.Tensor  # i32 [1, 1], not read
    side_ids: torch.Tensor  # [1], not read, as the others
    side_raw: torch.Tensor
    side_processed: torch.Tensor
    slots: torch.Tensor  # i32 [ALONE_ROWS], zeros: each row's slot

    @classmethod
    @lru_cache(maxsize=16)
    def on(cls, device: torch.device) -> "AloneImage":
        """The one of a device, which nobody writes to. Made at first use, which a captured graph must not be."""
        table = torch.zeros(1, int(Word.SLOT_WORDS), dtype=torch.int32)
        numbers = table.view(torch.float32)
        numbers[0, [Word.TEMPERATURE, Word.TOP_P]] = 1.0
        numbers[0, Word.LOG_MIN_P] = -torch.inf
        table[0, Word.FLAGS] = int(SlotFlag.WANTS_LOGPROBS)
        table[0, Word.MASK_ROW] = -1
        floats = torch.zeros(1, device=device)
        ints = torch.zeros(1, dtype=torch.int32, device=device)
        slots = torch.zeros(ALONE_ROWS, dtype=torch.int32, device=device)
        return cls(table.to(device, non_blocking=True), ints[:, None], ints, floats, floats, slots)
