"""Checks token ids, and finds the label ids of a scoring request.

Each label is exactly one token in context, and all are distinct.
"""

from collections.abc import Mapping, Sequence

from scoring.errors import ScoreCode, ScoringError, refusal
from scoring.tokenizer_protocol import TokenizerProtocol


def token_id_problem(field: str, ids: Sequence[int], vocab_size: int, *, text: bool = False) -> str | None:
    """Returns the message for ids that are not all in [0, vocab_size), the width of the logits; None if they are.

    Args:
        field: The field that the ids came in.
        ids: Token ids.
        vocab_size: The width of the logits.
        text: The field held text, so that the ids are the tokenizer's.
    """
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    given = min(ids) if min(ids) < 0 else max(ids)
    words = str(given) if abs(given) < 1 << 64 else "an integer of more than 64 bits"
    if text:
        return (
            f"`{field}` must be text without the tokens that the model lacks: the tokenizer gives it id {words}, and "
            f"the model has ids in [0, {vocab_size}). The tokenizer is another model's, or has tokens that were added."
        )
    return f"`{field}` must be made of token ids in [0, {vocab_size}). Given: {words}."


def check_label_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Checks label ids that a request gives.

    Args:
        ids: The request's ids, [L].
        vocab_size: Width of the logits.

    Returns:
        The ids as a list.

    Raises:
        ScoringError: An id is outside [0, vocab_size), or is given twice.
    """
    wrong = token_id_problem("label_token_ids", ids, vocab_size)
    if wrong:
        raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, "label_token_ids")
    return _distinct(list(ids), "label_token_ids")


def label_ids(tokenizer: TokenizerProtocol, labels: Sequence[str], suffix: str, *, plain: bool = False) -> list[int]:
    """Finds the one id that each label adds to the end of the prompt.

    Splitting text changes its tokens, so a label is encoded after the suffix and not by itself. There is no fallback:
    a label that is not one token would give a confident score of something else.

    Args:
        tokenizer: Encodes the labels.
        labels: The labels as text, [L].
        suffix: The text that ends every prompt of the request, "" if there is none.
        plain: The suffix is marked text.

    Returns:
        The id of each label, [L].

    Raises:
        ScoringError: A label is not one token, or two labels are the same token.
    """
    texts = [suffix, *(suffix + label for label in labels)]
    before, *after = tokenizer.encode_batch(texts, add_special_tokens=False, plain=plain)
    found = []
    for index, ids in enumerate(after):
        if len(ids) != len(before) + 1 or ids[: len(before)] != before:
            field = f"labels[{index}]"
            tail = ids[len(before) :] if ids[: len(before)] == before else ids
            rule = f"be exactly one token after this prompt. Given: the ids {_few(tail)}."
            raise refusal(field, rule, ScoreCode.LABEL_NOT_SINGLE_TOKEN)
        found.append(ids[-1])
    return _distinct(found, "labels")


def joint_label_ids(
    tokenizer: TokenizerProtocol, labels: Sequence[str], texts: Mapping[int, str], items: str
) -> list[int]:
    """Finds the one id that each label adds to the end of every row, which is tokenised as one text.

    Args:
        tokenizer: Encodes the labels.
        labels: The labels as text, [L].
        texts: The rows' texts, by item; at least one.
        items: Name of the request's field with the items, for errors.

    Returns:
        The id of each label, [L].

    Raises:
        ScoringError: A label is not one token, or another one after another item; or two labels are the same token.
    """
    rest = iter(texts.items())
    first, text = next(rest)
    found = label_ids(tokenizer, labels, text)
    for index, text in rest:
        for label, (one, other) in enumerate(zip(found, label_ids(tokenizer, labels, text), strict=True)):
            if one != other:
                places = f"{one} after `{items}[{first}]` and {other} after `{items}[{index}]`"
                rule = f"be the same token after every item. Given: {places}."
                raise refusal(f"labels[{label}]", rule, ScoreCode.LABEL_NOT_SINGLE_TOKEN)
    return found


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
