"""Codes: short answers whose probability can be read off, since none of them begins another.

A code of one token is read in the row of the question itself. A code of tokens t1, t2 has P = P(t1) P(t2 | t1), and its
second factor is read in a further row, the question's prompt and t1. Codes with the same beginning share that row.

Shape legend: K codes of a question, E edges (the tokens read after each beginning, one after the other), S steps.
"""

import string
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Ids = tuple[int, ...]
LETTERS = string.ascii_uppercase + string.ascii_lowercase
NAMES = (*LETTERS, *(first + second for first, second in product(LETTERS, repeat=2)))


class Code(NamedTuple):
    text: str
    ids: Ids


class Encode(Protocol):
    """Ids that each text adds after the end of a prompt; None where the end itself would be encoded otherwise."""

    def __call__(self, texts: Sequence[str]) -> list[Ids | None]: ...


def alphabet(encode: Encode, most: int) -> tuple[Code, ...]:
    """At most `most` codes: letters and pairs of letters of one token, then those of two tokens.

    No code is the beginning of another as a sequence of tokens: were A and A B both codes, the probability of A would
    hold that of A B. Where that leaves too few, a code of one token gives way to the codes that it begins, the one
    that begins most of them first. A tokenizer may have fewer than `most`.
    """
    found = {ids: name for name, ids in reversed([*zip(NAMES, encode(NAMES), strict=True)]) if ids}
    ordered = [Code(name, ids) for ids, name in reversed(found.items())]
    singles = [code for code in ordered if len(code.ids) == 1]
    doubles = [code for code in ordered if len(code.ids) == 2]
    begun = Counter(code.ids[0] for code in doubles)
    free = len(doubles) - sum(begun[code.ids[0]] for code in singles)
    while len(singles) + free < most:
        best = max(reversed(singles), key=lambda code: begun[code.ids[0]], default=None)
        if best is None or begun[best.ids[0]] < 2:
            break
        singles.remove(best)
        free += begun[best.ids[0]]
    taken = {code.ids[0] for code in singles}
    return tuple([*singles, *(code for code in doubles if code.ids[0] not in taken)][:most])


def prefix_free(codes: Sequence[Code]) -> bool:
    """Whether no code equals or begins another."""
    ids = sorted(code.ids for code in codes)  # a sequence stands right before those that it begins
    return all(ids) and not any(after[: len(before)] == before for before, after in pairwise(ids))


class Reader(NamedTuple):
    """Where the tokens of K codes are read. Row i of a question is its prompt and then `stems[i]`."""

    stems: tuple[Ids, ...]  # beginnings of codes, the empty one first
    tokens: tuple[Ids, ...]  # by stem: what is read there
    edges: Places  # [S] which edge each token of each code is
    owners: Places  # [S] and whose
    size: int  # K

    def logprobs(self, edges: Float64s) -> Float64s:
        """float64 [K]: log P of each code, from those of all edges [E]."""
        return np.bincount(self.owners, weights=edges[self.edges], minlength=self.size).astype(np.float64, copy=False)


def reader(codes: Sequence[Code]) -> Reader:
    """How to read `codes`, which must be prefix-free."""
    children: dict[Ids, dict[int, int]] = {(): {}}
    for code in codes:
        for at, token in enumerate(code.ids):
            below = children.setdefault(code.ids[:at], {})
            below.setdefault(token, len(below))
    starts = dict(zip(children, np.cumsum([0, *map(len, children.values())]).tolist(), strict=False))
    steps = [(k, code.ids[:at], token) for k, code in enumerate(codes) for at, token in enumerate(code.ids)]
    return Reader(
        stems=tuple(children),
        tokens=tuple(tuple(below) for below in children.values()),
        edges=np.array([starts[stem] + children[stem][token] for _, stem, token in steps], np.intp),
        owners=np.array([owner for owner, _, _ in steps], np.intp),
        size=len(codes),
    )
