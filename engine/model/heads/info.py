"""Says what a pooling head answers. It needs no torch: it also travels to the processes that speak HTTP."""

from enum import StrEnum
from typing import Literal, NamedTuple

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class HeadKind(StrEnum):
    """Names the kinds of head that a model is served with. `LM` is the language-model head, which pools nothing."""

    LM = "lm"
    SEQUENCE = "sequence"


class HeadInfo(NamedTuple):
    """Describes a pooling head: K numbers for each row, before any activation."""

    kind: HeadKind
    width: int  # K
    labels: tuple[str, ...]  # [K] names of the numbers, in order
    problem_type: ProblemType | None = None  # what the head was trained for, where the checkpoint says it
