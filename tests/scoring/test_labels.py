"""A label is exactly one distinct token in its context, or the request is refused."""

from typing import Any

import pytest

from scoring.errors import ScoreCode, ScoringError
from scoring.labels import check_label_ids, joint_label_ids, label_ids


def test_a_label_is_one_token_after_the_suffix(tokens: Any) -> None:
    assert label_ids(tokens, ["yes", "no"], "") == [tokens.id("yes"), tokens.id("no")]
    assert label_ids(tokens, [" yes", " no"], "answer:") == [tokens.id(" yes"), tokens.id(" no")]


def test_a_label_that_merges_with_the_suffix_is_refused(tokens: Any) -> None:
    with pytest.raises(ScoringError) as caught:
        label_ids(tokens, ["yes"], "answer")
    assert caught.value.code is ScoreCode.LABEL_NOT_SINGLE_TOKEN
    assert caught.value.field == "labels[0]"
    assert f"[{tokens.id('answeryes')}]" in caught.value.message


def test_a_label_of_joined_texts_is_the_token_that_follows_each(tokens: Any) -> None:
    texts = {0: "is it", 3: "is it?"}
    assert joint_label_ids(tokens, [" yes", " no"], texts, "items") == [tokens.id(" yes"), tokens.id(" no")]
    with pytest.raises(ScoringError) as caught:
        joint_label_ids(tokens, ["yes"], {2: "answer"}, "items")
    assert caught.value.code is ScoreCode.LABEL_NOT_SINGLE_TOKEN


def test_a_label_that_is_another_token_behind_another_item_is_refused(tokens: Any) -> None:
    class Merging:
        """Writes an x behind a digit as another token."""

        def encode_batch(self, texts: list[str], **_: Any) -> list[list[int]]:
            return [
                [ord(c) + 500 * (c == "x" and text[:at][-1:].isdigit()) for at, c in enumerate(text)] for text in texts
            ]

    merging: Any = Merging()
    assert joint_label_ids(merging, ["x", "y"], {0: "a", 1: "b"}, "items") == [120, 121]
    with pytest.raises(ScoringError) as caught:
        joint_label_ids(merging, ["y", "x"], {0: "a", 4: "1"}, "items")
    assert caught.value.field == "labels[1]"
    assert "120 after `items[0]` and 620 after `items[4]`" in caught.value.message


@pytest.mark.risk("Q3", figure="refused")
def test_a_label_of_two_tokens_is_refused_with_the_ids_found(tokens: Any) -> None:
    with pytest.raises(ScoringError, match=rf"\[{tokens.id('y')}, {tokens.id('!')}\]") as caught:
        label_ids(tokens, ["no", "y!"], "")
    assert caught.value.field == "labels[1]"


def test_equal_labels_are_refused(tokens: Any) -> None:
    with pytest.raises(ScoringError, match=r"at \[0\] and \[2\]") as caught:
        label_ids(tokens, ["a", "b", "a"], "")
    assert caught.value.code is ScoreCode.DUPLICATE_LABEL
    with pytest.raises(ScoringError, match=r"at \[0\] and \[2\]"):
        check_label_ids([3, 4, 3], 9)


@pytest.mark.parametrize("token", [-1, 9, 2**31 - 1, 2**80])
def test_label_ids_are_held_against_the_width_of_the_logits(token: int) -> None:
    assert check_label_ids([8, 0], 9) == [8, 0]
    with pytest.raises(ScoringError) as caught:
        check_label_ids([0, token], 9)
    assert caught.value.code is ScoreCode.INVALID_TOKEN_ID
