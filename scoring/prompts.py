"""Rows of a scoring request: query and item joined, cut to length, as flat ids with one shared prefix."""

from scoring.errors import ScoreCode, ScoringError
from scoring.rows import Bounds, Int32s, Names, Prompts, Rows
from scoring.seams import Concat, Joint, Templated
from scoring.tokens import Tokens

__all__ = ["Bounds", "Int32s", "Names", "Prompts", "Rows", "build_rows"]


def build_rows(tokens: Tokens, spec: Prompts, bounds: Bounds) -> Rows:
    """Raises ScoringError for what is wrong with the request as a whole. CPU work: call it off the event loop."""
    if isinstance(spec.query, str) != isinstance(spec.items[0], str):
        raise ScoringError(
            ScoreCode.INVALID_VALUE,
            f"`{spec.names.items}` must be of the same kind as `query`: both text or both token ids. "
            "Given: one of each.",
            spec.names.items,
        )
    if spec.seam == "joint" and not isinstance(spec.query, str):
        raise ScoringError(ScoreCode.INVALID_VALUE, "`seam` must be concat for token ids. Given: joint.", "seam")
    if spec.template is not None:
        return Templated(tokens, spec, bounds, spec.template).build()
    builder = Joint(tokens, spec, bounds) if spec.seam == "joint" else Concat(tokens, spec, bounds)
    return builder.build()
