"""`apply_temperature` against its reference, bit for bit."""

import numpy as np
import pytest
import torch

from gpu_sampler.kernels.temperature import apply_temperature
from gpu_sampler.state.layout import Word
from tests.support import temper as reference
from tests.support.temper import TemperArrays, temper_case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 64  # elements


def on(device: str, arrays: TemperArrays, dtype: torch.dtype = torch.float32, gap: int = 0) -> list[torch.Tensor]:
    """The arguments as tensors; `gap` NaN columns lie between the rows of the logits."""
    logits_RV, *others = arrays
    wide = torch.full((logits_RV.shape[0], logits_RV.shape[1] + gap), torch.nan, dtype=dtype, device=device)
    wide[:, : logits_RV.shape[1]] = torch.from_numpy(logits_RV).to(dtype).to(device)
    return [wide[:, : logits_RV.shape[1]], *(torch.from_numpy(x).to(device) for x in others)]


def assert_equals_reference(arrays: TemperArrays, found_PV: torch.Tensor) -> None:
    np.testing.assert_array_equal(found_PV.cpu().numpy(), reference.apply_temperature(*arrays))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 17, 111, 4097])
def test_rows_are_those_of_the_reference(size: int, dtype: torch.dtype, device: str) -> None:
    arrays = temper_case(size, seed=size + 1).arrays()
    assert_equals_reference(arrays, apply_temperature(*on(device, arrays, dtype)))


@pytest.mark.parametrize("gap", [1, 8, 129])
def test_row_stride_does_not_matter(gap: int, device: str) -> None:
    arrays = temper_case(111, seed=gap).arrays()
    assert_equals_reference(arrays, apply_temperature(*on(device, arrays, torch.bfloat16, gap)))


@pytest.mark.risk("S4")
def test_side_list_longer_than_one_block_and_ids_out_of_range_touch_nothing_else(device: str) -> None:
    """2,500 entries over two tiles, ids outside of the vocabulary among them; guards around the output stay."""
    case = temper_case(4200, seed=9)
    row = next(row for row, length in enumerate(case.side_len_R) if length > 2100)
    start = int(case.table_SW[case.slots_R[row], Word.OVERLAY_START])
    case.side_ids_E[start : start + 4] = (-1, 4200, 2**31 - 1, -(2**31))
    case.side_processed_E[start : start + 4] = 7.0
    arguments = on(device, case.arrays())
    case.side_processed_E[start : start + 4] = -np.inf  # what the reference leaves out, the kernel must not write
    shape = (len(case.rows_P), 4200)
    count = shape[0] * shape[1]
    whole = torch.full((count + 2 * GUARD,), torch.nan, device=device)
    found_PV = apply_temperature(*arguments, out_PV=whole[GUARD : GUARD + count].view(shape))
    assert_equals_reference(case.arrays(), found_PV)
    assert torch.isnan(whole[:GUARD]).all() and torch.isnan(whole[-GUARD:]).all()


def test_no_rows_give_no_rows(device: str) -> None:
    arrays = temper_case(17, seed=1).arrays()._replace(rows_P=np.zeros(0, np.int32))
    assert apply_temperature(*on(device, arrays)).shape == (0, 17)


def test_a_side_list_left_out_is_caught(device: str) -> None:
    arrays = temper_case(111, seed=3).arrays()
    found_PV = apply_temperature(*on(device, arrays._replace(side_len_R=np.zeros_like(arrays.side_len_R))))
    with pytest.raises(AssertionError):
        assert_equals_reference(arrays, found_PV)


def test_logits_of_another_kind_are_refused(device: str) -> None:
    arguments = on(device, temper_case(17, seed=1).arrays())
    for wrong in (arguments[0].to(torch.float64), arguments[0].T, arguments[0][0]):
        with pytest.raises(ValueError, match="got logits"):
            apply_temperature(wrong, *arguments[1:])
    with pytest.raises(ValueError, match="got out"):
        apply_temperature(*arguments, out_PV=torch.zeros(3, 17, device=device))
    with pytest.raises(ValueError, match="got rows"):
        apply_temperature(arguments[0], arguments[1].to(torch.int64), *arguments[2:])


@pytest.mark.gpu
def test_a_graph_replays_on_new_logits() -> None:
    first, second = temper_case(111, seed=4).arrays(), temper_case(111, seed=5).arrays()
    arguments = on("cuda", first)
    apply_temperature(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found_PV = apply_temperature(*arguments)
    for held, new in zip(arguments, on("cuda", second), strict=True):
        held.copy_(new)
    graph.replay()
    assert_equals_reference(second, found_PV)
