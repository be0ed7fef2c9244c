"""Holds `TenantQueues`, which keeps its answers in order, beside the rule written out over all queues."""

import heapq
import random

import pytest

from engine.request_cost import BLOCK, MAX_LEVELS, SizeIndex, TenantQueues

PRIORITIES = (-1, 0, 0, 0, 5)


def before(queues: TenantQueues, tenant: str, priority: int, cost: float) -> float:
    """Returns what `TenantQueues.before` does, by reading every queue."""
    own = sum(tokens for (_, name), tokens in queues._queues.items() if name == tenant)
    earlier, level = dict[str, float](), dict[str, float]()
    for (queued, name), tokens in queues._queues.items():
        if name != tenant:
            kind = earlier if queued < priority else level
            kind[name] = kind.get(name, 0) + tokens
    return own + sum(earlier.values()) + sum(min(tokens, own + cost) for tokens in level.values())


@pytest.mark.parametrize("tenants", [1, 3, 50, 3 * BLOCK])
def test_answers_follow_every_change(tenants: int) -> None:
    draw = random.Random(tenants)
    queues = TenantQueues()
    for number in range(4 * tenants + 400):
        tenant, priority, tokens = f"t{draw.randrange(tenants)}", draw.choice(PRIORITIES), draw.randrange(1, 100)
        change = draw.random()
        if change < 0.7:
            queues.add(tenant, priority, tokens)
        elif change < 0.99:
            queues.add(tenant, priority, -tokens)
        else:
            queues.work_off(draw.random() * queues.total)
        if number % 9 == 0:
            asked = f"t{draw.randrange(tenants)}", draw.choice((-1, 0, 2, 5)), draw.randrange(200)
            assert queues.before(*asked) == pytest.approx(before(queues, *asked))
            found = [(one.tokens, one.priority, one.tenant) for one in queues.largest(8)]
            expected = heapq.nlargest(8, ((tokens, *key) for key, tokens in queues._queues.items()))
            assert found == [(int(tokens), *key) for tokens, *key in expected]


def test_priorities_that_were_asked_for_once_cost_nothing_more() -> None:
    queues = TenantQueues()
    queues.add("a", 0, 10)
    for priority in range(-1000, 1000):
        asked = "b", priority, 5
        assert queues.before(*asked) == before(queues, *asked)
        assert queues.before("b", 0, 7) == 7
    assert len(queues._levels) == len(queues._earlier) == MAX_LEVELS
    assert 0 in queues._levels


def test_an_index_that_shrinks_and_grows_stays_in_order() -> None:
    index = SizeIndex[int]({key: key + 1 for key in range(5 * BLOCK)})
    for key in range(0, 5 * BLOCK, 2):
        index.set(key, 0)
    for key in range(3 * BLOCK):
        index.set(-key, 7)
    sizes = [size for size, _ in index.descending()]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == len(index)
    assert index.capped_sum(7) == sum(min(size, 7) for size in sizes)
    assert index.capped_sum(10**9) == sum(sizes)
    assert index.capped_sum(0) == 0
