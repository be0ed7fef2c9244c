"""A digest changes with every bit of every weight, and with nothing else."""

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.config import EngineConfig, ModelConfig
from engine.model.loader import load_model
from engine.model.weights_digest import CHUNK_WORDS, joined_digest, weights_digest
from tests.support import model_folders as folders


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 7, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_weights_have_one_digest_and_each_changed_bit_another(dtype: torch.dtype) -> None:
    first = weights_digest(model(dtype))
    assert weights_digest(model(dtype)) == first
    seen = {first}
    for name, tensor in model(dtype).state_dict().items():
        for place in range(tensor.numel()):
            changed = model(dtype)
            bits = changed.state_dict()[name].reshape(-1).view(torch.uint8)
            bits[place * tensor.element_size()] ^= 1
            seen.add(weights_digest(changed))
    assert len(seen) == 1 + sum(one.numel() for one in model(dtype).state_dict().values())


def test_names_dtypes_shapes_order_and_parts_count() -> None:
    first = model()
    assert weights_digest(first) != weights_digest(first.bfloat16())
    assert weights_digest(nn.Linear(2, 1, bias=False)) != weights_digest(nn.Linear(1, 2, bias=False))
    assert weights_digest(model(), model()) != weights_digest(model())
    one, other = nn.Embedding(2, 3), nn.Embedding(2, 3)
    other.weight = nn.Parameter(one.weight.detach().flip(0))
    assert weights_digest(one) != weights_digest(other)
    assert joined_digest("a") == "a" and len({joined_digest("a", "b"), joined_digest("b", "a"), "a"}) == 3


def test_a_tensor_of_several_chunks_is_read_to_its_end() -> None:
    chunk = CHUNK_WORDS["cpu"]
    long = nn.Embedding(1, 2 * chunk + 3)
    nn.init.zeros_(long.weight)
    digests = {weights_digest(long)}
    for place in (0, chunk, 2 * chunk, 2 * chunk + 2):
        nn.init.zeros_(long.weight)
        long.weight.data[0, place] = 1.0
        digests.add(weights_digest(long))
    assert len(digests) == 5


def test_the_digest_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights_digest(model())
    monkeypatch.setitem(CHUNK_WORDS, "cpu", 3)
    assert weights_digest(model()) == first


def test_a_model_is_digested_as_it_was_loaded_and_random_weights_are_the_same_everywhere(tmp_path: Path) -> None:
    engine = EngineConfig(kv_slots=128)

    def digest(seed: int, random_weights: bool = False) -> str:
        folder = folders.save(tmp_path / f"{seed}", folders.llama(), seed=seed)
        return load_model(ModelConfig(path=folder, device="cpu", random_weights=random_weights), engine).weights_digest

    assert digest(1) == digest(1) != digest(2)
    assert digest(1, random_weights=True) == digest(2, random_weights=True) != digest(1)
