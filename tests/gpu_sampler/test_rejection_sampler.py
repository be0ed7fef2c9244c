"""Verification on the reference: strict equals plain decoding, a run without drafts equals `sample` bit for bit, and no
draft, however wrong, touches what is not its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_sampler.output import RowFlag, SampleOutput, VerifyOutput, VerifyWords
from gpu_sampler.reference import filters
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, ProposalKind, Rule, VerifyRules
from tests.support.speculation import DRAFTERS, Chain, chain, plain, speculate, with_params

V = 200
RULES: tuple[Rule, ...] = ("strict", "standard", "block")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 9, "temperature": 1.3},
    "nucleus": {"top_p": 0.7},
    "wide nucleus": {"top_p": 0.99, "temperature": 2.0},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    "words": {"bad_words_ids": ((3, 5), (7,)), "stop_token_ids": (2, 9), "min_tokens": 5, "logit_bias": ((4, 2.0),)},
    "allowed": {"allowed_token_ids": tuple(range(0, V, 3)), "top_k": 20},
}


def wide(name: str) -> Chain:
    size = 400 if "wide" in name else V
    return chain(size, 3, apart=0.4, spread=0.4 if "wide" in name else 2.0, **FEATURES[name])


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_strict_rows_say_what_they_say_without_drafts(name: str, drafter: Any) -> None:
    case = wide(name)
    alone = plain(case, rows=3, length=14)
    rules = VerifyRules(rule="strict")
    for steps in (1, 3, 4):
        spoken = speculate(case, rows=3, length=14, steps=steps, drafter=drafter, rules=rules)
        assert (spoken.tokens == alone).all(), steps


def test_strict_rows_accept_more_of_a_drafter_that_knows_their_noise() -> None:
    case, rules = wide("plain"), VerifyRules(rule="strict")
    said = [speculate(case, rows=40, length=12, steps=3, drafter=d, rules=rules).accepted for d in ("sparse", "dense")]
    assert said[0] > said[1] + 0.3


def test_rows_with_a_seed_of_their_own_are_strict_by_default() -> None:
    case = with_params(wide("plain"), seed=3)
    alone = plain(case, rows=4, length=9)
    assert (speculate(case, rows=4, length=9, steps=3, drafter="dense", rules=VerifyRules()).tokens == alone).all()
    loose = VerifyRules(seeded="standard")
    assert (speculate(case, rows=4, length=9, steps=3, drafter="dense", rules=loose).tokens != alone).any()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("rule", RULES)
def test_run_without_drafts_is_sample_bit_for_bit(rule: Rule, mode: LogprobsMode) -> None:
    samplers = [admitted(mode) for _ in range(2)]
    rows = len(FEATURES)
    for step in range(3):
        logits = np.random.default_rng(step).normal(0, 1.5, (rows, V)).astype(np.float32)
        logits[step, 4] = np.nan
        logits[step + 3] = -np.inf
        proposal = Proposal(np.full((rows, 2), -1, np.int32), np.full(rows, ProposalKind.ONE_HOT, np.uint8))
        padded = np.repeat(logits, 3, axis=0)
        padded.reshape(rows, 3, V)[:, 1:] = np.nan  # rows behind the last draft's are not looked at
        found = samplers[0].verify(padded, range(1, rows + 1), proposal, VerifyRules(rule=rule, seeded=rule))
        expected = samplers[1].sample(logits, range(1, rows + 1))
        assert found.counts.tolist() == [1] * rows
        for name, part in expected._asdict().items():
            assert getattr(found, name)[:, 0].tobytes() == part.tobytes(), name
        assert (found.tokens[:, 1:] == INVALID_TOKEN).all() and not found.flags[:, 1:].any()
        for one, other in ((x.state.table, y.state.table) for x, y in [samplers]):
            assert (one == other).all()


def test_strict_rows_whose_nucleus_is_scanned_after_many_draws_say_what_sample_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scan belongs to the row's only draw: its kept tokens must not be drawn from anew."""
    monkeypatch.setattr(filters, "MAX_DRAWS", 8)
    rows, size = 16, 1200
    logits = np.random.default_rng(0).normal(0, 0.1, (rows, size)).astype(np.float32)
    samplers = [Sampler(num_slots=rows + 1, vocab_size=size) for _ in range(2)]
    for sampler in samplers:
        for slot in range(1, rows + 1):
            sampler.admit(slot, SamplingParams(top_p=0.3, seed=slot), (3, 5), seed=slot)
    expected = samplers[1].sample(logits, range(1, rows + 1))
    assert (expected.flags & RowFlag.NUCLEUS_SCAN).any()
    proposal = Proposal(np.full((rows, 0), -1, np.int32), np.full(rows, ProposalKind.ONE_HOT, np.uint8))
    found = samplers[0].verify(logits, range(1, rows + 1), proposal)
    assert found.tokens[:, 0].tolist() == expected.tokens.tolist()


def admitted(mode: LogprobsMode = "raw_logprobs", **more: Any) -> Sampler:
    """A slot for each of the features."""
    sampler = Sampler(num_slots=len(FEATURES) + 1, vocab_size=V, logprobs_mode=mode)
    for slot, features in enumerate(FEATURES.values(), start=1):
        params = SamplingParams(max_tokens=40, logprobs=3, logprob_token_ids=(5, 1, V - 1), **features, **more)
        sampler.admit(slot, params, (3, 5, 7), seed=slot)
    return sampler


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_strict_runs_report_what_plain_decoding_reports(mode: LogprobsMode) -> None:
    """Every draft is the right one, so that each row of the run reports."""
    steps, rows, tail = 4, len(FEATURES), np.random.default_rng(1).normal(0, 1.5, (5, len(FEATURES), V))
    logits = tail.astype(np.float32)
    ours, other = admitted(mode), admitted(mode)
    said = [other.sample(logits[step], range(1, rows + 1)) for step in range(steps + 1)]
    drafts = np.stack([output.tokens for output in said[:steps]], axis=1)
    proposal = Proposal(drafts, np.full(rows, ProposalKind.ONE_HOT, np.uint8))
    found = ours.verify(logits.swapaxes(0, 1).reshape(-1, V), range(1, rows + 1), proposal, VerifyRules(rule="strict"))
    assert found.counts.tolist() == [steps + 1] * rows
    for step, output in enumerate(said):
        for name, part in output._asdict().items():
            np.testing.assert_array_equal(getattr(found, name)[:, step], part, err_msg=name)
    assert (ours.state.table == other.state.table).all()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_any_rule_reports_the_logprobs_of_plain_decoding_for_its_tokens(rule: Rule, mode: LogprobsMode) -> None:
    """Each row is sampled alone too, and asked for the token that the run has there."""
    rng, rows, steps = np.random.default_rng(5), len(FEATURES), 3
    logits = rng.normal(0, 5, (rows * (steps + 1), V)).astype(np.float32)
    ours = admitted(mode)
    drafts = logits.reshape(rows, steps + 1, V)[:, :steps].argmax(axis=2).astype(np.int32)
    proposal = Proposal(drafts, np.full(rows, ProposalKind.ONE_HOT, np.uint8))
    found = ours.verify(logits, range(1, rows + 1), proposal, VerifyRules(rule=rule))
    assert (found.counts > 1).sum() >= 3
    for row, (slot, features) in enumerate(enumerate(FEATURES.values(), start=1)):
        for step in range(found.counts[row]):
            alone = Sampler(num_slots=2, vocab_size=V, logprobs_mode=mode)
            token = int(found.tokens[row, step])
            params = SamplingParams(max_tokens=40, logprobs=3, logprob_token_ids=(token,), **features)
            alone.admit(1, params, (3, 5, 7), seed=slot, output_ids=found.tokens[row, :step])
            one: Any = alone.sample(logits[row * (steps + 1) + step][None], [1])
            assert found.logprobs is not None and found.top_ids is not None
            assert abs(found.logprobs[row, step] - one.chosen_logprobs[0, 0]) <= 2e-5
            assert found.top_ids[row, step].tolist() == one.top_ids[0].tolist()


def test_state_moves_by_the_accepted_tokens_alone() -> None:
    ours, other = admitted(), admitted()
    rows, steps = len(FEATURES), 4
    said: dict[int, list[int]] = {slot: [] for slot in range(1, rows + 1)}
    for turn in range(4):
        rng = np.random.default_rng(turn)
        logits = rng.normal(0, 2, (rows * (steps + 1), V)).astype(np.float32)
        drafts = logits.reshape(rows, steps + 1, V)[:, :steps].argmax(axis=2).astype(np.int32)
        drafts[turn, 1], drafts[turn + 1, 0] = V + 3, -1  # of no vocabulary, and of no run
        proposal = Proposal(drafts, np.full(rows, ProposalKind.ONE_HOT, np.uint8))
        found = ours.verify(logits, range(1, rows + 1), proposal, VerifyRules(rule="standard"))
        for slot in range(1, rows + 1):
            emitted = found.tokens[slot - 1, : found.counts[slot - 1]]
            assert (emitted >= 0).all() and (emitted < V).all()
            said[slot] += emitted.tolist()
            other.admit(slot, params_of(slot), (3, 5, 7), seed=slot, output_ids=said[slot])
    np.testing.assert_array_equal(ours.state.position, other.state.position)
    np.testing.assert_array_equal(ours.state.last_tokens, other.state.last_tokens)
    for slot in range(1, rows + 1):
        one, two = (dict(zip(*x.state.overlay(slot)[:2], strict=True)) for x in (ours, other))
        assert one == two


def params_of(slot: int) -> SamplingParams:
    features = list(FEATURES.values())[slot - 1]
    return SamplingParams(max_tokens=40, logprobs=3, logprob_token_ids=(5, 1, V - 1), **features)


def verify_one(
    drafts: list[int],
    q: Callable[[int], tuple[list[int], list[float]]],
    p: list[float],
    rule: Rule = "standard",
    seed: int = 0,
) -> VerifyOutput:
    """One row of a small vocabulary with probabilities `p` at every position."""
    sampler = Sampler(num_slots=2, vocab_size=len(p))
    sampler.admit(1, SamplingParams(), [], seed=seed)
    q_ids = np.full((1, len(drafts), PROPOSAL_IDS), -1, np.int32)
    q_probs = np.zeros((1, len(drafts), PROPOSAL_IDS), np.float32)
    for step in range(len(drafts)):
        ids, probs = q(step)
        q_ids[0, step, : len(ids)], q_probs[0, step, : len(ids)] = ids, probs
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(np.array(p, np.float32)), (len(drafts) + 1, 1))
    proposal = Proposal(np.array([drafts], np.int32), np.array([ProposalKind.SPARSE], np.uint8), q_ids, q_probs)
    return sampler.verify(logits, [1], proposal, VerifyRules(rule=rule))


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_draft_that_its_own_proposal_does_not_have_is_rejected_and_flagged(rule: Rule) -> None:
    for seed in range(20):
        found = verify_one([1], lambda step: ([0, 2], [0.5, 0.5]), [0.2, 0.6, 0.2], rule, seed)
        assert found.counts.tolist() == [1] and found.flags[0, 0] == RowFlag.BAD_PROPOSAL
        assert found.tokens[0, 0] == 1  # all that is left of p behind q


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_draft_of_no_vocabulary_is_rejected_and_flagged(rule: Rule) -> None:
    found = verify_one([99, 1], lambda step: ([0, 99], [0.5, 0.5]), [0.4, 0.6], rule)
    assert found.counts.tolist() == [1] and found.flags[0, 0] == RowFlag.BAD_PROPOSAL


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_proposal_equal_to_the_target_is_accepted_and_one_apart_never(rule: Rule) -> None:
    p = [0.25, 0.25, 0.5, 0]
    for seed in range(40):
        assert verify_one([2, 0, 1], lambda step: ([0, 1, 2], p[:3]), p, rule, seed).counts.tolist() == [4]
        found = verify_one([3, 3], lambda step: ([3], [1.0]), p, rule, seed)
        assert found.counts.tolist() == [1] and found.tokens[0, 0] in (0, 1, 2)


def test_residual_without_weight_is_replaced_by_the_target_and_flagged() -> None:
    """q above p everywhere, which no proposal of sum 1 has."""
    for seed in range(200):
        found = verify_one([0], lambda step: ([0, 1], [0.9, 0.9]), [0.5, 0.5], seed=seed)
        if found.counts[0] == 1:
            assert found.flags[0, 0] == RowFlag.ZERO_RESIDUAL and found.tokens[0, 0] in (0, 1)
            return
    raise AssertionError("nothing was rejected")


def test_row_without_a_finite_logit_ends_the_run_without_a_token() -> None:
    sampler = Sampler(num_slots=2, vocab_size=3)
    sampler.admit(1, SamplingParams(), [], seed=0)
    logits = np.array([[0, 40, 0], [-np.inf, -np.inf, np.nan], [0, 0, 0]], np.float32)
    proposal = Proposal(np.array([[1, 1]], np.int32), np.array([1], np.uint8))
    for rule in ("strict", "standard", "block"):
        found = sampler.verify(logits, [1], proposal, VerifyRules(rule=rule))
        assert found.tokens[0].tolist() == [1, INVALID_TOKEN, INVALID_TOKEN] and found.counts[0] == 2
        assert found.flags[0].tolist() == [0, RowFlag.BAD_VALUE | RowFlag.NO_TOKEN, 0]


def test_bad_values_behind_the_end_of_a_run_are_not_reported() -> None:
    sampler = Sampler(num_slots=2, vocab_size=3)
    sampler.admit(1, SamplingParams(temperature=0), [], seed=0)
    logits = np.array([[0, 9, 0], [np.nan, 0, 0]], np.float32)
    found = sampler.verify(logits, [1], Proposal(np.array([[0]], np.int32), np.array([1], np.uint8)))
    assert found.tokens.tolist() == [[1, -1]] and found.flags.tolist() == [[0, 0]]


def test_synthetic_rates_are_what_is_accepted() -> None:
    rows, case = 400, wide("plain")
    rules = VerifyRules(rule="synthetic", synthetic=(0.9, 0.5, 0.0))
    spoken = speculate(case, rows=rows, length=1, steps=3, drafter="dense", rules=rules)
    counts = spoken.runs[0][1]
    assert counts.max() == 3
    assert (counts > 1).mean() == pytest.approx(0.9, abs=0.06)
    assert (counts > 2).mean() == pytest.approx(0.45, abs=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_is_verified_alone_as_among_others(rule: Rule) -> None:
    """Permuted rows, other slots, neighbours of other kinds and another padding of the runs: the same bits."""
    rng, rows, steps = np.random.default_rng(8), len(FEATURES), 3
    logits = rng.normal(0, 2, (rows, steps + 1, V)).astype(np.float32)
    drafts = logits[:, :steps].argmax(axis=2).astype(np.int32)
    kind = np.full(rows, ProposalKind.ONE_HOT, np.uint8)
    together = admitted().verify(
        logits.reshape(-1, V), range(1, rows + 1), Proposal(drafts, kind), VerifyRules(rule=rule)
    )
    order = rng.permutation(rows)
    permuted = admitted().verify(
        logits[order].reshape(-1, V), order + 1, Proposal(drafts[order], kind), VerifyRules(rule=rule)
    )
    for name, part in permuted._asdict().items():
        assert part.tobytes() == getattr(together, name)[order].tobytes(), name
    for row in range(rows):
        longer = np.concatenate([logits[row], np.zeros((2, V), np.float32)])
        padded = np.append(drafts[row], [-1, 7])[None].astype(np.int32)
        alone = admitted().verify(longer, [row + 1], Proposal(padded, kind[:1]), VerifyRules(rule=rule))
        assert alone.tokens[0, : steps + 1].tobytes() == together.tokens[row].tobytes()
        assert alone.logprobs is not None and together.logprobs is not None
        assert alone.logprobs[0, : steps + 1].tobytes() == together.logprobs[row].tobytes()


def test_proposals_of_tensors_and_of_half_precision_are_read_as_arrays_are() -> None:
    case = chain(40, 2)
    samplers = [Sampler(num_slots=2, vocab_size=40) for _ in range(2)]
    for sampler in samplers:
        sampler.admit(1, case.params, [], seed=4)
    q_logits = torch.from_numpy(case.drafter_VV[None, :2]).to(torch.bfloat16)
    ids, kind = torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([3], dtype=torch.uint8)
    logits = torch.from_numpy(case.target_VV[:3]).to(torch.bfloat16)
    given = Proposal(ids, kind, q_logits=q_logits)
    arrays = Proposal(ids.numpy(), kind.numpy(), q_logits=q_logits.float().numpy())
    one = samplers[0].verify(logits, [1], given)
    other = samplers[1].verify(logits.float().numpy(), [1], arrays)
    assert one.tokens.tobytes() == other.tokens.tobytes()


def test_arrays_of_other_shapes_are_refused_by_name() -> None:
    sampler = Sampler(num_slots=3, vocab_size=4)
    good = Proposal(np.zeros((2, 3), np.int32), np.ones(2, np.uint8))
    with pytest.raises(ValueError, match=r"got logits \(7, 4\), expected \(8, 4\)"):
        sampler.verify(np.zeros((7, 4), np.float32), [1, 2], good)
    rows = np.zeros((8, 4), np.float32)
    with pytest.raises(ValueError, match=r"got draft_ids \(3, 3\), expected \(2, K\) with K at most 8"):
        sampler.verify(rows, [1, 2], good._replace(draft_ids=np.zeros((3, 3), np.int32)))
    with pytest.raises(ValueError, match=r"got kind \(1,\), expected \(2,\)"):
        sampler.verify(rows, [1, 2], good._replace(kind=np.ones(1, np.uint8)))
    with pytest.raises(ValueError, match=r"got q_logits \(2, 3, 5\), expected \(2, 3, 4\)"):
        sampler.verify(rows, [1, 2], good._replace(q_logits=np.zeros((2, 3, 5))))
    with pytest.raises(ValueError, match="`q_ids` and `q_probs` must be given together"):
        sampler.verify(rows, [1, 2], good._replace(q_ids=np.zeros((2, 3, 64), np.int32)))


def test_rules_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"`rule` must be one of strict, standard, block, synthetic\. Given"):
        VerifyRules(rule="typical")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`synthetic` must be rates in \[0, 1\]"):
        VerifyRules(synthetic=(1.1,))
    with pytest.raises(ValueError, match="`synthetic` must give a rate for each position"):
        VerifyRules(rule="synthetic")


@pytest.mark.parametrize("requests", [0, 1, 3])
@pytest.mark.parametrize(("n_top", "n_chosen"), [(None, 0), (0, 0), (2, 0), (0, 3)])
def test_words_of_an_output_are_found_again(requests: int, n_top: int | None, n_chosen: int) -> None:
    made = VerifyWords.empty(requests, 2, n_top, n_chosen, torch.device("cpu"))
    made.words.copy_(torch.arange(len(made.words)))
    output = made.split()
    assert output.tokens.shape == (requests, 3) and output.counts.shape == (requests,)
    again = VerifyWords.of(output)
    assert torch.equal(again.words, made.words)
    copied = again.on(again.words.clone()).split()
    for own, other in zip(output, copied, strict=True):
        assert (own is None) == (other is None)
        assert own is None or torch.equal(own.view(torch.int32), other.view(torch.int32))


def test_output_and_its_rows_are_views_of_each_other() -> None:
    six = np.arange(6)
    rows = SampleOutput(six, six, six, np.arange(12).reshape(6, 2), None, None, six)
    output = VerifyOutput.of(rows, np.ones(2, np.int32), 2)
    assert output.top_ids is not None and output.top_ids.shape == (2, 3, 2) and output.top_logprobs is None
    assert np.shares_memory(output.rows().tokens, rows.tokens)
