"""The official OpenAI client against the app in process."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from deployments.messages import Failure
from engine.jobs import ErrorCode


@pytest.fixture
async def sdk(app: FastAPI) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))  # what the SDK itself uses
    async with openai.AsyncOpenAI(base_url="http://api/v1", api_key="any", http_client=http, max_retries=0) as client:
        yield client


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["toy"]
    assert (await sdk.models.retrieve("toy")).owned_by == "assay"


async def test_a_completion(sdk: openai.AsyncOpenAI) -> None:
    found = await sdk.completions.create(model="toy", prompt=["a", "b"], logprobs=2, max_tokens=4, n=2, seed=3)
    assert [choice.text for choice in found.choices] == [" wor"] * 4
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens == [" ", "w", "o", "r"]
    assert found.usage is not None and found.usage.total_tokens == 20


async def test_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.completions.create(
        model="toy", prompt="a", stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == " world"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


async def test_errors_are_the_clients_own(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as invalid:
        await sdk.completions.create(model="toy", prompt="a", temperature=9)
    assert (invalid.value.code, invalid.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="gpt", prompt="a")
    backend.chunk_failure = Failure(ErrorCode.OVERLOADED, "Busy.", None)
    with pytest.raises(openai.RateLimitError):
        await sdk.completions.create(model="toy", prompt="a")


async def test_a_stream_that_breaks_raises(sdk: openai.AsyncOpenAI, backend: Any) -> None:
    from deployments.wire.errors import ApiError

    backend.fail, backend.fail_after = ApiError("replica_lost", "Lost."), 2
    stream = await sdk.completions.create(model="toy", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="Lost"):
        async for _ in stream:
            pass
