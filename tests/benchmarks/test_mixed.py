"""The load of ragged scores and streams: sizes in their bounds, queries that come again, answers read to their ends."""

import json
import random

import pytest

from benchmarks.service.bench_mixed import (
    ITEM_TOKENS,
    ITEMS,
    QUERY_TOKENS,
    Target,
    answer_length,
    log_uniform,
    scoring_requests,
)


def test_sizes_are_within_their_bounds_and_reach_both() -> None:
    draw = random.Random(1)
    for low, high in (ITEMS, ITEM_TOKENS, QUERY_TOKENS):
        found = {log_uniform(draw, (low, high)) for _ in range(50_000)}
        assert min(found) == low and max(found) == high


def test_queries_come_again_with_their_frequencies() -> None:
    seen: dict[str, int] = {}
    made = scoring_requests(Target(("", 0), "m", 1000), seed=3)
    for _ in range(300):
        count, data = next(made)
        body = json.loads(data.partition(b"\r\n\r\n")[2])
        assert len(body["items"]) == count
        query = str(body["query"])
        seen[query] = seen.get(query, 0) + 1
    times = sorted(seen.values(), reverse=True)
    assert times[0] > 30 > times[len(times) // 2]


@pytest.mark.parametrize("cut", [0, 10, 40])
def test_an_answer_is_read_to_its_end(cut: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nx: y\r\n\r\nabc"
    assert answer_length(answer[: len(answer) - cut]) == (None if cut > 8 else len(answer))
    with pytest.raises(ValueError, match="no length"):
        answer_length(b"HTTP/1.1 200 OK\r\n\r\n")
