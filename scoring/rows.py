"""What is joined into rows, within which bounds, and the rows themselves: flat ids with one shared prefix.

Shape legend: N items, P prefix tokens, M tokens of all rows after the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ItemError, ScoringLimits
from scoring.templates import Filled
from scoring.truncation import Side

Int32s = npt.NDArray[np.int32]


def offsets(lengths: Sequence[int]) -> Int32s:
    """[N + 1] where each of N rows of these lengths begins if they stand one after the other, and where the last
    ends."""
    found = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=found[1:])
    return found


class Names(NamedTuple):
    """What a route calls the fields that errors name."""

    items: str = "items"
    item_tokens: str = "max_item_tokens"
    query_tokens: str = "max_query_tokens"


NAMES = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What is joined, and how. Query and items are of one kind: text, or token ids. With a template both are text,
    joined as it says; `item_first` and `add_special_tokens` then mean nothing."""

    query: str | list[int]
    items: list[str] | list[list[int]]
    item_first: bool = False
    add_special_tokens: bool = True
    seam: Literal["concat", "joint"] = "concat"
    truncate: Literal["item", "error"] = "item"
    truncation_side: Side = "right"
    max_item_tokens: int | None = None
    max_query_tokens: int | None = None
    max_row_tokens: int | None = None  # of the whole row, taken from the item; only with the joint seam
    template: Filled | None = None
    names: Names = NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the model and the server allow."""

    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    limits: ScoringLimits


class Rows(NamedTuple):
    """Row i is `prefix + ids[starts[i]:starts[i + 1]]` and belongs to item `items[i]`; failed items have no row."""

    prefix: Int32s  # [P]
    ids: Int32s  # [M]
    starts: Int32s  # [rows + 1]
    items: list[int]  # [rows]
    truncated: list[int]  # [N] tokens cut off each item
    errors: dict[int, ItemError]
    suffix: str  # text that ends every prompt, "" if there is none; marked text with a template
    texts: dict[int, str]  # by item, as tokenised: under the `joint` seam only

    def lengths(self) -> list[int]:
        """Tokens of each row, its prefix included."""
        found: list[int] = (np.diff(self.starts) + len(self.prefix)).tolist()
        return found
