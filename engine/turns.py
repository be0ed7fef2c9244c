"""Turns: which kind of step comes next, by the weighted time that each has had."""

from collections.abc import Iterable

from engine.batch import StepKind

WEIGHTS = {StepKind.DECODE: 2.0, StepKind.PREFILL: 1.0, StepKind.SCORE: 1.0}


class Turns:
    """The kinds of `WEIGHTS`; a verify step is a decode step's turn."""

    def __init__(self, decode_gap_s: float) -> None:
        self._decode_gap_s = decode_gap_s
        self._spent = dict.fromkeys(WEIGHTS, 0.0)  # weighted seconds by kind
        self._had_work: set[StepKind] = set()
        self._last_decode = 0.0

    def order(self, working: Iterable[StepKind], now: float) -> list[StepKind]:
        """The kinds that have work, the one that is due first. Decode steps are, once their rows have waited for the
        gap."""
        work = set(working)
        kinds = [kind for kind in WEIGHTS if kind in work]
        known = [self._spent[kind] for kind in kinds if kind in self._had_work]
        for kind in kinds:
            if kind not in self._had_work:  # what was idle re-enters level with the others
                self._spent[kind] = max(self._spent[kind], min(known, default=max(self._spent.values())))
                if kind is StepKind.DECODE:
                    self._last_decode = now
        self._had_work = work
        kinds.sort(key=lambda kind: self._spent[kind])
        if StepKind.DECODE in kinds and now - self._last_decode >= self._decode_gap_s:
            kinds.sort(key=lambda kind: kind is not StepKind.DECODE)
        return kinds

    def decodes(self, now: float) -> None:
        """The step planned at `now` is one of running rows."""
        self._last_decode = now

    def took(self, kind: StepKind, seconds: float) -> None:
        """A step of `kind` has ended."""
        turn = StepKind.DECODE if kind is StepKind.VERIFY else kind
        self._spent[turn] += seconds / WEIGHTS[turn]
        if turn is StepKind.DECODE:
            self._last_decode += seconds  # its rows wait from its end: else slow decoding would always be due
