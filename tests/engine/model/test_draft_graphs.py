"""Runs of drafts as one graph against a draft at a time: over stand-ins on a CPU, and on a GPU bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine.model_runner
from engine.attention.flashinfer_backend import FlashInferAttention
from engine.attention.flashinfer_wrappers import Partition
from engine.attention.interface import NO_SOFTCAP, NO_WINDOW
from engine.attention.plans import AttentionParams, GraphBuffers, Sequences
from engine.batch.input_batch import StepKind
from engine.config import EngineConfig, SpeculationConfig
from engine.model.cuda_graphs import decode
from engine.model.cuda_graphs.decode import CapturedStep
from engine.model.hf_model import HFModel
from engine.model_runner import ModelRunner
from engine.scheduler.request_state import RequestTable
from engine.scheduler.scheduler import Step, StepOutput
from engine.spec_decode import draft_graphs, draft_model
from engine.spec_decode.draft_graphs import FED_FIRST, DraftGraphs, row_counts
from engine.spec_decode.draft_model import DraftModel
from engine.spec_decode.proposer import DraftRows
from gpu_sampler.output import VerifyOutput
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Draft, DraftMethod, VerifyRules
from gpu_sampler.startup_progress import silent
from gpu_sampler.state.host_state import SlotFlag
from tests.engine.model.stand_in import Replayed, ReplayedDrafts, run_steps

CPU = torch.device("cpu")
VOCAB, WIDTH, LIVE, DRAFTS, POOL = 111, 40, 5, 3, 331
BARE = SlotFlag.HAS_OVERLAY | SlotFlag.HAS_MASK
KINDS_OF_ROWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 7},
    {"seed": 5, "min_p": 0.02},
)
BODIES: dict[str, dict[str, Any]] = {"qwen3": {}, "gpt_oss": {"num_experts_per_tok": 4}}


class HostSampler(Sampler):
    """The reference behind the calls that a device's sampler answers inside a graph."""

    def prepare_drafts(self, slots: Any) -> bool:
        self.state.apply()
        return not (self.state.flags[np.asarray(slots, np.int64)] & np.uint32(BARE)).any()

    def launch_draft(
        self, logits: torch.Tensor, slots: torch.Tensor, offset: int, method: DraftMethod, rules: VerifyRules
    ) -> Draft:
        return Draft(*map(torch.from_numpy, self.draft(logits, slots.numpy(), offset, method, rules)))


class Left(NamedTuple):
    """All that a call of `propose` leaves behind, the keys and values of the rows' slots among it."""

    ids: Any
    kinds: Any
    q_ids: Any
    q_probs: Any
    lengths: Any
    missing: Any
    tokens: Any
    seen: Any
    pools: Any


class Drafting:
    """Five rows of 6 to 14 tokens behind their prefill; a few draft at a time."""

    def __init__(self, model: HFModel, sampler: Sampler, config: SpeculationConfig, rows: Sequence[dict[str, Any]]):
        self.model, self.sampler = model, sampler
        self.table = RequestTable(LIVE, WIDTH, VOCAB, model.device, draft_model=True)
        self.proposer = DraftModel(model, self.table, sampler, config, 16_384)
        rng = np.random.default_rng(3)
        self.table.slots[1:] = rng.permutation(np.arange(1, POOL))[: LIVE * WIDTH].reshape(LIVE, WIDTH)
        self.lengths = np.array([0, 6, 9, 14, 8, 11])
        for slot in range(1, LIVE + 1):
            tokens = rng.integers(0, VOCAB, self.lengths[slot]).astype(np.int32)
            self.write(slot, 0, tokens)
            sampler.admit(slot, SamplingParams(**rows[slot - 1]), tokens, seed=slot)
        for tensor in (*model.kv_storage.keys, *model.kv_storage.values):
            tensor.fill_(float("nan"))

    def prefill(self) -> None:
        sequences = []
        for slot in range(1, LIVE + 1):
            end = int(self.lengths[slot]) - 1
            sequences.append(self.table.run(slot, 0, end, self.table.tokens[slot, :end], np.zeros(0, np.int32)))
        with torch.no_grad():
            self.proposer.prefill(sequences)

    def write(self, slot: int, start: int, tokens: Any) -> None:
        self.table.tokens[slot, start : start + len(tokens)] = tokens
        self.table.token_table[slot, start : start + len(tokens)] = torch.from_numpy(tokens)

    def propose(self, slots: Sequence[int], most: Sequence[int]) -> Left:
        at = np.array(slots)
        with torch.no_grad():
            proposal = self.proposer.propose(DraftRows(at, self.lengths[at], np.array(most)))
        mine = torch.from_numpy(
            np.concatenate([self.table.slots[slot, : self.lengths[slot] + DRAFTS] for slot in slots])
        )
        pools = [
            tensor[mine.to(tensor.device).long()]
            for tensor in (*self.model.kv_storage.keys, *self.model.kv_storage.values)
        ]
        assert self.table.seen is not None
        ids, kinds, q_ids, q_probs = (torch.as_tensor(part).cpu().float() for part in proposal[:4])
        return Left(
            ids,
            kinds,
            q_ids,
            q_probs,
            torch.from_numpy(self.proposer.lengths(at).copy()),
            torch.tensor(self.proposer.missing(at)),
            self.table.token_table[1:].cpu().clone(),
            torch.from_numpy(self.table.seen[at].copy()),
            torch.stack(pools).cpu().float(),
        )

    def accept(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The first `counts` of the rows' drafts become their tokens, and one more of the target's."""
        for slot, count in zip(slots, counts, strict=True):
            length = int(self.lengths[slot])
            drafts = self.table.token_table[slot, length : length + count].cpu().numpy()
            self.write(slot, length, np.concatenate((drafts, np.array([slot + 40], np.int32))))
            self.lengths[slot] += count + 1


Turn = tuple[Sequence[int], Sequence[int], Sequence[int]]  # slots, the most drafts of each, and accepted ones
TURNS: tuple[Turn, ...] = (
    ((3, 1, 4), (DRAFTS,) * 3, (3, 0, 1)),  # padded to four rows
    ((1, 4, 3), (DRAFTS,) * 3, (1, 3, 2)),  # in another order; of row 4 the last draft has not been fed
    ((1, 2, 3, 4), (DRAFTS, DRAFTS, 1, DRAFTS), (2, 1, 1, 0)),  # a row that ends within the run
    ((4, 2, 1), (DRAFTS, 0, DRAFTS - 1), (0, 0, 0)),  # one row drafts nothing
    ((4, 2), (1, DRAFTS - 1), (1, 0)),  # not worth a whole run
    ((4, 2), (DRAFTS,) * 2, (0, 0)),
    ((5,), (DRAFTS,), (0,)),
)


def spoken(made: Drafting, turns: Sequence[Turn] = TURNS) -> list[Left]:
    made.prefill()
    left = []
    for slots, most, accepted in turns:
        left.append(made.propose(slots, most))
        made.accept(slots, accepted)
    return left


def differences(one: Sequence[Left], other: Sequence[Left], *, near: float = 0.0) -> set[str]:
    """Names of the parts that differ in any turn, floats by more than `near`."""
    found = set()
    for left, right in zip(one, other, strict=True):
        for name, mine, theirs in zip(Left._fields, left, right, strict=True):
            if not torch.allclose(mine, theirs, rtol=near, atol=near, equal_nan=True):
                found.add(name)
    return found


def config_of(method: DraftMethod) -> SpeculationConfig:
    return SpeculationConfig(
        method="draft_model", draft="tiny", num_speculative_tokens=DRAFTS, draft_sample_method=method
    )


@pytest.fixture
def drafting(tiny_models: Any, stand_in: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drafting]:
    """`drafting(name, method, captured=..., rows=...)`, with graphs of up to 4 rows."""

    def make(
        name: str = "qwen3",
        method: DraftMethod = "probabilistic",
        *,
        captured: bool = True,
        sampler: type[Sampler] = HostSampler,
        rows: Sequence[dict[str, Any]] = KINDS_OF_ROWS,
    ) -> Drafting:
        backend, engine = FlashInferAttention(CPU, torch.float32), EngineConfig(kv_slots=POOL, trace_base=False)
        model = HFModel(tiny_models.module(name, **BODIES[name]), engine, backend=backend)
        made = Drafting(model, sampler(num_slots=LIVE + 1, vocab_size=VOCAB), config_of(method), rows)
        with torch.no_grad():
            model._decode_graphs = Replayed(model.probed, max_rows=15, attended=600)
        monkeypatch.setattr(draft_model, "DraftGraphs", ReplayedDrafts)
        if captured:
            made.proposer.warm_up(lambda stage, seconds: None)
        return made

    return make


def replays(made: Drafting) -> list[int]:
    captured = made.proposer._graphs
    assert isinstance(captured, ReplayedDrafts)
    return captured.replays


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("method", ("probabilistic", "greedy"))
@pytest.mark.parametrize("name", BODIES)
def test_a_whole_run_leaves_what_a_draft_at_a_time_does(
    drafting: Callable[..., Drafting], name: str, method: DraftMethod
) -> None:
    made = drafting(name, method)
    assert differences(spoken(made), spoken(drafting(name, method, captured=False)), near=2e-5) == set()
    assert replays(made) == [4, 4, 4, 2, 2, 2]  # all turns but one


def test_a_replay_is_all_that_is_launched(drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafting()
    made.prefill()
    monkeypatch.setattr(made.model, "forward", lambda *_: pytest.fail("a draft was launched by itself"))
    made.propose((3, 1, 4), (DRAFTS,) * 3)


def as_it_is(made: Drafting) -> None: ...


def fed_late(made: Drafting) -> None:
    assert made.table.seen is not None
    made.table.seen[1] = made.lengths[1] - 3


def shared_whole(made: Drafting) -> None:
    made.table.sequences[1] = type("Request", (), {"shared": int(made.lengths[1]) - 1})()


def penalised(made: Drafting) -> None:
    made.sampler.release(1)
    made.sampler.admit(1, SamplingParams(frequency_penalty=0.5), made.table.tokens[1, :4], seed=1)


def masked(made: Drafting) -> None:
    made.sampler.release(1)
    made.sampler.admit(1, SamplingParams(allowed_token_ids=tuple(range(50))), made.table.tokens[1, :4], seed=1)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("alter", "slots", "most"),
    [
        (fed_late, (1, 2), (DRAFTS, DRAFTS)),
        (shared_whole, (1, 2), (DRAFTS, DRAFTS)),
        (penalised, (1, 2), (DRAFTS, DRAFTS)),
        (masked, (1, 2), (DRAFTS, DRAFTS)),
        (as_it_is, (1, 2), (DRAFTS - 1, DRAFTS - 1)),
        (as_it_is, (1, 2), (0, 0)),
        (as_it_is, (1, 2, 3, 4, 5), (DRAFTS,) * 5),
    ],
)
def test_rows_that_a_graph_was_not_captured_for_draft_one_by_one(
    drafting: Callable[..., Drafting], alter: Callable[[Drafting], None], slots: Sequence[int], most: Sequence[int]
) -> None:
    left = []
    for captured in (True, False):
        made = drafting(captured=captured)
        made.prefill()
        made.propose((1, 2), (DRAFTS, DRAFTS))
        made.accept((1, 2), (0, 0))
        alter(made)
        left.append(made.propose(slots, most))
        assert not captured or replays(made) == [2]  # the first time alone
    assert differences(left[:1], left[1:], near=2e-5) == set()


def test_a_step_without_rows_is_no_replay(drafting: Callable[..., Drafting]) -> None:
    made, none = drafting(), np.empty(0, np.int64)
    assert made.proposer.propose(DraftRows(none, none, none)).draft_ids.shape == (0, 0)
    assert replays(made) == []


@pytest.mark.parametrize(("most", "taken"), [(28, [2]), (27, [])])
def test_contexts_that_are_long_together_are_read_once(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch, most: int, taken: list[int]
) -> None:
    """Two rows of 6 and 9 tokens: their first steps attend to 5 + 6 + 8 + 9."""
    made = drafting()
    made.prefill()
    monkeypatch.setattr(decode, "MAX_VERIFY_ATTENDED", most)
    made.propose((1, 2), (DRAFTS, DRAFTS))
    assert replays(made) == taken


def test_without_a_device_s_sampler_or_graphs_of_the_model_nothing_is_captured(
    drafting: Callable[..., Drafting],
) -> None:
    assert drafting(sampler=Sampler).proposer._graphs is None
    made = drafting(captured=False)
    made.model._decode_graphs = None
    reported: list[str] = []
    made.proposer.warm_up(lambda stage, seconds: reported.append(stage))
    assert made.proposer._graphs is None and reported == []


def test_what_cannot_be_captured_is_said_and_drafted_one_by_one(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = drafting(captured=False)

    def refuses(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(draft_model, "DraftGraphs", refuses)
    made.proposer.warm_up(lambda stage, seconds: None)
    assert made.proposer._graphs is None and "not permitted" in caplog.text
    assert differences(spoken(made), spoken(drafting(captured=False))) == set()


@pytest.mark.parametrize(
    ("most", "captured", "sizes"),
    [
        (1, 256, (2,)),
        (2, 256, (2,)),
        (3, 256, (2, 4)),
        (33, 256, (2, 4, 8, 16, 32, 64)),
        (500, 256, (2, 4, 8, 16, 32, 64)),
        (500, 31, (2, 4, 8)),
        (5, 3, ()),
    ],
)
def test_row_counts_are_as_many_as_rows_and_steps_ask_for(most: int, captured: int, sizes: tuple[int, ...]) -> None:
    assert row_counts(most, captured) == sizes


def launched(made: Drafting, slots: Sequence[int]) -> Callable[[], StepOutput]:
    """Waits for a verify step of these rows, whose target is the draft model itself."""
    at = np.array(slots)
    step = Step(kind=StepKind.VERIFY, sequences=[], tokens=len(at), slots=at, positions=made.lengths[at])
    step.max_drafts = np.full(len(at), DRAFTS)
    config = EngineConfig(speculation=config_of("probabilistic"))
    runner = ModelRunner(made.model, made.sampler, made.table, config, made.proposer)
    with torch.no_grad():
        runner.launch(step)
    assert step.result is not None
    return step.result


def test_the_device_drafts_while_the_host_packs_what_judges_and_results_are_on_their_way_before_anything_else(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, order = drafting(), list[str]()

    def noted(owner: Any, name: str) -> None:
        honest = getattr(owner, name)

        def note(*given: Any, **named: Any) -> Any:
            found = honest(*given, **named)
            order.append(name)
            return found

        monkeypatch.setattr(owner, name, note)

    made.prefill()
    for owner, name in (
        (DraftGraphs, "replay"),
        (engine.model_runner, "verify_sequences"),
        (made.model, "forward"),
        (made.sampler, "verify"),
        (made.sampler, "fetch"),
        (engine.model_runner, "write_tokens"),
    ):
        noted(owner, name)
    found = launched(made, (3, 1, 4))()
    assert order == ["replay", "verify_sequences", "forward", "verify", "fetch", "write_tokens"]
    assert isinstance(found, VerifyOutput) and found.tokens.shape == (3, DRAFTS + 1)


def test_a_wrapper_that_cannot_plan_a_part_alone_captures_nothing(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version of FlashInfer may give its inner plan other arguments."""
    monkeypatch.setattr(Partition, "of", lambda *_: None)
    made = drafting()
    assert made.proposer._graphs is None and "a part alone" in caplog.text
    assert differences(spoken(made), spoken(drafting(captured=False))) == set()


# Planted faults.


def test_lengths_that_the_plan_does_not_know_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = drafting()
    made.prefill()
    monkeypatch.setattr(Partition, "__call__", lambda *_: None)
    with pytest.raises(AssertionError):
        made.propose((1, 2), (DRAFTS, DRAFTS))


def test_heads_that_keep_what_another_row_count_wrote_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, made = DraftGraphs._with_contexts, drafting()
    wanted = spoken(drafting(captured=False))

    def stale(self: DraftGraphs, head: Any, counts: Any) -> torch.Tensor:
        head.ends[:, 0] = 1
        return honest(self, head, counts)

    monkeypatch.setattr(DraftGraphs, "_with_contexts", stale)
    assert "q_probs" in differences(spoken(made), wanted, near=2e-5)


def test_positions_that_stand_still_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, wanted, made = CapturedStep.logits, spoken(drafting(captured=False)), drafting()
    assert made.proposer._graphs is not None
    second = [steps[1] for steps in made.proposer._graphs._steps.values()]

    def still(self: CapturedStep, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return honest(self, ids, positions - int(self in second), slots)

    monkeypatch.setattr(CapturedStep, "logits", still)
    assert {"ids", "q_probs", "pools"} <= differences(spoken(made), wanted, near=2e-5)


def test_steps_that_plan_into_one_buffer_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []

    def same(indptr: torch.Tensor, indices: torch.Tensor, *rest: Any) -> GraphBuffers:
        found.append(indices)
        return GraphBuffers(indptr, found[0], *rest)

    wanted = spoken(drafting(captured=False))
    monkeypatch.setattr(draft_graphs, "GraphBuffers", same)
    assert "q_probs" in differences(spoken(drafting()), wanted, near=2e-5)


def test_drafts_that_the_next_step_is_not_fed_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, wanted = DraftGraphs._fed, spoken(drafting(captured=False))
    monkeypatch.setattr(DraftGraphs, "_fed", lambda self, draft: torch.zeros_like(honest(self, draft)))
    assert {"q_probs", "pools"} <= differences(spoken(drafting()), wanted, near=2e-5)


def test_rows_that_go_on_behind_their_last_draft_are_found_out(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, wanted = DraftGraphs._pack, spoken(drafting(captured=False))

    def on(self: DraftGraphs, size: int, rows: DraftRows) -> Any:
        return honest(self, size, rows._replace(max_drafts=np.full_like(rows.max_drafts, DRAFTS)))

    monkeypatch.setattr(DraftGraphs, "_pack", on)
    assert {"ids", "tokens", "pools"} <= differences(spoken(drafting()), wanted, near=2e-5)


def test_drafts_that_are_stored_over_each_other_are_found_out(
    drafting: Callable[..., Drafting],
) -> None:
    made, wanted = drafting(), spoken(drafting(captured=False))
    made.proposer._state._offsets.zero_()
    assert {"ids", "q_ids", "q_probs"} <= differences(spoken(made), wanted, near=2e-5)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names the operations that launch something: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "new_empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "most"), [("probabilistic", 13), ("greedy", 9)])
def test_between_the_drafts_one_launch_brings_each_to_the_next(
    drafting: Callable[..., Drafting], monkeypatch: pytest.MonkeyPatch, method: DraftMethod, most: int
) -> None:
    """Beside the model's and the sampler's; whatever is stored waits for the end."""
    made, size = drafting(method=method), 4
    drawn = made.sampler.draft(np.zeros((size, VOCAB), np.float32), [0] * size, 0, method)
    rows = torch.zeros((FED_FIRST * size, VOCAB))
    monkeypatch.setattr(CapturedStep, "logits", lambda *_: rows)
    monkeypatch.setattr(made.sampler, "launch_draft", lambda *_: Draft(*map(torch.as_tensor, drawn)))
    assert made.proposer._graphs is not None
    with torch.no_grad(), Launches() as launches:
        run_steps(made.proposer._graphs, size)
    assert launches.names.count("maximum") == DRAFTS - 1
    assert len(launches.names) == most, launches.names


# On a GPU, in bfloat16


def on_gpu(tiny_models: Any, method: DraftMethod, captured: bool) -> Drafting:
    torch.compiler.reset()
    module = tiny_models.module("qwen3", head_dim=64, num_hidden_layers=2).to("cuda", torch.bfloat16)
    config = config_of(method)
    engine = EngineConfig(kv_slots=POOL, token_budget=64, max_running=LIVE, max_graph_batch_size=16, speculation=config)
    model = HFModel(module, engine)
    sampler = Sampler(num_slots=LIVE + 1, vocab_size=VOCAB, device="cuda")
    made = Drafting(model, sampler, config, KINDS_OF_ROWS)
    sampler.warm_up(LIVE, silent, drafts=DRAFTS, rules=config.rules)
    reported: list[str] = []
    made.proposer.warm_up(lambda stage, seconds: reported.append(stage))
    assert reported[-1] == "draft runs" and "draft graphs" in reported
    if not captured:
        made.proposer._graphs = None
    return made


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("method", ("probabilistic", "greedy"))
def test_a_captured_run_gives_the_bits_of_a_draft_at_a_time(
    tiny_models: Any, method: DraftMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = TURNS[:-1]  # one row alone has steps of another shape
    taken: list[int] = []
    honest = DraftGraphs.replay

    def counted(self: DraftGraphs, rows: DraftRows) -> None:
        taken.append(len(rows.slots))
        honest(self, rows)

    monkeypatch.setattr(DraftGraphs, "replay", counted)
    found = spoken(on_gpu(tiny_models, method, True), turns)
    assert taken == [3, 3, 4, 2, 2]
    assert differences(found, spoken(on_gpu(tiny_models, method, False), turns)) == set()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_what_is_staged_after_the_capture_reaches_the_next_replay(tiny_models: Any) -> None:
    """A row that becomes greedy drafts its best token, as a draft at a time does."""
    left = []
    for captured in (True, False):
        made = on_gpu(tiny_models, "probabilistic", captured)
        made.prefill()
        made.propose((2, 3), (DRAFTS, DRAFTS))
        made.accept((2, 3), (0, 0))
        for slot in (2, 3):
            made.sampler.release(slot)
            made.sampler.admit(slot, SamplingParams(temperature=0.0), made.table.tokens[slot, :5], seed=slot)
        left.append(made.propose((2, 3), (DRAFTS, DRAFTS)))
    assert differences(left[:1], left[1:]) == set()
    assert bool((left[0].q_probs[:, :, 0] == 1).all())


def launch_behind_work(made: Drafting) -> bool:
    """Whether the device was still at work that had been queued before when a speculative step was launched whole."""
    slots = (1, 2, 3)
    made.prefill()
    for _ in range(2):  # takes memory, and compiles what is compiled on first use
        found = launched(made, slots)()
        assert isinstance(found, VerifyOutput)
        made.accept(slots, found.counts - 1)
    torch.cuda.synchronize()
    cuda: Any = torch.cuda  # its events carry no types
    cuda._sleep(2_000_000_000)  # cycles, about a second
    before = cuda.Event()
    before.record()
    result = launched(made, slots)
    busy = not before.query()
    found = result()
    assert isinstance(found, VerifyOutput) and found.counts.min() >= 1
    return busy


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
def test_a_speculative_step_is_launched_whole_without_waiting_for_the_device(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on_gpu(tiny_models, "probabilistic", True)
    assert launch_behind_work(made)
    honest = DraftModel.lengths

    def asks(self: DraftModel, slots: Any) -> Any:  # the planted fault
        torch.cuda.current_stream().synchronize()
        return honest(self, slots)

    monkeypatch.setattr(DraftModel, "lengths", asks)
    assert not launch_behind_work(made)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # those of the compilers are not ours
@pytest.mark.parametrize("heads", (2, 4, 8))  # a key/value head has 1, 2 or 4, the last on tensor cores
def test_a_plan_of_lengths_alone_leaves_the_bytes_of_a_whole_one(heads: int) -> None:
    device, rows, most = torch.device("cuda"), 5, 9000
    backend = FlashInferAttention(device, torch.bfloat16)
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    indices = torch.zeros(rows * most, dtype=torch.int32, device=device)
    buffers = GraphBuffers(indptr, indices, torch.ones(rows, dtype=torch.int32, device=device), draft_graphs.STAGING)
    kind = AttentionParams(heads, 2, 64, NO_WINDOW, NO_SOFTCAP, 0.125)
    wrapper, rng, left = backend.wrappers.graph_decoder(kind, buffers, rows), np.random.default_rng(heads), []
    for longest in (2, 300, most):
        ends = np.concatenate((np.zeros(1), rng.integers(1, longest, rows).cumsum())).astype(np.int32)
        host = torch.from_numpy(ends).pin_memory()
        for whole in (True, False):
            wrapper._wrapper._int_workspace_buffer.zero_()
            wrapper._wrapper._pin_memory_int_workspace_buffer.zero_()
            if whole:
                queries = torch.arange(rows + 1, dtype=torch.int32)
                wrapper.plan(kind, Sequences(queries, host, indices[: int(ends[-1])], causal=True))
            else:
                wrapper.replan(host)
            torch.cuda.synchronize()
            left.append(wrapper._wrapper._int_workspace_buffer.cpu())
        assert left[-1].any() and torch.equal(left[-2], left[-1])
    assert not torch.equal(left[0], left[-1])
