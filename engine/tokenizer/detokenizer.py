"""Text of a growing list of token ids, without decoding the whole list again, up to its stop strings."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

REPLACEMENT = "\ufffd"
MAX_HELD = 16  # tokens; a UTF-8 character has four bytes, so a longer tail of replacements is garbage, not a wait


class IncrementalDecoder:
    """Returns the text that each push adds.

    The pieces and `finish()` joined are the text of all ids, unless more than MAX_HELD ids in a row make no character,
    or the decoder takes back a character before bytes that make none. They never depend on how the ids were grouped.

    A decoder may strip a leading space or join bytes over tokens, so the new tokens are decoded after the tokens of the
    last piece, whose text is then cut off. Text that ends in U+FFFD may be an unfinished character and waits. Amortised
    cost a token is constant: the window holds one emitted piece and at most MAX_HELD waiting tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skip: Container[int] = (),
        fixed_texts: Mapping[int, str] | None = None,
    ) -> None:
        """Makes a decoder.

        Args:
            decode: returns the text of a list of ids.
            skip: ids without text.
            fixed_texts: the text of each id, if it is the same behind all ids whose text is complete; "" for any other
                id. None: no id is known to have such a text.
        """
        self._decode = decode
        self._skip = skip
        self._fixed_texts = fixed_texts
        self._window: list[int] = []
        self._known = 0  # leading ids of the window whose text is out
        self._known_text: str | None = ""  # None: not decoded yet, and of no use if no ids follow

    def follow(self, ids: Sequence[int]) -> None:
        """Begins behind ids whose text is known, before any push: text that goes on keeps the space it begins with."""
        if self._fixed_texts is not None:
            return
        visible = [token for token in ids[-MAX_HELD:] if token not in self._skip]
        for size in range(1, len(visible) + 1):
            text = self._decode(visible[-size:])
            if text and REPLACEMENT not in text:
                self._window, self._known, self._known_text = visible[-size:], size, text
                return

    def copy(self) -> "IncrementalDecoder":
        """Returns another decoder behind the same ids. Neither changes the other."""
        made = IncrementalDecoder(self._decode, self._skip, self._fixed_texts)
        made._window, made._known, made._known_text = [*self._window], self._known, self._known_text
        return made

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that is complete with them."""
        if len(ids) == 1:
            return "" if ids[0] in self._skip else self._push_one(ids[0])
        new = [token for token in ids if token not in self._skip]
        if not new:
            return ""
        if len(new) > 1:
            text = self._decode(self._window + new)
            if REPLACEMENT not in text:
                self._window += new
                return self._emit(text)
        return "".join(map(self._push_one, new))

    def _push_one(self, token: int) -> str:
        if self._fixed_texts is not None and self._known == len(self._window) and (text := self._fixed_texts[token]):
            self._window, self._known, self._known_text = [token], 1, text
            return text
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._known <= MAX_HELD:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """Returns the text still held back; an unfinished character becomes U+FFFD."""
        return self._emit(self._decode(self._window)) if len(self._window) > self._known else ""

    def _emit(self, text: str) -> str:
        if self._known_text is None:
            self._known_text = self._decode(self._window[: self._known])
        if text.startswith(self._known_text):
            piece = text[len(self._known_text) :]
        else:  # bytes that make no character take those before them along in some decoders: they are decoded alone
            piece = self._decode(self._window[self._known :])
        if piece:
            self._window = self._window[self._known :]
            self._known_text = None
        elif len(self._window) > 2 * MAX_HELD:  # a long run without text, such as ids that the tokenizer does not know
            del self._window[self._known :]
        self._known = len(self._window)
        return piece


class StopMatch(NamedTuple):
    """Holds text that can be sent, and the stop string that ended it."""

    text: str  # up to the stop string if one was found
    stop: str | None


class StopMatcher:
    """Finds the stop string that ends first (the longest one, if several do), however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, text: str) -> StopMatch:
        """Adds text, and holds back its end while that may begin a stop string."""
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
        """Returns the rest when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _unsure(self, text: str) -> int:
        """Returns how many of the last characters may begin a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextPiece(NamedTuple):
    """Holds the text that a run of tokens adds to a branch."""

    text: str
    used: int  # tokens that belong to the branch: fewer than given once a stop string is complete
    offsets: list[int]  # characters decoded before each used token; empty unless requested
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
        """Keeps the options of the branch.

        Args:
            decoder: Turns token ids into text.
            stops: The stop strings.
            include_stop: Keep a stop string in the text.
            min_tokens: The text of so many first tokens never counts as a stop string.
            offsets: Report the character at which each token begins.
            start: The first offset.
        """
        self._decoder = decoder
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self._offsets = offsets
        self._count = 0  # tokens
        self._length = start  # characters decoded

    def push(self, ids: Sequence[int]) -> TextPiece:
        """Adds tokens."""
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
        """Returns the characters decoded so far."""
        return self._length

    def finish(self) -> StopMatch:
        """Returns the rest when no more tokens follow. It may still complete a stop string."""
        match = self._match(self._decoder.finish())
        if match.stop is None and self._matcher is not None:
            return StopMatch(match.text + self._matcher.finish(), None)
        return match

    def _match(self, text: str) -> StopMatch:
        if self._matcher is None or self._count <= self._min_tokens:
            return StopMatch(text, None)
        return self._matcher.push(text)
