"""SamplingState: what the sampler remembers of each request between steps, as arrays indexed by slot.

The host's arrays are the truth for what the host sets; `position`, overlay counts and the ring of last tokens advance
with every token. On the CPU they are all there is; on a device they are the mirror that `apply` copies from.

Shape legend: S slots, E overlay entries of all slots together, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.arena import Extent, ExtentAllocator
from gpu_sampler.params import (
    INVALID_TOKEN,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    ParamError,
    SamplingLimits,
    SamplingParams,
)

LEAST_TEMPERATURE: Final = 1e-6  # below it 1 / T would not be finite in float32
IN_PROMPT: Final = 1 << 30  # of an entry's count: the prompt holds the token
COUNT: Final = IN_PROMPT - 1
_MASK64: Final = (1 << 64) - 1
_SMALLEST: Final = float(np.finfo(np.float32).tiny)  # of repetition: it divides
_STAGED: Final = frozenset({"temperature", "top_k", "top_p", "min_p"})
_NO_SLOT: Final = Extent(0, 0)
_NO_IDS: Final = np.empty(0, np.int32)

Ids = npt.NDArray[np.int32]


class SlotFlag(IntFlag):
    GREEDY = 1
    EXPLICIT_SEED = 2
    WANTS_LOGPROBS = 4
    HAS_MASK = 8
    HAS_OVERLAY = 16
    COUNTS = 32  # its penalties depend on what was generated
    HAS_BAD_WORDS = 64  # of more than one token


class OverlayFull(Exception):
    """The arena has no room for this request now: it waits until others leave."""


class Overlay(NamedTuple):
    """Views of one slot's entries, each token at most once, in no order."""

    ids: Ids  # [n]
    counts: Ids  # [n], times generated, and IN_PROMPT
    bias: npt.NDArray[np.float32]  # [n], -inf for a ban


class SamplingState:
    """Verbs, the same for every feature: `admit`, `stage`, `apply`, `release`. Slot 0 is padding: greedy, no feature.

    Memory is O(slots + overlay_entries), never slots x vocabulary; allow masks (V / 8 bytes) exist only while used.
    """

    def __init__(
        self, *, num_slots: int, vocab_size: int, overlay_entries: int = 1 << 20, limits: SamplingLimits | None = None
    ) -> None:
        if num_slots < 1 or vocab_size < 1:
            raise ValueError(f"`num_slots` and `vocab_size` must be >= 1. Given: {num_slots}, {vocab_size}.")
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self.limits = limits or SamplingLimits()
        self.seed = np.zeros(num_slots, np.uint64)
        self.branch = np.zeros(num_slots, np.int32)
        self.position = np.zeros(num_slots, np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.flags = np.full(num_slots, int(SlotFlag.GREEDY), np.uint32)
        self.repetition = np.ones(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.overlay_start = np.zeros(num_slots, np.int64)
        self.overlay_len = np.zeros(num_slots, np.int32)
        self.overlay_cap = np.zeros(num_slots, np.int32)
        self.n_top = np.zeros(num_slots, np.int16)
        self.n_chosen = np.zeros(num_slots, np.int16)
        self.chosen_ids = np.full((num_slots, MAX_LOGPROB_TOKEN_IDS), INVALID_TOKEN, np.int32)
        self.last_tokens = np.full((num_slots, MAX_BAD_WORD_TOKENS), INVALID_TOKEN, np.int32)  # the newest is last
        self.entry_ids = np.full(overlay_entries, INVALID_TOKEN, np.int32)
        self.entry_counts = np.zeros(overlay_entries, np.int32)
        self.entry_bias = np.zeros(overlay_entries, np.float32)
        self._arena = ExtentAllocator(overlay_entries)
        self._extents: dict[int, Extent] = {}
        self.masks: dict[int, npt.NDArray[np.uint8]] = {}  # by slot: packed bits, 1 = allowed
        self.stop_ids: dict[int, Ids] = {}  # by slot: banned until min_tokens
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}  # by slot: those of two tokens and more
        self.dirty: set[int] = set()

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int] | Ids,
        *,
        seed: int,
        branch: int = 0,
        output_ids: Sequence[int] | Ids = (),
    ) -> None:
        """Sets every field of `slot`. With `output_ids` the row goes on where it was: position, counts, last tokens.

        Raises ParamError for a value out of range or a request that could never fit, OverlayFull for one that does not
        fit now; the slot is then as before.
        """
        self._check_slot(slot)
        params.validate(self.vocab_size, self.limits)
        prompt, output = self._known(prompt_ids), self._known(output_ids)
        entries = _first_entries(params, prompt)
        extent = self._reserve(params, len(entries[0]), len(output))
        self.release(slot)
        self._extents[slot] = extent
        self._set_numbers(slot, params, seed, branch, len(output_ids))
        self._set_lists(slot, params)
        self._set_overlay(slot, extent, entries)
        self._replay(slot, output)
        self.dirty.add(slot)

    def stage(self, slot: int, **changes: Any) -> None:
        """Changes single numbers of a slot between steps, e.g. `stage(3, temperature=0.5)`; all of them or none.

        Raises ParamError for a value out of range.
        """
        self._check_slot(slot)
        if unknown := sorted(changes.keys() - _STAGED):
            raise ValueError(f"`{unknown[0]}` cannot be staged.")
        params = replace(SamplingParams(), **changes)
        params.validate(self.vocab_size, self.limits)
        for name in changes:
            getattr(self, name)[slot] = self._stored(name, params)
        if "temperature" in changes:
            greedy = np.uint32(SlotFlag.GREEDY)
            self.flags[slot] = self.flags[slot] & ~greedy | (greedy if params.temperature == 0 else np.uint32(0))
        self.dirty.add(slot)

    def apply(self) -> None:
        """Brings dirty slots to the device. On the CPU the host's arrays are the state, so nothing moves."""
        self.dirty.clear()

    def release(self, slot: int) -> None:
        """Host only; the next `admit` sets every field. Releasing a free slot does nothing."""
        self._check_slot(slot)
        self._arena.give(self._extents.pop(slot, _NO_SLOT))
        self.overlay_len[slot] = self.overlay_cap[slot] = 0
        self.flags[slot] = int(SlotFlag.GREEDY)
        self.temperature[slot] = 0
        for by_slot in (self.masks, self.stop_ids, self.bad_words):
            by_slot.pop(slot, None)

    def overlay(self, slot: int) -> Overlay:
        start, length = int(self.overlay_start[slot]), int(self.overlay_len[slot])
        at = slice(start, start + length)
        return Overlay(self.entry_ids[at], self.entry_counts[at], self.entry_bias[at])

    def allowed(self, slot: int) -> npt.NDArray[np.bool_]:
        """bool [V]."""
        return np.unpackbits(self.masks[slot], count=self.vocab_size, bitorder="little").astype(np.bool_)

    @property
    def free_entries(self) -> int:
        return self._arena.free

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot < self.num_slots:
            raise ValueError(f"`slot` must be in [1, {self.num_slots}); 0 is padding. Given: {slot}.")

    def _stored(self, name: str, params: SamplingParams) -> float:
        """A staged number as the arrays keep it."""
        if name == "temperature":
            return 0.0 if params.temperature == 0 else max(params.temperature, LEAST_TEMPERATURE)
        if name == "top_k":
            return min(max(params.top_k, 0), self.vocab_size)
        return float(getattr(params, name))

    def _known(self, ids: Sequence[int] | Ids) -> Ids:
        """The ids that have a logit, as i32: no other can be drawn or penalised. Refusing them is the engine's part."""
        array = np.asarray(ids, np.int64).reshape(-1)
        return array[(array >= 0) & (array < self.vocab_size)].astype(np.int32)

    def _reserve(self, params: SamplingParams, entries: int, emitted: int) -> Extent:
        counted = max(params.max_tokens, emitted) if _counts(params) else 0
        needed = min(entries + counted, self.vocab_size)
        if needed > self._arena.size:
            raise ParamError(
                "max_tokens", f"{needed} overlay entries", f"such that at most {self._arena.size} are needed"
            )
        extent = self._arena.take(needed)
        if extent is None:
            raise OverlayFull(f"{needed} overlay entries are needed, {self._arena.free} are free")
        return extent

    def _set_numbers(self, slot: int, params: SamplingParams, seed: int, branch: int, position: int) -> None:
        self.seed[slot] = np.uint64(seed & _MASK64)
        self.branch[slot], self.position[slot] = branch, position
        for name in _STAGED:
            getattr(self, name)[slot] = self._stored(name, params)
        self.repetition[slot] = max(params.repetition_penalty, _SMALLEST)
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot], self.min_tokens[slot] = params.presence_penalty, params.min_tokens
        flags = SlotFlag.GREEDY if params.temperature == 0 else SlotFlag(0)
        flags |= SlotFlag.EXPLICIT_SEED if params.seed is not None else SlotFlag(0)
        flags |= SlotFlag.COUNTS if _counts(params) else SlotFlag(0)
        self.flags[slot] = int(flags)

    def _set_lists(self, slot: int, params: SamplingParams) -> None:
        chosen = params.logprob_token_ids or ()
        flags = SlotFlag(0)
        if params.logprobs is not None or chosen:
            flags |= SlotFlag.WANTS_LOGPROBS
        self.n_top[slot], self.n_chosen[slot] = params.logprobs or 0, len(chosen)
        self.chosen_ids[slot] = INVALID_TOKEN
        self.chosen_ids[slot, : len(chosen)] = chosen
        if params.allowed_token_ids is not None:
            bits = np.zeros(self.vocab_size, np.bool_)
            bits[list(params.allowed_token_ids)] = True
            self.masks[slot] = np.packbits(bits, bitorder="little")
            flags |= SlotFlag.HAS_MASK
        if params.min_tokens and params.stop_token_ids:
            self.stop_ids[slot] = np.unique(np.array(params.stop_token_ids, np.int32))
            flags |= SlotFlag.HAS_OVERLAY
        long_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
        if long_words:
            self.bad_words[slot] = long_words
            flags |= SlotFlag.HAS_BAD_WORDS | SlotFlag.HAS_OVERLAY
        self.flags[slot] |= int(flags)

    def _set_overlay(self, slot: int, extent: Extent, entries: tuple[Ids, Ids, npt.NDArray[np.float32]]) -> None:
        ids, counts, bias = entries
        self.overlay_start[slot], self.overlay_cap[slot] = extent.start, extent.length
        self.overlay_len[slot] = len(ids)
        at = slice(extent.start, extent.start + len(ids))
        self.entry_ids[at], self.entry_counts[at], self.entry_bias[at] = ids, counts, bias
        if extent.length:
            self.flags[slot] |= int(SlotFlag.HAS_OVERLAY)

    def _replay(self, slot: int, output: Ids) -> None:
        """Counts and last tokens as drawing `output` one by one would have left them."""
        self.last_tokens[slot] = INVALID_TOKEN
        if not self.flags[slot] & (SlotFlag.COUNTS | SlotFlag.HAS_BAD_WORDS):
            return
        kept = output[-MAX_BAD_WORD_TOKENS:]
        if len(kept):
            self.last_tokens[slot, -len(kept) :] = kept
        if self.flags[slot] & SlotFlag.COUNTS and len(output):
            tokens, firsts, times = np.unique(output, return_index=True, return_counts=True)
            for index in np.argsort(firsts):  # new entries in the order in which they came
                self.count(slot, int(tokens[index]), int(times[index]))

    def count(self, slot: int, token: int, times: int = 1) -> None:
        """Counts a generated token in the slot's overlay: its entry, or a new one.

        The extent holds every token that the request may emit. One drawn past its end will be dropped, and must not
        cost the other rows of the step anything: it is not counted.
        """
        start, length = int(self.overlay_start[slot]), int(self.overlay_len[slot])
        found = np.flatnonzero(self.entry_ids[start : start + length] == token)
        if len(found):
            self.entry_counts[start + int(found[0])] += times
            return
        if length >= self.overlay_cap[slot]:
            return
        self.entry_ids[start + length], self.entry_counts[start + length] = token, times
        self.entry_bias[start + length] = 0.0
        self.overlay_len[slot] = length + 1


def _counts(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _first_entries(params: SamplingParams, prompt: Ids) -> tuple[Ids, Ids, npt.NDArray[np.float32]]:
    """(ids, counts, bias) before any token is generated: bias, bans of one-token bad words, and the prompt's tokens
    where repetition looks at them."""
    bias: dict[int, float] = dict(params.logit_bias)
    bias.update((word[0], -np.inf) for word in params.bad_words_ids if len(word) == 1)
    seen = np.unique(prompt) if params.repetition_penalty != 1 else _NO_IDS
    ids = np.union1d(np.fromiter(bias, np.int32, len(bias)), seen).astype(np.int32)
    counts = np.where(np.isin(ids, seen), IN_PROMPT, 0).astype(np.int32)
    values = np.array([bias.get(int(token), 0.0) for token in ids], np.float32)
    return ids, counts, values
