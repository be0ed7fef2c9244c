"""Chooses the codes that stand for options, and reads their probabilities. No code begins another.

A code of one token is read in the row of the question itself. A code of tokens t1, t2 has P = P(t1) P(t2 | t1), and its
second factor is read in another row, the question's prompt and t1. Codes with the same beginning share that row.

Shape legend: K codes of a question, E edges (the tokens read after each beginning, one after the other), S steps.
"""

import string
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Ids = tuple[int, ...]
# Returns the ids that each text adds at the end of a prompt; None where it changes how that end is encoded.
Encode = Callable[[Sequence[str]], list[Ids | None]]
LETTERS = string.ascii_uppercase + string.ascii_lowercase
NAMES = (*LETTERS, *(first + second for first, second in product(LETTERS, repeat=2)))


class Code(NamedTuple):
    """Holds a short answer and its token ids."""

    text: str
    ids: Ids


def alphabet(encode: Encode, maximum: int) -> tuple[Code, ...]:
    """Chooses codes among letters and pairs of letters: those of one token first, then those of two tokens.

    No code is the beginning of another as a sequence of tokens: if A and A B were both codes, the probability of A
    would include that of A B. Where that leaves too few, a code of one token gives way to the codes that it begins,
    the one that begins the largest number first.

    Args:
        encode: Encodes texts at the end of a prompt.
        maximum: How many codes are needed.

    Returns:
        At most `maximum` codes; fewer if the tokenizer has no more.
    """
    found = {ids: name for name, ids in reversed([*zip(NAMES, encode(NAMES), strict=True)]) if ids}
    ordered = [Code(name, ids) for ids, name in reversed(found.items())]
    singles = [code for code in ordered if len(code.ids) == 1]
    doubles = [code for code in ordered if len(code.ids) == 2]
    begun = Counter(code.ids[0] for code in doubles)
    free = len(doubles) - sum(begun[code.ids[0]] for code in singles)
    while len(singles) + free < maximum:
        best = max(reversed(singles), key=lambda code: begun[code.ids[0]], default=None)
        if best is None or begun[best.ids[0]] < 2:
            break
        singles.remove(best)
        free += begun[best.ids[0]]
    taken = {code.ids[0] for code in singles}
    return tuple([*singles, *(code for code in doubles if code.ids[0] not in taken)][:maximum])


def prefix_free(codes: Sequence[Code]) -> bool:
    """Returns whether no code equals or begins another."""
    ids = sorted(code.ids for code in codes)  # a sequence stands right before those that it begins
    return all(ids) and not any(after[: len(before)] == before for before, after in pairwise(ids))


class CodeReader(NamedTuple):
    """Says where the tokens of K codes are read. Row i of a question is its prompt and then `stems[i]`."""

    stems: tuple[Ids, ...]  # beginnings of codes, the empty one first
    tokens: tuple[Ids, ...]  # by stem: what is read there
    edges: Indices  # [S] which edge each token of each code is
    owners: Indices  # [S] and whose
    size: int  # K

    def logprobs(self, edges: Float64s) -> Float64s:
        """Returns log P of each code, float64 [K], from the log-probabilities of all edges [E]."""
        return np.bincount(self.owners, weights=edges[self.edges], minlength=self.size).astype(np.float64, copy=False)


def code_reader(codes: Sequence[Code]) -> CodeReader:
    """Returns how to read `codes`, which must be prefix-free."""
    children: dict[Ids, dict[int, int]] = {(): {}}
    for code in codes:
        for at, token in enumerate(code.ids):
            below = children.setdefault(code.ids[:at], {})
            below.setdefault(token, len(below))
    starts = dict(zip(children, np.cumsum([0, *map(len, children.values())]).tolist(), strict=False))
    steps = [(k, code.ids[:at], token) for k, code in enumerate(codes) for at, token in enumerate(code.ids)]
    return CodeReader(
        stems=tuple(children),
        tokens=tuple(tuple(below) for below in children.values()),
        edges=np.array([starts[stem] + children[stem][token] for _, stem, token in steps], np.intp),
        owners=np.array([owner for owner, _, _ in steps], np.intp),
        size=len(codes),
    )
