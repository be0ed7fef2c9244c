"""KVStorage: shapes, and how many slots it gets."""

import pytest
import torch

from engine.config import EngineConfig
from engine.kv_cache import storage
from engine.kv_cache.storage import CPU_SLOTS, KVStorage, KVStorageTooSmall, LayerShape, slots_that_fit

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 16, 16), LayerShape(3, 24, 8)]


def test_every_layer_has_its_own_tensors_of_its_own_shape() -> None:
    pool = KVStorage(LAYERS, 17, torch.bfloat16, CPU)
    assert [tuple(one.shape) for one in pool.keys] == [(17, 1, 2, 16), (17, 1, 3, 24)]
    assert [tuple(one.shape) for one in pool.values] == [(17, 1, 2, 16), (17, 1, 3, 8)]
    assert {one.dtype for one in pool.keys + pool.values} == {torch.bfloat16}
    assert not any(one.any() for one in pool.keys + pool.values)


def test_a_pool_may_be_filled_with_nan() -> None:
    pool = KVStorage(LAYERS, 3, torch.float32, CPU, fill=float("nan"))
    assert all(bool(one.isnan().all()) for one in pool.keys + pool.values)


def test_a_pool_needs_a_slot_beside_the_padding_slot() -> None:
    with pytest.raises(ValueError, match="num_slots"):
        KVStorage(LAYERS, 1, torch.float32, CPU)


def test_the_operators_size_is_taken_as_it_is() -> None:
    assert slots_that_fit(LAYERS, torch.float32, CPU, EngineConfig(kv_slots=77), 4096) == 77


def test_a_cpu_pool_is_bounded() -> None:
    assert slots_that_fit(LAYERS, torch.float32, CPU, EngineConfig(), 128) == CPU_SLOTS


def test_memory_is_divided_by_what_a_token_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = (2 * 32 + 3 * 32) * 4
    monkeypatch.setattr(storage, "_bytes_for_pool", lambda device, fraction: 1000 * token_bytes + 3)
    assert slots_that_fit(LAYERS, torch.float32, CPU, EngineConfig(), 128) == 1000


def test_too_little_memory_is_an_error_that_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_bytes_for_pool", lambda device, fraction: -5)
    with pytest.raises(
        KVStorageTooSmall, match=r"holds 0 tokens of 640 bytes; at least 129 are needed.*kv_memory_fraction"
    ):
        slots_that_fit(LAYERS, torch.float32, CPU, EngineConfig(), 128)
