"""Defines the limits of a scoring request, and the errors of a request or of one of its items.

Each limit is stated here once: the wire models and the documentation read it from here.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """Limits what one scoring request may hold. All are counts; the configuration may change each."""

    max_items: int = 4096
    max_labels: int = 256
    max_questions: int = 400
    max_choices: int = 255
    max_levels: int = 255
    max_continuations: int = 256  # of one item
    max_continuation_tokens: int = 1024  # of each
    max_joined_chars: int = 16_777_216  # of all rows of a `joint` request, whose text is tokenised row by row
    max_instruction_chars: int = 16_384  # of `instruction` and of `system`


class ScoreCode(StrEnum):
    """Names why a request or an item is refused. The values are codes of the HTTP contract."""

    INVALID_VALUE = "invalid_value"
    INVALID_TOKEN_ID = "invalid_token_id"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    LABEL_NOT_SINGLE_TOKEN = "label_not_single_token"
    DUPLICATE_LABEL = "duplicate_label"
    NONFINITE_LOGITS = "nonfinite_logits"


class ItemError(NamedTuple):
    """Says why one item failed. The other items are unaffected."""

    code: ScoreCode
    message: str

    def under(self, name: str, other: str) -> "ItemError":
        """Returns the error with `other` in place of the item's name."""
        return self._replace(message=self.message.replace(f"`{name}`", f"`{other}`"))


NONFINITE = ItemError(
    ScoreCode.NONFINITE_LOGITS, "The model gave no finite number for this item. Its neighbours are unaffected."
)


class ScoringError(ValueError):
    """Refuses a whole request. The message never holds the request's text."""

    def __init__(self, code: ScoreCode, message: str, field: str | None) -> None:
        super().__init__(code, message, field)
        self.code = code
        self.message = message
        self.field = field


def refusal(field: str, rule: str, code: ScoreCode = ScoreCode.INVALID_VALUE) -> ScoringError:
    """Returns the error of a request whose field breaks a rule: "`field` must " and the rule."""
    return ScoringError(code, f"`{field}` must {rule}", field)
