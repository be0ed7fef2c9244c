"""An agent of Pydantic AI with text answers, plain and streamed, and its errors. Arguments: url, messages."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def streamed(agent: Any, prompt: str) -> list[str]:
    async with agent.run_stream(prompt) as answer:
        return [part async for part in answer.stream_text(delta=True, debounce_by=None)]


def told(call: Any) -> dict[str, Any]:
    try:
        call()
    except ModelHTTPError as error:
        return {"kind": type(error).__name__, "status": error.status_code}
    return {"kind": None}


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    system, user = (message["content"] for message in arguments["messages"])
    provider = OpenAIProvider(base_url=f"{arguments['url']}/v1", api_key="any")

    def agent(model: str, **settings: Any) -> Any:
        settings = {"temperature": 0.0, **settings}
        return Agent(OpenAIChatModel(model, provider=provider), system_prompt=system, model_settings=settings)

    plain = agent("builtin").run_sync(user)
    usage = plain.usage() if callable(plain.usage) else plain.usage
    found = {
        "plain": plain.output,
        "tokens": [usage.input_tokens, usage.output_tokens],
        "parts": asyncio.run(streamed(agent("builtin"), user)),
        "errors": {
            "model": told(lambda: agent("other").run_sync(user)),
            "temperature": told(lambda: agent("builtin", temperature=9.0).run_sync(user)),
        },
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
