"""The toy model: a pure function of the tokens attended to, read through the slots."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.requests import Int32s
from tests.support import toy_model
from tests.support.toy_model import ToyFault, ToyModel

TABLE = torch.zeros((4, 64), dtype=torch.int32)
NONE = np.empty(0, np.int32)


def ids(*values: int) -> Int32s:
    return np.array(values, np.int32)


def last_row(model: ToyModel, tokens: Int32s, slots: Int32s) -> torch.Tensor:
    run = ScheduledSequence(0, NONE, slots, tokens, ids(len(tokens) - 1))
    return model.forward(StepKind.PREFILL, [run], TABLE)[0]


def test_a_row_does_not_depend_on_slots_chunks_or_neighbours() -> None:
    tokens = ids(5, 6, 7, 8, 9)
    alone = last_row(ToyModel(), tokens, ids(1, 2, 3, 4, 5))
    model = ToyModel()
    assert torch.equal(last_row(model, tokens, ids(50, 3, 77, 8, 21)), alone)
    slots = ids(100, 101, 102, 103, 104)
    sequences = [
        ScheduledSequence(0, NONE, slots[:2], tokens[:2], NONE),
        ScheduledSequence(0, NONE, ids(60, 61), ids(1, 2), ids(0, 1)),
        ScheduledSequence(0, slots[:2], slots[2:], tokens[2:], ids(2)),
    ]
    assert torch.equal(model.forward(StepKind.SCORE, sequences, TABLE)[2], alone)
    table = TABLE.clone()
    table[3, 4] = 9
    decode = ScheduledSequence(3, slots[:4], ids(200), None, ids(0))
    assert torch.equal(model.forward(StepKind.DECODE, [decode], table)[0], alone)
    labels = ids(200, 7, 0)
    assert torch.equal(model.label_logits(StepKind.DECODE, [decode], table, labels)[0], alone[labels.tolist()])


@pytest.mark.parametrize("changed", [ids(5, 6, 8, 7, 9), ids(5, 6, 7, 8), ids(4, 6, 7, 8, 9), ids(0, 5, 6, 7, 8, 9)])
def test_order_content_and_length_matter(changed: Int32s) -> None:
    model = ToyModel()
    tokens = ids(5, 6, 7, 8, 9)
    row = last_row(model, tokens, np.arange(1, 6, dtype=np.int32))
    assert not torch.equal(last_row(model, changed, np.arange(11, 11 + len(changed), dtype=np.int32)), row)


def test_a_wrong_slot_changes_the_answer_and_a_freed_one_is_caught() -> None:
    model = ToyModel()
    last_row(model, ids(5, 6, 7), ids(1, 2, 3))
    right = model.forward(StepKind.SCORE, [ScheduledSequence(0, ids(1, 2, 3), ids(9), ids(8), ids(0))], TABLE)
    wrong = model.forward(StepKind.SCORE, [ScheduledSequence(0, ids(1, 3, 2), ids(9), ids(8), ids(0))], TABLE)
    assert not torch.equal(right, wrong)
    model.forget(ids(2))
    with pytest.raises(ToyFault, match="holds nothing"):
        model.forward(StepKind.SCORE, [ScheduledSequence(0, ids(1, 2, 3), ids(9), ids(8), ids(0))], TABLE)


def test_logits_spread_over_several_nats() -> None:
    rows = torch.stack([last_row(ToyModel(), ids(n, 3), ids(1, 2))[: toy_model.RAISE] for n in range(50)])
    assert 2.3 < float(rows.std()) < 2.7
    assert abs(float(rows.mean())) < 0.1
    assert float(rows.max()) > 6


def test_magic_tokens_do_what_they_say() -> None:
    model = ToyModel()
    assert torch.isnan(last_row(model, ids(1, toy_model.NAN, 2), ids(1, 2, 3))).any()
    assert torch.isposinf(last_row(model, ids(1, toy_model.INF, 2), ids(1, 2, 3))).any()
    assert torch.isneginf(last_row(model, ids(1, toy_model.EMPTY, 2), ids(1, 2, 3))).all()
    assert torch.isneginf(last_row(model, ids(1), ids(1))[toy_model.RAISE :]).all()
    with pytest.raises(ToyFault):
        last_row(model, ids(toy_model.RAISE), ids(1))


def test_hang_waits_for_its_release() -> None:
    model = ToyModel()
    thread = threading.Thread(target=last_row, args=(model, ids(toy_model.HANG), ids(1)), daemon=True)
    thread.start()
    assert model.hanging.wait(10)
    assert thread.is_alive()
    model.released.set()
    thread.join(10)
    assert not thread.is_alive()


PROGRAM = """
import numpy as np, torch
from engine.batch.input_batch import ScheduledSequence, StepKind
from tests.support.toy_model import KILL, ToyModel
a = lambda *v: np.array(v, np.int32)
sequence = ScheduledSequence(0, a(), a(1), a(KILL), a(0))
ToyModel().forward(StepKind.PREFILL, [sequence], torch.zeros((1, 4), dtype=torch.int32))
"""


@pytest.mark.full
@pytest.mark.parametrize(("faults", "status"), [("1", toy_model.KILL_STATUS), ("0", 1)])
def test_kill_ends_the_process_and_the_toy_loads_only_for_fault_tests(faults: str, status: int) -> None:
    env = {**os.environ, "ASSAY_TEST_FAULTS": faults, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, timeout=300, check=False)
    assert ran.returncode == status
    assert faults == "1" or b"ASSAY_TEST_FAULTS=1" in ran.stderr
