"""A plan of lengths alone, over a module that notes what it is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.flashinfer_wrappers import Partition

OLD, NEW = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)


def module() -> Any:
    """Of the inner plan of FlashInfer, which notes its arguments."""
    calls: list[tuple[Any, ...]] = []
    return SimpleNamespace(plan=lambda *given: calls.append(given), calls=calls)


def test_lengths_take_the_place_of_those_that_were_planned_and_all_else_stays() -> None:
    made, lengths, staging = module(), OLD.diff(), torch.zeros(7, dtype=torch.uint8)
    honest = made.plan
    partition = Partition.of(made, lambda: made.plan(staging, OLD, lengths, 2, 0.0), OLD, lengths)
    assert partition is not None and made.plan is honest
    partition(NEW)
    given = made.calls[-1]
    assert given[0] is staging and given[1] is NEW and given[3:] == (2, 0.0)
    assert given[2].tolist() == [5, 4]


def test_without_tensor_cores_there_are_no_lengths_to_tell() -> None:
    made, lengths = module(), OLD.diff()
    partition = Partition.of(made, lambda: made.plan(OLD, 2), OLD, lengths)
    assert partition is not None
    partition(NEW)
    assert len(made.calls[-1]) == 2 and made.calls[-1][0] is NEW


@pytest.mark.parametrize("given", [(), (OLD.clone(), 2), (OLD, OLD.diff(), 2)])
def test_a_module_that_is_told_of_lengths_in_another_way_is_not_taken(given: tuple[Any, ...]) -> None:
    made = module()
    honest = made.plan
    assert Partition.of(made, lambda: made.plan(*given), OLD, OLD.diff()) is None
    assert made.plan is honest


def test_a_wrapper_that_plans_by_itself_or_fails_is_left_as_it_is() -> None:
    made = module()
    honest = made.plan
    assert Partition.of(None, lambda: None, OLD, OLD.diff()) is None
    assert Partition.of(made, lambda: None, OLD, OLD.diff()) is None

    def fails() -> None:
        raise RuntimeError("out of workspace")

    with pytest.raises(RuntimeError, match="workspace"):
        Partition.of(made, fails, OLD, OLD.diff())
    assert made.plan is honest
