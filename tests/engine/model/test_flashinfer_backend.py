"""FlashInferAttention on a CPU, over a stand-in that does what FlashInfer documents of its calls."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.flashinfer_wrappers import Partition
from engine.attention.plans import AttentionParams
from engine.batch import shared_prefix
from engine.batch.input_batch import ScheduledSequence, StepKind, single_tokens
from engine.config import EngineConfig
from engine.model import hf_model
from engine.model.compatibility import UnsupportedModel
from engine.model.cuda_graphs import decode
from engine.model.hf_model import HFModel
from tests.engine.model.conftest import SIX
from tests.engine.model.stand_in import Decode, Prefill, Ragged, Replayed, Wrapper

CPU = torch.device("cpu")
ENGINE = EngineConfig(kv_slots=331)


@pytest.mark.parametrize("name", SIX)
def test_mixed_and_decode_steps_give_what_each_sequence_gives_alone(
    tiny_models: Any, tiny_driver: Any, stand_in: object, name: str
) -> None:
    d = tiny_driver(tiny_models.module(name), backend=FlashInferAttention(CPU, torch.float32))
    assert d.model.kv_storage.keys[0].shape[3] == 64  # 16, padded with zeros
    a, b = d.add(23), d.add(19)
    c = d.add(17, shares=(a, 11))
    first = [d.run(a, 0, 11), d.run(c, 11, 16), d.run(b, 0, 18), d.run(a, 11, 21)]
    assert d.error(StepKind.PREFILL, first) < 1e-5
    rows = [d.run(one, at, at + 1, from_table=True) for one, at in ((c, 16), (a, 21), (b, 18))]
    assert d.error(StepKind.DECODE, rows) < 1e-5
    assert d.error(StepKind.DECODE, [d.run(a, 22, 23, from_table=True)]) < 1e-5


def _over_one_context(d: Any, long: int, own: Sequence[int]) -> list[ScheduledSequence]:
    """The end of a sequence of `long` tokens, and before and behind it runs of so many tokens over the first of it."""
    first = d.add(long)
    d.model.forward(StepKind.PREFILL, [d.run(first, 0, long - 4)], d.table)
    shared = d.slots[first][: long - 4]
    sequences = []
    for tokens in own:
        run = d.run(d.add(long - 4 + tokens, shares=(first, long - 4)), long - 4, long - 4 + tokens)
        sequences.append(run._replace(context=shared))
    return [*sequences[:3], d.run(first, long - 4, long), *sequences[3:]]


def _cascading(monkeypatch: pytest.MonkeyPatch, *, gathers: bool = False) -> FlashInferAttention:
    """Takes any context of 8 tokens and more in two levels."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_CONTEXT", 8)
    backend = FlashInferAttention(CPU, torch.float32)
    backend.cascade_ratio, backend._gathers = 0.0, gathers
    return backend


@pytest.mark.parametrize("gathers", (False, True))
@pytest.mark.parametrize("name", SIX)
def test_contexts_in_common_are_attended_to_once_and_merged(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch, name: str, gathers: bool
) -> None:
    d = tiny_driver(tiny_models.module(name), backend=_cascading(monkeypatch, gathers=gathers))
    Ragged.plans = Prefill.plans = before = 0
    sequences = _over_one_context(d, 24, (2, 5, 3, 1, 4))
    assert d.error(StepKind.SCORE, sequences) < 1e-5
    windows = {call.window for call in d.model.probed.calls}
    whole = sum(window <= 0 for window in windows)
    assert Ragged.plans == whole * gathers
    assert Prefill.plans - before == len(windows) + len(windows) + whole * (not gathers)


def test_a_merge_by_other_weights_would_be_found_out(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = tiny_driver(tiny_models.module("qwen3"), backend=_cascading(monkeypatch))
    sequences = _over_one_context(d, 24, (2, 5, 3, 1, 4))

    def halves(v: torch.Tensor, s: torch.Tensor, other: torch.Tensor, _: object, mask: torch.Tensor) -> None:
        v[mask] = (v[mask] + other[mask]) / 2

    monkeypatch.setattr(sys.modules["flashinfer"], "merge_state_in_place", halves)
    assert d.error(StepKind.SCORE, sequences) > 1e-2


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma2", 2), ("gpt_oss", 2)])
def test_a_step_plans_once_a_kind_of_layer(
    tiny_models: Any, tiny_driver: Any, stand_in: object, name: str, kinds: int
) -> None:
    d = tiny_driver(tiny_models.module(name, num_hidden_layers=4), backend=FlashInferAttention(CPU, torch.float32))
    run = d.run(d.add(5), 0, 5)
    before = Prefill.plans
    d.model.forward(StepKind.PREFILL, [run], d.table)
    assert Prefill.plans - before == kinds


def test_a_log_sum_exp_in_another_base_would_be_found_out(
    tiny_models: Any, stand_in: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "log_base", math.e)
    with pytest.raises(UnsupportedModel, match="packed steps change its rows"):
        HFModel(tiny_models.module("gpt_oss"), ENGINE, backend=FlashInferAttention(CPU, torch.float32))


@pytest.mark.parametrize(("dims", "stored"), [((16, 16), 64), ((96, 96), 128), ((192, 128), 256), ((64, 64), 64)])
def test_head_dims_are_stored_as_the_next_that_the_kernels_take(
    stand_in: object, dims: tuple[int, int], stored: int
) -> None:
    assert FlashInferAttention(CPU, torch.float32).stored_dims(*dims) == (stored, stored)


def test_larger_heads_are_refused_by_name(tiny_models: Any, stand_in: object) -> None:
    module = tiny_models.module("llama", head_dim=320)
    with pytest.raises(UnsupportedModel, match=r"llama.*heads have 320 dims.*256"):
        HFModel(module, ENGINE, backend=FlashInferAttention(CPU, torch.float32))


def test_windows_count_the_token_itself_and_the_library_does_not() -> None:
    assert AttentionParams(4, 2, 64, 7, 0.0, 1.0).window_left == 6
    assert AttentionParams(4, 2, 64, -1, 0.0, 1.0).window_left == -1


def test_arrays_that_steps_name_grow_and_old_ones_stay(stand_in: object) -> None:
    backend = FlashInferAttention(CPU, torch.float32)
    small = backend.constants.at_least(5)
    large = backend.constants.at_least(1500)
    assert backend.constants.at_least(7) is large
    assert len(large.ones) >= 1500
    assert len(large.rows) == len(large.ones) + 1
    assert small.rows.tolist() == list(range(len(small.rows)))


@pytest.mark.parametrize("name", ("qwen3", "gpt_oss"))
def test_decode_steps_use_the_next_larger_graph_or_none(
    tiny_models: Any, tiny_driver: Any, stand_in: object, name: str
) -> None:
    backend = FlashInferAttention(CPU, torch.float32)
    d = tiny_driver(tiny_models.module(name), backend=backend)
    with torch.no_grad():
        made = Replayed(d.model.probed, max_rows=6, attended=50)
    d.model._decode_graphs = made
    for _ in range(8):
        d.add(17)
    d.model.forward(StepKind.PREFILL, [d.run(index, 0, 7, rows=[]) for index in range(8)], d.table)
    for place, rows in enumerate((1, 2, 3, 5, 8)):
        sequences = [d.run(index, 7 + place, 8 + place, from_table=True) for index in range(rows)]
        assert d.error(StepKind.DECODE, sequences) < 1e-5
        others = [d.run(index, 7 + place, 8 + place) for index in range(rows, 8)]
        if others:
            d.model.forward(StepKind.PREFILL, others, d.table)
    assert made.replays == [2, 2, 4]  # 5 rows attend to more than 50 tokens, and 8 are more than the largest graph
    sequences = [d.run(index, 12, 13, rows=[0] if index else []) for index in range(2)]
    assert d.error(StepKind.DECODE, sequences) < 1e-5  # a row that was not asked for
    assert made.replays == [2, 2, 4, 2]


@pytest.mark.parametrize(("known", "whole"), [(True, 0), (False, 3)])
def test_a_replay_plans_the_lengths_of_its_rows_alone(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch, known: bool, whole: int
) -> None:
    """A version of FlashInfer whose plan has another form is given whole plans."""
    if not known:
        monkeypatch.setattr(Partition, "of", lambda *_: None)
    d, made = _verifying(tiny_models, tiny_driver, "qwen3")
    own, plans = Decode.plan, []

    def plan(self: Decode, *given: Any, **more: Any) -> None:
        plans.append(len(given[0]) - 1)
        own(self, *given, **more)

    monkeypatch.setattr(Decode, "plan", plan)
    for place in range(7, 10):
        sequences = [d.run(index, place, place + 1, from_table=True) for index in range(3)]
        assert d.error(StepKind.DECODE, sequences) < 1e-5
    assert made.replays == [4, 4, 4] and plans == [4] * whole


def test_lengths_that_a_replay_does_not_plan_are_found_out(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = _verifying(tiny_models, tiny_driver, "qwen3")
    monkeypatch.setattr(Partition, "__call__", lambda *_: None)
    with pytest.raises(AssertionError):
        d.model.forward(StepKind.DECODE, [d.run(0, 7, 8, from_table=True)], d.table)


def _verifying(tiny_models: Any, tiny_driver: Any, name: str, **bounds: int) -> tuple[Any, Replayed]:
    """Three sequences of 7 tokens behind a prefill, and graphs of up to 16 rows."""
    backend = FlashInferAttention(CPU, torch.float32)
    d = tiny_driver(tiny_models.module(name), backend=backend)
    with torch.no_grad():
        options: dict[str, Any] = {"max_rows": 16, "attended": 300} | bounds
        made = Replayed(d.model.probed, **options)
    d.model._decode_graphs = made
    for _ in range(3):
        d.add(17)
    d.model.forward(StepKind.PREFILL, [d.run(index, 0, 7, rows=[]) for index in range(3)], d.table)
    return d, made


@pytest.mark.parametrize("name", ("qwen3", "gpt_oss"))
def test_verify_steps_are_replayed_as_single_tokens(
    tiny_models: Any, tiny_driver: Any, stand_in: object, name: str
) -> None:
    """Runs of five, three and one new tokens; shorter ones give their last row again."""
    d, made = _verifying(tiny_models, tiny_driver, name)
    ends = ((0, 12, [0, 1, 2, 3, 4]), (1, 10, [0, 1, 2, 2, 2]), (2, 8, [0, 0, 0, 0, 0]))
    assert d.error(StepKind.VERIFY, [d.run(index, 7, end, rows=rows) for index, end, rows in ends]) < 1e-5
    # A draft model's first step: two tokens a row, the last row of each; as many rows as tokens, but not the same.
    assert d.error(StepKind.VERIFY, [d.run(0, 12, 14, rows=[1]), d.run(1, 10, 12, rows=[1, 1, 1])]) < 1e-5
    d.table[2, 8:11] = torch.from_numpy(d.ids[2][8:11])
    assert d.error(StepKind.VERIFY, [d.run(2, 8, 11)._replace(ids=None)]) < 1e-5
    assert made.replays == [16, 4, 4]


@pytest.mark.parametrize("most", [{"max_rows": 8}, {"again": 50}])
def test_long_verify_steps_run_packed(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch, most: dict[str, int]
) -> None:
    monkeypatch.setattr(decode, "MAX_VERIFY_ATTENDED", most.pop("again", decode.MAX_VERIFY_ATTENDED))
    d, made = _verifying(tiny_models, tiny_driver, "qwen3", **most)
    padded = d.model.padded_tokens
    assert d.error(StepKind.VERIFY, [d.run(index, 7, 10) for index in range(3)]) < 1e-5
    assert made.replays == [] and d.model.padded_tokens == padded


def test_single_tokens_that_do_not_see_each_other_are_found_out(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(sequences: Any) -> list[ScheduledSequence]:
        return [one._replace(context=one.context[:7]) for one in single_tokens(sequences)]

    d, _ = _verifying(tiny_models, tiny_driver, "qwen3")
    monkeypatch.setattr(hf_model, "single_tokens", apart)
    assert d.error(StepKind.VERIFY, [d.run(0, 7, 12)]) > 1e-3
