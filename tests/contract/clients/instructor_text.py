"""Instructor in its text modes: plain texts, and a model of Pydantic read from a text. Arguments: url, messages."""

import json
import sys
from pathlib import Path
from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel


class Listing(BaseModel):
    """What the built-in model, which writes no JSON, is asked for in vain."""

    documents: list[str]


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    messages = arguments["messages"]
    plain = openai.OpenAI(base_url=f"{arguments['url']}/v1", api_key="any", max_retries=0)

    def create(mode: Any, response_model: Any) -> Any:
        client = instructor.from_openai(plain, mode=mode)
        return client.chat.completions.create(
            model="builtin", messages=messages, response_model=response_model, max_retries=0, temperature=0.0
        )

    found = {"text": create(instructor.Mode.MD_JSON, None).choices[0].message.content}
    for mode in (instructor.Mode.MD_JSON, instructor.Mode.JSON):
        try:
            create(mode, Listing)
        except InstructorRetryException as error:
            completion = error.last_completion
            written = completion.choices[0].message.content if completion is not None else None
            found[mode.name] = {"written": written, "error": str(error)}
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
