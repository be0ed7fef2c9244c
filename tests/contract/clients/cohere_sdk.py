"""Cohere's client, version 1 and version 2 of its API, plain and async. Arguments: url, query, documents."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import cohere
from cohere.core.api_error import ApiError


def plain(found: Any) -> dict[str, Any]:
    """The answer's fields as the client's own types hold them."""
    results = [
        {
            "index": one.index,
            "score": one.relevance_score,
            "text": one.document.text if getattr(one, "document", None) else None,
        }
        for one in found.results
    ]
    meta = found.meta
    return {
        "id": found.id,
        "results": results,
        "version": meta.api_version.version,
        "search_units": meta.billed_units.search_units,
        "input_tokens": meta.tokens.input_tokens,
        "warnings": meta.warnings,
    }


def told(call: Any) -> dict[str, Any]:
    """The error that a call raises, as the client types it."""
    try:
        call()
    except ApiError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "body": error.body}
    return {"kind": None}


async def asked(url: str, body: dict[str, Any]) -> Any:
    async with cohere.AsyncClientV2(api_key="any", base_url=url) as client:
        return await client.rerank(**body)


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    url, query, documents = arguments["url"], arguments["query"], arguments["documents"]
    one, two = cohere.Client(api_key="any", base_url=url), cohere.ClientV2(api_key="any", base_url=url)
    body = {"model": "builtin", "query": query, "documents": documents}
    objects = [{"text": text, "title": "ignored"} for text in documents]
    records = [{"name": text, "note": "none"} for text in documents]
    found = {
        "version": cohere.__version__,
        "v1": plain(one.rerank(query=query, documents=documents)),
        "v1_objects": plain(one.rerank(**body | {"documents": objects}, return_documents=True, max_chunks_per_doc=10)),
        "v1_fields": plain(
            one.rerank(**body | {"documents": records}, rank_fields=["note", "name"], return_documents=True)
        ),
        "v2": plain(two.rerank(**body)),
        "v2_best": plain(two.rerank(**body, top_n=2)),
        "v2_cut": plain(two.rerank(**body, max_tokens_per_doc=2)),
        "v2_async": plain(asyncio.run(asked(url, body))),
        "errors": {
            "model": told(lambda: two.rerank(**body | {"model": "other"})),
            "nothing": told(lambda: two.rerank(**body | {"documents": []})),
            "images": told(lambda: one.rerank(**body | {"documents": [{"text": "a", "image": "b"}]})),
            "long": told(lambda: two.rerank(**body | {"query": "red chair " * 2000})),
        },
    }
    answer.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
