"""Chooses the request that `assay serve` shows once a service is ready: one that its model answers."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

QUERY, DOCUMENT = "red chair", "A pine chair for reading, sturdy and red, made in Lisbon."
QUESTION = {  # in the built-in model's own form
    "query": "Query: a red chair from Lisbon\nDocument: ",
    "items": [
        "A pine chair for reading, sturdy and red, made in Lisbon.\nRelevant:",
        "A pine chair for reading, sturdy and blue, made in Lisbon.\nRelevant:",
    ],
    "labels": [" yes", " no"],
}
PAIRS = {"query": QUERY, "documents": [DOCUMENT, DOCUMENT.replace("red", "blue")]}
OF_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "lm": ("/generative_scoring", QUESTION),
    "sequence": ("/classify", {"input": DOCUMENT}),
    "pooled": ("/v1/embeddings", {"input": DOCUMENT}),
}
MODELS = "/v1/models"  # every model answers it
TIMEOUT_S = 5.0


class Example(NamedTuple):
    """Holds a request: a GET where it has no body."""

    path: str
    body: dict[str, Any] | None = None
    key: bool = False  # it needs an API key

    def command(self, url: str) -> str:
        """Returns the request as a command of a shell."""
        words = [f"curl {url}{self.path}"]
        words += ["-H 'authorization: Bearer KEY'"] if self.key else []
        words += ["-H 'content-type: application/json'", f"-d '{json.dumps(self.body)}'"] if self.body else []
        return " ".join(words)


def example_of(url: str) -> Example:
    """Returns a request that the service at a URL answers, by what its /v1/models says of the model's head."""
    try:
        with get(f"{url}{MODELS}") as answer:
            facts = json.load(answer)["data"][0]["assay"]
            kind, pairs = facts["head"]["kind"], facts["prompt_source"]
    except urllib.error.HTTPError as error:
        return Example(MODELS, key=error.code == http.HTTPStatus.UNAUTHORIZED)
    except (http.client.HTTPException, OSError, ValueError, LookupError, TypeError):
        return Example(MODELS)
    if kind != "lm" and pairs is not None:
        return Example("/rerank", PAIRS)
    return Example(*OF_HEADS.get(kind, (MODELS,)))


def get(url: str) -> Any:
    """Opens a URL of this machine, without the proxies of the environment. Raises as `urllib.request` does."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=TIMEOUT_S)
