"""The built-in pair: drafts change no greedy token, and are accepted as often as the two models' overlap says."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.engine import Engine
from engine.metrics import EngineStats
from engine.model.compatibility import UnsupportedModel
from engine.model.loader import UnsupportedDraft, load_models
from engine.model.model_folder import BUILTIN, BUILTIN_DRAFT
from engine.requests import GenerateChunk, GenerateRequest
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_state import DraftState
from engine.tokenizer.tokenizer import load_tokenizer
from gpu_sampler.output import VerifyOutput
from gpu_sampler.reference import rejection_sample
from gpu_sampler.reference.rejection_sample import residual
from gpu_sampler.reference.softmax_stats import Float64s
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Proposal, Rule
from tools.builtin_model import evaluate

PROMPTS: Final = int(os.environ.get("ASSAY_TEST_PROMPTS", "50"))
NEW: Final = 32
DRAFT: Final = SpeculationConfig(method="draft_model", draft="builtin")
NUMBERS: Final = json.loads((evaluate.FOLDER / "numbers.json").read_text())


class Overlap(Sampler):
    """Notes the sum of min(p, q) of every draft that was reached, p being the target's own row at temperature 1."""

    sums: list[float]

    def verify(self, logits: Any, slots: Any, proposal: Proposal, *rest: Any) -> VerifyOutput:
        out = super().verify(logits, slots, proposal, *rest)
        assert proposal.q_ids is not None and proposal.q_probs is not None
        p = logits.double().softmax(-1).numpy().reshape(len(slots), -1, logits.shape[-1])
        reached = np.minimum(out.counts, (proposal.draft_ids >= 0).sum(axis=1))
        for row, count in enumerate(reached.tolist()):
            for place in range(count):
                known = proposal.q_ids[row, place] >= 0
                own = p[row, place][proposal.q_ids[row, place][known]]
                self.sums.append(float(np.minimum(own, proposal.q_probs[row, place][known]).sum()))
        return out


@contextmanager
def running(speculation: SpeculationConfig) -> Iterator[Engine]:
    options = EngineConfig(kv_slots=16_384, max_running=16, speculation=speculation)
    target, draft = load_models(ModelConfig(device="cpu", max_model_len=256), options)
    engine = Engine(target, options, draft=draft)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
    engine.check()


def prompts(count: int) -> list[npt.NDArray[np.int32]]:
    rows = load_tokenizer("builtin").encode_batch(evaluate.completion_prompts(count), add_special_tokens=False)
    return [np.array(row, np.int32) for row in rows]


async def complete(engine: Engine, count: int, **fields: Any) -> list[GenerateChunk]:
    params = SamplingParams(max_tokens=NEW, stop_token_ids=engine.model.eos_token_ids, **fields)
    requests = [
        GenerateRequest(request_id=str(i), prompt=ids, params=params, seed=i) for i, ids in enumerate(prompts(count))
    ]
    return [chunks[0] for chunks in await asyncio.gather(*(engine.complete(request) for request in requests))]


@pytest.fixture(scope="module")
def plain() -> list[GenerateChunk]:
    """Greedy, without speculation."""
    with running(SpeculationConfig()) as engine:
        return asyncio.run(complete(engine, PROMPTS, temperature=0.0, logprobs=0))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("speculation", [DRAFT, SpeculationConfig(method="ngram")], ids=["draft_model", "ngram"])
async def test_greedy_rows_are_those_of_plain_decoding_token_for_token(
    plain: list[GenerateChunk], speculation: SpeculationConfig
) -> None:
    with running(speculation) as engine:
        found = await complete(engine, PROMPTS, temperature=0.0, logprobs=0)
        stats = engine.stats()
    assert sum(stats.drafts_accepted) > 0
    for own, other in zip(plain, found, strict=True):
        assert own.tokens.tolist() == other.tokens.tolist()
        assert own.logprobs is not None and other.logprobs is not None
        assert np.abs(own.logprobs - other.logprobs).max() < 5e-5  # other batch shapes, whose logits round otherwise


class Accepted(NamedTuple):
    stats: EngineStats
    overlap: float  # mean sum of min(p, q) over the drafts reached

    @property
    def rate(self) -> float:
        """Accepted drafts over reached ones."""
        return sum(self.stats.drafts_accepted) / sum(self.stats.drafts_reached)


async def accepted(rule: Rule, count: int = 72) -> Accepted:
    sums: list[float] = []
    config = SpeculationConfig(method="draft_model", draft="builtin", rejection_sample_method=rule)
    with running(config) as engine:
        engine.sampler.__class__ = Overlap
        engine.sampler.sums = sums  # type: ignore[attr-defined]
        await complete(engine, count)
        return Accepted(engine.stats(), float(np.mean(sums)))


@pytest.mark.full
async def test_drafts_are_accepted_as_often_as_the_models_overlap() -> None:
    """The draws are seeded, so that the sample is one and the same: about 1,100 drafts, standard error 1 %."""
    standard = await accepted("standard")
    assert standard.rate == pytest.approx(standard.overlap, rel=0.02)
    assert standard.overlap == pytest.approx(NUMBERS["mean_sum_min_p_q"]["1.0"], rel=0.02)
    assert standard.stats.drafts_missing_q == 0
    block = await accepted("block")
    tokens = [one.stats.generated_tokens / one.stats.drafts for one in (standard, block)]
    assert tokens[1] > 0.98 * tokens[0]  # never fewer in expectation


class Expected(Sampler):
    """Notes how many of a run's drafts each rule accepts in the mean over its acceptance numbers."""

    both: list[tuple[float, float]]  # standard, block

    def verify(self, logits: Any, slots: Any, proposal: Proposal, *rest: Any) -> VerifyOutput:
        p_RkV = logits.double().softmax(-1).numpy().reshape(len(slots), -1, logits.shape[-1])
        for row, p_kV in enumerate(p_RkV):
            run = rejection_sample.run_of(proposal, row)
            q_kV = [run.q(step, p_kV.shape[1], 1.0) for step in range(len(run.drafts))]
            if q_kV:
                self.both.append(in_the_mean(p_kV, np.array(q_kV), run.drafts))
        return super().verify(logits, slots, proposal, *rest)


def in_the_mean(p_kV: Float64s, q_kV: Float64s, drafts: tuple[int, ...]) -> tuple[float, float]:
    """Drafts accepted by `standard` and by `block`: the sum over i of the chance that i or more are."""
    at = range(len(drafts))
    ratios_k = rejection_sample.ratios(p_kV[at, drafts], q_kV[at, drafts])
    weights = rejection_sample.block_weights(ratios_k)
    masses = np.array([residual(p_kV[i], q_kV[i], weights[i]).sum() for i in at[1:]])
    refused_k = 1 - rejection_sample.block_chances(weights, masses)
    return float(np.minimum(ratios_k, 1).cumprod().sum()), float(sum(1 - refused_k[i:].prod() for i in at))


async def gains(count: int) -> Float64s:
    """Returns what `block` accepts of each run beyond `standard`."""
    with running(DRAFT) as engine:
        engine.sampler.__class__ = Expected
        engine.sampler.both = []  # type: ignore[attr-defined]
        await complete(engine, count)
        both = np.array(engine.sampler.both)  # type: ignore[attr-defined]
    gain: Float64s = both[:, 1] - both[:, 0]
    print(  # with -s
        f"\n{len(both):,} runs: standard {both[:, 0].mean():.4f}, block {both[:, 1].mean():.4f} drafts accepted; "
        f"gain {gain.mean():.4f}, standard error {gain.std() / len(gain) ** 0.5:.4f}"
    )
    return gain


@pytest.mark.full
async def test_block_accepts_at_least_as_many_of_the_same_drafts() -> None:
    """In expectation over the drafts, that is: of single runs it may accept fewer."""
    gain = await gains(max(72, PROMPTS))
    assert gain.min() < 0
    assert gain.mean() > -3 * gain.std() / len(gain) ** 0.5


async def test_a_run_that_is_kept_whole_or_not_at_all_accepts_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: `block` without what is left of the target behind each draft."""
    monkeypatch.setattr(rejection_sample, "block_chances", lambda weights, masses: np.append(0 * masses, weights[-1]))
    gain = await gains(24)
    assert gain.mean() < -3 * gain.std() / len(gain) ** 0.5


async def test_a_distribution_that_is_dropped_on_purpose_costs_acceptance_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = DraftState.put
    monkeypatch.setattr(DraftState, "put", lambda state, slots, at, ids, q: put(state, slots, at, ids, None))
    dropped = await accepted("standard", 24)
    assert dropped.rate < 0.8 * NUMBERS["mean_sum_min_p_q"]["1.0"]
    assert dropped.stats.drafts_missing_q == dropped.stats.drafts > 0


class Drafted(Sampler):
    """Notes each greedy row's tokens and drafts."""

    seen: list[tuple[list[int], list[int]]]
    rows: RequestTable

    def verify(self, logits: Any, slots: Any, proposal: Proposal, *rest: Any) -> VerifyOutput:
        for slot, drafts in zip(slots.tolist(), proposal.draft_ids.tolist(), strict=True):
            tokens = self.rows.tokens[slot, : self.rows.known[slot]].tolist()
            self.seen.append((tokens, [draft for draft in drafts if draft >= 0]))
        return super().verify(logits, slots, proposal, *rest)


async def test_each_draft_is_the_best_token_of_the_draft_model_as_the_library_runs_it_alone() -> None:
    library = AutoModelForCausalLM.from_pretrained(BUILTIN_DRAFT, dtype=torch.float32).eval()
    seen: list[tuple[list[int], list[int]]] = []
    with running(DRAFT) as engine:
        engine.sampler.__class__ = Drafted
        engine.sampler.seen, engine.sampler.rows = seen, engine.core.table  # type: ignore[attr-defined]
        await complete(engine, 9, temperature=0.0)
    for tokens, drafts in seen:
        with torch.no_grad():
            rows = library(torch.tensor([tokens + drafts])).logits[0, len(tokens) - 1 : -1]
        assert rows.argmax(-1).tolist() == drafts
    assert sum([len(drafts) for _, drafts in seen]) > 150


# Pairs that do not go together.


def load(draft: Path, **model: Any) -> None:
    options = EngineConfig(kv_slots=64, speculation=SpeculationConfig(method="draft_model", draft=draft))
    load_models(ModelConfig(device="cpu", **{"max_model_len": 64, **model}), options)


def test_a_draft_of_another_vocabulary_is_refused_by_name_before_its_weights_are_read(tmp_path: Path) -> None:
    config = json.loads((BUILTIN_DRAFT / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 2000}))
    with pytest.raises(
        UnsupportedDraft, match=r"`speculation.draft` must have .* 2048 ids\. Given: .*other, with 2000\."
    ):
        load(tmp_path / "other")


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    for file in BUILTIN_DRAFT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    tokenizer = json.loads((BUILTIN / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedDraft, match=r"target's tokenizer\. Given: .*, in which 2 of 2048 tokens"):
        load(tmp_path)


def test_a_draft_that_is_too_short_for_the_target_is_refused(tmp_path: Path) -> None:
    for file in BUILTIN_DRAFT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((BUILTIN_DRAFT / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    with pytest.raises(UnsupportedDraft, match=r"sequences of 64 tokens"):
        load(tmp_path)


def test_a_draft_of_longrope_serves_sequences_that_change_no_neighbour(tmp_path: Path) -> None:
    for file in BUILTIN_DRAFT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((BUILTIN_DRAFT / "config.json").read_text())
    factors = [1.0] * (config["head_dim"] // 2)
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    load(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"`model.max_model_len` to at most 64\. Given: 65"):
        load(tmp_path, max_model_len=65)


def test_both_models_have_the_same_slots() -> None:
    options = EngineConfig(kv_slots=64, speculation=DRAFT)
    target, draft = load_models(ModelConfig(device="cpu", max_model_len=64), options)
    assert draft is not None
    assert target.num_slots == draft.num_slots == 64
