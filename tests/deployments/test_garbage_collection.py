"""Nothing is collected while modules are imported, and collections go on afterwards as before."""

import gc
from collections.abc import Iterator

import pytest

from deployments.garbage_collection import paused


@pytest.fixture
def collects() -> Iterator[None]:
    """Collections are on. An engine of other tests in this process may have switched them off."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_a_pause_ends_with_its_block_and_switches_nothing_on(collects: None) -> None:
    with pytest.raises(ImportError), paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()
