"""Verify steps and drafts by the kernels: every integer is the reference's and every float is near it, for mixtures of
all features, kinds of proposal and lengths of run, turn after turn; planted faults fail the same check."""

from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler import triton_sampler
from gpu_sampler.kernels import verify_rows
from gpu_sampler.kernels.rejection_sample import rejection_sample
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, Rule, VerifyRules
from gpu_sampler.state.layout import Word
from tests.support.draws import DISTRIBUTION_ALPHA
from tests.support.edges import pair_of_samplers
from tests.support.guards import GUARD, Guarded
from tests.support.planted import always_one, nothing_of_q, only_p, plant
from tests.support.speculation import Drafter, chain, check_distribution, plain, speculate
from tests.support.verifying import FEATURES, admit_all, verify_agrees, verify_step

RAW: LogprobsMode = "raw_logprobs"
PROCESSED: LogprobsMode = "processed_logprobs"
REQUESTS = len(FEATURES)
STANDARD = VerifyRules(seeded="block")


def kernels(device: str) -> Any:
    def make(slots: int, vocab_size: int, mode: LogprobsMode) -> Sampler:
        return Sampler(num_slots=slots, vocab_size=vocab_size, device=device, logprobs_mode=mode, backend="triton")

    return make


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("rule", "seeded", "mode", "size"),
    [
        ("standard", "strict", RAW, 300),
        ("block", "standard", PROCESSED, 300),
        ("block", "standard", RAW, 700),
        ("strict", "block", PROCESSED, 700),
        ("synthetic", "block", RAW, 129),
    ],
)
def test_verify_steps_agree_with_the_reference(
    device: str, rule: Rule, seeded: Rule, mode: LogprobsMode, size: int
) -> None:
    rules = VerifyRules(rule=rule, seeded=seeded, synthetic=(0.7, 0.5))
    assert not verify_agrees(device, mode, rules, requests=REQUESTS, steps=2, size=size, turns=2, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [RAW, PROCESSED])
@pytest.mark.parametrize("rule", ["strict", "standard", "block"])
@pytest.mark.parametrize(("requests", "steps", "size"), [(37, 1, 111), (61, 4, 1111), (25, 8, 3001), (16, 4, 32_003)])
def test_many_verify_steps_agree_with_the_reference(
    device: str, rule: Rule, mode: LogprobsMode, requests: int, steps: int, size: int
) -> None:
    for seed in range(4):  # one of them may hang on less than float32 can tell
        rules = VerifyRules(rule=rule, seeded="standard")
        found = verify_agrees(device, mode, rules, requests=requests, steps=steps, size=size, turns=2, seed=seed)
        if not found:
            return
    raise AssertionError(found)


def without_advance(device_state: Any, *given: Any, **named: Any) -> None:
    """Nothing of a slot moves."""
    before = device_state.words.clone()
    rejection_sample(device_state, *given, **named)
    device_state.words.copy_(before)


def without_conclusion(*given: Any, **named: Any) -> None:
    """The row's own draw is reported, and rows behind the count keep their flags."""


_expand = verify_rows.expand


def drafts_not_seen(device_state: Any, slots_B: Any, runs: Any, *given: Any, **named: Any) -> None:
    """Target rows see the slot as it is before the run."""
    _expand(device_state, slots_B, runs, *given, **named)
    rows = runs.state
    for request, slot in enumerate(slots_B.tolist()):
        for step in range(1, rows.steps + 1):
            own = rows.table[1 + request * (rows.steps + 1) + step]
            for word in (slice(Word.OVERLAY_START, Word.OVERLAY_CAP + 1), slice(Word.LAST, Word.CHOSEN)):
                own[word] = device_state.table[slot, word]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("name", "fault"),
    [("rejection_sample", without_advance), ("conclude", without_conclusion), ("expand", drafts_not_seen)],
)
def test_planted_fault_fails_the_same_check(
    device: str, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_sampler, name, fault)
    assert verify_agrees(device, RAW, STANDARD, requests=REQUESTS, steps=2, size=300, turns=2, seed=3)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("name", "fault"), [("share_of", nothing_of_q), ("weight_behind", always_one), ("ratio_of", only_p)]
)
def test_fault_planted_in_the_judgement_fails_the_same_check(
    device: str, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, name, fault)
    rules = VerifyRules(rule="block", seeded="standard")
    assert verify_agrees(device, RAW, rules, requests=REQUESTS, steps=2, size=300, turns=1, seed=3)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("mode", [RAW, PROCESSED])
def test_run_without_drafts_is_sample_bit_for_bit(device: str, mode: LogprobsMode) -> None:
    samplers = [kernels(device)(REQUESTS + 1, 300, mode) for _ in range(2)]
    for sampler in samplers:
        admit_all(sampler, REQUESTS)
    rows = np.random.default_rng(2).normal(0, 2, (REQUESTS, 300)).astype(np.float32)
    padded = np.repeat(rows, 2, axis=0)
    padded[1::2] = np.nan
    slots = range(1, REQUESTS + 1)
    none = Proposal(np.full((REQUESTS, 1), -1, np.int32), np.ones(REQUESTS, np.uint8))
    verified = samplers[0].verify(torch.tensor(padded).to(device), slots, none, STANDARD)
    found = samplers[0].fetch(verified).result()
    expected = samplers[1].fetch(samplers[1].sample(torch.tensor(rows).to(device), slots)).result()
    assert found.counts.tolist() == [1] * REQUESTS
    for name, part in expected._asdict().items():
        assert getattr(found, name)[:, 0].tobytes() == part.tobytes(), name
    again = [sampler.sample(torch.tensor(rows).to(device), slots) for sampler in samplers]
    assert again[0].tokens.tolist() == again[1].tokens.tolist()  # at the next position, with what was counted


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "frequency_penalty": 0.7}], ids=["plain", "penalties"])
def test_strict_rows_say_what_they_say_without_drafts(device: str, params: dict[str, Any]) -> None:
    case = chain(150, 4, apart=0.3, spread=2.0, **params)
    alone = plain(case, rows=2, length=6, make=kernels(device))
    rules = VerifyRules(rule="strict")
    spoken = speculate(case, rows=2, length=6, steps=3, drafter="sparse", rules=rules, make=kernels(device))
    assert (spoken.tokens == alone).all()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafts_agree_with_the_reference(device: str, method: Any) -> None:
    """Three drafts one behind another, of rows with every feature; one row has nothing finite."""
    size, slots = 300, np.arange(1, REQUESTS + 1)
    ours, reference = pair_of_samplers(REQUESTS + 1, size, device, RAW)
    for sampler in (ours, reference):
        admit_all(sampler, REQUESTS)
    for offset in range(3):
        logits = np.random.default_rng(offset).normal(0, 2, (REQUESTS, size)).astype(np.float32)
        logits[3 + offset] = np.nan
        own = [part.cpu().numpy() for part in ours.draft(torch.tensor(logits).to(device), slots, offset, method)]
        wanted = reference.draft(logits, slots, offset, method)
        np.testing.assert_array_equal(own[0], wanted.ids)
        np.testing.assert_array_equal(own[1], wanted.q_ids)
        np.testing.assert_allclose(own[2], wanted.q_probs, atol=2e-6)


def test_drafts_of_a_top_k_that_is_wider_than_a_list_pass_its_other_filters(device: str) -> None:
    size, slots = 700, np.arange(1, 5)
    filters = [{"top_p": 0.2}, {"min_p": 0.5}, {"top_p": 0.3, "min_p": 0.4}, {}]
    ours, reference = pair_of_samplers(5, size, device, RAW)
    for sampler in (ours, reference):
        for slot, more in enumerate(filters, 1):
            sampler.admit(slot, SamplingParams(top_k=400, temperature=0.8, **more), [], seed=slot)  # type: ignore[arg-type]
    logits = np.random.default_rng(1).normal(0, 2, (4, size)).astype(np.float32)
    own = [part.cpu().numpy() for part in ours.draft(torch.tensor(logits).to(device), slots, 0, "probabilistic")]
    wanted = reference.draft(logits, slots, 0, "probabilistic")
    np.testing.assert_array_equal(own[0], wanted.ids)
    np.testing.assert_array_equal(own[1], wanted.q_ids)
    np.testing.assert_allclose(own[2], wanted.q_probs, atol=2e-6)
    kept = (wanted.q_ids >= 0).sum(axis=1)
    assert (kept[:3] < 30).all() and kept[3] == wanted.q_ids.shape[1]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("rule", ["standard", "strict"])
def test_a_draft_launched_for_a_graph_is_that_of_each_row_alone(device: str, rule: Rule, method: Any) -> None:
    """One plan for all rows without overlay or mask, padding among them, and the plan that each row asks for."""
    size, rules = 300, VerifyRules(rule=rule)
    alone, together = (kernels(device)(6, size, RAW) for _ in range(2))
    for sampler in (alone, together):
        for slot in range(1, 5):
            sampler.admit(slot, params_without_overlay(slot), [], seed=slot)
        sampler.admit(5, SamplingParams(temperature=0.0), [], seed=5)
    assert together.prepare_drafts(range(1, 6))
    slots = torch.tensor([3, 1, 0, 5, 4, 2, 0], dtype=torch.int32, device=device)
    for offset in range(2):
        rng = np.random.default_rng(offset)
        logits = torch.from_numpy(rng.normal(0, 2, (len(slots), size)).astype(np.float32)).to(device)
        found = together.launch_draft(logits.clone(), slots, offset, method, rules)
        for row, slot in enumerate(slots.tolist()):
            if slot:
                wanted = alone.draft(logits[row : row + 1].clone(), [slot], offset, method, rules)
                for mine, theirs in zip(found, wanted, strict=True):
                    assert torch.equal(mine[row], theirs[0])


def test_drafts_of_rows_with_an_overlay_or_a_mask_are_not_for_a_graph(device: str) -> None:
    sampler = kernels(device)(4, 150, RAW)
    rows = (SamplingParams(), SamplingParams(frequency_penalty=1.0), SamplingParams(allowed_token_ids=(3, 4)))
    for slot, params in enumerate(rows, 1):
        sampler.admit(slot, params, [3], seed=slot)
    assert [sampler.prepare_drafts([slot]) for slot in (1, 2, 3)] == [True, False, False]
    assert sampler.prepare_drafts([0, 1]) and not sampler.prepare_drafts([1, 2])


def test_logits_of_rows_without_overlay_are_left_as_they_were(device: str) -> None:
    """While a residual is drawn, the ids of its proposal are taken out of the row."""
    sampler = kernels(device)(5, 300, RAW)
    for slot in range(1, 5):
        sampler.admit(slot, params_without_overlay(slot), [], seed=slot)
    step = verify_step(4, 2, 300, 1)
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.tensor(step.logits_RV).to(device, dtype)
        before = given.clone()
        sampler.verify(given, range(1, 5), step.proposal, VerifyRules(seeded="standard"))
        assert torch.equal(given.view(torch.uint8), before.view(torch.uint8))


def params_without_overlay(slot: int) -> SamplingParams:
    features: list[dict[str, Any]] = [{}, {"top_p": 0.99, "temperature": 2.0}, {"top_k": 9}, {"min_p": 0.01}]
    return SamplingParams(**features[slot - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["greedy", "sparse", "dense"])
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.8}, {"frequency_penalty": 0.75}])
def test_kernels_speak_by_the_distribution(device: str, params: dict[str, Any], rule: Rule, drafter: Drafter) -> None:
    case = chain(5, 11, **params)
    spoken = speculate(
        case, rows=20_000, length=3, steps=2, drafter=drafter, rules=VerifyRules(rule=rule), make=kernels(device)
    )
    assert check_distribution(case, spoken).least > DISTRIBUTION_ALPHA


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_code_for_many_requests_gives_the_bits_of_that_for_few(
    device: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, slots = verify_step(REQUESTS, 4, 3001, seed=4), np.arange(1, REQUESTS + 1)
    found = []
    for few in (REQUESTS, 0):
        monkeypatch.setattr(triton_sampler, "FEW_REQUESTS", few)
        sampler = kernels(device)(REQUESTS + 1, 3001, RAW)
        admit_all(sampler, REQUESTS)
        there = Proposal(*(torch.tensor(part).to(device) for part in step.proposal))
        logits = torch.tensor(step.logits_RV).to(device)
        found.append(sampler.fetch(sampler.verify(logits, slots, there, VerifyRules(rule=rule))).result())
    for own, other in zip(*found, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("rows", [1, 2])
def test_warm_up_leaves_every_slot_as_it_was(device: str, rows: int) -> None:
    """With one row, too, though its steps have two requests: what does not fit the workspace is refused."""
    sampler = kernels(device)(3, 150, RAW)
    sampler.admit(1, SamplingParams(frequency_penalty=1.0), [3], seed=1)
    before = sampler.state.table.copy()
    lines: list[str] = []
    sampler.warm_up(rows, lambda stage, seconds: lines.append(stage), drafts=2, dense=True)
    assert sum("verify" in line for line in lines) == 6 and sum("draft" in line for line in lines) >= 1
    assert (sampler.state.table == before).all()


def hostile(size: int) -> Proposal:
    """Ids at both ends of the vocabulary and far outside of it, as drafts and in their proposals, of every kind."""
    ids = np.array([-1, size - 1, size, 2**31 - 1], np.int32)
    drafts = np.resize(np.roll(ids, 2), (REQUESTS, 3)).astype(np.int32)
    q_ids = np.resize(ids, (REQUESTS, 3, PROPOSAL_IDS)).astype(np.int32)
    q_probs = np.full((REQUESTS, 3, PROPOSAL_IDS), 1 / PROPOSAL_IDS, np.float32)
    return Proposal(drafts, (np.arange(REQUESTS) % 4).astype(np.uint8), q_ids, q_probs, None)


@pytest.mark.full(keep=1)
@pytest.mark.risk("S4")
@pytest.mark.parametrize("rule", ["strict", "standard", "block"])
def test_ids_outside_of_the_vocabulary_touch_no_row_beside(device: str, rule: Rule) -> None:
    """Rows, workspace, lists and the runs' image stand between words that would show it; no such id is said."""
    size, guarded = 300, Guarded()
    sampler = kernels(device)(REQUESTS + 1, size, RAW)
    admit_all(sampler, REQUESTS)
    slots, rules = np.arange(1, REQUESTS + 1), VerifyRules(rule=rule)
    step = verify_step(REQUESTS, 3, size, seed=8)
    proposal = Proposal(*(None if part is None else torch.tensor(part).to(device) for part in hostile(size)))
    on_device: Any = sampler._triton
    on_device.reserve(REQUESTS * 4)
    for holder in (on_device.reserve(REQUESTS * 4), on_device._runs_of(REQUESTS, 3), on_device):
        guarded.guard(holder)
    for name in ("side_ids", "side_raw", "side_processed"):
        setattr(on_device.device_state, name, guarded.copy(getattr(on_device.device_state, name)))
    logits = guarded.copy(torch.tensor(step.logits_RV).to(device))
    given = Proposal(*(None if part is None else guarded.copy(part) for part in proposal))
    found = sampler.fetch(sampler.verify(logits, slots, given, rules)).result()
    said = np.arange(found.tokens.shape[1]) < found.counts[:, None]
    tokens = found.tokens[said]
    assert len(guarded.buffers) > 20 and guarded.intact()
    assert (tokens < size).all() and (tokens >= -1).all()
    guarded.buffers[3][-GUARD] = 0
    assert not guarded.intact()
