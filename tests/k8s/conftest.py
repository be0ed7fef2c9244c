"""The rendered overlays, once a run; tests get copies that they may break."""

import copy
import functools
from collections.abc import Callable

import pytest

from tests.k8s.render import K8S, OVERLAYS, Object, render


@functools.cache
def _rendered(name: str) -> list[Object]:
    return render(K8S / "overlays" / name)


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    """Each overlay in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def objects_of() -> Callable[[str], list[Object]]:
    """A copy of the objects of an overlay."""
    return lambda name: copy.deepcopy(_rendered(name))


@pytest.fixture
def objects(overlay: str, objects_of: Callable[[str], list[Object]]) -> list[Object]:
    return objects_of(overlay)
