"""Why a scoring request, or one item of it, is refused."""

from enum import StrEnum
from typing import NamedTuple


class ScoreCode(StrEnum):
    """Closed. The values are the codes of the HTTP contract."""

    INVALID_VALUE = "invalid_value"
    INVALID_TOKEN_ID = "invalid_token_id"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    LABEL_NOT_SINGLE_TOKEN = "label_not_single_token"
    DUPLICATE_LABEL = "duplicate_label"
    NONFINITE_LOGITS = "nonfinite_logits"


class ItemError(NamedTuple):
    """One item failed; the others are unaffected."""

    code: ScoreCode
    message: str


class ScoringError(ValueError):
    """The whole request is refused. The message never holds the request's text."""

    def __init__(self, code: ScoreCode, message: str, field: str | None) -> None:
        super().__init__(code, message, field)
        self.code = code
        self.message = message
        self.field = field


def id_range(field: str, ids: list[int], vocab_size: int) -> str | None:
    """What is wrong with ids that are not all in [0, vocab_size), the width of the logits; None if nothing is."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    given = min(ids) if min(ids) < 0 else max(ids)
    words = str(given) if abs(given) < 1 << 64 else "an integer of more than 64 bits"
    return f"`{field}` must be made of token ids in [0, {vocab_size}). Given: {words}."
