"""Lays out the words of a slot: one row of the table that the host writes, `DeviceState` copies, and kernels read.

Shape legend: S slots, W = Word.SLOT_WORDS.
"""

from enum import IntEnum
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import INVALID_TOKEN, MAX_BAD_WORD_TOKENS, MAX_LOGPROB_TOKEN_IDS

# Words of a bad word in its extent: its length, then places for its ids, which take the last ones.
BAD_WORD_WORDS: Final = 1 + MAX_BAD_WORD_TOKENS

_Number = TypeVar("_Number", bound=np.generic)


class Word(IntEnum):
    """Names the places in a slot's row of i32 words. Numbers are stored as the bits of a float32."""

    SEED_LOW = 0
    SEED_HIGH = 1
    BRANCH = 2
    POSITION = 3  # advances on the device
    TEMPERATURE = 4  # 0 = greedy
    TOP_K = 5  # 0 = off
    TOP_P = 6
    MIN_P = 7
    FLAGS = 8  # SlotFlag
    REPETITION = 9
    FREQUENCY = 10
    PRESENCE = 11
    MIN_TOKENS = 12
    OVERLAY_START = 13
    OVERLAY_LEN = 14  # advances on the device
    OVERLAY_CAP = 15
    N_TOP = 16
    N_CHOSEN = 17
    MASK_ROW = 18  # -1 = none
    STOPS_START = 19  # in the array of entries, as OVERLAY_START and WORDS_START are
    N_STOPS = 20
    WORDS_START = 21  # BAD_WORD_WORDS each
    N_WORDS = 22
    LOG_MIN_P = 23  # ln(min_p), -inf when off
    LAST = 24  # 16 words: the last tokens, the newest last; advances on the device
    CHOSEN = 40  # 128 words
    SLOT_WORDS = 168


class SlotTable:
    """Holds the host's table i32 [S, W] and its columns by name: views, so that what is set there reaches a device."""

    def __init__(self, num_slots: int) -> None:
        """Makes every slot a free one: greedy, no feature."""
        self.table = np.zeros((num_slots, Word.SLOT_WORDS), np.int32)
        # The low word comes first, which is how a little-endian host keeps 64 bits.
        self.seed = self.table[:, Word.SEED_LOW : Word.SEED_HIGH + 1].view(np.uint64)[:, 0]
        self.branch = self._column(Word.BRANCH, np.int32)
        self.position = self._column(Word.POSITION, np.int32)
        self.temperature = self._column(Word.TEMPERATURE, np.float32)
        self.top_k = self._column(Word.TOP_K, np.int32)
        self.top_p = self._column(Word.TOP_P, np.float32)
        self.min_p = self._column(Word.MIN_P, np.float32)
        self.log_min_p = self._column(Word.LOG_MIN_P, np.float32)
        self.flags = self._column(Word.FLAGS, np.uint32)
        self.repetition = self._column(Word.REPETITION, np.float32)
        self.frequency = self._column(Word.FREQUENCY, np.float32)
        self.presence = self._column(Word.PRESENCE, np.float32)
        self.min_tokens = self._column(Word.MIN_TOKENS, np.int32)
        self.overlay_start = self._column(Word.OVERLAY_START, np.int32)
        self.overlay_len = self._column(Word.OVERLAY_LEN, np.int32)
        self.overlay_cap = self._column(Word.OVERLAY_CAP, np.int32)
        self.n_top: npt.NDArray[Any] = self._column(Word.N_TOP, np.int32)
        self.n_chosen = self._column(Word.N_CHOSEN, np.int32)
        self.mask_row = self._column(Word.MASK_ROW, np.int32)
        self.stops_start = self._column(Word.STOPS_START, np.int32)
        self.n_stops = self._column(Word.N_STOPS, np.int32)
        self.words_start = self._column(Word.WORDS_START, np.int32)
        self.n_words = self._column(Word.N_WORDS, np.int32)
        self.last_tokens = self.table[:, Word.LAST : Word.LAST + MAX_BAD_WORD_TOKENS]  # the newest is last
        self.chosen_ids = self.table[:, Word.CHOSEN : Word.CHOSEN + MAX_LOGPROB_TOKEN_IDS]
        self.top_p[:] = self.repetition[:] = 1
        self.log_min_p[:] = -np.inf
        self.mask_row[:] = -1
        self.last_tokens[:] = self.chosen_ids[:] = INVALID_TOKEN

    def _column(self, word: Word, kind: type[_Number]) -> npt.NDArray[_Number]:
        return self.table[:, word].view(kind)
