"""The words of a slot on the device: a row of the table that `DeviceImage` keeps and every kernel reads."""

from enum import IntEnum


class Word(IntEnum):
    """Places in a slot's row of i32 words. Numbers are stored as the bits of a float32."""

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
    STOPS_START = 19
    N_STOPS = 20
    WORDS_START = 21
    N_WORDS = 22
    LOG_MIN_P = 23  # ln(min_p), -inf when off
    LAST = 24  # 16 words: the last tokens, the newest last; advances on the device
    CHOSEN = 40  # 128 words
    SLOT_WORDS = 168
