"""The generations of bench_fleet: how tokens are counted, and that a lost or doubled one is seen."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.fleet import bench_fleet
from benchmarks.fleet.client import (
    BROKEN,
    FEWEST,
    MOST,
    NEW_TOKENS,
    OK,
    PROMPT_TOKENS,
    Order,
    OverHttp,
    Requests,
    TimedAnswer,
    load,
)
from benchmarks.fleet.client_pool import LoadAnswers
from benchmarks.fleet.faults import degraded
from benchmarks.fleet.load import generation_rates, lost_or_doubled_tokens, summary, with_ratio, workload_of
from benchmarks.fleet.token_counter import StreamCounter, count_tokens
from benchmarks.support.report import Row
from deployments.api.sse import DONE, event

VOCAB = 151_936
PER_S = 10  # tokens of a stream in a second


def part(ids: list[int], text: str = "", **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "token_ids": ids, **more}]})


def stream_of(counts: list[int]) -> list[bytes]:
    first = part([], prompt_token_ids=[1, 2, 3], seed=7)
    return [first, *(part(list(range(count))) for count in counts), DONE]


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_tokens_are_counted_however_a_stream_is_cut(cut: int) -> None:
    data = b"".join([b": keep-alive\n\n", *stream_of([1, 3, 0, 2])])
    counter = StreamCounter()
    assert sum(counter.feed(data[at : at + cut]) for at in range(0, len(data), cut)) == 6
    assert counter.complete


def test_a_text_that_looks_like_ids_and_ids_of_the_prompt_are_not_counted() -> None:
    data = part([5], text='"token_ids":[1,2,3]', prompt_token_ids=[1, 2])
    assert count_tokens(data) == 1
    assert count_tokens(json.dumps({"choices": [{"token_ids": [4, 5], "prompt_token_ids": [1]}]}).encode()) == 2


@pytest.mark.parametrize("end", [b"", event({"error": {"code": "replica_lost"}}), event({"error": {}}) + DONE])
def test_a_stream_with_an_error_or_without_its_end_is_not_complete(end: bytes) -> None:
    counter = StreamCounter()
    assert counter.feed(part([1, 2]) + end) == 2
    assert not counter.complete


def streams(count: int, seconds: float, *, tokens: int = NEW_TOKENS) -> Iterator[TimedAnswer]:
    """Callers whose streams follow each other, each with a token every tenth of a second."""
    took = tokens / PER_S
    for caller in range(count):
        start = -caller * took / count
        while start < seconds:
            arrived = [start + (at + 1) / PER_S for at in range(tokens)]
            yield TimedAnswer(start + took, took, OK, True, arrived, [1] * tokens)
            start += took


@pytest.mark.parametrize("seconds", [20.0, 33.3, 47.9])
def test_rates_of_streams_count_tokens_by_their_arrival(seconds: float) -> None:
    loaded = LoadAnswers(0.0, seconds, list(streams(8, seconds)), 0.0)
    found = generation_rates(loaded, stream=True)
    assert found["tokens_s"] == pytest.approx(8 * PER_S, rel=0.02)
    assert found["ttft_p50_ms"] == pytest.approx(100) and found["gap_p99_ms"] == pytest.approx(100)
    assert found["p50_ms"] == pytest.approx(12_800)
    plain = [one._replace(arrived_s=[one.done_s], tokens=[NEW_TOKENS]) for one in loaded.answers]
    assert generation_rates(loaded._replace(answers=plain), stream=False)["tokens_s"] == pytest.approx(8 * PER_S)


@pytest.mark.parametrize(("at", "gap"), [(9.0, 2000), (17.0, None)])
def test_a_stall_that_ends_in_the_middle_is_a_gap_and_a_later_one_is_none(at: float, gap: float | None) -> None:
    loaded = LoadAnswers(0.0, 20.0, [TimedAnswer(19.0, 19.0, OK, True, [at - 2, at], [1, 1])], 0.0)
    assert generation_rates(loaded, stream=True)["gap_p99_ms"] == gap


def test_failed_generations_bring_no_tokens_and_are_reported() -> None:
    answers = [TimedAnswer(6.0, 2.0, status, True, [5.0, 6.0], [1, 1]) for status in (OK, 429, 503, BROKEN)]
    found = generation_rates(LoadAnswers(0.0, 10.0, answers, 0.0), stream=True)
    assert (found["refused"], found["failed"]) == (1, 2)
    assert found["tokens_s"] == pytest.approx(2 / 6)
    nothing = generation_rates(LoadAnswers(0.0, 10.0, [], 0.0), stream=True)
    assert (nothing["tokens_s"], nothing["ttft_p50_ms"], nothing["gap_p50_ms"]) == (0, None, None)


def test_lost_and_doubled_tokens_do_not_make_up_for_each_other() -> None:
    good = list(streams(3, 20.0))
    assert lost_or_doubled_tokens(good) == 0
    lost = good[0]._replace(tokens=[1] * (NEW_TOKENS - 1))
    doubled = good[1]._replace(tokens=[2, *[1] * (NEW_TOKENS - 1)])
    broken = good[2]._replace(tokens=[1], status=BROKEN)  # counted as failed
    assert lost_or_doubled_tokens([*good, lost, doubled, broken, TimedAnswer(1.0, 1.0, OK)]) == 2


def test_a_mixed_row_has_both_rates_and_both_ratios() -> None:
    mixed = workload_of("mixed")
    scores = [TimedAnswer(second + 1.0, 1.0, OK) for second in range(10)]
    refused = [TimedAnswer(5.0, 1.0, 429), TimedAnswer(5.0, 1.0, 429, True)]
    found = summary(LoadAnswers(0.0, 10.0, [*scores, *refused, *streams(4, 10.0)], 0.0), mixed)
    assert found["items_s"] == pytest.approx(64) and found["tokens_s"] == pytest.approx(4 * PER_S, rel=0.02)
    assert (found["refused"], found["failed"]) == (2, 0) and found["p50_ms"] == pytest.approx(1000)
    assert found["stream_p50_ms"] == pytest.approx(12_800)
    one = with_ratio({"case": "mixed", "path": "http", "items_s": 10.0, "tokens_s": 100.0}, [])
    two = with_ratio({"case": "mixed", "path": "http", "items_s": 19.0, "tokens_s": 150.0}, [one])
    assert (two["ratio"], two["tokens_ratio"]) == (1.9, 1.5)
    plain: Row = {"case": "plain-64", "path": "http", "tokens_s": 100.0}
    assert with_ratio(plain | {"tokens_s": 180.0}, [plain]) == plain | {"tokens_s": 180.0, "ratio": 1.8}


def test_degraded_rates_are_those_between_the_loss_and_the_replacement() -> None:
    scores = [TimedAnswer(second + 1.0, 1.0, OK) for second in range(10)]  # 64 items a second, from 10 s on none
    found = degraded(scores, workload_of("mixed"), {"items_s": 64.0, "tokens_s": None}, 5.0, 15.0)
    assert found == {"degraded_ratio": pytest.approx(0.5), "degraded_tokens_ratio": None}


def test_generations_end_at_different_times() -> None:
    """Of one length they would come in waves, whose prompts one replica computes together and several apart."""
    made = Requests(Order(vocab=VOCAB, seed=3)).generations(stream=True)
    asked = [tokens for _, tokens in itertools.islice(made, 400)]
    assert min(asked) >= FEWEST and max(asked) <= MOST and len(set(asked)) > 100
    assert sum(asked) / len(asked) == pytest.approx(NEW_TOKENS, rel=0.05)


def test_names_say_what_is_under_way() -> None:
    plain, streamed, mixed, other = map(workload_of, ("plain-64", "streams-256", "mixed", "mixed-2-16"))
    assert (plain.scores, plain.generations, plain.stream, plain.scored) == (0, 64, False, False)
    assert (streamed.generations, streamed.stream) == (256, True)
    assert (mixed.items, mixed.scores, mixed.generations, mixed.stream) == (64, 8, 64, True)
    assert (other.scores, other.generations) == (2, 16)
    assert workload_of("rerank").scores is None
    for name in ("streams", "plain-0", "mixed-4", "stream-64"):
        with pytest.raises(ValueError, match=repr(name)):
            workload_of(name)
    with pytest.raises(SystemExit):
        bench_fleet.parse(["--workloads", "rerank,nothing"])
    with pytest.raises(SystemExit):
        bench_fleet.parse(["--faults", "killed,bored"])


def generated(end: list[int], ended: asyncio.Event) -> Callable[[web.Request], Any]:
    """A service that ends the load at its first request. Each token of an answer is an event, but for the 60 last of
    those that were asked for: in their place come events of so many tokens as `end` says."""

    async def answer(request: web.Request) -> web.StreamResponse:
        ended.set()
        body = await request.json()
        assert len(body["prompt"]) == PROMPT_TOKENS and max(body["prompt"]) < VOCAB
        assert body["ignore_eos"] and body["temperature"] == 0 and FEWEST <= body["max_tokens"] <= MOST
        counts = [1] * (body["max_tokens"] - 60) + end
        if not body["stream"]:
            ids = list(range(sum(counts)))
            return web.json_response({"choices": [{"token_ids": ids, "prompt_token_ids": body["prompt"]}]})
        response = web.StreamResponse()
        await response.prepare(request)
        for data in stream_of(counts):
            await response.write(data)
        await response.write_eof()
        return response

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("end", "wrong"), [([1] * 60, 0), ([20, 40], 0), ([1] * 59, 1), ([1] * 58 + [4], 2)])
async def test_a_planted_loss_is_seen_by_the_client(stream: bool, end: list[int], wrong: int) -> None:
    app = web.Application()
    ended = asyncio.Event()
    app.router.add_post("/v1/completions", generated(end, ended))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    over = OverHttp(Order(vocab=VOCAB, seed=3, generations=2, stream=stream, urls=(url,)))
    try:
        async with asyncio.timeout(20):
            answers = await load(over.generate, 2, 0, ended, generation=True)
    finally:
        await over.close()
        await runner.cleanup()
    assert len(answers) == 2 and all(one.status == OK and one.generation for one in answers)
    assert lost_or_doubled_tokens(answers) == wrong * len(answers)
