"""Counts the tokens of answers to `/v1/completions` that list their ids, without reading the JSON."""

import re

IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')  # a quote within a text is escaped, so that no text looks like this
EVENT_END = b"\n\n"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'


def count_tokens(data: bytes) -> int:
    """Returns the number of ids in all lists of generated tokens in `data`."""
    return sum(ids.count(b",") + 1 for ids in IDS.findall(data) if ids.strip())


class StreamCounter:
    """Counts the tokens of a stream as its bytes come, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._done = self._error = False

    def feed(self, data: bytes) -> int:
        """Returns the number of tokens in the events that `data` completes."""
        events, end, self._rest = (self._rest + data).rpartition(EVENT_END)
        if not end:
            return 0
        self._done = self._done or DONE in events
        self._error = self._error or ERROR in events
        return count_tokens(events)

    @property
    def complete(self) -> bool:
        """Says whether the stream has come to its end without an error."""
        return self._done and not self._error
