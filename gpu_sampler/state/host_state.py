"""Keeps what the sampler remembers of each request between steps, as arrays indexed by slot.

The host's arrays are the truth for what the host sets. Positions, overlay counts and last tokens advance with every
token: here on the CPU, and in `DeviceState` on a device, which the host does not follow. A request that resumes is
admitted again with the tokens it has.

Shape legend: S slots, W words of a slot, E entries of all slots together, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import INVALID_TOKEN, MAX_BAD_WORD_TOKENS, ParamError, SamplingLimits, SamplingParams
from gpu_sampler.spec_decode import MAX_DRAFTS
from gpu_sampler.state.layout import BAD_WORD_WORDS, SlotTable
from gpu_sampler.state.overlay import BadWords, Extent, ExtentAllocator, RequestOverlay, counts, known, request_overlay
from gpu_sampler.state.overlay import Ids as Ids

MIN_TEMPERATURE: Final = 1e-6  # below it 1 / T would not be finite in float32
IN_PROMPT: Final = 1 << 30  # bit of an entry's count: the prompt holds the token
COUNT: Final = IN_PROMPT - 1
_MASK64: Final = (1 << 64) - 1
_SMALLEST: Final = float(np.finfo(np.float32).tiny)  # of what may not become 0
_STAGED: Final = frozenset({"temperature", "top_k", "top_p", "min_p"})
_NO_SLOT: Final = Extent(0, 0)
_MIN_MASKS: Final = 256  # 4.9 MB at V = 151,936
_MASK_BYTES: Final = 1 << 22


class SlotFlag(IntFlag):
    """Names the features of a slot."""

    GREEDY = 1
    EXPLICIT_SEED = 2
    WANTS_LOGPROBS = 4
    HAS_MASK = 8
    HAS_OVERLAY = 16
    COUNTS = 32  # its penalties depend on what was generated
    HAS_BAD_WORDS = 64  # with more than one token


# Each operation on an enum's members takes a microsecond, and a request some ten.
_GREEDY, _EXPLICIT_SEED = int(SlotFlag.GREEDY), int(SlotFlag.EXPLICIT_SEED)
_COUNTS, _HAS_BAD_WORDS = int(SlotFlag.COUNTS), int(SlotFlag.HAS_BAD_WORDS)


class OverlayFull(Exception):
    """Reports that the overlay has no room for a request now: it waits until others leave."""


class Overlay(NamedTuple):
    """Views one slot's entries, each token at most once, in no order."""

    ids: Ids  # [n]
    counts: Ids  # [n], times generated, and IN_PROMPT
    bias: npt.NDArray[np.float32]  # [n], -inf for a ban


class Dirty(NamedTuple):
    """Lists slots that a device has not seen yet. None is in both."""

    admitted: tuple[int, ...]  # with all that they have
    staged: tuple[int, ...]  # with the numbers that `stage` changes, and no other


class SamplingState(SlotTable):
    """Admits, stages and releases slots, in the same way for every feature. Slot 0 is padding: greedy, no feature.

    Memory is O(slots + overlay_entries), never slots x vocabulary; allow masks (V / 8 bytes) exist only while used.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        overlay_entries: int = 1 << 20,
        mask_rows: int | None = None,
        limits: SamplingLimits | None = None,
    ) -> None:
        """Allocates the arrays.

        Args:
            num_slots: S, with the padding slot.
            vocab_size: V.
            overlay_entries: E.
            mask_rows: slots that may have an allow mask together: by default as many as 4 MB hold, but at least 256,
                and no more than there are slots.
            limits: bounds of request parameters.

        Raises:
            ValueError: a size is below 1.
        """
        if mask_rows is None:
            mask_rows = min(num_slots, max(_MIN_MASKS, _MASK_BYTES * 8 // max(vocab_size, 1)))
        if num_slots < 1 or vocab_size < 1 or mask_rows < 1:
            given = f"{num_slots}, {vocab_size}, {mask_rows}"
            raise ValueError(f"`num_slots`, `vocab_size` and `mask_rows` must be >= 1. Given: {given}.")
        super().__init__(num_slots)
        self.num_slots, self.vocab_size, self.mask_rows = num_slots, vocab_size, mask_rows
        self.limits = limits or SamplingLimits()
        self.flags[:] = _GREEDY
        self.entry_ids = np.full(overlay_entries, INVALID_TOKEN, np.int32)  # and lists of ids, after a slot's entries
        self.entry_counts = np.zeros(overlay_entries, np.int32)
        self.entry_bias = np.zeros(overlay_entries, np.float32)
        self.draft_ids = np.full((num_slots, MAX_DRAFTS), INVALID_TOKEN, np.int32)  # of the run under way
        self._extent_allocator = ExtentAllocator(overlay_entries)
        self._extents: dict[int, Extent] = {}
        self._free_masks = list(range(mask_rows))
        self.masks: dict[int, npt.NDArray[np.uint8]] = {}  # by slot: packed bits, 1 = allowed
        self.stop_ids: dict[int, Ids] = {}  # by slot: banned until min_tokens
        self.bad_words: dict[int, BadWords] = {}  # by slot: those of two tokens and more
        self._admitted, self._staged = set[int](), set[int]()

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
        """Sets every field of `slot`.

        Args:
            slot: in [1, S).
            params: how its tokens are drawn.
            prompt_ids: the prompt, which a repetition penalty counts.
            seed: 64 bits.
            branch: the place among a request's n samples, which separates their noise.
            output_ids: tokens drawn already; the row goes on there, with position, counts and last tokens.

        Raises:
            ParamError: a value is out of range, or the request could never fit. The slot is then as before.
            OverlayFull: the request does not fit now. The slot is then as before.
        """
        self._check_slot(slot)
        params.validate(self.vocab_size, self.limits)
        output = known(output_ids, self.vocab_size)
        requested = request_overlay(params, prompt_ids, len(output), self.vocab_size)
        extent = self._reserve(requested)
        self.release(slot)
        self._extents[slot] = extent
        self._set_numbers(slot, params, seed, branch, len(output_ids))
        self._set_outputs(slot, params)
        self._set_overlay(slot, extent, requested)
        self._set_mask(slot, requested)
        self._replay(slot, output)
        self._admitted.add(slot)

    def stage(self, slot: int, **changes: Any) -> None:
        """Changes numbers of a slot between steps, for example `stage(3, temperature=0.5)`; all of them or none.

        Raises:
            ParamError: a value is out of range.
            ValueError: a field cannot be staged.
        """
        self._check_slot(slot)
        if unknown := sorted(changes.keys() - _STAGED):
            raise ValueError(f"`{unknown[0]}` cannot be staged.")
        params = replace(SamplingParams(), **changes)
        params.validate(self.vocab_size, self.limits)
        for name in changes:
            getattr(self, name)[slot] = self._stored(name, params)
        if "temperature" in changes:
            greedy = np.uint32(_GREEDY)
            self.flags[slot] = self.flags[slot] & ~greedy | (greedy if params.temperature == 0 else np.uint32(0))
        if "min_p" in changes:
            self.log_min_p[slot] = _log(params.min_p)
        self._staged.add(slot)

    def apply(self) -> None:
        """Marks all changes as applied: on the CPU the host's arrays are the state. See `DeviceState.apply`."""
        self.take_dirty()

    def take_dirty(self) -> Dirty:
        """Returns the slots changed since the last call, for a device that follows."""
        found = Dirty(tuple(sorted(self._admitted)), tuple(sorted(self._staged - self._admitted)))
        self._admitted.clear()
        self._staged.clear()
        return found

    def touch(self) -> None:
        """Makes every slot in use dirty, for a device that begins now."""
        self._admitted.update(self._extents)

    def release(self, slot: int) -> None:
        """Frees a slot on the host; the next `admit` sets every field. A free slot stays as it is."""
        self._check_slot(slot)
        self._extent_allocator.give(self._extents.pop(slot, _NO_SLOT))
        if slot in self.masks:
            self._free_masks.append(int(self.mask_row[slot]))
        self.mask_row[slot] = -1
        self.overlay_len[slot] = self.overlay_cap[slot] = self.n_stops[slot] = self.n_words[slot] = 0
        self.flags[slot] = _GREEDY
        self.temperature[slot] = 0
        for by_slot in (self.masks, self.stop_ids, self.bad_words):
            by_slot.pop(slot, None)
        # Its places may be another slot's before the next `apply`, which must not write them twice.
        self._admitted.discard(slot)
        self._staged.discard(slot)

    def overlay(self, slot: int) -> Overlay:
        """Returns views of the slot's entries."""
        start, length = int(self.overlay_start[slot]), int(self.overlay_len[slot])
        at = slice(start, start + length)
        return Overlay(self.entry_ids[at], self.entry_counts[at], self.entry_bias[at])

    def allowed(self, slot: int) -> npt.NDArray[np.bool_]:
        """Returns the slot's allow mask, bool [V]."""
        return np.unpackbits(self.masks[slot], count=self.vocab_size, bitorder="little").astype(np.bool_)

    def lists(self, slot: int) -> Ids:
        """Returns a view of the lists after the slot's entries: see `RequestOverlay.lists`."""
        end = self.words_start[slot] + BAD_WORD_WORDS * self.n_words[slot]
        return self.entry_ids[self.stops_start[slot] : end]

    @property
    def dirty(self) -> bool:
        """Returns whether `take_dirty` has slots to return."""
        return bool(self._admitted or self._staged)

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot < self.num_slots:
            raise ValueError(f"`slot` must be in [1, {self.num_slots}); 0 is padding. Given: {slot}.")

    def _stored(self, name: str, params: SamplingParams) -> float:
        """Returns a staged number as the arrays keep it."""
        if name == "temperature":
            return 0.0 if params.temperature == 0 else max(params.temperature, MIN_TEMPERATURE)
        if name == "top_k":
            return min(max(params.top_k, 0), self.vocab_size)
        if name == "top_p":
            return max(params.top_p, _SMALLEST)  # else no token would have its share
        return float(getattr(params, name))

    def _reserve(self, requested: RequestOverlay) -> Extent:
        needed = requested.places
        if needed > self._extent_allocator.size:
            raise ParamError(
                "max_tokens", f"{needed} overlay entries", f"such that at most {self._extent_allocator.size} are needed"
            )
        if requested.mask is not None and not self._free_masks:
            raise OverlayFull(f"an allow mask is needed, all {self.mask_rows} are in use")
        extent = self._extent_allocator.take(needed)
        if extent is None:
            raise OverlayFull(f"{needed} overlay entries are needed, {self._extent_allocator.free} are free")
        return extent

    def _set_numbers(self, slot: int, params: SamplingParams, seed: int, branch: int, position: int) -> None:
        self.seed[slot] = np.uint64(int(seed) & _MASK64)  # numpy's own integers may be signed
        self.branch[slot], self.position[slot] = branch, position
        for name in _STAGED:
            getattr(self, name)[slot] = self._stored(name, params)
        self.log_min_p[slot] = _log(params.min_p)
        self.repetition[slot] = max(params.repetition_penalty, _SMALLEST)
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot], self.min_tokens[slot] = params.presence_penalty, params.min_tokens
        flags = _GREEDY if params.temperature == 0 else 0
        flags |= _EXPLICIT_SEED if params.seed is not None else 0
        self.flags[slot] = flags | (_COUNTS if counts(params) else 0)

    def _set_outputs(self, slot: int, params: SamplingParams) -> None:
        chosen = params.logprob_token_ids or ()
        if params.logprobs is not None or chosen:
            self.flags[slot] |= int(SlotFlag.WANTS_LOGPROBS)
        self.n_top[slot], self.n_chosen[slot] = params.logprobs or 0, len(chosen)
        self.chosen_ids[slot] = INVALID_TOKEN
        self.chosen_ids[slot, : len(chosen)] = chosen

    def _set_overlay(self, slot: int, extent: Extent, requested: RequestOverlay) -> None:
        start, behind = extent.start, extent.start + requested.cap
        at = slice(start, start + len(requested.ids))
        self.entry_ids[at], self.entry_bias[at] = requested.ids, requested.bias
        self.entry_counts[at] = np.where(requested.in_prompt, IN_PROMPT, 0)
        self.entry_ids[behind : extent.end] = requested.lists
        self.overlay_start[slot], self.overlay_cap[slot], self.overlay_len[slot] = (
            start,
            requested.cap,
            len(requested.ids),
        )
        self.stops_start[slot], self.n_stops[slot] = behind, len(requested.stop_ids)
        self.words_start[slot], self.n_words[slot] = behind + len(requested.stop_ids), len(requested.bad_words)
        if extent.length:
            self.flags[slot] |= int(SlotFlag.HAS_OVERLAY)
        if len(requested.stop_ids):
            self.stop_ids[slot] = requested.stop_ids
        if requested.bad_words:
            self.bad_words[slot] = requested.bad_words
            self.flags[slot] |= _HAS_BAD_WORDS

    def _set_mask(self, slot: int, requested: RequestOverlay) -> None:
        if requested.mask is None:
            return
        self.masks[slot] = requested.mask
        self.mask_row[slot] = self._free_masks.pop()
        self.flags[slot] |= int(SlotFlag.HAS_MASK)

    def _replay(self, slot: int, output: Ids) -> None:
        """Sets counts and last tokens as drawing `output` one by one would have left them."""
        self.last_tokens[slot] = INVALID_TOKEN
        flags = int(self.flags[slot])
        if not flags & (_COUNTS | _HAS_BAD_WORDS):
            return
        kept = output[-MAX_BAD_WORD_TOKENS:]
        if len(kept):
            self.last_tokens[slot, -len(kept) :] = kept
        if flags & _COUNTS and len(output):
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


def _log(min_p: float) -> float:
    """Returns ln of the number as the table keeps it, -inf for 0, which is off."""
    kept = float(np.float32(min_p))
    return float(np.log(kept)) if kept > 0 else -np.inf
