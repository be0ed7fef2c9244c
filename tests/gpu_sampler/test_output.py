"""The one buffer of a device's output."""

import pytest
import torch

from gpu_sampler.output import OutputWords

SHAPES = pytest.mark.parametrize(
    ("rows", "n_top", "n_chosen"), [(0, None, 0), (1, None, 0), (3, 0, 0), (3, 1, 0), (7, 5, 3), (256, 20, 128)]
)


@SHAPES
def test_every_part_begins_at_16_bytes_and_has_its_shape(rows: int, n_top: int | None, n_chosen: int) -> None:
    output = OutputWords.empty(rows, n_top, n_chosen, torch.device("cpu")).split()
    parts = [part for part in output if part is not None]
    assert all(part.data_ptr() % 16 == 0 and part.is_contiguous() for part in parts)
    shapes = [(rows,), (rows,)] if n_top is None else [(rows,)] * 3 + [(rows, n_top)] * 2 + [(rows, n_chosen), (rows,)]
    assert [tuple(part.shape) for part in parts] == shapes


@SHAPES
def test_an_output_finds_its_buffer_again(rows: int, n_top: int | None, n_chosen: int) -> None:
    made = OutputWords.empty(rows, n_top, n_chosen, torch.device("cpu"))
    made.words.copy_(torch.arange(len(made.words), dtype=torch.int32))
    found = OutputWords.of(made.split())
    assert found[1:] == made[1:] and found.words.equal(made.words)
    again = OutputWords(found.words.clone(), *found[1:]).split()
    for one, other in zip(made.split(), again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.view(torch.int32).equal(other.view(torch.int32))


@SHAPES
def test_arrays_are_the_same_numbers_as_the_tensors(rows: int, n_top: int | None, n_chosen: int) -> None:
    made = OutputWords.empty(rows, n_top, n_chosen, torch.device("cpu"))
    made.words.copy_(torch.arange(len(made.words), dtype=torch.int32))
    for tensor, array in zip(made.split(), made.arrays(), strict=True):
        assert (tensor is None) == (array is None)
        if array is not None:
            assert array.dtype == tensor.numpy().dtype and array.tobytes() == tensor.numpy().tobytes()
            assert array.shape == tuple(tensor.shape)
