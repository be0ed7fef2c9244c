"""The reference of `apply_temperature` against a computation by single numbers."""

import math

import numpy as np
import pytest

from tests.support.temper import LARGEST, TemperCase, apply_temperature, temper_case, tempered

SIZES = (1, 3, 17, 111, 700)


def by_hand(case: TemperCase, place: int, token: int) -> float:
    """One number of the result, from the case's own record of what stands where."""
    row = int(case.rows_P[place])
    if not 0 <= row < len(case.logits_RV):
        return -math.inf
    slot = case.slots_R[row]
    if token in case.side[row]:
        z = case.side[row][token]
    else:
        z = float(case.logits_RV[row, token])
        z = z if z < math.inf and case.allowed[slot][token] else -math.inf
    temperature = case.temperatures[slot] or 1.0
    return float(np.clip(z / temperature, -LARGEST, LARGEST)) if z > -math.inf else -math.inf


@pytest.mark.parametrize("size", SIZES)
def test_reference_is_what_single_numbers_give(size: int) -> None:
    case = temper_case(size, seed=size)
    found_PV = apply_temperature(*case.arrays())
    expected_PV = [[by_hand(case, place, token) for token in range(size)] for place in range(len(case.rows_P))]
    np.testing.assert_allclose(found_PV, expected_PV, rtol=3e-7)


def test_case_holds_every_feature() -> None:
    """Else the test above would say nothing of it."""
    case = temper_case(111, seed=111)
    assert (case.rows_P < 0).any() and (case.rows_P >= len(case.logits_RV)).any()
    assert any(case.side) and any(not side for side in case.side)
    assert any(not allowed.all() for allowed in case.allowed) and 0.0 in case.temperatures
    assert np.isnan(case.logits_RV).any() and (case.logits_RV == np.inf).any()


def test_finite_values_stay_finite_at_every_temperature() -> None:
    z_V = np.array([LARGEST, -LARGEST, 1.0, 0.0, -np.inf], np.float32)
    for temperature in (1e-6, 1e-2, 1.0, 2.0):
        found_V = tempered(z_V, np.float32(temperature))
        assert np.isfinite(found_V[:4]).all() and found_V[4] == -np.inf


@pytest.mark.parametrize("fault", ["side list left out", "temperature left out", "mask left out"])
def test_planted_fault_is_seen(fault: str) -> None:
    case = temper_case(111, seed=111)
    arrays = case.arrays()
    if fault == "side list left out":
        arrays = arrays._replace(side_len_R=np.zeros_like(case.side_len_R))
    elif fault == "temperature left out":
        arrays = arrays._replace(table_SW=case.table_without_temperature())
    else:
        arrays = arrays._replace(masks_MW=np.full_like(case.masks_MW, -1))
    assert not np.array_equal(apply_temperature(*arrays), apply_temperature(*case.arrays()))
