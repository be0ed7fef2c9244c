"""IncrementalDecoder: text from a growing list of token ids, without decoding the whole list again."""

from collections.abc import Callable, Container, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD = 16  # tokens; a UTF-8 character has four bytes, so a longer tail of replacements is garbage, not a wait


class IncrementalDecoder:
    """Returns the text that each push adds.

    The pieces and `finish()` joined are the text of all ids, unless more than MAX_HELD ids in a row make no character.
    They never depend on how the ids were grouped.

    A decoder may strip a leading space or join bytes over tokens, so the new tokens are decoded after the tokens of the
    last piece, whose text is then cut off. Text that ends in U+FFFD may be an unfinished character and waits. Amortised
    cost a token is constant: the window holds one emitted piece and at most MAX_HELD waiting tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Container[int] = ()) -> None:
        """Makes a decoder.

        Args:
            decode: returns the text of a list of ids.
            skip: ids without text.
        """
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._known = 0  # leading ids of the window whose text is out
        self._known_text: str | None = ""  # None: not decoded yet, and of no use if no ids follow

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that is complete with them."""
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
        piece = text[len(self._known_text) :]
        if piece:
            self._window = self._window[self._known :]
            self._known_text = None
        elif len(self._window) > 2 * MAX_HELD:  # a long run without text, such as ids that the tokenizer does not know
            del self._window[self._known :]
        self._known = len(self._window)
        return piece
