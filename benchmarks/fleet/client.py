"""Sends requests to a fleet in a closed loop, as a process of benchmarks.fleet.client_pool.

It speaks JSON lines on stdin and stdout: it reads an `Order` and writes `true` when it is ready; the next line starts
the load and the one after ends it; then it writes the answers and its CPU seconds. Requests go to the order's `urls`
over HTTP; without any, scores go from the ingress's own dispatcher to the replicas.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.fleet.token_counter import StreamCounter, count_tokens
from benchmarks.support import workloads
from engine.requests import Int32s

APP, REPLICA = "assay", "Replica"
BASES = 4  # requests that are drawn; what is sent differs from them in the first ids of its query and its items
FRESH = 3
REFUSED_S = 0.1  # until a caller who was not answered with 200 asks again
OK, BROKEN = 200, 0
PATIENCE_S = 120.0
READY_S = 60.0
PROMPT_TOKENS = 128  # of a generation
NEW_TOKENS = 128  # in the mean; generations of one length would begin and end together, in waves
FEWEST, MOST = NEW_TOKENS // 2, NEW_TOKENS * 3 // 2
LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Defines a load: requests of `items` items of `item` tokens after `query`, with `at_once` in flight, beside
    `generations` in flight, plain or streamed."""

    vocab: int
    seed: int
    query: int = 0
    items: int = 0
    item: int = 0
    at_once: int = 0
    generations: int = 0
    stream: bool = False
    urls: tuple[str, ...] = ()
    gcs: str = ""  # Ray's address, where no `urls` are given
    args: str = ""  # the application's, as JSON

    def line(self) -> str:
        return json.dumps(asdict(self))


class Reply(NamedTuple):
    """Holds the status of an answer, the arrivals of its tokens (their times, and the number of tokens of each), and
    the number that was asked for."""

    status: int
    arrived_s: Sequence[float] = ()
    tokens: Sequence[int] = ()
    asked: int = 0


class TimedAnswer(NamedTuple):
    """Holds one answer; times are of the monotonic clock, which all processes share. The last three are those of
    `Reply`."""

    done_s: float
    took_s: float
    status: int
    generation: bool = False
    arrived_s: Sequence[float] = ()
    tokens: Sequence[int] = ()
    asked: int = NEW_TOKENS


Ask = Callable[[int], Awaitable[Reply]]  # by the caller's number


class Requests:
    """Makes scoring requests that all begin differently, so that the prefix cache never helps."""

    def __init__(self, order: Order) -> None:
        self._draw = random.Random(order.seed)
        self._last = min(order.vocab, workloads.END_ID)
        # The same as in bench_service: without a query, the first token of a row is one.
        length = order.item if order.query else order.item - 1
        found = workloads.scoring(BASES, order.query or 1, order.items, length, order.seed)
        self._bases = [(q % order.vocab, [i % order.vocab for i in items]) for q, items in found]
        self.labels = [label % order.vocab for label in workloads.LABELS]

    def fresh(self) -> list[int]:
        return [self._draw.randrange(workloads.FIRST_ID, self._last) for _ in range(FRESH)]

    def bodies(self) -> Iterator[bytes]:
        """Makes JSON bodies, serialised once except for the new ids."""
        frames = [self._frame(query, items) for query, items in self._bases]
        while True:
            for before, between, after in frames:
                one, two, three = self.fresh()
                yield b"%b%d%b%d, %d%b" % (before, one, between, two, three, after)

    def _frame(self, query: Int32s, items: list[Int32s]) -> tuple[bytes, bytes, bytes]:
        """Returns the body without its first query id and the first two ids of its first item."""
        first = [-2, *items[0][FRESH - 1 :].tolist()]
        body = {
            "query": [-1, *query[1:].tolist()],
            "items": [first, *(item.tolist() for item in items[1:])],
            "label_token_ids": self.labels,
            "detail": "probabilities",
        }
        before, _, rest = json.dumps(body).encode().partition(b"-1")
        between, _, after = rest.partition(b"-2")
        return before, between, after

    def generations(self, *, stream: bool) -> Iterator[tuple[bytes, int]]:
        """Makes JSON bodies of generations, each with its number of tokens. Their answers list ids, because ids may
        have no text."""
        fixed = {"temperature": 0, "ignore_eos": True, "stream": stream, "return_token_ids": True}
        while True:
            prompt = [self._draw.randrange(workloads.FIRST_ID, self._last) for _ in range(PROMPT_TOKENS)]
            tokens = self._draw.randint(FEWEST, MOST)
            yield json.dumps({"prompt": prompt, "max_tokens": tokens, **fixed}).encode(), tokens

    def arrays(self) -> Iterator[tuple[Int32s, Int32s, Int32s]]:
        """Returns the query, the ids of the items and their starts."""
        flat = [(q, np.concatenate(i), np.cumsum([0, *map(len, i)]).astype(np.int32)) for q, i in self._bases]
        while True:
            for query, ids, starts in flat:
                query, ids = query.copy(), ids.copy()
                query[0], ids[0], ids[1] = self.fresh()
                yield query, ids, starts


class OverHttp:
    """Sends requests over HTTP to the addresses in turn."""

    def __init__(self, order: Order) -> None:
        self._urls = order.urls
        self._stream = order.stream
        requests = Requests(order)
        self._bodies, self._generations = requests.bodies(), requests.generations(stream=order.stream)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
            headers={"content-type": "application/json"},
            trust_env=False,
        )

    async def ask(self, caller: int) -> Reply:
        """Asks for scores."""
        return await self._post(caller, "/generative_scoring", next(self._bodies), _read)

    async def generate(self, caller: int) -> Reply:
        """Asks for a generation. A stream that ends with an error, or early, is a broken answer."""
        read = _read_stream if self._stream else _read_tokens
        body, tokens = next(self._generations)
        reply = await self._post(caller, "/v1/completions", body, read)
        return reply._replace(asked=tokens)

    async def _post(
        self, caller: int, path: str, body: bytes, read: Callable[[aiohttp.ClientResponse], Awaitable[Reply]]
    ) -> Reply:
        url = self._urls[caller % len(self._urls)]
        try:
            async with self._http.post(url + path, data=body) as answer:
                return await (read if answer.status == OK else _read)(answer)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return Reply(BROKEN)

    async def close(self) -> None:
        await self._http.close()


async def _read(answer: aiohttp.ClientResponse) -> Reply:
    await answer.read()
    return Reply(answer.status)


async def _read_tokens(answer: aiohttp.ClientResponse) -> Reply:
    body = await answer.read()
    return Reply(OK, (time.monotonic(),), (count_tokens(body),))


async def _read_stream(answer: aiohttp.ClientResponse) -> Reply:
    counter, arrived, tokens = StreamCounter(), list[float](), list[int]()
    async for data in answer.content.iter_any():
        if count := counter.feed(data):
            arrived.append(time.monotonic())
            tokens.append(count)
    return Reply(OK if counter.complete else BROKEN, arrived, tokens)


class DirectDispatch:
    """Sends requests through the ingress's own dispatcher, in this process."""

    def __init__(self, order: Order) -> None:
        """Connects to Ray, once in a process and inside the running loop, which the handle's router uses."""
        import ray
        from ray import serve

        from deployments.broadcast import broadcast_of
        from deployments.config.app_args import AppArgs
        from deployments.observability.ingress_metrics import IngressMetrics
        from deployments.routing.dispatcher import Dispatcher
        from deployments.routing.handle_transport import HandleTransport
        from deployments.routing.health_monitor import HealthMonitor
        from deployments.routing.load_tracker import load_tracker_of

        ray.init(address=order.gcs, namespace="serve", log_to_driver=False)
        args, metrics = AppArgs.model_validate_json(order.args), IngressMetrics()
        handle = serve.get_deployment_handle(REPLICA, APP)
        self._board = HealthMonitor(broadcast_of(handle), args.health, metrics)
        scrape: Any = None  # not used
        self._dispatch = Dispatcher(
            HandleTransport(handle), args, self._board, metrics, scrape, load_tracker_of(APP, REPLICA)
        )
        self._board.start()

    async def ready(self, order: Order) -> None:
        requests = Requests(order)
        self._labels, self._arrays = np.array(requests.labels, np.int32), requests.arrays()
        async with asyncio.timeout(READY_S):
            while not self._board.ready:
                await asyncio.sleep(0.05)

    async def ask(self, caller: int) -> Reply:
        from deployments.api.request_context import new_id
        from deployments.errors import ERROR_KINDS, ApiError
        from engine.requests import ScoreRequest

        prefix, ids, starts = next(self._arrays)
        task = ScoreRequest(
            request_id=new_id("bench-"), prefix=prefix, ids=ids, starts=starts, labels=self._labels, full=False
        )
        try:
            await self._dispatch.score(task, all_or_nothing=True)
        except ApiError as error:
            return Reply(ERROR_KINDS[error.code].status)
        return Reply(OK)


async def load(
    ask: Ask, at_once: int, first: int, ended: asyncio.Event, *, generation: bool = False
) -> list[TimedAnswer]:
    """Runs `at_once` clients, numbered from `first`, in a closed loop until `ended` is set."""
    found: list[TimedAnswer] = []

    async def caller(number: int) -> None:
        while not ended.is_set():
            sent = time.monotonic()
            reply = await ask(number)
            done = time.monotonic()
            found.append(TimedAnswer(done, done - sent, reply.status, generation, *reply[1:]))
            if reply.status != OK:
                await asyncio.sleep(REFUSED_S)

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + at_once):
            group.create_task(caller(number))
    return found


class Client:
    """Executes orders until the input ends."""

    def __init__(self, lines: asyncio.StreamReader, say: Callable[[object], None]) -> None:
        self._lines = lines
        self._say = say
        self._past: DirectDispatch | None = None

    async def run(self) -> None:
        while line := await self._lines.readline():
            given = json.loads(line)
            order = Order(**given | {"urls": tuple(given["urls"])})
            over = OverHttp(order) if order.urls else None
            try:
                if over:
                    await self._obey(order, over.ask, over.generate)
                else:
                    await self._obey(order, await self._past_http(order))
            finally:
                if over:
                    await over.close()

    async def _past_http(self, order: Order) -> Ask:
        self._past = self._past or DirectDispatch(order)
        await self._past.ready(order)
        return self._past.ask

    async def _obey(self, order: Order, ask: Ask, generate: Ask | None = None) -> None:
        self._say(True)
        await self._lines.readline()
        used, ended = time.process_time(), asyncio.Event()
        loads = [load(ask, order.at_once, order.seed, ended)]
        if generate:
            loads.append(load(generate, order.generations, order.seed, ended, generation=True))
        work = asyncio.gather(*loads)
        await self._lines.readline()
        ended.set()
        answers = [one for found in await work for one in found]
        self._say({"answers": answers, "cpu_s": time.process_time() - used})


async def main() -> None:
    lines = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no line of ours
    await Client(lines, lambda said: print(json.dumps(said), file=out, flush=True)).run()


if __name__ == "__main__":
    asyncio.run(main())
