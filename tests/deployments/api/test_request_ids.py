"""R15: ids that clients choose mean nothing: equal ones, or ones that begin like others, disturb no other request."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deployments.config.app_args import AppArgs
from deployments.protocol import Failure, GenerateCall
from deployments.replica.replica import ReplicaServer
from engine.requests import EngineError, ErrorCode, GenerateRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model

IDS = ["", "a", "a", "ab", "abc", "a/0", "a/1", "canary", "a" * 256, "\0"]
LEAVES = 2  # its id is another's, and the beginning of many


def task(number: int, request_id: str) -> GenerateCall:
    prompt = np.arange(number, number + 9, dtype=np.int32)
    params = SamplingParams(max_tokens=80)
    return (GenerateRequest(request_id=request_id, prompt=prompt, params=params, seed=number),)


async def tokens(server: ReplicaServer, number: int, request_id: str, leave: bool = False) -> list[int]:
    found: list[int] = []
    stream = server.stream(task(number, request_id))
    async for reply in stream:
        assert not isinstance(reply, Failure), reply
        for item in reply.chunks:
            chunk: Any = item.chunk
            if isinstance(chunk, Failure):
                return [*found, -1]
            found += chunk.tokens.tolist()
        if leave:
            await stream.aclose()  # type: ignore[attr-defined]
            break
    return found


async def disturbed(args: dict[str, Any], plant: Callable[[ReplicaServer], None] | None = None) -> list[int]:
    """The numbers of the streams that another stream's id, or its end, changed."""
    server, model = ReplicaServer(AppArgs.model_validate(args), "r1"), toy_model.ToyModel(num_slots=4096)
    await server.start(model)
    try:
        alone = [await tokens(server, number, f"own-{number}") for number in range(len(IDS))]
        if plant is not None:
            plant(server)
        model.step_seconds = 0.001
        found = await asyncio.gather(*(tokens(server, i, name, leave=i == LEAVES) for i, name in enumerate(IDS)))
    finally:
        server.stop()
    return [number for number in range(len(IDS)) if number != LEAVES and found[number] != alone[number]]


@pytest.mark.risk("R15", figure="0 of 9 streams disturbed by the end of another; 40 of 40 ids our own")
async def test_streams_with_equal_and_prefix_ids_are_independent(toy_args: dict[str, Any]) -> None:
    found = await disturbed(toy_args)
    print(f"R15: {len(found)} of {len(IDS) - 1} streams disturbed")
    assert not found


@pytest.mark.risk("R15", planted=True)
@pytest.mark.risk("S8", planted=True)
async def test_cancelling_by_the_beginning_of_an_id_would_be_seen(toy_args: dict[str, Any]) -> None:
    def by_prefix(server: ReplicaServer) -> None:
        tracker = server.engine.core.tracker
        close = tracker.close
        gone = EngineError(ErrorCode.DRAINING, "Cancelled with another one.")

        def closing(state: Any, *, keep: bool = True) -> None:
            for other in list(tracker.live.values()):
                if other.request.request_id.startswith(state.request.request_id):
                    tracker._results.add(other.results, gone)
                    close(other, keep=keep)

        tracker.close = closing  # type: ignore[method-assign]

    assert await disturbed(toy_args, by_prefix)


@pytest.mark.risk("R15")
@pytest.mark.risk("S8", figure="0 of 9")
@pytest.mark.parametrize("path", ["/v1/completions", "/generative_scoring"])
async def test_a_client_cannot_choose_the_servers_ids(client: Any, backend: Any, path: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "user": "u"}
    if path == "/generative_scoring":
        body = {"query": "q", "items": ["a"], "label_token_ids": [1, 2]}
    body["request_id"] = "mine"
    sent = await asyncio.gather(*(client.post(path, body, x_request_id="mine") for _ in range(20)))
    ids = {answer.headers["x-assay-request-id"] for answer in sent} | {answer.json()["id"] for answer in sent}
    requests = {
        request.request_id for request in (*(one for call in backend.tasks for one in call), *backend.score_tasks)
    }
    assert len(ids) == 40 and len(requests) == 20
    assert not any("mine" in one for one in ids | requests)
