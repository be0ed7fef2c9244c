"""LangChain's partner packages: reranking by Cohere's, decisions and chat by OpenAI's.

Arguments: url, query, documents, input, messages.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langchain_openai.decisions import Choice, Level, OpenAIDecisions, Predicate, Score
from pydantic import SecretStr


def reranked(url: str, query: str, documents: list[str]) -> dict[str, Any]:
    reranker = CohereRerank(model="builtin", base_url=url, cohere_api_key=SecretStr("any"), top_n=3)
    given = [Document(text, metadata={"index": i}) for i, text in enumerate(documents)]
    compressed = [one.metadata | {"text": one.page_content} for one in reranker.compress_documents(given, query)]
    return {
        "compressed": [
            {"index": one["index"], "score": one["relevance_score"], "text": one["text"]} for one in compressed
        ],
        "all": [
            {"index": one["index"], "score": one["relevance_score"]}
            for one in reranker.rerank(documents, query, top_n=None)
        ],
    }


def decided(url: str, text: str) -> dict[str, Any]:
    decisions = OpenAIDecisions(model="builtin", base_url=f"{url}/v1", api_key=SecretStr("any"), max_retries=0)
    questions = {
        "red": Predicate(instructions="is it red?"),
        "colour": Choice(instructions="which colour?", choices={"blue": None, "red": None, "green": None}),
        "style": Score(instructions="which style is it?", levels=["light", Level(label="soft"), "sturdy"]),
    }
    plain = decisions.invoke({"input": text, "questions": questions})
    message = asyncio.run(decisions.ainvoke({"input": [HumanMessage(text)], "questions": questions}))
    return {
        "plain": plain.model_dump(),
        "message": message.model_dump(),
        "kinds": [[*plain.predicates], [*plain.choices], [*plain.scores]],
    }


def chatted(url: str, messages: list[tuple[str, str]]) -> dict[str, Any]:
    model = ChatOpenAI(model="builtin", base_url=f"{url}/v1", api_key=SecretStr("any"), temperature=0, max_retries=0)
    found = model.invoke(messages)
    parts = [str(part.content) for part in model.stream(messages)]
    try:
        model.invoke([("user", "red chair " * 4000)])
        kind: list[str] = []
    except Exception as error:
        kind = [parent.__name__ for parent in type(error).__mro__]
    return {
        "text": found.content,
        "usage": found.usage_metadata,
        "finish": found.response_metadata["finish_reason"],
        "parts": parts,
        "long": kind,
    }


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    url = arguments["url"]
    messages = [(one["role"], one["content"]) for one in arguments["messages"]]
    found = {
        "rerank": reranked(url, arguments["query"], arguments["documents"]),
        "decisions": decided(url, arguments["input"]),
        "chat": chatted(url, messages),
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
