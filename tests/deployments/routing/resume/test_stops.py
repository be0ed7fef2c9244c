"""A stop string is found where it stands, also if the replica was lost between its characters."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from deployments.api.app import build_api
from deployments.config.settings import SamplingDefaults
from engine.tokenizer.detokenizer import BranchText, StopMatcher
from tests.support.toy_model import ByteTokenizer

FleetOf = Callable[..., Awaitable[Any]]
BODY: dict[str, Any] = {
    "prompt": [[5, 6, 7]], "max_tokens": 40, "seed": 3, "stream": True, "allowed_token_ids": [*range(97, 123)],
}  # fmt: skip


async def reported(fleet: Any, **fields: Any) -> tuple[str, str | None, str | None]:
    """A stream's text, its finish reason, and the stop string that ended it."""
    settings = next(iter(fleet.servers.values()))._args.api_settings(SamplingDefaults(), {})
    transport = httpx.ASGITransport(app=build_api(fleet.dispatch, ByteTokenizer(), settings))
    text, reason, stop = "", None, None
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        answer = await http.post("/v1/completions", json=BODY | fields)
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            text, reason, stop = text + choice["text"], choice["finish_reason"], choice["stop_reason"]
    return text, reason, stop


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
async def test_a_stop_string_is_found_across_a_resume(
    fleet_of: FleetOf, cut: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole, reason, _ = await reported(await fleet_of())
    assert len(whole) == 40 and reason == "length"
    stop = whole[after - 1 : after + 3]  # a character before the loss, three behind it
    fleet = await fleet_of(cut("died", after))
    for server in fleet.servers.values():
        monkeypatch.setattr(server.engine.model, "step_seconds", 0.005)  # so that a reply brings one token
    assert await reported(fleet, stop=[stop]) == (whole[: whole.index(stop)], "stop", stop)
    assert fleet.epochs == [0, 1]


async def test_a_resume_that_forgets_the_text_is_seen(
    fleet_of: FleetOf, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _, _ = await reported(await fleet_of())
    stop = whole[2:6]
    fleet = await fleet_of(cut("died", 3))
    for server in fleet.servers.values():
        monkeypatch.setattr(server.engine.model, "step_seconds", 0.005)
    true_push = BranchText.push
    pushed: list[int] = []

    def forgetful(self: BranchText, tokens: Any) -> Any:
        if len(pushed) == 3:
            self._matcher = StopMatcher([stop], False)
        pushed.append(len(tokens))
        return true_push(self, tokens)

    monkeypatch.setattr(BranchText, "push", forgetful)
    assert await reported(fleet, stop=[stop]) != (whole[:2], "stop", stop)
