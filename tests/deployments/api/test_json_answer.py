"""Large answers are cut into pieces, also where lists begin with null."""

from typing import Any

import pytest
from pydantic_core import to_json

from deployments.api import json_answer
from deployments.api.json_answer import ENTRIES, encode

ROW = {"token": "word", "logprob": -1.5, "rank": 3}


@pytest.mark.parametrize(
    "value",
    [
        [ROW] * 20_000,
        [None, *[ROW] * 20_000],
        {"choices": [{"prompt_logprobs": [None, *[{str(n): ROW for n in range(20)}] * 3_000]}]},
        {"columns": [None, *[[0.5] * 500] * 200]},
    ],
)
def test_no_call_of_the_encoder_writes_much_more_than_its_share(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(part: object) -> bytes:
        found = to_json(part, inf_nan_mode="null")
        calls.append(len(found))
        return found

    monkeypatch.setattr(json_answer, "_json", counted)
    pieces = encode(value, 1 << 30)
    assert b"".join(pieces) == to_json(value)
    assert max(calls) <= 32 * ENTRIES and len(calls) > 5
