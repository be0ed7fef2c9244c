"""SamplingState: what the sampler remembers of each running request, as arrays indexed by slot.

The arrays are the host's mirror: the truth for everything the host sets. On the CPU they are also what the sampler
reads, so `apply` has nothing to bring anywhere; a device sampler uploads the dirty slots that `apply` names.
Slot 0 belongs to no request: padding rows name it. Memory is by slot and by overlay entry, never [slots, V].
Shape legend: S slots, R rows, E overlay entries, W bad words.
"""

from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.arena import Extents, MaskArena
from gpu_sampler.arena import OverlayFull as OverlayFull
from gpu_sampler.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    ParamError,
    SamplingLimits,
    SamplingParams,
)
from gpu_sampler.reference.count_tokens import OverlayArrays, count_tokens
from gpu_sampler.reference.patch_rows import COUNT_MASK, EARLY_BIT, PROMPT_BIT, RowOverlay

LEAST_TEMPERATURE = 1e-6
PADDING_SLOT = 0
_NO_MASK = -1
_NO_TOKEN = -2  # in the ring, where the row has no token yet; differs from every id and from the wildcard
_WILDCARD = -1

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


class SlotFlag(IntFlag):
    GREEDY = 1
    EXPLICIT_SEED = 2
    WANTS_LOGPROBS = 4
    HAS_MASK = 8
    HAS_OVERLAY = 16
    HAS_BAD_WORDS = 32
    COUNTS_TOKENS = 64  # penalties: what the row produces enters its overlay
    ACTIVE = 128


class Rows(NamedTuple):
    """Parameters of R rows, gathered from their slots."""

    seeds_R: npt.NDArray[np.uint64]
    positions_R: Int32s
    branches_R: Int32s
    temperatures_R: Float32s  # 0 on greedy rows
    top_k_R: Int32s  # 0 = off
    top_p_R: Float32s  # 1 = off
    min_p_R: Float32s  # 0 = off

    def take(self, rows: npt.NDArray[np.integer]) -> "Rows":
        return Rows(*(field[rows] for field in self))


class _BadWords(NamedTuple):
    begins_W: Int32s  # [W, 15] all but the last token, aligned right, wildcards before it
    ends_W: Int32s  # [W] the token banned after that


class SamplingState:
    """Verbs: `admit` and `stage` write the mirror and mark the slot dirty, `apply` makes the writes visible to the next
    sample, `release` gives a slot back. `advance` moves rows on by the tokens they produced."""

    def __init__(self, num_slots: int, vocab_size: int, overlay_entries: int) -> None:
        if num_slots < 1 or vocab_size < 1 or overlay_entries < 0:
            raise ValueError(
                f"got {num_slots} slots, {vocab_size} tokens, {overlay_entries} entries, expected >= 1, 1, 0"
            )
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.overlay_entries = overlay_entries
        self._allocate_slots(num_slots)
        self._extents = Extents(overlay_entries)
        self._overlay = OverlayArrays(
            ids=np.full(overlay_entries, -1, np.int32),
            counts=np.zeros(overlay_entries, np.int32),
            bias=np.zeros(overlay_entries, np.float32),
            start=np.zeros(num_slots, np.int64),
            length=np.zeros(num_slots, np.int32),
            capacity=np.zeros(num_slots, np.int32),
        )
        self._masks = MaskArena(vocab_size)
        self._bad_words: dict[int, _BadWords] = {}
        self._dirty: set[int] = set()

    def _allocate_slots(self, slots: int) -> None:
        self.seed = np.zeros(slots, np.uint64)
        self.branch = np.zeros(slots, np.int32)
        self.position = np.zeros(slots, np.int32)
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.flags = np.zeros(slots, np.uint32)
        self.flags[PADDING_SLOT] = int(SlotFlag.GREEDY)
        self.repetition = np.ones(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.min_tokens = np.zeros(slots, np.int32)
        self.n_top = np.zeros(slots, np.int16)
        self.n_chosen = np.zeros(slots, np.int16)
        self.chosen_ids = np.full((slots, MAX_LOGPROB_TOKEN_IDS), -1, np.int32)
        self.mask_row = np.full(slots, _NO_MASK, np.int32)
        self.ring = np.full((slots, MAX_BAD_WORD_TOKENS), _NO_TOKEN, np.int32)

    @property
    def overlay(self) -> OverlayArrays:
        return self._overlay

    @property
    def overlay_free(self) -> int:
        return self._extents.free

    @property
    def masks_used(self) -> int:
        return self._masks.used

    def active(self, slots: Int64s) -> npt.NDArray[np.bool_]:
        return self.has(slots, SlotFlag.ACTIVE)

    def has(self, slots: Int64s, flag: SlotFlag) -> npt.NDArray[np.bool_]:
        """bool [R]"""
        return (self.flags[slots] & np.uint32(flag)) != 0

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: npt.NDArray[np.integer] | Sequence[int],
        *,
        seed: int,
        branch: int = 0,
        output_ids: npt.NDArray[np.integer] | Sequence[int] = (),
        limits: SamplingLimits = SamplingLimits(),
    ) -> None:
        """Sets every field of a free slot; `output_ids` are tokens that the row already has. Raises ParamError for a
        bad parameter or one that no empty arena could serve, OverlayFull where there is no room now; neither changes
        anything. ValueError: the slot is taken or there is no such slot."""
        self._check_free(slot)
        params.validate(self.vocab_size, limits)
        if isinstance(branch, bool) or not 0 <= branch < 2**31:
            raise ParamError("branch", branch, "in [0, 2^31)")
        prompt = _ids("prompt", prompt_ids, self.vocab_size)
        outputs = _ids("output", output_ids, self.vocab_size)
        entries = _entries(params, prompt, outputs)
        capacity = _capacity(params, len(entries), len(outputs), self.vocab_size)
        if capacity > self.overlay_entries:
            raise ParamError(
                "max_tokens",
                f"a need of {capacity} overlay entries",
                f"such that penalties, bias and bans need at most {self.overlay_entries} overlay entries",
            )
        start = self._extents.take(capacity)
        self._set_numbers(slot, params, seed, branch, len(outputs))
        self._set_overlay(slot, start, capacity, entries)
        self._set_reports(slot, params)
        if params.allowed_token_ids is not None:
            self.mask_row[slot] = self._masks.take(params.allowed_token_ids)
        self._set_bad_words(slot, params, outputs)
        self.flags[slot] = int(_flags(params, capacity))
        self._dirty.add(slot)

    def stage(self, slot: int, **changes: float) -> None:
        """Changes numbers of an admitted row: `position`, `branch`, `seed`, `temperature`, `top_k`, `top_p`, `min_p`,
        `min_tokens`. The caller has validated them."""
        if not 0 < slot < self.num_slots or not self.flags[slot] & np.uint32(SlotFlag.ACTIVE):
            raise ValueError(f"got slot {slot}, expected an admitted one")
        known = {"position", "branch", "seed", "temperature", "top_k", "top_p", "min_p", "min_tokens"}
        if unknown := set(changes) - known:
            raise ValueError(f"got {sorted(unknown)}, expected some of {sorted(known)}")
        for name, value in changes.items():
            getattr(self, name)[slot] = value
        greedy = np.uint32(SlotFlag.GREEDY)
        self.flags[slot] = self.flags[slot] | greedy if self.temperature[slot] == 0 else self.flags[slot] & ~greedy
        self._dirty.add(slot)

    def apply(self) -> Int64s:
        """Makes what was staged visible. Returns the slots that changed since the last call, in order, for whoever
        keeps a copy of them; with nothing dirty it does nothing."""
        slots = np.array(sorted(self._dirty), np.int64)
        self._dirty.clear()
        return slots

    def release(self, slot: int) -> None:
        """Frees the slot and what it held of the arenas. Host only: the next `admit` resets every field."""
        if not 0 < slot < self.num_slots or not self.flags[slot] & np.uint32(SlotFlag.ACTIVE):
            raise ValueError(f"got slot {slot}, expected an admitted one")
        self._extents.give(int(self._overlay.start[slot]), int(self._overlay.capacity[slot]))
        self._overlay.capacity[slot] = self._overlay.length[slot] = 0
        if self.mask_row[slot] != _NO_MASK:
            self._masks.give(int(self.mask_row[slot]))
            self.mask_row[slot] = _NO_MASK
        self._bad_words.pop(slot, None)
        self.flags[slot] = 0
        self._dirty.discard(slot)

    def rows(self, slots: Int64s) -> Rows:
        return Rows(
            self.seed[slots],
            self.position[slots],
            self.branch[slots],
            self.temperature[slots],
            self.top_k[slots],
            self.top_p[slots],
            self.min_p[slots],
        )

    def row_overlay(self, slot: int) -> RowOverlay:
        """Steps 1 and 2 of the row's next token."""
        start, length = int(self._overlay.start[slot]), int(self._overlay.length[slot])
        extent = slice(start, start + length)
        mask_row = int(self.mask_row[slot])
        return RowOverlay(
            self._overlay.ids[extent],
            self._overlay.counts[extent],
            self._overlay.bias[extent],
            float(self.repetition[slot]),
            float(self.frequency[slot]),
            float(self.presence[slot]),
            bool(self.position[slot] < self.min_tokens[slot]),
            self.banned_words(slot),
            None if mask_row == _NO_MASK else self._masks.allowed(mask_row),
        )

    def banned_words(self, slot: int) -> Int32s:
        """Last tokens of the bad words whose other tokens are the row's latest outputs."""
        words = self._bad_words.get(slot)
        if words is None:
            return np.empty(0, np.int32)
        tail = np.roll(self.ring[slot], -int(self.position[slot]) % MAX_BAD_WORD_TOKENS)[1:]
        matches = ((words.begins_W == _WILDCARD) | (words.begins_W == tail)).all(axis=1)
        return words.ends_W[matches]

    def advance(self, slots: Int64s, tokens: npt.NDArray[np.integer]) -> None:
        """Each row has produced its token (negative: none): counts it and moves the row one position on. A padding row
        does not move."""
        real = slots != PADDING_SLOT
        slots, tokens = slots[real], tokens[real]
        counting = self.has(slots, SlotFlag.COUNTS_TOKENS)
        count_tokens(self._overlay, slots[counting], tokens[counting])
        self.ring[slots, self.position[slots] % MAX_BAD_WORD_TOKENS] = np.where(tokens < 0, _NO_TOKEN, tokens)
        self.position[slots] += 1

    def _check_free(self, slot: int) -> None:
        if not 0 < slot < self.num_slots:
            raise ValueError(f"got slot {slot}, expected 1 to {self.num_slots - 1}")
        if self.flags[slot] & np.uint32(SlotFlag.ACTIVE):
            raise ValueError(f"got slot {slot}, expected one that is free")

    def _set_numbers(self, slot: int, params: SamplingParams, seed: int, branch: int, position: int) -> None:
        self.seed[slot] = np.uint64(seed % 2**64)
        self.branch[slot] = branch
        self.position[slot] = position
        self.temperature[slot] = max(params.temperature, LEAST_TEMPERATURE) if params.temperature > 0 else 0.0
        self.top_k[slot] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[slot] = max(params.top_p, float(np.finfo(np.float32).tiny))
        self.min_p[slot] = params.min_p
        self.repetition[slot] = max(params.repetition_penalty, float(np.finfo(np.float32).tiny))
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.min_tokens[slot] = params.min_tokens

    def _set_overlay(self, slot: int, start: int, capacity: int, entries: dict[int, tuple[int, float]]) -> None:
        overlay, end = self._overlay, start + len(entries)
        overlay.start[slot], overlay.length[slot], overlay.capacity[slot] = start, len(entries), capacity
        overlay.ids[start:end] = list(entries)
        overlay.counts[start:end] = [bits for bits, _ in entries.values()]
        overlay.bias[start:end] = [bias for _, bias in entries.values()]

    def _set_reports(self, slot: int, params: SamplingParams) -> None:
        chosen = params.logprob_token_ids or ()
        self.n_top[slot] = params.logprobs or 0
        self.n_chosen[slot] = len(chosen)
        self.chosen_ids[slot] = -1
        self.chosen_ids[slot, : len(chosen)] = chosen

    def _set_bad_words(self, slot: int, params: SamplingParams, outputs: Int32s) -> None:
        self.ring[slot] = _NO_TOKEN
        tail = outputs[-MAX_BAD_WORD_TOKENS:]
        at = np.arange(len(outputs) - len(tail), len(outputs)) % MAX_BAD_WORD_TOKENS
        self.ring[slot, at] = tail
        if not params.bad_words_ids:
            return
        begins = np.full((len(params.bad_words_ids), MAX_BAD_WORD_TOKENS - 1), _WILDCARD, np.int32)
        for row, word in zip(begins, params.bad_words_ids, strict=True):
            if len(word) > 1:
                row[-(len(word) - 1) :] = word[:-1]
        self._bad_words[slot] = _BadWords(begins, np.array([word[-1] for word in params.bad_words_ids], np.int32))


def _penalised(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


def _entries(params: SamplingParams, prompt: Int32s, outputs: Int32s) -> dict[int, tuple[int, float]]:
    """id -> (count and bits, bias) of what the row starts with."""
    bits: dict[int, int] = {}
    bias = dict(params.logit_bias)
    if params.repetition_penalty != 1:
        bits = dict.fromkeys(np.unique(prompt).tolist(), PROMPT_BIT)
    if _penalised(params):
        for token, count in zip(*(part.tolist() for part in np.unique(outputs, return_counts=True)), strict=True):
            bits[token] = bits.get(token, 0) + min(count, COUNT_MASK)
    if params.min_tokens > 0:
        for token in params.stop_token_ids:
            bits[token] = bits.get(token, 0) | EARLY_BIT
    return {token: (bits.get(token, 0), bias.get(token, 0.0)) for token in bits | bias}


def _capacity(params: SamplingParams, entries: int, produced: int, vocab_size: int) -> int:
    """Entries that the row can ever have: what it starts with and, under penalties, one for each token to come. A
    resumed row never needs more than it did at first."""
    return min(entries + max(params.max_tokens - produced, 0), vocab_size) if _penalised(params) else entries


def _flags(params: SamplingParams, capacity: int) -> SlotFlag:
    masked, words = params.allowed_token_ids is not None, bool(params.bad_words_ids)
    wanted = {
        SlotFlag.ACTIVE: True,
        SlotFlag.GREEDY: params.temperature == 0,
        SlotFlag.EXPLICIT_SEED: params.seed is not None,
        SlotFlag.WANTS_LOGPROBS: params.logprobs is not None or params.logprob_token_ids is not None,
        SlotFlag.HAS_MASK: masked,
        SlotFlag.HAS_BAD_WORDS: words,
        SlotFlag.HAS_OVERLAY: capacity > 0 or masked or words,
        SlotFlag.COUNTS_TOKENS: _penalised(params),
    }
    flags = SlotFlag(0)
    for flag, on in wanted.items():
        flags |= flag if on else SlotFlag(0)
    return flags


def _ids(field: str, ids: npt.NDArray[np.integer] | Sequence[int], vocab_size: int) -> Int32s:
    array = np.asarray(ids) if len(ids) else np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ParamError(field, f"an array of {array.dtype}, {array.ndim} axes", "a list of token ids")
    if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise ParamError(field, int(wrong), f"made of token ids in [0, {vocab_size})")
    return array.astype(np.int32)
