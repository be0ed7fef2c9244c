"""One step's work as flat arrays.

Shape legend: S sequences (runs) of the step, T new tokens together (padding included), A attended tokens together,
R rows whose logits are wanted.
"""

from enum import StrEnum
from typing import NamedTuple

from engine.jobs import Int32s


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    SCORE = "score"


class Run(NamedTuple):
    """One sequence's part of a step: `len(write)` new tokens after `context`, at positions len(context), ... .

    A context may name pool slots that an earlier run of the same step writes: attention writes before it attends.
    """

    slot: int  # request slot; 0 for score rows, which have none
    context: Int32s  # [C] pool slots of the tokens before, in order
    write: Int32s  # [n] pool slots of the new tokens
    ids: Int32s | None  # [n] the new tokens; None (n == 1): read on the device from token_table[slot, len(context)]
    rows: Int32s  # [*] which of the n new tokens' logits are wanted, ascending
