"""The official OpenAI client: models, completions, streams, errors. Answers what each call gave, as plain data."""

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


def main(given: Path, answer: Path) -> None:
    url = json.loads(given.read_text("utf-8"))["url"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
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
            "nothing": told(lambda: create(**body | {"max_tokens": 0})),
            "suffix": told(lambda: create(**body, suffix="x")),
            "missing": told(lambda: client.models.retrieve("other")),
        },
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
