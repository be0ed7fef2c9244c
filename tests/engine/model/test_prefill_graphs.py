"""Small prefill and score steps as graphs: over stand-ins on a CPU against torch, and on a GPU against eager steps."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention import flashinfer_wrappers
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.interface import forward_context
from engine.attention.plans import AttentionParams
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import StepKind, StepSize
from engine.config import EngineConfig
from engine.model import hf_model
from engine.model.cuda_graphs import prefill
from engine.model.cuda_graphs.decode import CapturedStep
from engine.model.cuda_graphs.prefill import PrefillGraphs, token_counts
from engine.model.heads.info import HeadInfo, HeadKind
from engine.model.heads.pooling_head import PoolingHead, PoolingModel
from engine.model.heads.row_pooling import Pooling
from engine.model.lm_head import LogprobQuery
from tests.engine.model.conftest import SIX
from tests.engine.model.halves import BF16, EAGER, SMALL, on_gpu
from tests.engine.model.stand_in import Prefill, Ragged, Replayed, ReplayedPrefill

CPU = torch.device("cpu")
WORKSPACE = 384 << 20
LABELS = np.array([5, 0, 110], np.int32)


@pytest.mark.parametrize(
    ("most", "counts"),
    [
        (32, (32,)),
        (100, (32, 64, 100)),
        (256, (32, 64, 128, 256)),
        (1024, (32, 64, 128, 256, 512, 768, 1024)),
        (7, (7,)),
    ],
)
def test_token_counts_end_with_the_most(most: int, counts: tuple[int, ...]) -> None:
    assert token_counts(most) == counts


def _replaying(
    tiny_models: Any,
    tiny_driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    backend: FlashInferAttention | None = None,
    most: int = 96,
) -> tuple[Any, ReplayedPrefill]:
    """A model whose small steps are of up to `most` tokens, over stand-ins."""
    backend = FlashInferAttention(CPU, torch.float32) if backend is None else backend
    monkeypatch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", WORKSPACE)  # a stand-in touches none of it
    d = tiny_driver(tiny_models.module(name), backend=backend)
    with torch.no_grad():
        graphs = Replayed(d.model.probed, max_rows=4, attended=200)
        d.model._decode_graphs, d.model._prefill_graphs = graphs, ReplayedPrefill(d.model.probed, most, graphs.memory)
    d.model.prefill_graph_limit = d.model._prefill_graphs.largest
    return d, d.model._prefill_graphs


def _with_head(module: Any, pooling: Pooling | None) -> PoolingModel:
    """The body of a language model, and a head of three numbers."""
    body = module.base_model
    torch.manual_seed(2)
    layers = torch.nn.Linear(body.config.hidden_size, 3).to(body.device)
    return PoolingModel(body, PoolingHead(HeadInfo(HeadKind.SEQUENCE, 3, ("a", "b", "c")), layers, pooling))


def _numbers(d: Any) -> list[torch.Tensor]:
    """Runs rows by themselves, together, and behind a prefix in the pool; returns the numbers of the head."""
    a, b = d.add(47), d.add(29)
    c = d.add(31, shares=(a, 11))
    model, table = d.model, d.table
    answers = [model.pooled(StepKind.SCORE, [d.run(a, 0, 47, rows=[46])], table)]
    answers.append(model.pooled(StepKind.SCORE, [d.run(b, 0, 29, rows=[28]), d.run(c, 11, 31, rows=[19])], table))
    model.fill(StepKind.SCORE, [d.run(b, 0, 17, rows=[])], table)
    answers.append(model.pooled(StepKind.SCORE, [d.run(b, 17, 29, rows=[11])], table))
    return [answer.clone() for answer in answers]


def _asked(tokens: int, *, more: int = 0) -> LogprobQuery:
    """The log-probabilities of some tokens, and of the best and of chosen ones beside them."""
    rng = np.random.default_rng(tokens)
    return LogprobQuery(rng.integers(0, 111, tokens), more, rng.integers(0, 111, (tokens, more)))


def _answers(d: Any) -> list[torch.Tensor]:
    """Runs mixed prompts, items over a prefix in the pool, given tokens, and a decode step over filled prompts."""
    a, b = d.add(47), d.add(29)
    c = d.add(31, shares=(a, 11))
    model, table = d.model, d.table
    mixed = [d.run(a, 0, 11, rows=[10]), d.run(b, 0, 17, rows=[2, 16]), d.run(c, 11, 24, rows=[])]
    answers = [model.forward(StepKind.PREFILL, [*mixed, d.run(a, 11, 20, rows=[0, 0, 8])], table).clone()]
    items = [d.run(b, 17, 22, rows=[4]), d.run(c, 24, 28, rows=[3])]
    answers.append(model.label_logits(StepKind.SCORE, items, table, LABELS))
    for more in (0, 2):
        found = model.target_logprobs(StepKind.SCORE, [d.run(a, 20, 30)], table, _asked(10, more=more))
        answers += [found.logprobs[:, None], found.top_logprobs, found.chosen]
    model.fill(StepKind.PREFILL, [d.run(a, 30, 40, rows=[]), d.run(c, 28, 30, rows=[])], table)
    answers.append(model.forward(StepKind.PREFILL, [d.run(b, 22, 26, rows=[])], table).clone())
    rows = [d.run(one, at, at + 1, from_table=True) for one, at in ((a, 40), (c, 30), (b, 26))]
    answers.append(model.forward(StepKind.DECODE, rows, table).clone())
    return [answer.float() for answer in answers]


def _largest_difference(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Returns the largest error over the largest number of all: a label's logit may be small by itself."""
    assert [one.shape for one in got] == [one.shape for one in wanted]
    whole, other = (torch.cat([one.flatten() for one in all_]) for all_ in (got, wanted))
    return float((whole - other).abs().max() / other.abs().max())


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", [*SIX, "granite", "cohere"])
def test_answers_of_replayed_steps_are_those_of_eager_ones(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, name)
    eager = tiny_driver(tiny_models.module(name), backend=TorchAttention())
    assert _largest_difference(_answers(d), _answers(eager)) < 1e-4
    assert small.replays == [64, 32, 32, 32, 32, 32]
    assert d.model.graph_replays == 7  # the decode step, too
    assert d.model.padded_tokens == 14 + 23 + 22 + 22 + 20 + 28 + 1


def test_a_step_may_fill_its_graph_and_have_as_many_runs_as_it_takes(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3")
    assert small.largest == StepSize(96, 15, prefill.MAX_ATTENDED)
    a = d.add(64)
    assert d.error(StepKind.PREFILL, [d.run(a, 0, 32)]) < 1e-5
    assert d.error(StepKind.PREFILL, [d.run(a, 32, 64)]) < 1e-5
    for count in (15, 16):
        short = [d.run(d.add(4), 0, 4) for _ in range(count)]
        assert d.error(StepKind.SCORE, short) < 1e-5
    assert small.replays == [32, 32, 64]  # of sixteen runs none would be left for padding


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("pooling", [None, *Pooling])
def test_the_numbers_of_a_pooling_head_are_those_of_eager_steps(
    tiny_models: Any,
    tiny_driver: Any,
    stand_in: object,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    pooling: Pooling | None,
) -> None:
    """A model with such a head has no decode graphs beside those of its prefill steps."""
    monkeypatch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", WORKSPACE)
    monkeypatch.setattr(hf_model, "PrefillGraphs", ReplayedPrefill)
    backend = FlashInferAttention(CPU, torch.float32)
    d = tiny_driver(_with_head(tiny_models.module(name), pooling), backend=backend)
    monkeypatch.setattr(d.model, "_engine", replace(d.model._engine, prefill_graph_tokens=64))
    with torch.no_grad():
        d.model._capture_prefill()
    eager = tiny_driver(_with_head(tiny_models.module(name), pooling), backend=TorchAttention())
    assert _largest_difference(_numbers(d), _numbers(eager)) < 1e-4
    assert d.model._prefill_graphs.replays == [64, 64, 32, 32]


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.SCORE])
@pytest.mark.parametrize(("tokens", "taken"), [(1, [32]), (64, [64]), (65, [96]), (80, [96])])
def test_the_next_larger_graph_takes_a_step(
    tiny_models: Any,
    tiny_driver: Any,
    stand_in: object,
    monkeypatch: pytest.MonkeyPatch,
    kind: StepKind,
    tokens: int,
    taken: list[int],
) -> None:
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3")
    assert d.error(kind, [d.run(d.add(tokens), 0, tokens)]) < 1e-5
    assert small.replays == taken


def test_larger_steps_those_over_long_contexts_and_other_kinds_run_as_before(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3", most=64)
    a, b = d.add(64), d.add(80)
    assert d.error(StepKind.PREFILL, [d.run(b, 0, 65)]) < 1e-5
    assert d.error(StepKind.PREFILL, [d.run(a, 0, 40)]) < 1e-5
    assert small.replays == [64]
    monkeypatch.setattr(prefill, "MAX_ATTENDED", 49)
    assert d.error(StepKind.SCORE, [d.run(a, 40, 50)]) < 1e-5
    assert d.error(StepKind.VERIFY, [d.run(a, 50, 53)]) < 1e-5
    assert d.error(StepKind.DECODE, [d.run(a, 53, 54, from_table=True)]) < 1e-5
    assert small.replays == [64]


def test_contexts_in_common_are_no_cascade_in_a_small_step(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch.shared_prefix.MIN_SHARED_CONTEXT", 8)
    backend = FlashInferAttention(CPU, torch.float32)
    backend.cascade_ratio, backend._gathers = 0.0, True
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3", backend=backend)
    first = d.add(24)
    d.model.fill(StepKind.PREFILL, [d.run(first, 0, 20, rows=[])], d.table)
    shared = d.slots[first][:20]
    sequences = [d.run(d.add(23, shares=(first, 20)), 20, 23)._replace(context=shared) for _ in range(3)]
    Ragged.plans = 0
    before = Prefill.plans
    assert d.error(StepKind.SCORE, sequences) < 1e-5
    assert (small.replays, Ragged.plans, Prefill.plans - before) == ([32, 32], 0, 1)


def test_contexts_are_shared_after_a_step_that_runs_as_no_graph(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small as it is: its module would be loaded in the first step of a request otherwise."""
    for module in ("engine.batch.shared_prefix", "engine.model.hf_model"):
        monkeypatch.setattr(f"{module}.MIN_SHARED_CONTEXT", 8)
    backend = FlashInferAttention(CPU, torch.float32)
    backend.cascade_ratio, backend._gathers = 0.0, True
    d, small = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3", backend=backend)
    d.model.contexts_built = Future()
    d.model.contexts_built.set_result([])
    Ragged.plans = 0
    with torch.no_grad():
        d.model.share_contexts()
    assert (small.replays, Ragged.plans) == ([], 1)


def test_scores_are_timed_from_the_last_layer_on(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3")
    a = d.add(21)
    d.model.head_watch = None
    d.model.fill(StepKind.PREFILL, [d.run(a, 0, 7, rows=[])], d.table)
    assert d.model.head_watch is None
    watches: list[Any] = []
    for at in (7, 14):
        d.model.label_logits(StepKind.SCORE, [d.run(a, at, at + 7, rows=[6])], d.table, LABELS)
        watches.append(d.model.head_watch)
        watches[-1].stop()
        assert watches[-1].seconds() > 0
    assert watches[0] is not watches[1]


def test_rows_wanted_at_the_time_of_capture_would_be_found_out(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the last layer is narrowed inside the graph, to the rows of the step that was captured."""

    def narrowed(self: Any, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self._slots = slots
        with forward_context(self, torch.arange(1)):
            out = self._module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        rows: torch.Tensor = out.last_hidden_state[0]
        return rows

    monkeypatch.setattr(CapturedStep, "hidden", narrowed)
    d, _ = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3")
    assert d.error(StepKind.PREFILL, [d.run(d.add(9), 0, 9)]) > 1e-2


def test_padding_that_attends_with_a_sequence_would_be_found_out(
    tiny_models: Any, tiny_driver: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: padding is the end of the last sequence, but what it attends to is not."""
    d, _ = _replaying(tiny_models, tiny_driver, monkeypatch, "qwen3")
    honest = prefill._filled_up

    def joined(batch: Any, sequences: int) -> Any:
        made = honest(batch, sequences)
        made.qo_indptr[len(batch.qo_indptr) - batch.padding - 1] = made.qo_indptr[-1]
        return made

    monkeypatch.setattr(prefill, "_filled_up", joined)
    assert not d.error(StepKind.PREFILL, [d.run(d.add(9), 0, 9)]) < 1e-3  # a row of nothing is none


def test_no_graph_has_more_sequences_than_the_workspace_has_room_for(stand_in: object) -> None:
    """Plans like the library: one tile of 16, 64 or 128 rows a sequence beside those that its tokens fill."""
    backend = FlashInferAttention(CPU, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", WORKSPACE)
        shapes = ((16, 8, 128, 1024), (32, 8, 128, 1024), (64, 8, 128, 1023), (16, 8, 256, 1024), (71, 1, 64, 150))
        for heads, kv_heads, dim, tokens in shapes:
            most = backend.wrappers.max_sequences(AttentionParams(heads, kv_heads, dim, -1, 0.0, 1.0), tokens)
            assert most > 16
            for tile in (16, 64, 128):
                tiles = -(-tokens * (heads // kv_heads) // tile) + most - 1
                assert tiles * tile * heads * (dim + 1) * 4 <= WORKSPACE
        assert backend.wrappers.max_sequences(AttentionParams(16, 8, 128, -1, 0.0, 1.0), 1024) > 128
        assert backend.wrappers.max_sequences(AttentionParams(128, 8, 256, -1, 0.0, 1.0), 1024) < 1


def test_where_no_graph_has_room_nothing_is_captured(tiny_models: Any, tiny_driver: Any, stand_in: object) -> None:
    backend = FlashInferAttention(CPU, torch.float32)  # over the stand-in's workspace of 64 bytes
    d = tiny_driver(tiny_models.module("qwen3"), backend=backend)
    with torch.no_grad():
        graphs = Replayed(d.model.probed, max_rows=4, attended=200)
    d.model._prefill_graphs = PrefillGraphs(d.model.probed, 64, graphs.memory)
    assert d.model._prefill_graphs.largest is None
    assert d.error(StepKind.PREFILL, [d.run(d.add(9), 0, 9)]) < 1e-5


@pytest.mark.parametrize("tokens", [-1, 1, 31, 8193])
def test_sizes_that_no_graph_has_are_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"engine\.prefill_graph_tokens"):
        EngineConfig(prefill_graph_tokens=tokens)


# On a GPU, in bfloat16


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("name", SIX)
def test_captured_prefill_steps_agree_with_eager_ones(tiny_models: Any, tiny_driver: Any, name: str) -> None:
    torch.compiler.reset()
    eager = tiny_driver(on_gpu(tiny_models, name), engine=EAGER)
    full = tiny_driver(on_gpu(tiny_models, name), engine=SMALL)
    reported: dict[str, float] = {}
    full.model.warm_up(reported.__setitem__)
    full.model.share_contexts()
    assert list(reported) == ["attention kernels", "compile", "graphs", "prefill graphs", "likelihoods"]
    assert reported["prefill graphs"] > 0
    assert full.model.prefill_graph_limit == StepSize(96, 15, prefill.MAX_ATTENDED)
    before = full.model.graph_replays
    assert _largest_difference(_answers(full), _answers(eager)) < BF16
    assert full.model.graph_replays - before == 7


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_captured_steps_of_a_pooling_head_agree_with_eager_ones(tiny_models: Any, tiny_driver: Any) -> None:
    torch.compiler.reset()
    drivers = [
        tiny_driver(_with_head(on_gpu(tiny_models, "qwen3"), Pooling.LAST), engine=engine) for engine in (EAGER, SMALL)
    ]
    reported: dict[str, float] = {}
    drivers[1].model.warm_up(reported.__setitem__)
    assert "graphs" not in reported
    assert reported["prefill graphs"] > 0
    before = drivers[1].model.graph_replays
    eager, full = map(_numbers, drivers)
    assert _largest_difference(full, eager) < BF16
    assert drivers[1].model.graph_replays - before == 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("heads", [2, 4])  # of a key/value head: 1, and with tensor cores in decode steps 4
def test_full_graphs_many_runs_and_other_replays_between_agree_with_eager(
    tiny_models: Any, tiny_driver: Any, heads: int
) -> None:
    torch.compiler.reset()
    more = {"num_attention_heads": 4, "num_key_value_heads": 4 // heads}
    drivers = [tiny_driver(on_gpu(tiny_models, "qwen3", **more), engine=engine) for engine in (EAGER, SMALL)]
    drivers[1].model.warm_up(lambda stage, seconds: None)
    answers = []
    for d in drivers:
        a, found = d.add(96), []
        sequences = [d.run(d.add(4), 0, 4) for _ in range(15)]
        for last, tokens in ((32, 32), (64, 32), (94, 30)):
            found.append(d.model.forward(StepKind.PREFILL, [d.run(a, last - tokens, last)], d.table).clone())
            found.append(d.model.forward(StepKind.SCORE, sequences, d.table).clone())
        found.append(d.model.forward(StepKind.DECODE, [d.run(a, 94, 95, from_table=True)], d.table).clone())
        answers.append([one.float() for one in found])
    assert _largest_difference(answers[1], answers[0]) < BF16
    assert drivers[1].model.graph_replays >= 7


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_a_replayed_small_step_gives_the_same_bits_as_before(tiny_models: Any, tiny_driver: Any) -> None:
    d = tiny_driver(on_gpu(tiny_models, "qwen3"), engine=SMALL)
    d.model.warm_up(lambda stage, seconds: None)
    a, b = d.add(40), d.add(60)
    sequences = [d.run(a, 0, 40)]
    first = d.model.forward(StepKind.PREFILL, sequences, d.table).clone()
    d.model.forward(StepKind.PREFILL, [d.run(b, 0, 60)], d.table)
    assert torch.equal(d.model.forward(StepKind.PREFILL, sequences, d.table), first)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("changes", [{"prefill_graph_tokens": 0}, {"graphs": False}])
def test_without_the_option_or_graphs_none_are_captured(
    tiny_models: Any, tiny_driver: Any, changes: dict[str, Any]
) -> None:
    engine = EngineConfig(**{"kv_slots": 331, "token_budget": 64, "max_running": 4, "compile": False, **changes})
    d = tiny_driver(on_gpu(tiny_models, "llama"), engine=engine)
    reported: list[str] = []
    d.model.warm_up(lambda stage, seconds: reported.append(stage))
    assert "prefill graphs" not in reported
    assert d.model.prefill_graph_limit is None
