"""Haystack's chat generator, plain and streamed, and its errors. Arguments: url, messages."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    system, user = (message["content"] for message in arguments["messages"])
    messages = [ChatMessage.from_system(system), ChatMessage.from_user(user)]

    def generator(**options: Any) -> Any:
        return OpenAIChatGenerator(
            api_key=Secret.from_token("any"),
            model="builtin",
            api_base_url=f"{arguments['url']}/v1",
            max_retries=0,
            generation_kwargs={"temperature": 0.0, **options},
        )

    parts: list[str] = []
    plain = generator().run(messages)["replies"][0]
    streamed = generator().run(messages, streaming_callback=lambda chunk: parts.append(chunk.content))["replies"][0]
    try:
        generator(temperature=9.0).run(messages)
    except Exception as error:
        status = getattr(error, "status_code", None)
    found = {
        "plain": plain.text,
        "usage": plain.meta["usage"],
        "finish_reason": plain.meta["finish_reason"],
        "streamed": streamed.text,
        "parts": parts,
        "status": status,
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
