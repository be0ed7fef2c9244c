"""Text of a branch while it is made: characters held back until they are sure, and stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.tokenizer.detokenizer import IncrementalDecoder


class StopMatch(NamedTuple):
    text: str  # sure text, up to the stop string if one was found
    stop: str | None


class StopMatcher:
    """Finds the stop string that ends first (of those, the longest), however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, text: str) -> StopMatch:
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include else start], stop)
        keep = self._unsure(text)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The rest: no stop string can end any more."""
        held, self._held = self._held, ""
        return held

    def _unsure(self, text: str) -> int:
        """How many last characters may be the beginning of a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextPiece(NamedTuple):
    """What a run of tokens adds to a branch."""

    text: str
    used: int  # tokens that belong to the branch: fewer than given once a stop string is complete
    offsets: list[int]  # characters decoded before each used token; empty unless asked for
    stop: str | None


class BranchText:
    """Detokenises one branch and watches for its stop strings. Ids and log-probabilities are never held back."""

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        offsets: bool = False,
        start: int = 0,
    ) -> None:
        """Text of the first `min_tokens` tokens is never taken for a stop string. `start`: the first offset."""
        self._decoder = decoder
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self._offsets = offsets
        self._count = 0  # tokens
        self._length = start  # characters decoded

    def push(self, ids: Sequence[int]) -> TextPiece:
        if self._matcher is None and not self._offsets:
            return TextPiece(self._decoder.push(ids), len(ids), [], None)
        text, offsets = "", []
        for used, token in enumerate(ids, 1):
            offsets.append(self._length)
            new = self._decoder.push([token])
            self._length += len(new)
            self._count += 1
            match = self._match(new)
            text += match.text
            if match.stop is not None:
                return TextPiece(text, used, offsets, match.stop)
        return TextPiece(text, len(ids), offsets, None)

    def offset(self) -> int:
        return self._length

    def finish(self) -> StopMatch:
        """What is left when no more tokens come. It may still complete a stop string."""
        match = self._match(self._decoder.finish())
        if match.stop is None and self._matcher is not None:
            return StopMatch(match.text + self._matcher.finish(), None)
        return match

    def _match(self, text: str) -> StopMatch:
        if self._matcher is None or self._count <= self._min_tokens:
            return StopMatch(text, None)
        return self._matcher.push(text)
