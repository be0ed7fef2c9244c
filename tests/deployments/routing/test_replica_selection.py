"""Who is asked: the ring, the loads on a fake clock, affinity and spill, and the router that obeys."""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.serve.request_router import RequestRouter

from deployments.config.sections import RouterArgs
from deployments.protocol import GenerateCall, Route
from deployments.routing import load_tracker
from deployments.routing.load_tracker import LoadTracker
from deployments.routing.replica_selection import (
    MIN_KEY_TOKENS,
    STEPS_S,
    RendezvousHash,
    ReplicaSelector,
    TokenRouter,
    point,
    route_of,
)
from engine.requests import GenerateRequest, Load, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams

NAMES = tuple("abcdefgh")
KEYS = [point(f"query {number}".encode()) for number in range(4000)]


def first_of(names: Sequence[str]) -> list[str]:
    return [best(names, key) for key in KEYS]


def ordered(names: Sequence[str], key: int) -> tuple[str, ...]:
    return tuple(names[place] for place in RendezvousHash(names).order(key))


def best(names: Sequence[str], key: int) -> str:
    return ordered(names, key)[0]


def test_the_order_is_the_same_in_every_process_and_names_everyone_once() -> None:
    for key in KEYS[:50]:
        assert ordered(NAMES, key) == ordered(NAMES[::-1], key)
        assert sorted(ordered(NAMES, key)) == list(NAMES)
    assert ordered((), 5) == ()
    assert point(b"a#0") == 0xAB60D3F47D8EBE19
    assert ordered(NAMES, point(b"query")) == tuple("aegdchbf")


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_replica_that_leaves_moves_only_its_own_keys(count: int) -> None:
    names = NAMES[:count]
    before, after = first_of(names), first_of(names[:-1]) if count > 1 else []
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {names[-1]}
    assert len(moved) / len(KEYS) <= 2 / count


def test_the_hash_spreads_keys() -> None:
    shares = Counter(first_of(NAMES))
    assert max(shares.values()) / (len(KEYS) / len(NAMES)) < 1.1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_loads(*names: str) -> tuple[LoadTracker, Clock]:
    clock = Clock()
    loads = LoadTracker(clock)
    loads.publish(names)
    return loads, clock


def test_a_load_is_what_was_reported_less_what_was_done_and_what_was_sent_since() -> None:
    loads, clock = make_loads("a", "b")
    first = loads.send("a", 500)
    assert (loads.load("a"), loads.load("b")) == (500, 0)
    loads.report(first, Load(2000, 100.0))  # the first 500 are in it
    assert loads.load("a") == 2000
    second = loads.send("a", 50)
    clock.now += 5
    assert loads.load("a") == 2000 - 500 + 50
    assert loads.close(first) == "a"  # an older ticket takes nothing back from a newer report
    assert loads.load("a") == 1550
    loads.close(second)
    assert loads.load("a") == 1500
    clock.now += 1000
    assert loads.load("a") == 0


def test_a_queue_of_unknown_speed_is_soon_forgotten() -> None:
    """A replica that is never asked for its load would otherwise stay loaded, and so stay unasked, for ever."""
    loads, clock = make_loads("a")
    ticket = loads.send("a", 10)
    loads.report(ticket, Load(10**6, 0.0))
    loads.close(ticket)
    assert loads.load("a") == 10**6
    clock.now += 1
    assert loads.load("a") == 0


def test_a_call_that_went_elsewhere_is_on_the_other_ones_books() -> None:
    loads, _ = make_loads("a", "b")
    ticket = loads.send("a", 70)
    loads.moved(ticket, "b")
    assert (loads.load("a"), loads.load("b")) == (0, 70)
    assert loads.close(ticket) == "b"
    loads.moved(ticket, "a")  # closed: nothing happens
    loads.report(ticket, Load(5, 1.0))
    assert (loads.load("a"), loads.load("b")) == (0, 0)


def test_what_waits_here_is_in_no_report() -> None:
    loads, clock = make_loads("a")
    reported, held, gone = loads.send("a", 10), loads.send("a", 70), loads.send("a", 30)
    loads.hold(held)
    loads.hold(gone)
    assert loads.load("a") == 110
    loads.report(reported, Load(200, 100.0))
    assert loads.load("a") == 200 + 70 + 30
    clock.now += 1
    assert loads.load("a") == 100 + 70 + 30, "it is not worked off, either"
    loads.close(gone)
    loads.release(held)
    loads.release(held)
    loads.release(gone)
    assert loads.load("a") == 100 + 70
    loads.report(reported, Load(150, 100.0))  # and now it counts what was sent
    loads.close(held)
    assert loads.load("a") == 150


def test_a_replica_that_left_takes_its_load_along() -> None:
    loads, _ = make_loads("a", "b")
    ticket = loads.send("a", 70)
    loads.publish(["b", "c"])
    assert loads.replicas == ("b", "c")
    loads.close(ticket)
    assert [loads.load(name) for name in "abc"] == [0, 0, 0]


def make_placement(loads: LoadTracker, suspects: Sequence[str] = (), **fields: Any) -> ReplicaSelector:
    return ReplicaSelector(loads, RouterArgs(**fields), lambda running: suspects)


def test_equal_keys_go_to_one_replica_while_the_load_is_balanced() -> None:
    loads, _ = make_loads(*NAMES)
    placement = make_placement(loads)
    for key in KEYS[:20]:
        assert placement.rank(key) == ordered(NAMES, key)


def test_a_hot_replica_spills_to_the_next_and_comes_last() -> None:
    loads, _ = make_loads(*NAMES)
    placement = make_placement(loads, max_imbalance_tokens=1000)
    order = placement.rank(KEYS[0])
    loads.send(order[0], 1000)
    assert placement.rank(KEYS[0]) == order  # within the slack
    loads.send(order[0], 1000)
    assert placement.rank(KEYS[0]) == (*order[1:], order[0])


def test_the_busiest_is_near_the_mean_under_keys_as_unequal_as_zipfs() -> None:
    loads, _ = make_loads(*NAMES)
    placement = make_placement(loads, max_imbalance_tokens=0)
    draw = random.Random(5)
    ranks = range(1, len(KEYS) + 1)
    for key in draw.choices(KEYS, [1 / rank for rank in ranks], k=3000):
        loads.send(placement.rank(key)[0], 300)
    sent = [loads.load(name) for name in NAMES]
    assert max(sent) / (sum(sent) / len(sent)) <= 1.3


def test_without_bounds_those_keys_would_overload_one() -> None:
    """The planted counterpart: affinity alone."""
    loads, _ = make_loads(*NAMES)
    draw = random.Random(5)
    for key in draw.choices(KEYS, [1 / rank for rank in range(1, len(KEYS) + 1)], k=3000):
        loads.send(best(NAMES, key), 300)
    sent = [loads.load(name) for name in NAMES]
    assert max(sent) / (sum(sent) / len(sent)) > 1.3


RERANK = 128, 128 + 64 * 256  # tokens of the query, and of a request


def busiest(spared: int | None, seed: int, count: int = 2, at_once: int = 32) -> float:
    """Requests of the busiest replica over the mean, for requests with queries of their own that come together."""
    loads, _ = make_loads(*NAMES[:count])
    placement, draw = make_placement(loads), random.Random(seed)
    sent = Counter[str]()
    for _ in range(at_once):
        name = placement.rank(draw.getrandbits(64), (), spared)[0]
        loads.send(name, RERANK[1])
        sent[name] += 1
    return max(sent.values()) * count / at_once


@pytest.mark.parametrize(("count", "most"), [(2, 1.0), (4, 1.125)])
def test_requests_with_short_queries_of_their_own_are_spread_evenly(count: int, most: float) -> None:
    assert statistics.mean(busiest(RERANK[0], seed, count) for seed in range(50)) <= most


def test_affinity_at_any_price_would_spread_them_unevenly() -> None:
    """The planted counterpart: a queue is waited in for what is not worth it."""
    assert statistics.mean(busiest(None, seed) for seed in range(50)) > 1.08


def test_a_long_beginning_is_worth_a_queue_and_twice_as_long_a_queue_is_not() -> None:
    loads, _ = make_loads("a", "b")
    placement = make_placement(loads)
    home, other = placement.rank(KEYS[0])
    loads.send(home, 8000)
    assert placement.rank(KEYS[0], (), 4000) == (home, other)
    loads.send(home, 1)
    assert placement.rank(KEYS[0], (), 4000) == (other, home)
    loads.send(other, 1)
    assert placement.rank(KEYS[0], (), 4000) == (home, other)


def choice_behind(call: Any, tokens: int) -> bool:
    """Says whether the call stays with its own replica, behind so many tokens there and none elsewhere. Replicas
    compute 100,000 tokens/s."""
    loads, _ = make_loads(*NAMES)
    placement = make_placement(loads)
    key = placement.key_of(call)
    home = ordered(NAMES, key or 0)[0]
    for name in NAMES:
        ticket = loads.send(name, 0)
        loads.report(ticket, Load(tokens if name == home else 0, 100_000.0))
        loads.close(ticket)
    return placement.rank(key, (), placement.cacheable(call), placement.steps_s(call))[0] == home


def test_scores_stay_behind_what_is_computed_before_their_step_in_any_case() -> None:
    spared = int(100_000 * STEPS_S)
    assert choice_behind(score(ids(100), ids(5)), spared + 190)
    assert not choice_behind(score(ids(100), ids(5)), spared + 210)


def test_generations_leave_a_replica_with_more_to_do() -> None:
    assert choice_behind(generate(ids(100)), 190)
    assert not choice_behind(generate(ids(100)), 210)


def test_a_key_that_one_replica_cannot_serve_is_shared_by_the_next_ones() -> None:
    loads, _ = make_loads(*NAMES)
    placement, order = make_placement(loads), ordered(NAMES, KEYS[0])
    for place in range(4):
        assert placement.rank(KEYS[0], (), 100)[0] == order[place]
        loads.send(order[place], 1000)


def test_two_replicas_alone_would_both_be_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the fault: the second is the last that takes over."""
    best = ReplicaSelector._best
    monkeypatch.setattr(ReplicaSelector, "_best", staticmethod(lambda ahead, *key: best(ahead[:2], *key)))
    loads, _ = make_loads(*NAMES)
    placement, order = make_placement(loads), ordered(NAMES, KEYS[0])
    loads.send(order[0], 1000)
    loads.send(order[1], 1000)
    assert placement.rank(KEYS[0], (), 100)[0] in order[:2]


def seen_full(monkeypatch: pytest.MonkeyPatch, *, trend_s: float) -> float:
    """A queue of 1,000 tokens that others keep full is reported every second; returns its load as seen in between."""
    monkeypatch.setattr(load_tracker, "TREND_S", trend_s)
    loads, clock = make_loads("a")
    for _ in range(8):
        ticket = loads.send("a", 50)
        loads.report(ticket, Load(1000, 1000.0))
        loads.close(ticket)
        clock.now += 1
    clock.now -= 0.1
    return loads.load("a")


def test_a_queue_that_others_fill_is_not_seen_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_full(monkeypatch, trend_s=0.3) > 800


def test_a_queue_that_only_shrank_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the fault: a queue shrinks by the replica's speed, whatever others send."""
    assert seen_full(monkeypatch, trend_s=float("inf")) < 200


def test_the_loads_of_all_are_those_of_each() -> None:
    loads, clock = make_loads(*NAMES)
    tickets = [loads.send(name, 100 * place) for place, name in enumerate(NAMES)]
    loads.report(tickets[3], Load(5000, 100.0))
    loads.hold(tickets[5])
    loads.close(tickets[6])
    clock.now += 2
    names, tokens, _ = loads.loads()
    assert names == NAMES
    assert tokens.tolist() == [loads.load(name) for name in NAMES]


def test_what_a_cache_may_spare_is_the_prefix_or_the_first_prompt() -> None:
    assert ReplicaSelector.cacheable(score(ids(300), ids(5))) == 300
    assert ReplicaSelector.cacheable(score(ids(0), ids(5))) == 0
    assert ReplicaSelector.cacheable(generate(ids(70))) == 70


def test_without_a_key_the_less_loaded_of_two_is_first() -> None:
    loads, _ = make_loads("a", "b")
    loads.send("a", 10)
    placement = make_placement(loads)
    assert {placement.rank(None) for _ in range(20)} == {("b", "a")}


def test_the_tried_are_left_out_and_the_suspected_while_there_are_others() -> None:
    loads, _ = make_loads("a", "b", "c")
    placement = make_placement(loads, suspects="a")
    assert sorted(placement.rank(KEYS[0])) == ["b", "c"]
    assert placement.rank(KEYS[0], {"b"}) == ("c",)
    assert sorted(placement.rank(KEYS[0], {"b", "c"})) == ["b", "c"]  # again, rather than one that answers no canary
    assert make_placement(loads).rank(KEYS[0], {"a", "b", "c"}) == ()
    assert make_placement(loads, suspects="abc").rank(KEYS[0], {"b", "c"}) == ("a",)
    assert make_placement(LoadTracker()).rank(KEYS[0]) == ()


def frozen(*others: str) -> tuple[LoadTracker, Clock]:
    """Returns loads of replicas that have reported every 10 ms. `a` owes an answer then; all queues are empty."""
    loads, clock = make_loads("a", *others)
    for _ in range(50):
        for name in ("a", *others):
            ticket = loads.send(name, 10)
            clock.now += 0.01
            loads.report(ticket, Load(0, 1000.0))
            loads.close(ticket)
    loads.send("a", 10)
    return loads, clock


@pytest.mark.parametrize("patience", [load_tracker.PATIENCE, pytest.param(1e9, id="planted fault")])
def test_a_replica_that_falls_silent_is_sent_no_more_than_a_call_at_times(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen one looks empty, since its queue is believed to be worked off: it would draw the calls of all."""
    monkeypatch.setattr(load_tracker, "PATIENCE", patience)
    loads, clock = frozen("b")
    selector, taken = make_placement(loads), Counter[str]()
    for number in range(1000):  # 10 s of a closed loop, in which `b` answers each call and `a` none
        name = selector.rank(KEYS[number])[0]
        ticket = loads.send(name, 1)
        clock.now += 0.01
        taken[name] += 1
        if name == "b":
            loads.report(ticket, Load(0, 1000.0))
            loads.close(ticket)
    assert (taken["a"] < 60) is (patience < 1e9), taken


def test_a_replica_with_one_long_answer_is_heard_when_it_is_asked() -> None:
    loads, clock = frozen("b")
    clock.now += 60
    assert not loads.silent(), "nothing has asked it for long"
    ticket = loads.send("a", 10)
    assert loads.silent() == ["a"]
    loads.report(ticket, Load(0, 1000.0))
    assert not loads.silent()
    loads.close(ticket)


def test_how_long_a_replica_may_be_silent_follows_its_reports() -> None:
    loads, clock = make_loads("a")
    for _ in range(3):  # a slow device: a step takes 2 s
        first, second = loads.send("a", 10), loads.send("a", 10)
        clock.now += 2
        loads.report(first, Load(0, 1000.0))
        loads.close(first)
        loads.close(second)
    ticket = loads.send("a", 10)
    clock.now += 2 * load_tracker.PATIENCE - 0.1
    loads.send("a", 10)
    assert not loads.silent()
    clock.now += 0.2
    assert loads.silent() == ["a"]
    loads.close(ticket)


def test_a_replica_that_owes_nothing_is_not_silent() -> None:
    loads, clock = make_loads("a")
    ticket, held = loads.send("a", 10), loads.send("a", 10)
    loads.hold(held)
    loads.close(ticket)
    clock.now += 0.4
    loads.close(loads.send("a", 10))
    clock.now += 0.4
    assert not loads.silent()
    loads.publish(())
    loads.publish(("a",))
    loads.close(held)
    assert loads._replicas["a"].owed == 0


def ids(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.int32)


def score(prefix: Any, rows: Any, **fields: Any) -> ScoreRequest:
    starts = np.array([0, len(rows)], np.int32)
    return ScoreRequest(request_id="s", prefix=prefix, ids=rows, starts=starts, labels=ids(1), **fields)


def generate(prompt: Any, **fields: Any) -> GenerateCall:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 16), n=fields.pop("n", 1))
    return (GenerateRequest(request_id="g", prompt=prompt, params=params, seed=0),)


def test_a_key_is_the_beginning_and_the_cache_domain() -> None:
    placement = make_placement(LoadTracker())
    base = placement.key_of(score(ids(300), ids(5)))
    assert base is not None
    assert placement.key_of(score(ids(300), ids(9, 4))) == base
    assert placement.key_of(score(ids(256), ids(9))) == base  # what comes later does not count
    assert placement.key_of(generate(ids(300))) == base
    assert placement.key_of(score(ids(300), ids(5), cache_salt="other")) != base
    assert placement.key_of(score(ids(300, 1), ids(5))) != base
    assert placement.key_of(score(ids(MIN_KEY_TOKENS - 1), ids(500))) is None
    assert placement.key_of(generate(ids(MIN_KEY_TOKENS))) is not None


class Named(SimpleNamespace):
    """A replica as the router sees it."""

    def __init__(self, name: str) -> None:
        super().__init__(replica_id=SimpleNamespace(unique_id=name))


def pending(*arguments: object, **named: object) -> Any:
    metadata = SimpleNamespace(internal_request_id="of the HTTP request", multiplexed_model_id="")
    return SimpleNamespace(args=list(arguments), kwargs=named, metadata=metadata, future=asyncio.Future())


async def chosen(request: Any, *names: str) -> list[set[str]]:
    router = object.__new__(TokenRouter)
    ranks = await router.choose_replicas([Named(name) for name in names], request)
    return [{replica.replica_id.unique_id for replica in rank} for rank in ranks]


async def test_the_router_obeys_the_route_and_has_everyone_else_in_reserve() -> None:
    call = pending(score(ids(3), ids(3)), route=Route(("c", "gone", "a"), 1))
    assert await chosen(call, "a", "b", "c", "d") == [{"c"}, {"a"}, {"b", "d"}]
    assert await chosen(call, "a", "c") == [{"c"}, {"a"}]
    for arguments in ((), (None,), ("words",), (score(ids(3), ids(3)),)):
        assert await chosen(pending(*arguments), "a", "b") == [{"a", "b"}]
    assert await chosen(None, "a") == [{"a"}]
    assert route_of(pending(route=("a",))) is None  # of another type: not ours


async def test_calls_of_one_http_request_are_told_apart() -> None:
    """Serve gives them one id; each must get the replica that was chosen for it."""
    router: Any = object.__new__(TokenRouter)
    router._pending_requests_by_id = {}
    one, other = pending("one"), pending("other")
    router._add_pending_request_to_indices(one)
    router._add_pending_request_to_indices(other)
    match = router._get_pending_request_matching_internal_request_id
    assert match(other.metadata) is other and match(one.metadata) is one
    router._remove_pending_request_from_indices(one)
    assert match(one.metadata) is None and match(other.metadata) is other
    other.future.cancel()
    assert match(other.metadata) is None and match(None) is None


async def test_serve_alone_would_not_tell_them_apart() -> None:
    """Why the router overrides it, and how to know when it need not any more."""
    router: Any = object.__new__(TokenRouter)
    router._pending_requests_by_id = {}
    one, other = pending("one"), pending("other")
    RequestRouter._add_pending_request_to_indices(router, one)
    RequestRouter._add_pending_request_to_indices(router, other)
    assert RequestRouter._get_pending_request_matching_internal_request_id(router, other.metadata) is one
