"""Computes what a request needs of the memory that all slots share, and gives out extents of it.

An overlay is the set of tokens whose logits a request changes: by bias, bans or penalties.
"""

from bisect import insort
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state.layout import BAD_WORD_WORDS


class Extent(NamedTuple):
    """Names a range of the shared array."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class ExtentAllocator:
    """Allocates extents of one shared array, first fit over a sorted list of free ones; joins freed neighbours."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._holes: list[Extent] = [Extent(0, size)] if size else []

    def take(self, length: int) -> Extent | None:
        """Takes an extent of `length`; returns None, and takes nothing, where no hole is that large."""
        if length == 0:
            return Extent(0, 0)
        for index, hole in enumerate(self._holes):
            if hole.length >= length:
                rest = Extent(hole.start + length, hole.length - length)
                self._holes[index : index + 1] = [rest] if rest.length else []
                self.free -= length
                return Extent(hole.start, length)
        return None

    def give(self, extent: Extent) -> None:
        """Takes an extent back; RuntimeError where part of it was free already, which is a fault of ours."""
        if extent.length == 0:
            return
        if any(extent.start < hole.end and hole.start < extent.end for hole in self._holes):
            raise RuntimeError("an extent was freed that no slot owned")
        insort(self._holes, extent)
        self.free += extent.length
        joined: list[Extent] = []
        for hole in self._holes:
            if joined and joined[-1].end == hole.start:
                joined[-1] = Extent(joined[-1].start, joined[-1].length + hole.length)
            else:
                joined.append(hole)
        self._holes = joined


Ids = npt.NDArray[np.int32]
BadWords = tuple[tuple[int, ...], ...]
_NO_IDS: Final = np.empty(0, np.int32)
_NO_FLAGS: Final = np.empty(0, np.bool_)
_NO_BIAS: Final = np.empty(0, np.float32)


class RequestOverlay(NamedTuple):
    """Lists what a request needs: its first n overlay entries, the lists after them, and its allow mask."""

    ids: Ids  # [n], each token once
    in_prompt: npt.NDArray[np.bool_]  # [n], whether repetition finds it in the prompt
    bias: npt.NDArray[np.float32]  # [n], -inf for a ban
    cap: int  # entries that it may grow to, >= n
    stop_ids: Ids  # ascending, each once: banned until min_tokens
    bad_words: BadWords  # those of two tokens and more
    mask: npt.NDArray[np.uint8] | None  # [V / 8] packed bits, the lowest first; 1 = allowed

    @property
    def lists(self) -> Ids:
        """Returns the lists after the entries: stop ids, then each bad word as its length and its ids.

        The ids of a bad word end at the last of BAD_WORD_WORDS places.
        """
        if not self.bad_words:
            return self.stop_ids
        words = np.zeros((len(self.bad_words), BAD_WORD_WORDS), np.int32)
        for row, word in zip(words, self.bad_words, strict=True):
            row[0], row[-len(word) :] = len(word), word
        return np.concatenate([self.stop_ids, words.reshape(-1)])

    @property
    def places(self) -> int:
        """Returns the length of the extent.

        The same places of a step's side list hold the entries and, at the places of the lists, what the lists ban: at
        most one token for each stop id and each bad word.
        """
        return self.cap + len(self.stop_ids) + BAD_WORD_WORDS * len(self.bad_words)


def request_overlay(
    params: SamplingParams, prompt: Sequence[int] | Ids, emitted: int, vocab_size: int
) -> RequestOverlay:
    """Returns the overlay of a request.

    Args:
        params: its parameters.
        prompt: token ids, which a repetition penalty counts.
        emitted: tokens drawn already.
        vocab_size: V.
    """
    biased: dict[int, float] = dict(params.logit_bias)
    biased.update((word[0], -np.inf) for word in params.bad_words_ids if len(word) == 1)
    seen = np.unique(known(prompt, vocab_size)) if params.repetition_penalty != 1 else _NO_IDS
    ids, in_prompt, bias = _entries(biased, seen) if biased or len(seen) else (_NO_IDS, _NO_FLAGS, _NO_BIAS)
    counted = max(params.max_tokens, emitted) if counts(params) else 0
    return RequestOverlay(
        ids=ids,
        in_prompt=in_prompt,
        bias=bias,
        cap=min(len(ids) + counted, vocab_size),
        stop_ids=np.unique(np.array(params.stop_token_ids, np.int32)) if params.min_tokens else _NO_IDS,
        bad_words=_long_words(params.bad_words_ids),
        mask=None if params.allowed_token_ids is None else _packed(params.allowed_token_ids, vocab_size),
    )


def _entries(biased: dict[int, float], seen: Ids) -> tuple[Ids, npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Returns the entries [n] of biased ids and of the prompt's, ascending: ids, which the prompt has, and biases."""
    biased_ids = np.fromiter(biased, np.int32, len(biased))
    ids = np.union1d(biased_ids, seen).astype(np.int32)
    bias = np.zeros(len(ids), np.float32)
    bias[np.searchsorted(ids, biased_ids)] = np.fromiter(biased.values(), np.float32, len(biased))
    return ids, np.isin(ids, seen), bias


def known(ids: Sequence[int] | Ids, vocab_size: int) -> Ids:
    """Returns the ids that have a logit, as i32: no other can be drawn or penalised. The engine refuses others."""
    if not len(ids):
        return _NO_IDS
    array = np.asarray(ids, np.int64).reshape(-1)
    return array[(array >= 0) & (array < vocab_size)].astype(np.int32)


def counts(params: SamplingParams) -> bool:
    """Returns whether the penalties depend on generated tokens."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _long_words(words: BadWords) -> BadWords:
    """Returns the words of two tokens and more, without those that another one of them ends: where they match, it does.

    No two of the words left can ban the same token together, which spares `apply_logits_processors` a search.
    """
    long_words = dict.fromkeys(tuple(word) for word in words if len(word) > 1)
    return tuple(
        word for word in long_words if not any(word[start:] in long_words for start in range(1, len(word) - 1))
    )


def _packed(ids: tuple[int, ...], vocab_size: int) -> npt.NDArray[np.uint8]:
    """Returns ids as a mask of bits, the lowest first."""
    bits = np.zeros(vocab_size, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little")
