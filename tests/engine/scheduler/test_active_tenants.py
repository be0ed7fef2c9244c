"""Whether requests of several tenants come: those that have some, and those that keep coming."""

from engine.scheduler.fair_queue import MEMORY_S, ActiveTenants


def visit(tenants: ActiveTenants, tenant: str, at: float) -> None:
    tenants.enter(tenant, at)
    tenants.leave(tenant, at + 0.01)


def test_one_tenant_is_alone_whatever_it_has() -> None:
    tenants = ActiveTenants()
    for at in range(5):
        tenants.enter("a", at / 10)
    assert not tenants.several(1.0)
    for at in range(5):
        tenants.leave("a", 1 + at / 10)
    assert not tenants.several(1.5)


def test_two_tenants_with_requests_are_several() -> None:
    tenants = ActiveTenants()
    tenants.enter("a", 0.0)
    tenants.enter("b", 0.0)
    assert tenants.several(100.0)
    tenants.leave("b", 100.0)
    assert not tenants.several(100.0)


def test_a_tenant_that_keeps_coming_is_active_between_its_requests() -> None:
    tenants = ActiveTenants()
    tenants.enter("a", 0.0)
    for at in (1.0, 1.5):
        visit(tenants, "b", at)
    assert tenants.several(1.6)
    assert tenants.several(1.51 + MEMORY_S)
    assert not tenants.several(1.52 + MEMORY_S)


def test_a_tenant_that_comes_once_in_a_while_is_not() -> None:
    tenants = ActiveTenants()
    tenants.enter("a", 0.0)
    for at in (0.0, 5.0, 10.0):
        visit(tenants, "health check", at)
        assert not tenants.several(at + 0.1)


def test_tenants_that_left_long_ago_are_forgotten() -> None:
    tenants = ActiveTenants()
    for number in range(1_000):
        visit(tenants, f"t{number}", number / 100)
    assert not tenants.several(11.1)
    assert not any((tenants._once, tenants._regular, tenants._requests, tenants._returned))
