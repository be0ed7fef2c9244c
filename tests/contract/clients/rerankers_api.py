"""The package `rerankers` with the dialects of Cohere, Jina and TEI. Arguments: url, query, documents."""

import json
import sys
from pathlib import Path
from typing import Any

from rerankers import Reranker

PROVIDERS = {"cohere": "/v1/rerank", "jina": "/v1/rerank", "text-embeddings-inference": "/rerank"}


def ranked(url: str, provider: str, query: str, documents: list[str]) -> list[dict[str, Any]]:
    # The model's type names the dialect.
    ranker: Any = Reranker("builtin", model_type=provider, api_key="any", url=url + PROVIDERS[provider])
    found = ranker.rank(query=query, docs=documents)
    return [{"index": one.document.doc_id, "score": one.score, "text": one.document.text} for one in found.results]


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    rest = (arguments["query"], arguments["documents"])
    found = {provider: ranked(arguments["url"], provider, *rest) for provider in PROVIDERS}
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
