"""Haystack's rankers for Cohere and Jina. Arguments: url, query, documents."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    url, key = arguments["url"], Secret.from_token("any")
    documents = [Document(content=text, id=str(index)) for index, text in enumerate(arguments["documents"])]
    rankers = {
        "cohere": CohereRanker(model="builtin", api_key=key, api_base_url=url, top_k=100),
        "jina": JinaRanker(model="builtin", api_key=key, base_url=f"{url}/v1/rerank"),
    }

    def ranked(ranker: Any) -> list[dict[str, Any]]:
        found = ranker.run(query=arguments["query"], documents=documents)["documents"]
        return [{"index": int(one.id), "score": one.score, "text": one.content} for one in found]

    answer.write_text(json.dumps({name: ranked(ranker) for name, ranker in rankers.items()}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
