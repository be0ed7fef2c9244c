"""Shows progress: one line that is redrawn on a terminal, and a plain line from time to time elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

BAR = 24
TERMINAL_S = 0.2
PLAIN_S = 10.0
WINDOW_S = 15.0  # of which the rate is the mean


class ProgressBar:
    """Shows how many items are done, the rate and the remaining time.

    Args:
        total: items.
        done: items that were done before.
        stream: where to write; None writes nothing.
        clock: seconds, monotonic.
    """

    def __init__(
        self, total: int, done: int, stream: TextIO | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream
        self._clock = clock
        self._moving = stream is not None and stream.isatty()
        self._shown = clock()
        self._seen = deque([(clock(), done, 0)])

    def update(self, done: int, failed: int, tokens: int) -> None:
        """Shows the state from time to time. `tokens` are those of this run."""
        now = self._clock()
        self._seen.append((now, done, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        if self._stream is not None and (now - self._shown >= (TERMINAL_S if self._moving else PLAIN_S)):
            self._show(self.line(failed))
            self._shown = now

    def line(self, failed: int) -> str:
        """Renders the state."""
        (since, before, tokens_before), (now, done, tokens) = self._seen[0], self._seen[-1]
        seconds = max(now - since, 1e-9)
        rate = (done - before) / seconds
        left = f"{duration((self._total - done) / rate)} left" if rate > 0 else "no end in sight"
        part = done / self._total if self._total else 1.0
        bar = f"[{'#' * int(BAR * part):-<{BAR}}] " if self._moving else ""
        return (
            f"{bar}{done:,} of {self._total:,} ({part:.0%}), {rate:,.0f} items/s, "
            f"{(tokens - tokens_before) / seconds:,.0f} tokens/s, {left}" + (f", {failed:,} errors" if failed else "")
        )

    def end(self, failed: int) -> None:
        """Draws the line a last time."""
        if self._stream is not None and self._moving:
            self._show(self.line(failed))
            self._stream.write("\n")

    def _show(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(f"\r\x1b[K{line}" if self._moving else f"{line}\n")
            self._stream.flush()


def duration(seconds: float) -> str:
    """Renders a duration in at most two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02} min"
