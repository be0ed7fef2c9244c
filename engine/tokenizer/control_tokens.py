"""ControlTokens: secret names that keep the text of users from becoming control tokens.

In a renamed tokenizer every control token has a secret name that no user can guess, and no other. A template's literal
text is rewritten to those names once (`ControlTokens.mark`). All other text is encoded as ordinary characters, together
with its neighbours, exactly as the plain tokenizer would split the same text.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

NONCE_BYTES = 16
_MARKER = re.compile(r"[<\[{(|].*[>\]})|]", re.DOTALL)


class ControlTokens:
    """Maps the strings of control tokens to their secret names."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        """Makes new names. `controls`: text and id of each control token."""
        nonce = secrets.token_hex(NONCE_BYTES)
        # Lower-case ASCII without spaces: no normaliser changes it. The end keeps one name from beginning another.
        self.names = {text: f"<{nonce}:{token}>" for text, token in controls.items()}
        longest = sorted(map(re.escape, self.names), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest)) if longest else None
        self._name = re.compile(f"<{nonce}:[0-9]+>")
        self.seam = f"<{nonce}:seam>"

    def mark(self, text: str) -> str:
        """Replaces the control strings in a text by their secret names."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self.names[found.group()], text)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the characters [start, end) of each secret name in a marked text."""
        return [found.span() for found in self._name.finditer(text)]


def is_control(token: Mapping[str, Any], pieces: Collection[str]) -> bool:
    """Tells whether an added token means something beyond its text.

    Beside those that are called special these are tokens in brackets that were added after the pieces were learned: a
    marker such as `<think>` often is not called special. Added white space and words, and tags such as `<table>` that
    a vocabulary was learned with, are ordinary text.

    Args:
        token: an added token of a tokenizer's JSON.
        pieces: the model's own vocabulary.
    """
    return bool(token["special"]) or (
        _MARKER.fullmatch(token["content"]) is not None and token["content"] not in pieces
    )


def controls_of(data: str) -> list[dict[str, Any]]:
    """Returns the added tokens of a tokenizer's JSON that are control tokens: `content`, `id`, `special` and more."""
    found = json.loads(data)
    vocabulary = found["model"].get("vocab") or {}
    pieces = set(vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary))
    return [token for token in found["added_tokens"] if token["content"] and is_control(token, pieces)]


def renamed(data: str, controls: ControlTokens) -> str:
    """Returns the JSON of a `tokenizers` tokenizer with every control token under its secret name, ids unchanged."""
    found = json.loads(data)
    for token in found["added_tokens"]:
        token["content"] = controls.names.get(token["content"], token["content"])
    model = found["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {controls.names.get(piece, piece): token for piece, token in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # pairs of piece and score
        model["vocab"] = [[controls.names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # no two pieces of plain text may become a control token, either
        model["merges"] = [merge for merge in model["merges"] if controls.names.keys().isdisjoint(_pieces(merge))]
    if model.get("unk_token") is not None:
        model["unk_token"] = controls.names.get(model["unk_token"], model["unk_token"])
    return json.dumps(found)


def _pieces(merge: str | list[str]) -> tuple[str, ...]:
    """Returns the two pieces of a merge, and the one that they become."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    return (*pair, "".join(pair))
