"""Defines the workloads that every engine runs: random token ids from a fixed seed, the same for all engines.

Scoring: (name, requests, query tokens, items per request, item tokens).
Decoding: (name, prompts, prompt tokens, new tokens).
"""

import random

import numpy as np

from engine.requests import Int32s

SCORING = (("rerank", 32, 128, 64, 256), ("long-query", 64, 1024, 64, 32), ("classify", 4096, 0, 1, 128))
DECODE = (("decode256", 256, 128, 128),)
LABELS = (9693, 2152)
FIRST_ID, END_ID = 10, 150_000


def token_lists(count: int, length: int, seed: int) -> list[Int32s]:
    """Returns `count` arrays of `length` ids, drawn as in the workloads of other engines."""
    draw = random.Random(seed)
    return [np.array([draw.randrange(FIRST_ID, END_ID) for _ in range(length)], np.int32) for _ in range(count)]


def scoring(requests: int, query: int, items: int, item: int, seed: int = 0) -> list[tuple[Int32s, list[Int32s]]]:
    """Returns the query ids and item ids of each request."""
    draw = random.Random(seed)

    def ids(length: int) -> Int32s:
        return np.array([draw.randrange(FIRST_ID, END_ID) for _ in range(length)], np.int32)

    return [(ids(query), [ids(item) for _ in range(items)]) for _ in range(requests)]
