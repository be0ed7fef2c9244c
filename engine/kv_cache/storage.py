"""Stores keys and values: one tensor of each a layer, indexed by token slot. A page is one slot."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.config import EngineConfig

CPU_SLOTS = 65_536  # enough for tests and laptops; the memory is touched only where slots are used
MAX_SLOTS = 1 << 22  # beyond this the host's slot lists cost more than a larger prefix cache saves
CPU_SHARE = 0.25  # of the machine's memory
MIN_SLOTS = 2


class LayerShape(NamedTuple):
    """Describes what one layer stores of a token: heads, and head dims after any padding."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of one token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


class KVStorageTooSmall(RuntimeError):
    """Reports that the memory left holds fewer slots than the engine needs."""


class KVStorage:
    """Holds a layer's keys (slots, 1, kv heads, key dim) and values (slots, 1, kv heads, value dim), for each layer.

    Slot 0 takes what padding writes. A slot holds what the last step that wrote it wrote.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0.0,
    ) -> None:
        if num_slots < MIN_SLOTS:
            raise ValueError(f"`num_slots` must be >= {MIN_SLOTS} (slot 0 is padding). Given: {num_slots}.")
        self.num_slots = num_slots
        self.keys = [_filled((num_slots, 1, one.kv_heads, one.key_dim), fill, dtype, device) for one in layers]
        self.values = [_filled((num_slots, 1, one.kv_heads, one.value_dim), fill, dtype, device) for one in layers]


def _filled(shape: tuple[int, ...], fill: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # zeros is not full(0): on a CPU the system hands out zero pages only as they are touched
    if fill == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.full(shape, fill, dtype=dtype, device=device)


def bytes_of_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Returns the bytes of a token's keys and values in all layers."""
    return sum(one.numbers for one in layers) * dtype.itemsize


def slots_that_fit(
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    engine: EngineConfig,
    max_model_len: int,
    beside: int = 0,
) -> int:
    """Returns how many slots the KV storage gets: `engine.kv_slots`, or as many as the memory allows.

    Args:
        layers: The layout that each layer stores.
        dtype: The storage's element type.
        device: Holds the storage.
        engine: The engine's configuration.
        max_model_len: Tokens of a sequence.
        beside: Bytes that a token takes in a draft model's storage over the same slots.

    Raises:
        KVStorageTooSmall: The memory left holds too few slots.
    """
    if engine.kv_slots is not None:
        return engine.kv_slots
    token_bytes = bytes_of_token(layers, dtype) + beside
    slots = min(_bytes_for_pool(device, engine.kv_memory_fraction) // token_bytes, MAX_SLOTS)
    if device.type == "cpu":
        slots = min(slots, CPU_SLOTS)
    wanted = min(max_model_len, engine.token_budget) + 1
    if slots < wanted:
        raise KVStorageTooSmall(
            f"The memory left on {device} holds {max(slots, 0)} tokens of {token_bytes} bytes; at least {wanted} are "
            "needed. Lower `model.max_model_len` or raise `engine.kv_memory_fraction`."
        )
    return int(slots)


def _bytes_for_pool(device: torch.device, fraction: float) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading and the checks have freed counts as free
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - fraction) * total)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SHARE)
