"""A model with `engine.numerics: invariant` answers with the same bits, whatever else its engine does.

The kernels are interpreted: the process is that of the kernels' own tests (`make test`).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from engine.attention import invariant_backend
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import MIN_COMPARED_SLOTS, EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.model import hf_model
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.info import HeadInfo, HeadKind
from engine.model.heads.pooling_head import PoolingHead, PoolingModel
from engine.model.heads.row_pooling import Pooling
from engine.model.hf_model import HFModel
from engine.model.invariant import linear
from engine.model.invariant.linear import Products, proven, tried_rows
from engine.model.lm_head import WantedRows
from engine.model.optimize import fusion_passes
from engine.model.optimize.compile import compile_layers
from engine.model.packing_check import PackingCheck
from engine.requests import GenerateRequest, Int32s, PoolingRequest, PoolingTask, ScoreRequest
from gpu_sampler.sampling_params import SamplingParams
from tests.engine.model.conftest import LENGTH, VOCAB, TinyModels
from tests.engine.model.stand_in import Replayed, ReplayedPrefill, put_in

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
CONFIG = EngineConfig(kv_slots=1_500, max_running=32, numerics="invariant", token_budget=48)
LAYERS = 2
TOKENS = 4
QUERY = 9


def make_model(module: Any, config: EngineConfig = CONFIG) -> HFModel:
    """Makes a model for a test that compares bits itself. Interpreted, the checks of a start take ten seconds."""
    if not INTERPRETED:
        return HFModel(module, config)
    with mock.patch.object(PackingCheck, "run"), mock.patch.object(PackingCheck, "compare_bits"):
        return HFModel(module, config)


@asynccontextmanager
async def started(module: Any, config: EngineConfig = CONFIG) -> AsyncIterator[Engine]:
    engine = Engine(make_model(module, config), config)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def module_of(name: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> Any:
    device = "cpu" if INTERPRETED else "cuda"
    return TinyModels().module(name, num_hidden_layers=LAYERS).to(device, dtype)


def ids(seed: int, length: int) -> Int32s:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def generation(number: int, **params: Any) -> GenerateRequest:
    fields = {"max_tokens": TOKENS, "temperature": 0.0, "logprobs": 2, **params}
    return GenerateRequest(
        request_id=f"g{number}", prompt=ids(number, 7 + 9 * (number % 6)), params=SamplingParams(**fields), seed=number
    )


def score(items: Sequence[int]) -> ScoreRequest:
    rows = [ids(1_000 + item, 3 + 5 * (item % 8)) for item in items]
    return ScoreRequest(
        request_id="s",
        prefix=ids(99, QUERY),
        ids=np.concatenate(rows),
        starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        labels=np.array([5, 9], np.int32),
    )


class Answer(NamedTuple):
    """Holds what a caller received, as bits."""

    tokens: bytes
    logprobs: bytes
    top: bytes


async def answered(engine: Engine, request: GenerateRequest) -> Answer:
    chunks = [chunk async for chunk in engine.generate(request)]
    columns = [[getattr(chunk, name).tobytes() for chunk in chunks] for name in ("tokens", "logprobs", "top_logprobs")]
    return Answer(*(b"".join(column) for column in columns))


async def scored(engine: Engine, request: ScoreRequest) -> list[bytes]:
    """Returns the log-probabilities of each item's labels, as bits."""
    found = await engine.score(request)
    assert not found.status.any()
    return [row.tobytes() for row in found.label_logprobs]


async def at_once(engine: Engine, requests: Sequence[GenerateRequest], count: int) -> list[Answer]:
    """Answers `count` requests at a time."""
    found: list[Answer] = []
    for first in range(0, len(requests), count):
        found += await asyncio.gather(*(answered(engine, one) for one in requests[first : first + count]))
    return found


async def compare_generations(count: int, *sizes: int) -> None:
    """Compares generations one at a time with as many as `sizes` name at once: greedy and seeded ones, behind new and
    behind cached prompts, with drafts and without."""
    requests = [generation(number, **({"temperature": 0.9} if number % 2 else {})) for number in range(count)]
    async with started(module_of()) as engine:
        alone = await at_once(engine, requests, 1)
        for size in sizes:
            assert await at_once(engine, requests, size) == alone
    async with started(module_of(), replace(CONFIG, prefix_cache=False)) as engine:
        assert await at_once(engine, requests, max(sizes)) == alone
    ngram = SpeculationConfig(
        method="ngram", num_speculative_tokens=3, ngram_tokens=1, rejection_sample_method="strict"
    )
    async with started(module_of(), replace(CONFIG, speculation=ngram)) as engine:
        assert await at_once(engine, requests, max(sizes)) == alone


@pytest.mark.full
async def test_generations_have_the_same_bits_at_one_two_and_four_at_once() -> None:
    await compare_generations(4, 2, 4)


def test_rows_that_the_last_layer_leaves_out_change_no_bit_of_the_others() -> None:
    sequences, first = [], 1
    for number, length in enumerate((11, 2, 23)):
        slots = np.arange(first, first + length, dtype=np.int32)
        sequences.append(ScheduledSequence(0, slots[:0], slots, ids(number, length), np.array([length - 1], np.int32)))
        first += length
    found = []
    for restricts in (True, False):
        model = make_model(module_of(), replace(CONFIG, restrict_last_layer=restricts))
        assert any(isinstance(one, WantedRows) for one in model.module.modules()) is restricts
        table = torch.zeros((1, 1), dtype=torch.int32, device=model.device)
        found.append(model.forward(StepKind.SCORE, sequences, table))
    assert torch.equal(*found)


@pytest.mark.full
def test_a_last_layer_that_takes_other_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WantedRows.rows

    def rolled(self: WantedRows, hidden: torch.Tensor) -> torch.Tensor:
        return honest(self, hidden).roll(1, dims=1)

    monkeypatch.setattr(WantedRows, "rows", rolled)
    with pytest.raises(UnsupportedModel, match="packed steps change"):
        HFModel(module_of(), CONFIG)


@pytest.mark.gpu
async def test_on_a_gpu_two_hundred_generations_have_the_same_bits_at_any_number_at_once() -> None:
    await compare_generations(200, 3, 16, 200)


@pytest.mark.gpu
async def test_on_a_gpu_scores_have_the_same_bits() -> None:
    await compare_scores("qwen3", 60)


async def compare_scores(name: str, count: int) -> None:
    order = np.random.default_rng(0).permutation(count).tolist()
    async with started(module_of(name)) as engine:
        together = await scored(engine, score(range(count)))
        cached = await scored(engine, score(range(count)))
        shuffled = await scored(engine, score(order))
    async with started(module_of(name)) as engine:
        alone = [(await scored(engine, score([item])))[0] for item in range(count)]
        beside, *_ = await asyncio.gather(
            scored(engine, score(range(count))), *(answered(engine, generation(number)) for number in range(3))
        )
    assert cached == together and alone == together and beside == together
    assert [shuffled[order.index(item)] for item in range(count)] == together


def with_head(layers: nn.Module | None = None, pooling: Pooling = Pooling.LAST) -> PoolingModel:
    """Returns the body of a language model, and a head of three numbers behind it."""
    body = module_of().base_model
    torch.manual_seed(3)
    hidden = body.config.hidden_size
    made = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 48), nn.ReLU(), nn.Linear(48, 3))
    info = HeadInfo(HeadKind.SEQUENCE, 3, ("a", "b", "c"), whole_rows=pooling is Pooling.MEAN)
    return PoolingModel(body, PoolingHead(info, layers or made, pooling).to(body.device))


async def classified(engine: Engine, items: Sequence[int]) -> list[bytes]:
    """Returns the head's numbers of each item, as bits."""
    given, head = score(items), engine.model.pooling_head
    prefix = given.prefix[:0] if head is not None and head.whole_rows else given.prefix
    found = await engine.pooling(
        PoolingRequest(request_id="p", prefix=prefix, ids=given.ids, starts=given.starts, task=PoolingTask.CLASSIFY)
    )
    assert not found.status.any()
    return [row.tobytes() for row in found.values]


async def compare_classes(count: int, pooling: Pooling = Pooling.LAST) -> None:
    order = np.random.default_rng(0).permutation(count).tolist()
    async with started(with_head(pooling=pooling)) as engine:
        together = await classified(engine, range(count))
        cached = await classified(engine, range(count))
        shuffled = await classified(engine, order)
    async with started(with_head(pooling=pooling)) as engine:
        alone = [(await classified(engine, [item]))[0] for item in range(count)]
    assert cached == together and alone == together
    assert [shuffled[order.index(item)] for item in range(count)] == together


@pytest.mark.parametrize("pooling", [Pooling.LAST, pytest.param(Pooling.MEAN, marks=pytest.mark.full)])
async def test_numbers_of_a_pooling_head_have_the_same_bits(pooling: Pooling) -> None:
    await compare_classes(4, pooling)


@pytest.mark.gpu
async def test_on_a_gpu_numbers_of_a_pooling_head_have_the_same_bits() -> None:
    await compare_classes(60)
    HFModel(with_head(), CONFIG)._compare_bits()


@pytest.mark.full
def test_a_head_that_follows_the_number_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the last bits of a head's numbers follow the rows of its step."""
    own = PoolingHead.forward
    HFModel(with_head(), CONFIG)._compare_bits()
    monkeypatch.setattr(PoolingHead, "forward", lambda self, rows: own(self, rows) * (1 + 1e-6 * (len(rows) > 8)))
    with pytest.raises(UnsupportedModel, match="change the bits of its rows"):
        HFModel(with_head(), CONFIG)._compare_bits()


def test_a_head_without_invariant_kernels_is_refused() -> None:
    hidden = module_of().config.hidden_size
    with pytest.raises(UnsupportedModel, match=r"Conv1d.*sums by code of its own.*set it to fast"):
        HFModel(with_head(nn.Conv1d(hidden, 3, 1)), CONFIG)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
async def test_scores_have_the_same_bits_alone_together_shuffled_cached_and_beside_generations(name: str) -> None:
    await compare_scores(name, 6)


@pytest.mark.full
async def test_products_that_follow_the_number_of_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a product of more than eight rows sums K in another order."""
    from engine.kernels import invariant_gemm as kernel

    own = kernel.invariant_gemm

    def by_rows(x: torch.Tensor, weight: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        if x.numel() // x.shape[-1] > 8:
            x, weight = x.flip(-1), weight.flip(-1)
        return own(x, weight, *others, **options)

    monkeypatch.setattr(kernel, "invariant_gemm", by_rows)
    with pytest.raises(UnsupportedModel, match="change the bits of its rows"):
        HFModel(module_of(dtype=torch.float32), CONFIG)


def as_served(name: str = "qwen3") -> HFModel:
    """Returns a model with compiled layers and captured steps, as `warm_up` leaves one on a GPU."""
    model = HFModel(module_of(name), replace(CONFIG, max_running=4, prefill_graph_tokens=32))
    compile_layers(model.module, model.probed.attentions, backend="aot_eager")
    with torch.no_grad():
        model._decode_graphs = model._capture()
        model._capture_prefill()
    return model


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are compiled anew, and run again where others are replayed."""
    put_in(monkeypatch)
    monkeypatch.setattr(hf_model, "DecodeGraphs", Replayed)
    monkeypatch.setattr(hf_model, "PrefillGraphs", ReplayedPrefill)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.full
@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_compiled_and_captured_steps_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of any size the same code of a layer runs, where rotations are part of attention. Residuals are part of
    products but in the last layer, which computes the wanted rows alone."""
    joined = list[int]()
    own = fusion_passes.join_kernels
    monkeypatch.setattr(fusion_passes, "join_kernels", lambda graph: joined.append(own(graph)))
    model = as_served(name)
    model._compare_bits()
    assert model.graph_replays >= 3 and joined == [3, 1]


@pytest.mark.full
@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("kind", ["_InvariantDecoder", "_InvariantPrefiller"])
def test_captured_steps_of_other_bits_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: attention of one kind of captured step rounds in another way."""
    made = getattr(invariant_backend, kind)
    own = made._run

    def other(self: Any, q: torch.Tensor, cache: Any, *, out: torch.Tensor, return_lse: bool = False) -> Any:
        return own(self, q * 1.01, cache, out=out, return_lse=return_lse)

    monkeypatch.setattr(made, "_run", other)
    with pytest.raises(UnsupportedModel, match="change the bits of its rows"):
        as_served()._compare_bits()


@pytest.mark.full
def test_the_smallest_storage_holds_what_a_start_compares() -> None:
    HFModel(module_of(), replace(CONFIG, kv_slots=MIN_COMPARED_SLOTS))._compare_bits()
    with pytest.raises(ValueError, match=r"`engine.kv_slots` must be >= 16 with `numerics: invariant`.*Given: 15"):
        replace(CONFIG, kv_slots=MIN_COMPARED_SLOTS - 1)
    assert EngineConfig(kv_slots=2).kv_slots == 2


@pytest.mark.parametrize("wrong", [(), ("few",), ("library",), ("few", "library")])
def test_products_are_used_where_their_bits_are_the_kernels(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults: a product of some number of rows differs in one bit of one number."""
    from engine.kernels import invariant_gemm as kernel
    from gpu_sampler.kernels import lm_head_logprob

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return (x.double() @ weight.double().T).to(x.dtype)

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: Any, products: Products, *, exact: bool) -> torch.Tensor:
        found = product(x, weight)
        if (products.few and "few" in wrong and len(x) == 17) or (
            products.library and "library" in wrong and len(x) > 450
        ):
            found[-1, -1] = torch.nextafter(found[-1, -1], found.new_tensor(9.0))
        return found

    monkeypatch.setattr(lm_head_logprob, "INTERPRETED", False)
    monkeypatch.setattr(kernel, "invariant_gemm", product)
    monkeypatch.setattr(linear, "multiply", multiply)
    weight = torch.randn((20, 8), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert proven(weight, None, 500, library=True) == Products("few" not in wrong, "library" not in wrong)
    assert proven(weight, None, 500) == Products("few" not in wrong, False)
    assert proven(weight.float(), None, 500, library=True) == Products()


def test_every_small_number_of_rows_is_tried_and_the_most() -> None:
    for most in (1, 63, 64, 65, 16_384):
        found = tried_rows(most)
        assert found == sorted(set(found)) and found[-1] == most and set(range(1, min(64, most) + 1)) <= set(found)
    assert len(found) < 160


@pytest.mark.parametrize(("name", "part"), [("gpt_oss", "router"), ("qwen3_moe", "experts")])
def test_a_layer_without_an_invariant_kernel_is_refused_by_name(name: str, part: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{part}.*sums by code of its own.*set it to fast"):
        HFModel(module_of(name), CONFIG)


def test_logits_are_float32_and_those_of_the_library() -> None:
    module, tokens = module_of("gemma2", torch.float32), ids(5, LENGTH - 1)
    with torch.no_grad():
        own = module(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0]
    slots, every = np.arange(1, LENGTH, dtype=np.int32), np.arange(LENGTH - 1, dtype=np.int32)
    sequence = ScheduledSequence(0, slots[:0], slots, tokens, every)
    found = HFModel(module, CONFIG).forward(StepKind.SCORE, [sequence], torch.zeros((1, 1), dtype=torch.int32))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"`engine\.numerics` must be fast on a CPU"):
        HFModel(module_of(), CONFIG)
