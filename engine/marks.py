"""Marks: a tokenizer in which no text of a user can become a control token, and a template's control tokens still do.

Every control token is known there by a secret name that no user can guess, and by no other. A template's literal text
is rewritten to those names once (`Marks.mark`); whatever stands around it is encoded as ordinary characters, together
with its neighbours, exactly as the plain tokenizer would split the same text.
"""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

NONCE_BYTES = 16


class Marks:
    """Control strings and their secret names."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        """`controls`: each control token's text and id."""
        nonce = secrets.token_hex(NONCE_BYTES)
        # Lower-case ASCII without spaces: no normaliser changes it. The end keeps one name from beginning another.
        self.names = {text: f"<{nonce}:{token}>" for text, token in controls.items()}
        longest = sorted(map(re.escape, self.names), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest)) if longest else None

    def mark(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self.names[found.group()], text)


def is_control(token: Mapping[str, Any]) -> bool:
    """Whether an added token means something beyond its text. Runs of white space are added to many vocabularies
    as ordinary pieces; a marker such as `<think>` often is not called special and still is one."""
    return bool(token["special"]) or not token["content"].isspace()


def renamed(data: str, marks: Marks) -> str:
    """The JSON of a `tokenizers` tokenizer with every control token under its secret name, ids unchanged."""
    found = json.loads(data)
    for token in found["added_tokens"]:
        token["content"] = marks.names.get(token["content"], token["content"])
    model = found["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {marks.names.get(piece, piece): token for piece, token in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):  # pairs of piece and score
        model["vocab"] = [[marks.names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = marks.names.get(model["unk_token"], model["unk_token"])
    return json.dumps(found)
