"""The rerankers of LlamaIndex that speak our dialects: Cohere, Jina, TEI. Arguments: url, query, documents."""

import json
import sys
from pathlib import Path
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference


def ranked(reranker: Any, query: str, documents: list[str]) -> list[dict[str, Any]]:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i)), score=0.5) for i, text in enumerate(documents)]
    found = reranker.postprocess_nodes(nodes, query_str=query)
    return [{"index": int(one.node.node_id), "score": one.score, "text": one.node.text} for one in found]


def told(call: Any) -> dict[str, Any]:
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "words": str(error)}
    return {"kind": None}


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    url, rest = arguments["url"], (arguments["query"], arguments["documents"])
    cohere: dict[str, Any] = {"model": "builtin", "api_key": "any", "base_url": url, "max_retries": 1}
    jina: dict[str, Any] = {"model": "builtin", "api_key": "any", "base_url": f"{url}/v1"}
    found = {
        "cohere": ranked(CohereRerank(top_n=3, **cohere), *rest),
        "jina": ranked(JinaRerank(top_n=3, **jina), *rest),
        "tei": ranked(TextEmbeddingInference(top_n=3, base_url=url), *rest),
        "tei_all": ranked(TextEmbeddingInference(top_n=100, base_url=url, auth_token="Bearer any"), *rest),
        "errors": {
            "cohere": told(lambda: ranked(CohereRerank(**cohere | {"model": "other"}), *rest)),
            "jina": told(lambda: ranked(JinaRerank(**jina | {"model": "other"}), *rest)),
        },
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
