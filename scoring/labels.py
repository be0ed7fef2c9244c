"""Labels of a scoring request: token ids, given or found for strings, each exactly one distinct token in context."""

from collections.abc import Sequence

from scoring.errors import ScoreCode, ScoringError, id_range
from scoring.tokenizer_protocol import Tokens


def check_label_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Ids as given, if they are in [0, vocab_size) and distinct."""
    wrong = id_range("label_token_ids", ids, vocab_size)
    if wrong:
        raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, "label_token_ids")
    return _distinct(list(ids), "label_token_ids")


def label_ids(tokens: Tokens, labels: Sequence[str], suffix: str, *, plain: bool = False) -> list[int]:
    """The one id that each label adds to the prompt's fixed end, `suffix`; "" if the prompt has none.

    Splitting text changes its tokens, so a label is encoded after the suffix and not alone. There is no fallback: a
    label that is not one token would give a confident score of something else. `plain`: the suffix is marked text.
    """
    texts = [suffix, *(suffix + label for label in labels)]
    before, *after = tokens.encode_batch(texts, add_special_tokens=False, plain=plain)
    found = []
    for index, ids in enumerate(after):
        if len(ids) != len(before) + 1 or ids[: len(before)] != before:
            field = f"labels[{index}]"
            tail = ids[len(before) :] if ids[: len(before)] == before else ids
            raise ScoringError(
                ScoreCode.LABEL_NOT_SINGLE_TOKEN,
                f"`{field}` must be exactly one token after this prompt. Given: the ids {_few(tail)}.",
                field,
            )
        found.append(ids[-1])
    return _distinct(found, "labels")


def _distinct(ids: list[int], field: str) -> list[int]:
    seen: dict[int, int] = {}
    for index, token in enumerate(ids):
        if token in seen:
            raise ScoringError(
                ScoreCode.DUPLICATE_LABEL,
                f"`{field}` must be distinct tokens. Given: {token} at [{seen[token]}] and [{index}].",
                f"{field}[{index}]",
            )
        seen[token] = index
    return ids


def _few(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}, ...] ({len(ids)} in all)" if len(ids) > 16 else f"[{shown}]"
