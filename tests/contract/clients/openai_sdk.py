"""The official OpenAI client: models, completions, chat, decisions, streams, errors, each answer as plain data.

Arguments: url, messages, input.
"""

import json
import sys
from pathlib import Path
from typing import Any

import openai

PROMPT = "Query: a red chair\nDocument: A sturdy red"


def told(call: Any) -> dict[str, Any]:
    """The error that a call raises, as the client types it."""
    try:
        call()
    except openai.APIStatusError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "code": error.code, "param": error.param}
    return {"kind": None}


def chatted(client: openai.OpenAI, messages: Any) -> dict[str, Any]:
    create = client.chat.completions.create
    body: dict[str, Any] = {"model": "builtin", "messages": messages, "temperature": 0, "seed": 7}
    several: dict[str, Any] = body | {"temperature": 1.0, "n": 3, "max_completion_tokens": 17}
    stream = create(**body, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True})
    streamed = create(**several, stream=True)
    return {
        "plain": create(**body, logprobs=True, top_logprobs=2).model_dump(),
        "events": [event.model_dump() for event in stream],
        "several": create(**several).model_dump(),
        "several_events": [event.model_dump() for event in streamed],
        "errors": {
            "tools": told(lambda: create(**body, tools=[{"type": "function", "function": {"name": "f"}}])),
            "role": told(lambda: create(**body | {"messages": [{"role": "other", "content": "a"}]})),
            "long": told(lambda: create(**body | {"messages": [{"role": "user", "content": "red chair " * 4000}]})),
        },
    }


def decided(client: openai.OpenAI, text: str) -> dict[str, Any]:
    create = client.decisions.create
    questions: list[Any] = [
        {"type": "predicate", "instructions": "is it red?", "name": "red"},
        {
            "type": "choice",
            "instructions": "which colour?",
            "choices": [{"value": "blue"}, {"value": "red"}, {"value": "green"}],
        },
        {
            "type": "score",
            "instructions": "which style is it?",
            "levels": [{"label": "light"}, {"label": "soft"}, {"label": "sturdy"}],
        },
    ]
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
    return {
        "plain": create(model="builtin", input=text, questions=questions).model_dump(),
        "parts": create(model="builtin", input=parts, questions=questions).model_dump(),
        "errors": {
            "choices": told(
                lambda: create(model="builtin", input=text, questions=[questions[1] | {"choices": [{"value": "blue"}]}])
            ),
            "long": told(lambda: create(model="builtin", input="red chair " * 4000, questions=questions)),
        },
    }


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    client = openai.OpenAI(base_url=f"{arguments['url']}/v1", api_key="any", max_retries=0)
    create = client.completions.create
    body: dict[str, Any] = {"model": "builtin", "prompt": PROMPT, "max_tokens": 12, "seed": 7}
    stream = create(**body, echo=True, logprobs=2, stream=True, stream_options={"include_usage": True})
    events = [event.model_dump() for event in stream]
    strict = create(**body, echo=True, logprobs=2)
    found = {
        "models": [model.model_dump() for model in client.models.list()],
        "model": client.models.retrieve("builtin").model_dump(),
        "plain": create(**body).model_dump(),
        "echo": strict.model_dump(),
        "events": events,
        "several": create(**body | {"prompt": [PROMPT, "A lamp", "The"]}, n=2).model_dump(),
        "ids": create(
            **body | {"prompt": [[40, 41], [42]]}, echo=True, logprobs=0, extra_body={"top_k": 3}
        ).model_dump(),
        "prompt_only": create(**body | {"max_tokens": 0}, extra_body={"prompt_logprobs": 1}).model_dump(),
        "errors": {
            "temperature": told(lambda: create(**body, temperature=9)),
            "model": told(lambda: create(**body | {"model": "other"})),
            "long": told(lambda: create(**body | {"prompt": [[1] * 4000]})),
            "less": told(lambda: create(**body | {"max_tokens": -1})),
            "suffix": told(lambda: create(**body, suffix="x")),
            "missing": told(lambda: client.models.retrieve("other")),
        },
        "chat": chatted(client, arguments["messages"]),
        "decisions": decided(client, arguments["input"]),
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
