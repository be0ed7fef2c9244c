"""Clients of text-embeddings-inference. Arguments: url, part (embed or predict), texts.

huggingface_hub's InferenceClient is the client that text-embeddings-inference documents; LlamaIndex has one
of its own.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("HF_HUB_OFFLINE", None)  # the hub's client would refuse to reach a server on this machine too

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference


def told(call: Any) -> dict[str, Any]:
    try:
        call()
    except HfHubHTTPError as error:
        return {"status": error.response.status_code, "words": str(error)}
    return {"status": None}


async def asynchronous(url: str, texts: list[str]) -> Any:
    async with AsyncInferenceClient() as client:
        return (await client.feature_extraction(texts, model=url)).tolist()


def embedded(url: str, texts: list[str]) -> dict[str, Any]:
    embed, hub = f"{url}/embed", InferenceClient()
    tei = TextEmbeddingsInference(model_name="any", base_url=url, text_instruction="", query_instruction="")
    return {
        "hub": [hub.feature_extraction(text, model=embed)[0].tolist() for text in texts],
        "hub_batch": hub.feature_extraction(texts, model=embed).tolist(),
        "hub_async": asyncio.run(asynchronous(embed, texts)),
        "hub_raw": hub.feature_extraction(texts, model=embed, normalize=False).tolist(),
        "llama_index": tei.get_text_embedding_batch(texts),
        "long": told(lambda: hub.feature_extraction("long " * 1000, model=embed)),
        "cut": len(hub.feature_extraction("long " * 1000, model=embed, truncate=True)),
    }


def labelled(url: str, texts: list[str]) -> dict[str, Any]:
    """The client keeps the first label of an answer, which is the best."""
    found: list[Any] = [InferenceClient().text_classification(text, model=f"{url}/predict") for text in texts]
    return {"labels": [{"label": one.label, "score": one.score} for one in found]}


def main(given: Path, answer: Path) -> None:
    arguments = json.loads(given.read_text("utf-8"))
    part = embedded if arguments["part"] == "embed" else labelled
    answer.write_text(json.dumps(part(arguments["url"], arguments["texts"])), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
