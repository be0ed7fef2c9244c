"""LiteLLM's functions against one server: rerank, chat, completion, and its errors.

Arguments: url, query, documents, messages, prompt.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import asks the network for prices

import litellm


def told(call: Any) -> dict[str, Any]:
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "status": getattr(error, "status_code", None), "words": str(error)}
    return {"kind": None}


def reranked(**options: Any) -> dict[str, Any]:
    found = litellm.rerank(**options)
    return {
        "id": found.id,
        "results": [
            {"index": one["index"], "score": one["relevance_score"], "text": (one.get("document") or {}).get("text")}
            for one in found.results
        ],
        "tokens": found.meta["tokens"]["input_tokens"],
    }


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    url = arguments["url"]
    rank = {"model": "hosted_vllm/builtin", "query": arguments["query"], "documents": arguments["documents"]}
    base: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "any", "max_retries": 0}
    chat: dict[str, Any] = {"model": "hosted_vllm/builtin", "messages": arguments["messages"], "temperature": 0} | base
    text: dict[str, Any] = {"model": "text-completion-openai/builtin", "prompt": arguments["prompt"]} | base
    text |= {"temperature": 0, "max_tokens": 12}
    long = [{"role": "user", "content": "red chair " * 4000}]
    found = {
        "rerank": {
            "plain": reranked(**rank, api_base=url),
            "v1": reranked(**rank, api_base=f"{url}/v1", top_n=2, return_documents=True),
            "named": reranked(**rank, api_base=f"{url}/v1/rerank", return_documents=False, api_key="any"),
        },
        "chat": litellm.completion(**chat).model_dump(),
        "chat_parts": [part.model_dump() for part in litellm.completion(**chat, stream=True)],
        "text": litellm.text_completion(**text).model_dump(),
        "text_parts": [part.model_dump() for part in litellm.text_completion(**text, stream=True)],
        "errors": {
            "model": told(lambda: litellm.completion(**chat | {"model": "hosted_vllm/other"})),
            "long": told(lambda: litellm.completion(**chat | {"messages": long})),
            "rerank": told(lambda: litellm.rerank(**rank | {"model": "hosted_vllm/other"}, api_base=url)),
        },
    }
    answer.write_text(json.dumps(found, default=str), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
