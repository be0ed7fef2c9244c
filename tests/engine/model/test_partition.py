"""A plan of lengths alone, over a module that records what it is given."""

from typing import Any

import pytest
import torch

from engine.attention.flashinfer_wrappers import Partition, recording

OLD, NEW = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)


class Module:
    """FlashInfer's compiled module, as far as its plan goes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def plan(self, *given: Any) -> None:
        self.calls.append(given)

    def paged_run(self) -> str:
        return "run"


class Wrapper:
    """A FlashInfer wrapper that takes its module anew in every plan, and gives it these arguments."""

    def __init__(self, *given: Any) -> None:
        self.module, self.given = Module(), given

    def plan(self) -> None:
        self._cached_module = self.module
        self._cached_module.plan(*self.given)

    def run(self) -> str:
        return self._cached_module.paged_run()


def planned(*given: Any) -> Any:
    wrapper = recording(Wrapper)(*given)
    wrapper.plan()
    return wrapper


def test_lengths_take_the_place_of_those_that_were_planned_and_all_else_stays() -> None:
    lengths, staging = OLD.diff(), torch.zeros(7, dtype=torch.uint8)
    wrapper = planned(staging, OLD, lengths, 2, 0.0)
    partition = Partition.of(wrapper, OLD, lengths)
    assert partition is not None
    partition(NEW)
    given = wrapper.module.calls[-1]
    assert given[0] is staging and given[1] is NEW and given[3:] == (2, 0.0)
    assert given[2].tolist() == [5, 4]


def test_without_tensor_cores_there_are_no_lengths_to_replace() -> None:
    wrapper = planned(OLD, 2)
    partition = Partition.of(wrapper, OLD, OLD.diff())
    assert partition is not None
    partition(NEW)
    assert len(wrapper.module.calls[-1]) == 2 and wrapper.module.calls[-1][0] is NEW


@pytest.mark.parametrize("given", [(), (OLD.clone(), 2), (OLD, OLD.diff(), 2)])
def test_a_module_that_takes_lengths_in_another_form_has_no_partition(given: tuple[Any, ...]) -> None:
    assert Partition.of(planned(*given), OLD, OLD.diff()) is None


def test_a_wrapper_that_plans_by_itself_has_no_partition() -> None:
    wrapper = Wrapper(OLD, 2)
    wrapper.plan()
    assert Partition.of(wrapper, OLD, OLD.diff()) is None
    assert Partition.of(recording(Wrapper)(OLD, 2), OLD, OLD.diff()) is None  # it has not planned


def test_recording_changes_neither_the_module_nor_other_wrappers() -> None:
    wrapper, other = planned(OLD, 2), Wrapper(OLD, 2)
    assert wrapper.run() == "run" and len(wrapper.module.calls) == 1
    other.plan()
    assert type(other._cached_module) is Module and vars(wrapper.module).keys() == {"calls"}


def test_a_plan_that_fails_fails_as_without_recording() -> None:
    wrapper = recording(Wrapper)(OLD, 2)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of workspace")

    wrapper.module.plan = fails
    with pytest.raises(RuntimeError, match="workspace"):
        wrapper.plan()
