"""The load of bench_fleet: what is asked, how it is led, and how its answers are counted."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.fleet import bench_fleet
from benchmarks.fleet.client import FRESH, OK, Client, Order, Requests, TimedAnswer
from benchmarks.fleet.client_pool import ClientPool, LoadAnswers
from benchmarks.fleet.load import SETTLE, rates, with_ratio
from benchmarks.support import workloads
from deployments.config.app_args import AppArgs

VOCAB = 151_936
SHAPES = {name: shape for name, _, *shape in workloads.SCORING}


def order_of(workload: str, **fields: Any) -> Order:
    query, items, item = SHAPES[workload]
    return Order(**{"query": query, "items": items, "item": item, "vocab": VOCAB, "at_once": 2, "seed": 3} | fields)


def beginning(body: bytes) -> tuple[int, ...]:
    given = json.loads(body)
    return given["query"][0], *given["items"][0][: FRESH - 1]


@pytest.mark.parametrize("workload", SHAPES)
def test_requests_are_the_workload_and_no_two_begin_alike(workload: str) -> None:
    query, items, item = SHAPES[workload]
    bodies = list(itertools.islice(Requests(order_of(workload)).bodies(), 9))
    arrays = list(itertools.islice(Requests(order_of(workload)).arrays(), 9))
    assert len({beginning(body) for body in bodies}) == 9
    for body, (prefix, ids, starts) in zip(bodies, arrays, strict=True):
        given = json.loads(body)
        assert len(given["query"]) == max(query, 1) and len(given["items"]) == items
        assert {len(one) for one in given["items"]} == {item if query else item - 1}
        assert given["query"] == prefix.tolist()  # both ways ask the same
        assert [*itertools.chain(*given["items"])] == ids.tolist()
        assert starts.tolist() == [0, *itertools.accumulate(map(len, given["items"]))]
        assert min(ids.min(), prefix.min()) >= 0 and max(ids.max(), prefix.max()) < VOCAB


def test_other_seeds_ask_other_things() -> None:
    first, other = (next(Requests(order_of("rerank", seed=seed)).bodies()) for seed in (3, 4))
    assert first != other


def bursts(offset: float) -> Iterator[TimedAnswer]:
    """Ten callers, all of whose requests take a second and end together: ten a second."""
    for second in range(10):
        yield from [TimedAnswer(second + 1 + offset, 1.0, OK)] * 10


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.59, 0.61, 0.9])
def test_rates_do_not_depend_on_where_bursts_fall(offset: float) -> None:
    found = rates(LoadAnswers(0.0, 9.3, list(bursts(offset)), 0.0), items=64)
    assert found["items_s"] == pytest.approx(640)


def test_a_count_of_ends_would_depend_on_it() -> None:
    """The planted counterpart."""
    rest = SETTLE * 9.3
    counts = [
        sum(rest <= one.done_s <= 9.3 - rest for one in bursts(offset)) / (9.3 - 2 * rest)
        for offset in (0.0, 0.3, 0.59, 0.61, 0.9)
    ]
    assert max(counts) / min(counts) > 1.1


def test_what_was_not_answered_is_no_item_and_is_reported() -> None:
    answers = [TimedAnswer(5.0, 1.0, status) for status in (200, 200, 429, 503, 0)]
    found = rates(LoadAnswers(0.0, 10.0, answers, 0.0), items=1)
    assert (found["refused"], found["failed"]) == (1, 2)
    assert found["items_s"] == pytest.approx(2 / 6)
    nothing = rates(LoadAnswers(0.0, 10.0, [], 0.0), items=1)
    assert (nothing["items_s"], nothing["p50_ms"], nothing["failed"]) == (0, None, 0)


def test_the_ratio_is_to_the_same_case_with_the_fewest_replicas() -> None:
    one = with_ratio({"case": "rerank", "path": "http", "items_s": 10.0}, [])
    past = with_ratio({"case": "rerank", "path": "handle", "items_s": 30.0}, [one])
    two = with_ratio({"case": "rerank", "path": "http", "items_s": 19.0}, [one, past])
    assert (one["ratio"], past["ratio"], two["ratio"]) == (1, 1, 1.9)
    assert with_ratio({"case": "a", "path": "http", "items_s": 0.0}, [])["ratio"] is None


async def test_a_client_obeys_its_lines_and_tells_every_answer() -> None:
    seen = Counter[str]()
    asked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        seen[str((await request.json())["query"])] += 1
        if len(seen) >= 6:
            asked.set()
        return web.Response(status=429 if len(seen) == 2 else 200)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/generative_scoring", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    lines, said = asyncio.StreamReader(), asyncio.Queue[Any]()
    client = asyncio.create_task(Client(lines, said.put_nowait).run())
    try:
        async with asyncio.timeout(20):
            order = order_of("classify", urls=(f"http://127.0.0.1:{runner.addresses[0][1]}",))
            lines.feed_data(order.line().encode() + b"\n")
            assert await said.get() is True
            assert not seen  # nothing is asked before the word
            lines.feed_data(b"\n")
            await asked.wait()
            lines.feed_data(b"\n")
            reported = await said.get()
    finally:
        lines.feed_eof()
        await client
        await runner.cleanup()
    statuses = Counter(one.status for one in reported["answers"])
    assert statuses[429] == 1 and sum(statuses.values()) == sum(seen.values())
    assert set(seen.values()) == {1}  # no request came twice


def test_a_client_that_has_died_is_an_error_and_not_a_hang() -> None:
    with ClientPool(1) as clients:
        clients._members[0].kill()
        clients._members[0].wait(10)
        with pytest.raises((RuntimeError, OSError)):
            clients.load([order_of("classify", urls=("http://127.0.0.1:1",))], lambda: None)


def test_arguments_name_a_tokenizer_where_the_model_has_none() -> None:
    words = ["--model", "benchmarks/models/qwen3-0.6b", "--random-weights", "--args", '{"retry": {"max_attempts": 1}}']
    given = bench_fleet.parse(words)
    found = AppArgs.model_validate(bench_fleet.arguments_of(given, gpus=2))
    assert (found.model.tokenizer_path, found.model.name) == ("builtin", "qwen3-0.6b")
    assert (found.replica.num_gpus, found.engine.kv_slots, found.retry.max_attempts) == (1, None, 1)
    plain = AppArgs.model_validate(bench_fleet.arguments_of(bench_fleet.parse([]), gpus=0))
    assert (plain.model.tokenizer_path, plain.replica.num_gpus) == (None, 0)
