"""Says what a pooling head answers. It needs no torch: it also travels to the processes that speak HTTP."""

from enum import StrEnum
from typing import Literal, NamedTuple

from engine.requests import PoolingTask

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


class HeadKind(StrEnum):
    """Names the kinds of head that a model is served with. `LM` is the language-model head, which pools nothing."""

    LM = "lm"
    SEQUENCE = "sequence"
    TOKEN = "token"
    POOLED = "pooled"
    POINTER = "pointer"


TASKS = {
    HeadKind.SEQUENCE: PoolingTask.CLASSIFY,
    HeadKind.TOKEN: PoolingTask.TOKEN_CLASSIFY,
    HeadKind.POOLED: PoolingTask.EMBED,
    HeadKind.POINTER: PoolingTask.TOKEN_CLASSIFY,
}


class EmbeddingInfo(NamedTuple):
    """Describes the vectors of a pooled head, as the model's folder and the operator do."""

    normalised: bool = True  # the model's vectors have length 1
    dimensions: tuple[int, ...] = ()  # lengths to which vectors may be cut; () for a model that was not trained so
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text that is written before an input)
    default_prompt: str | None = None  # the name of the one that is written where a request names none


class HeadInfo(NamedTuple):
    """Describes a pooling head: K numbers for each row or token, before any activation."""

    kind: HeadKind
    width: int  # K; of a pointer: numbers of a query and a key
    labels: tuple[str, ...]  # [K] names of the numbers, in order; () for those of a vector or a pointer
    problem_type: ProblemType | None = None  # what the head was trained for, where the checkpoint says it
    encoder: bool = False  # it reads rows in both directions, and pairs of texts as its tokenizer joins them
    whole_rows: bool = False  # a row is computed in one step and shares nothing with another
    mark: str | None = None  # text of the token whose places are answered: the one that ends a step, or marks a choice
    embedding: EmbeddingInfo | None = None  # of a pooled head

    @property
    def task(self) -> PoolingTask:
        """Returns the task that the head serves."""
        return TASKS[self.kind]
