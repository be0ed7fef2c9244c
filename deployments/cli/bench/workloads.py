"""Generates requests. Each one is new to the service, because a cached prefix would make it look faster."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

FIRST_ID = 10  # ids below are control tokens in many vocabularies
QUERY_TOKENS, ITEM_TOKENS, ITEMS = 32, 16, 8
PROMPT_TOKENS, NEW_TOKENS = 32, 16
WORDS = ("red", "blue", "chair", "table", "lamp", "tent", "pine", "steel", "made", "in", "Lisbon", "Oslo", "sturdy")


class ServedModel(NamedTuple):
    """Names the served model."""

    name: str
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Holds one request. `items` is the number of scores; with `stream` the first event is timed too."""

    workload: str
    path: str
    data: bytes
    items: int = 0
    stream: bool = False


Workload = Callable[[ServedModel, random.Random], BenchRequest]


def score(model: ServedModel, draw: random.Random) -> BenchRequest:
    """Scores 8 items of 16 tokens with two labels."""
    body = {
        "query": _ids(model, draw, QUERY_TOKENS),
        "items": [_ids(model, draw, ITEM_TOKENS) for _ in range(ITEMS)],
        "label_token_ids": sorted(draw.sample(range(min(FIRST_ID, model.vocab_size - 2), model.vocab_size), 2)),
    }
    return _request("score", "/generative_scoring", body, items=ITEMS)


def rerank(model: ServedModel, draw: random.Random) -> BenchRequest:
    """Ranks 8 documents of 12 words."""
    body = {"query": _text(draw, 8), "documents": [_text(draw, 12) for _ in range(ITEMS)]}
    return _request("rerank", "/v1/rerank", body, items=ITEMS)


def completions(model: ServedModel, draw: random.Random) -> BenchRequest:
    """Streams 16 tokens after a prompt of 32 tokens."""
    body = {
        "prompt": _ids(model, draw, PROMPT_TOKENS),
        "max_tokens": NEW_TOKENS,
        "temperature": 0.8,
        "seed": draw.randrange(1 << 31),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _request("completions", "/v1/completions", body, stream=True)


def mixed(model: ServedModel, draw: random.Random) -> BenchRequest:
    """Draws six scores to two reranks and two completions."""
    chosen: Workload = draw.choices((score, rerank, completions), (6, 2, 2))[0]
    return chosen(model, draw)


WORKLOADS: dict[str, Workload] = {"score": score, "rerank": rerank, "completions": completions, "mixed": mixed}


def _request(workload: str, path: str, body: dict[str, Any], *, items: int = 0, stream: bool = False) -> BenchRequest:
    return BenchRequest(workload=workload, path=path, data=json.dumps(body).encode(), items=items, stream=stream)


def _ids(model: ServedModel, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(min(FIRST_ID, model.vocab_size - 1), model.vocab_size) for _ in range(count)]


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))
