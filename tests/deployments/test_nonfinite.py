"""R11: a row whose logits are NaN or infinite fails by itself, on every route; nothing else changes by a bit."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support import toy_model

KINDS = {"nan": toy_model.NAN, "inf": toy_model.INF, "all -inf": toy_model.EMPTY}
ITEMS = [[60 + i, 70 + i] for i in range(17)]
BAD = 11
GENERATION = {"prompt": [40, 41, 42], "max_tokens": 40, "seed": 7, "logprobs": 3, "ignore_eos": True}


async def all_answers(client: Any, items: list[list[int]], beside: dict[str, Any]) -> tuple[list[Any], Any, list[str]]:
    """Scores, a completion's choices, and every body that was sent, with `beside` generated at the same time."""
    scoring = {"query": [1, 2, 3], "items": items, "label_token_ids": [65, 66, 200]}
    sent = await asyncio.gather(
        client.post("/generative_scoring", scoring),
        client.post("/v1/completions", GENERATION),
        *(client.post("/v1/completions", beside | {"stream": stream}) for stream in (False, True)),
    )
    rows = sent[0].json()["data"]
    kept = [(row["logprobs"], row["probabilities"], row["label_mass"], row["error"]) for row in rows]
    return kept, sent[1].json().get("choices"), [answer.text for answer in sent]


async def mismatches(client: Any, magic: int) -> int:
    """Neighbours that a poisoned item and two poisoned generations changed; fails where the poisoned are not told."""
    prompt = {"prompt": [9, 10], "max_tokens": 5, "seed": 1}
    clean, choices, _ = await all_answers(client, ITEMS, prompt)
    items = [[*item, magic] if index == BAD else item for index, item in enumerate(ITEMS)]
    before = client.server.engine.stats().nonfinite_rows
    rows, beside, texts = await all_answers(client, items, prompt | {"prompt": [9, magic]})
    counted = client.server.engine.stats().nonfinite_rows - before
    assert rows[BAD][3]["code"] == "nonfinite_logits" and rows[BAD][0] is None
    assert [json.loads(texts[place])["error"]["code"] for place in (2, 3)] == ["nonfinite_logits"] * 2
    assert not any(word in text for text in texts for word in ("NaN", "Infinity"))
    changed = [index for index in range(len(ITEMS)) if index != BAD and rows[index] != clean[index]]
    return len(changed) + int(beside != choices) + int(counted != 3)


@pytest.mark.risk(
    "R11",
    figure="0 of 17 neighbours changed, for each of NaN, +inf and a row of -inf; 3 of 3 bad rows counted; no NaN in "
    "any body",
)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_poisoned_row_fails_alone_and_is_counted(replica_client: Callable[..., Any], kind: str) -> None:
    client = await replica_client()
    found = await mismatches(client, KINDS[kind])
    print(f"R11 {kind}: {found} of {len(ITEMS)} neighbours changed")
    assert found == 0


@pytest.mark.risk("R11", planted=True)
async def test_a_fault_that_spreads_to_the_next_row_would_be_seen(
    replica_client: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await replica_client()
    read = toy_model.ToyModel._read

    def spreading(self: Any, runs: Any) -> Any:
        hashes, faults = read(self, runs)
        return hashes, np.maximum(faults, np.roll(faults, 1))

    monkeypatch.setattr(toy_model.ToyModel, "_read", spreading)
    assert await mismatches(client, toy_model.NAN) > 0
