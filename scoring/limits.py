"""Bounds of lists, labels and prompts of a scoring request, each stated once: wire models and docs read them here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """What one scoring request may ask for. Counts; a server may lower or raise each."""

    max_items: int = 4096
    max_labels: int = 256
    max_questions: int = 400
    max_choices: int = 255
    max_levels: int = 255
    max_continuations: int = 256  # of one item
    max_continuation_tokens: int = 1024  # of each
    max_joined_chars: int = 16_777_216  # of all rows of a `joint` request, whose text is tokenised row by row
    max_instruction_chars: int = 16_384  # of `instruction` and of `system`
