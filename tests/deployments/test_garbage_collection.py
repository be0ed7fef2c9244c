"""Nothing is collected while modules are imported, and collections go on afterwards as before."""

import gc

import pytest

from deployments.garbage_collection import paused


def test_a_pause_ends_with_its_block_and_switches_nothing_on() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
