"""Costs, ingress admission on a table of queues, replica admission in process, and refusals that stay cheap."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.middleware import RefusalLog
from deployments.auth.api_keys import ANONYMOUS
from deployments.config.sections import AdmissionArgs
from deployments.errors import ApiError
from deployments.protocol import AnyCall, Failure, GenerateCall
from deployments.replica.replica import ReplicaServer
from deployments.routing.admission import Admission
from deployments.routing.load_tracker import LoadTracker, QueueEstimate
from engine.config import Costs
from engine.request_cost import TenantQueues
from engine.requests import ErrorCode, GenerateRequest, LikelihoodRequest, Load, ScoreRequest, ScoreResult, TenantTokens
from gpu_sampler.sampling_params import SamplingParams
from tests.support import toy_model

COSTS = Costs()
Fleet = Any
MakeFleet = Callable[..., Any]


def ids(*lengths: int) -> Any:
    return np.ones(sum(lengths), np.int32), np.cumsum([0, *lengths]).astype(np.int32)


def score(prefix: int, *rows: int, **fields: Any) -> ScoreRequest:
    flat, starts = ids(*rows)
    given: dict[str, Any] = {"request_id": "s", "prefix": ids(prefix)[0], "ids": flat, "starts": starts}
    return ScoreRequest(**given | {"labels": np.arange(2, dtype=np.int32)} | fields)


def generate(*prompts: int, emitted: Sequence[Sequence[int]] = (), **params: Any) -> GenerateCall:
    return tuple(
        GenerateRequest(
            request_id=f"g{q}",
            prompt=ids(prompt)[0],
            params=SamplingParams(**params),
            seed=0,
            emitted=tuple(ids(count)[0] for count in emitted[q]) if emitted else (),
        )
        for q, prompt in enumerate(prompts)
    )


def likelihood(prefix: int, *rows: int) -> LikelihoodRequest:
    flat, starts = ids(*rows)
    ones = np.ones(len(rows), np.int32)
    return LikelihoodRequest(
        request_id="l", prefix=ids(prefix)[0], ids=flat, starts=starts, shared=ones * 0, wanted=ones
    )


def cost_of(call: AnyCall, costs: Costs = COSTS) -> int:
    return Admission(AdmissionArgs(), costs, LoadTracker()).work(call).tokens


def test_a_cost_is_what_is_read_and_four_times_what_is_written() -> None:
    assert cost_of(score(100, 11, 0)) == 112
    assert cost_of(score(30, 5, 0, 7)) == 30 + 5 + 1 + 7
    assert cost_of(likelihood(9, 5, 7)) == 9 + 4 + 6
    assert cost_of(generate(100, max_tokens=10, n=3)) == 220
    assert cost_of(generate(100, max_tokens=10_000)) == 100 + 4 * 512
    assert cost_of(generate(10, max_tokens=1), Costs(decode_token_cost=2.5)) == 12
    assert cost_of(generate(5, 7, 11, max_tokens=2_000, n=2)) == 23 + 6 * 4 * 512
    assert cost_of(generate(5, 7, max_tokens=9, n=2, emitted=((3, 4), (0, 2)))) == 12 + 9 + 4 * (6 + 5 + 9 + 7)
    alone = replace(generate(5, max_tokens=9)[0], prompt_logprobs=0, prompt_only=True)
    assert cost_of((alone,)) == 5


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def gate(*queues: Load) -> tuple[Admission, LoadTracker, Clock]:
    """Ingress admission before replicas that have just reported these queues."""
    clock = Clock()
    loads = LoadTracker(clock)
    loads.publish(str(number) for number in range(len(queues)))
    for number, load in enumerate(queues):
        ticket = loads.send(str(number), 0)
        loads.report(ticket, load)
        loads.close(ticket)
    return Admission(AdmissionArgs(), COSTS, loads), loads, clock


WAITS = {
    "no replica is known": ((), 100, 60, 0),
    "idle": ((Load(0, 0.0, 0),), 10**6, 1, 0),
    "idle, and too slow for it: no later attempt would fare better": ((Load(0, 10.0, 80),), 10**6, 1, 0),
    "room": ((Load(500, 100.0, 800),), 300, 60, 0),
    "one token too many": ((Load(500, 100.0, 800),), 301, 60, 0.01),
    "more than ever has room waits for an empty queue": ((Load(500, 100.0, 800),), 900, 60, 5),
    "a queue that is too long": ((Load(2_000, 100.0, 10**6),), 1, 60, 10),
    "not surely in time": ((Load(500, 100.0, 800),), 300, 10, 4),
    "never in time": ((Load(500, 100.0, 10_000),), 1_000, 7, 5),
    "unknown speed, room": ((Load(500, 0.0, 262_144),), 300, 1, 0),
    "unknown speed, full": ((Load(262_144, 0.0, 262_144),), 300, 1, 1),
    "the best of several": ((Load(500, 100.0, 500), Load(500, 100.0, 600)), 200, 60, 1),
    "one of several": ((Load(500, 100.0, 500), Load(500, 100.0, 800)), 200, 60, 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_gate_tells_the_seconds_until_it_opens(name: str) -> None:
    queues, cost, timeout_s, expected = WAITS[name]
    admission, _, _ = gate(*queues)
    assert admission.wait_s(TenantTokens("", 0, cost), timeout_s) == pytest.approx(expected)


def test_the_gate_opens_when_it_said() -> None:
    """And not before: what an ingress believes of a queue drains by itself, whether or not anything is heard of it."""
    admission, _, clock = gate(Load(5_000, 100.0, 800))
    with pytest.raises(ApiError) as refused:
        admission.admit(score(0, 300))
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s == pytest.approx(45)
    assert refused.value.headers()["retry-after"] == "45"
    clock.now += 44.9
    with pytest.raises(ApiError):
        admission.admit(score(0, 300))
    clock.now += 0.2
    admission.admit(score(0, 300))


@pytest.mark.parametrize(("queued", "reported"), [(501, "1"), (10**6, "60")])
def test_retry_after_is_from_1_to_60_seconds(queued: int, reported: str) -> None:
    admission, _, _ = gate(Load(queued, 100.0, 800))
    with pytest.raises(ApiError) as refused:
        admission.admit(score(0, 300))
    assert refused.value.headers()["retry-after"] == reported


def test_what_is_cut_into_blocks_needs_room_for_a_block() -> None:
    admission, _, _ = gate(Load(500, 100.0, 800), Load(500, 100.0, 800))
    admission.admit(score(0, 600), blocks=2)
    with pytest.raises(ApiError):
        admission.admit(score(0, 600))


def test_what_is_sent_counts_immediately_and_drains() -> None:
    admission, loads, clock = gate(Load(0, 100.0, 800))
    loads.send("0", 700)
    assert loads.queue("0") == QueueEstimate(700, 100.0, 800, 1)
    assert admission.wait_s(TenantTokens("", 0, 300), 60) == pytest.approx(2)
    clock.now += 3
    assert admission.wait_s(TenantTokens("", 0, 300), 60) == 0


def test_past_the_deadline_nothing_is_admitted() -> None:
    admission, _, _ = gate()
    with pytest.raises(ApiError) as late:
        admission.admit(score(0, 1, timeout_s=0))
    assert late.value.code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("queues", "wait_s"),
    [
        ((Load(749, 100.0, 800),), 0),
        ((Load(751, 100.0, 800),), 0.01),  # what has been read may still have the last 50
        ((Load(751, 100.0, 800), Load(749, 100.0, 800)), 0),
        ((Load(1_100, 100.0, 8_000),), 1),  # room, but too long a queue
        ((Load(10**6, 0.0, 0),), 0),
        ((), 0),
    ],
)
def test_the_last_part_of_a_queue_is_for_what_has_been_read(queues: Sequence[Load], wait_s: float) -> None:
    admission, _, clock = gate(*queues)
    if wait_s:
        with pytest.raises(ApiError) as refused:
            admission.check_open(60, "")
        assert refused.value.code == "overloaded"
        clock.now += wait_s + 0.001
    admission.check_open(60, "")


@pytest.mark.parametrize(
    ("most", "timeout_s", "open_below"), [(1 << 30, 60, 1_000), (1 << 30, 2, 75), (800, 1, 37), (800, 60, 750)]
)
def test_the_last_part_is_of_what_may_wait_until_the_deadline(most: int, timeout_s: float, open_below: int) -> None:
    """A queue may be of any length, or longer than a short deadline allows: the part is then of the shorter one."""
    admission, _, _ = gate(Load(open_below, 100.0, most))
    admission.check_open(timeout_s, "")
    admission, _, _ = gate(Load(open_below + 2, 100.0, most))
    with pytest.raises(ApiError):
        admission.check_open(timeout_s, "")


HEAVY = Load(780, 100.0, 800, (TenantTokens("heavy", 0, 780),))


@pytest.mark.risk(
    "R2",
    figure="a tenant with nothing queued is admitted beside one that has filled the queue, by the ingress and by the"
    " replica; planted (one queue for all): refused",
)
@pytest.mark.risk("R17")
def test_what_one_tenant_queues_is_no_reason_to_refuse_another() -> None:
    """The replica serves both in equal shares: a small request waits for as much of the other as it costs."""
    admission, loads, _ = gate(HEAVY)
    admission.check_open(60, "small")
    assert admission.wait_s(TenantTokens("small", 0, 20), 60) == 0
    assert loads.queue_before("0", TenantTokens("small", 0, 20)).tokens == pytest.approx(20)
    with pytest.raises(ApiError):
        admission.check_open(60, "heavy")
    assert admission.wait_s(TenantTokens("heavy", 0, 30), 60) == pytest.approx(0.1)
    assert admission.wait_s(TenantTokens("small", 0, 500), 60) > 0  # half of the replica does not do it in time
    assert admission.wait_s(TenantTokens("small", 1, 30), 60) > 0  # an earlier priority is served first


@pytest.mark.risk("R2", planted=True)
@pytest.mark.risk("R17", planted=True)
def test_one_queue_for_all_tenants_is_seen_to_refuse_the_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the fault: everything that waits is before every request."""
    monkeypatch.setattr(TenantQueues, "before", lambda self, tenant, priority, cost: self.total)
    admission, _, _ = gate(HEAVY)
    assert admission.wait_s(TenantTokens("small", 0, 30), 60) > 0
    with pytest.raises(ApiError):
        admission.check_open(60, "small")


def test_a_report_names_few_tenants_and_counts_the_others() -> None:
    """The others hold 300 tokens in three queues: a request waits for its own cost of each, or for all they have."""
    load = Load(700, 100.0, 800, (TenantTokens("a", 0, 400),), 3)
    _, loads, clock = gate(load)
    assert loads.queue_before("0", TenantTokens("b", 0, 10)).tokens == pytest.approx(40)
    assert loads.queue_before("0", TenantTokens("b", 0, 1_000)).tokens == pytest.approx(700)
    assert loads.queue("0").tenants == 4
    clock.now += 4  # 400 tokens, 100 of each
    assert loads.queue("0").tokens == pytest.approx(300)
    assert loads.queue_before("0", TenantTokens("b", 0, 1_000)).tokens == pytest.approx(300)
    assert loads.queue_before("0", TenantTokens("a", 0, 10)).tokens == pytest.approx(300)


def test_tenants_together_fill_no_more_than_the_harmonic_sum() -> None:
    """Each of 100 tenants takes all that it may, one token at a time: the queue has a bound however many there are."""
    queues, most = TenantQueues(), 840
    for number in range(100):
        work = TenantTokens(f"t{number}", 0, 1)
        while queues.before(*work) + 1 <= most:
            queues.add(*work)
    assert most <= queues.total <= most * sum(1 / count for count in range(1, 101))


async def test_a_replica_judges_each_tenant_by_its_own_wait(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(1, engine={"max_queued_tokens": 60, "kv_slots": 2048})
    held = await hold(fleet, 0, 50)
    engine = fleet.servers[0].engine
    assert engine.takes([score(0, 20), replace(score(0, 20), tenant="other"), score(0, 20)]) == [False, True, False]
    assert engine.queue().tenants == (TenantTokens("", 0, engine.queue().queued_tokens),)
    fleet.over.set()
    await held


async def test_refusals_are_logged_as_a_rate(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog(period_s=0.01)
    with caplog.at_level(logging.INFO, "assay.http"):
        for number in range(1_000):
            refusals.add("deadline_exceeded" if number % 10 == 0 else "overloaded")
        while not caplog.records:
            await asyncio.sleep(0.005)
        assert [record.getMessage() for record in caplog.records] == [
            "Refused 1000 requests in 0.01 s: deadline_exceeded 100, overloaded 900."
        ]
        refusals.add("draining")
        while len(caplog.records) < 2:
            await asyncio.sleep(0.005)
    assert "Refused 1 requests" in caplog.records[-1].getMessage()


# Over replicas in process.

HANG = [*range(40, 60), toy_model.HANG]


async def hold(fleet: Fleet, number: int = 0, size: int = 20) -> "asyncio.Task[Any]":
    """A replica whose step hangs, with `size` tokens of cost waiting behind it."""
    server, model = fleet.servers[number], fleet.models[number]
    hung = asyncio.create_task(server.score(score(0, 1, ids=np.array([toy_model.HANG], np.int32))))
    await asyncio.to_thread(model.hanging.wait, 10)
    behind = asyncio.create_task(server.score(score(0, size)))
    while server.engine.queue().queued_tokens < size:
        await asyncio.sleep(0)

    async def both() -> None:
        model.released.set()
        await asyncio.gather(hung, behind)

    return asyncio.create_task(_when_asked(both, fleet))


async def _when_asked(end: Callable[[], Any], fleet: Fleet) -> None:
    await fleet.over.wait()
    await end()


async def test_a_busy_replica_is_passed_over_and_then_known_to_be_busy(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(3, engine={"max_queued_tokens": 60, "kv_slots": 2048})
    held = [await hold(fleet, 0, 50), await hold(fleet, 1, 50)]
    reply = await fleet.dispatch.score(score(0, 20))
    assert reply.label_logprobs.shape == (1, 2)
    held.append(await hold(fleet, 2, 50))
    calls = fleet.handle.calls
    with pytest.raises(ApiError) as refused:
        for _ in range(3):  # a replica that was not asked yet is asked once
            await fleet.dispatch.score(score(0, 20))
    assert refused.value.code == "overloaded"
    assert int(refused.value.headers()["retry-after"]) >= 1
    asked = fleet.handle.calls - calls
    assert asked <= 3
    with pytest.raises(ApiError):
        await fleet.dispatch.score(score(0, 20))
    assert fleet.handle.calls - calls <= 3, "a replica that had said so was asked again"
    fleet.over.set()
    await asyncio.gather(*held)


async def test_prompts_are_taken_together_or_not_at_all(make_fleet: MakeFleet) -> None:
    """Three prompts, and room for two: a replica without the check would compute two."""
    fleet = await make_fleet(1, engine={"max_queued_tokens": 100, "kv_slots": 2048})
    held = await hold(fleet, 0, 20)
    server = fleet.servers[0]
    task = generate(20, 21, 22, max_tokens=2)
    assert isinstance(await server.generate(task), Failure)
    assert server.engine.queue().queued_tokens <= 21 + 1
    found = [reply async for reply in server.stream(task)]
    assert [type(reply) for reply in found] == [Failure]
    assert (found[0].code, found[0].load.max_queued_tokens) == (ErrorCode.OVERLOADED, 100)
    fleet.over.set()
    await held
    assert len((await server.generate(task)).chunks) == 3


async def test_no_refusal_waits_for_its_micro_batch(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in a micro-batch with room for one, which may come again, and a step that hangs.

    Planted: the refusal comes with the reply.
    """
    fleet = await make_fleet(1, engine={"max_queued_tokens": 110, "kv_slots": 2048})
    held = await hold(fleet, 0, 20)
    batch = (score(0, 30), score(0, 65))
    found = await fleet.servers[0].score_batch(batch)
    assert isinstance(found, tuple)
    fitting, refused = found
    assert fitting is None and isinstance(refused, Failure) and refused.code is ErrorCode.OVERLOADED
    monkeypatch.setattr(ReplicaServer, "_refusals", lambda self, requests: [None] * len(requests))
    monkeypatch.setattr("deployments.replica.replica._is_refused", lambda work: False)
    planted = asyncio.create_task(fleet.servers[0].score_batch(batch))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not planted.done()
    fleet.over.set()
    await held
    assert [type(reply) for reply in await planted] == [ScoreResult, Failure]


@pytest.mark.risk(
    "R1",
    figure="two replicas with steps of 0.5 s: 108 % at 4x, 0 time-outs, refusals within 7.0 ms (p99); planted: 1,110"
    " time-outs. The built-in model over Ray with its client on the same 2 cores, in fast mode: 94 % at 4x, 0"
    " time-outs, refusals after 3.2 ms (p50) and 16 ms (p99); with Serve's defaults 66 %, 23 and 123 ms: each"
    " refusal takes more than 12 ms of the model's cores there (benchmarks/results/overload-builtin*.json)",
)
async def test_a_full_service_refuses_in_milliseconds_without_a_line_each(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await make_fleet(1, engine={"max_queued_tokens": 60, "kv_slots": 2048})
    held = await hold(fleet, 0, 50)
    body = {"query": [1, 2, 3], "items": [[5] * 40], "label_token_ids": [7, 8]}
    seconds = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "assay.http"), caplog.at_level(logging.INFO, "ray.serve"):
        for _ in range(50):
            started = time.perf_counter()
            answer = await fleet.client.post("/generative_scoring", body)
            seconds.append(time.perf_counter() - started)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
    assert float(np.median(seconds)) < 0.05
    print(f"refusals: median {1e3 * float(np.median(seconds)):.1f} ms, slowest {1e3 * max(seconds):.1f} ms")
    assert len(caplog.records) <= 1 + sum(seconds)
    found = fleet.metrics.registry.get_sample_value("assay_rejected_total", {"reason": "overloaded"})
    assert found == 50
    fleet.over.set()
    await held
    async with asyncio.timeout(5):  # nothing was heard of the queue since: it is taken for empty after `retry-after`
        while (await fleet.client.post("/generative_scoring", body)).status_code != 200:
            await asyncio.sleep(0.02)


WORK = ("/generative_scoring", "/v1/score", "/rerank", "/v1/decisions", "/v1/completions", "/v1/chat/completions")


async def asked(fleet: Fleet, path: str) -> tuple[int, bool]:
    """The status of a request whose body is wrong, and whether the body was read."""
    read = asyncio.Event()
    statuses = list[int]()

    async def receive() -> dict[str, Any]:
        if read.is_set():
            await asyncio.Future()  # the client stays
        read.set()
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await fleet.client.app(scope, receive, send)
    return statuses[0], read.is_set()


async def test_a_full_service_refuses_before_it_reads(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the body nor a turn of the engine is waited for. Planted: a gate that does not look at the queues."""
    fleet = await make_fleet(1)
    now = time.monotonic()
    monkeypatch.setattr(fleet.loads, "_clock", lambda: now)
    ticket = fleet.loads.send("r0", 0)
    fleet.loads.report(ticket, Load(780, 100.0, 800))
    fleet.loads.close(ticket)
    assert [await asked(fleet, path) for path in WORK] == [(429, False)] * len(WORK)
    assert fleet.handle.calls == 0
    assert fleet.metrics.registry.get_sample_value("assay_rejected_total", {"reason": "overloaded"}) == len(WORK)
    assert [await asked(fleet, path) for path in ("/tokenize", "/detokenize")] == [(422, True)] * 2  # no replica's work
    monkeypatch.setattr(Admission, "check_open", lambda *given: None)
    assert await asked(fleet, WORK[0]) == (422, True)


async def test_a_replica_tells_how_fast_its_queue_is_worked_off(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(1, engine={"kv_slots": 4096, "token_budget": 64, "max_step_s": 0.02})
    server, model = fleet.servers[0], fleet.models[0]
    model.step_seconds = 0.02

    async def reported() -> float:
        families = server.metric_families()
        return float(next(f for f in families if f.name == "assay_drain_tokens_per_second").samples[0].value)

    assert await reported() == 0
    reply = await server.score(score(0, *[10] * 200))
    assert 64 / 0.1 < await reported() < 64 / 0.02
    assert reply.load.tokens_per_s == await reported() == server.record_autoscaling_stats()["tokens_per_s"]
    assert reply.load.max_queued_tokens == max(64, int(8 * reply.load.tokens_per_s))


async def test_a_draining_ingress_says_when_to_come_back(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(1)
    fleet.board.draining = True
    answer = await fleet.client.post("/v1/completions", {"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_tenant_travels_from_the_gate_to_the_engine(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.auth.authenticator.ANONYMOUS", replace(ANONYMOUS, name="t1"))
    fleet = await make_fleet(1)
    seen: set[Any] = set()
    enter = fleet.servers[0].engine.core.tracker.add

    def spy(work: Any) -> None:
        seen.add(work.tenant)
        enter(work)

    monkeypatch.setattr(fleet.servers[0].engine.core.tracker, "add", spy)
    scoring = {"query": "a", "items": ["b"]}
    for path, body in {
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/score": scoring | {"label_token_ids": [7, 8]},
        "/generative_scoring": scoring | {"continuations": ["c"]},
    }.items():
        answer = await fleet.client.post(path, body)
        assert answer.status_code == 200, answer.text
        assert seen == {"t1"}, path
        seen.clear()
