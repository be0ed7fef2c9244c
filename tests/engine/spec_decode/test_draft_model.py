"""Drafts before they are verified: who finds them, whose they are, and what a draft model may write."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind, pack
from engine.config import EngineConfig, SpeculationConfig
from engine.requests import GenerateRequest, Int32s
from engine.scheduler.policy import DRAFT_PERIOD, DRAFT_TRIAL, StepPolicy
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_model import DraftModel
from engine.spec_decode.draft_state import DraftState
from engine.spec_decode.ngram import NGram, followers
from engine.spec_decode.proposer import DraftRows
from engine.spec_decode.verify import verify_sequences, write_tokens
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import PROPOSAL_IDS, ProposalKind

CPU = torch.device("cpu")
MakeJob = Callable[..., GenerateRequest]


def ids(*values: int) -> Int32s:
    return np.array(values, np.int32)


def table(rows: int = 5, width: int = 40) -> RequestTable:
    made = RequestTable(rows, width, 300, CPU)
    made.slots[:] = np.arange((rows + 1) * width, dtype=np.int32).reshape(rows + 1, width)
    return made


# N-grams.


@pytest.mark.parametrize(
    ("tokens", "n", "most", "found"),
    [
        (ids(1, 2, 3, 4, 1, 2), 2, 3, [3, 4, 1]),
        (ids(1, 2, 9, 1, 2, 7, 5, 1, 2), 2, 4, [7, 5, 1, 2]),  # the latest place counts
        (ids(1, 2, 3), 2, 4, []),
        (ids(7, 7, 7), 2, 4, [7, 7, 7, 7]),  # the place overlaps the row's end
        (ids(5, 6, 5, 6), 2, 5, [5, 6, 5, 6, 5]),
        (ids(4, 8, 4), 1, 2, [8, 4]),
        (ids(4), 1, 2, []),
        (ids(1, 1), 2, 3, []),
        (ids(1, 2, 1, 2), 2, 0, []),
    ],
)
def test_ngrams_continue_as_the_row_went_on_before(tokens: Int32s, n: int, most: int, found: list[int]) -> None:
    assert followers(tokens, n, most).tolist() == found


def test_ngram_rows_have_as_many_drafts_as_they_may_and_leave_them_behind_their_tokens() -> None:
    rows = table()
    rows.tokens[1, :6] = [1, 2, 3, 4, 1, 2]
    rows.tokens[2, :3] = [9, 8, 7]
    rows.tokens[3, :4] = [5, 6, 5, 6]
    proposer = NGram(rows, SpeculationConfig(method="ngram", num_speculative_tokens=3))
    slots = np.array([3, 1, 2])
    proposal = proposer.propose(DraftRows(slots, np.array([4, 6, 3]), np.array([1, 3, 3])))
    assert proposer.lengths(slots).tolist() == [1, 3, 0]
    assert proposal.draft_ids.tolist() == [[5, -1, -1], [3, 4, 1], [-1, -1, -1]]
    assert proposal.kind.tolist() == [ProposalKind.ONE_HOT, ProposalKind.ONE_HOT, ProposalKind.NONE]
    assert rows.token_table[1, 6:9].tolist() == [3, 4, 1]
    assert rows.token_table[3, 4].item() == 5
    assert proposer.missing(slots) == 0


# Drafts by slot.


def drafted(state: DraftState, slot: int, count: int) -> None:
    """Draft i of the row is 10 slot + i, drawn from a distribution that names the row and the draft."""
    at = np.array([slot])
    state.clear(at)
    for offset in range(count):
        q_ids = torch.full((1, PROPOSAL_IDS), INVALID_TOKEN, dtype=torch.int32)
        q_ids[0, 0] = 10 * slot + offset
        q_probs = torch.zeros((1, PROPOSAL_IDS))
        q_probs[0, 0] = 1 / (10 * slot + offset)
        state.put(at, offset, torch.tensor([10 * slot + offset], dtype=torch.int32), (q_ids, q_probs))


def mismatches(state: DraftState, slots: list[int], counts: list[int]) -> int:
    """Drafts and their distributions that are not the row's own, read in the order of `slots`."""
    proposal = state.of(np.array(slots))
    assert proposal.q_ids is not None and proposal.q_probs is not None
    wrong = 0
    for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        for offset in range(proposal.draft_ids.shape[1]):
            own = 10 * slot + offset if offset < count else INVALID_TOKEN
            wrong += int(proposal.draft_ids[row, offset]) != own
            if offset < count:
                wrong += int(proposal.q_ids[row, offset, 0]) != own
                wrong += abs(float(proposal.q_probs[row, offset, 0]) - 1 / own) > 1e-7
    return wrong


def test_rows_with_two_none_and_one_draft_keep_their_own_distribution_in_any_order_and_number() -> None:
    state = DraftState(6, 4, CPU)
    for slot, count in ((4, 2), (2, 0), (5, 1)):
        drafted(state, slot, count)
    assert mismatches(state, [4, 2, 5], [2, 0, 1]) == 0
    assert mismatches(state, [5, 4, 2], [1, 2, 0]) == 0
    assert mismatches(state, [2, 5], [0, 1]) == 0
    assert mismatches(state, [2], [0]) == 0
    drafted(state, 5, 3)  # the others were skipped in that step
    assert mismatches(state, [5, 2, 4], [3, 0, 2]) == 0


def test_drafts_kept_by_row_of_the_step_are_caught() -> None:
    state = DraftState(6, 4, CPU)
    for slot, count in ((4, 2), (2, 0), (5, 1)):
        drafted(state, slot, count)
    rows = state.of(np.array([4, 2, 5]))
    state.of = lambda slots_B: rows  # type: ignore[method-assign]
    assert mismatches(state, [5, 4, 2], [1, 2, 0]) > 0


def test_a_draft_without_a_distribution_counts_as_certain_and_is_counted() -> None:
    state = DraftState(4, 2, CPU)
    drafted(state, 1, 2)
    assert state.without_q(np.array([1, 2])) == 0
    state.clear(np.array([1]))
    state.put(np.array([1]), 0, torch.tensor([5], dtype=torch.int32), None)
    assert state.without_q(np.array([1, 2])) == 1
    assert state.of(np.array([1])).kind.tolist() == [ProposalKind.ONE_HOT]


def test_a_draft_without_a_distribution_is_counted_though_the_one_behind_it_has_one() -> None:
    state = DraftState(4, 2, CPU)
    ids, q_ids = torch.tensor([5], dtype=torch.int32), torch.zeros((1, PROPOSAL_IDS), dtype=torch.int32)
    state.put(np.array([1]), 0, ids, None)
    state.put(np.array([1]), 1, ids, (q_ids, torch.ones((1, PROPOSAL_IDS)) / PROPOSAL_IDS))
    assert state.without_q(np.array([1, 2])) == 1


# The step.


def test_a_verify_step_reads_tokens_from_the_table_and_repeats_the_last_row_of_short_runs() -> None:
    rows = table()
    for slot in (1, 2, 3):
        rows.token_table[slot, :12] = torch.arange(12, dtype=torch.int32) + 100 * slot
    slots, lengths, drafts = np.array([2, 1, 3]), np.array([4, 7, 2]), np.array([2, 0, 1])
    batch = pack(StepKind.VERIFY, verify_sequences(rows, slots, lengths, drafts), rows.token_table, CPU)
    assert batch.ids.tolist() == [203, 204, 205, 106, 301, 302]
    assert batch.positions.tolist() == [3, 4, 5, 6, 1, 2]
    assert batch.keep_rows.tolist() == [0, 1, 2, 3, 3, 3, 4, 5, 5]
    assert batch.write_slots.tolist() == [*rows.slots[2, 3:6], rows.slots[1, 6], *rows.slots[3, 1:3]]


def test_known_and_unknown_runs_share_a_step() -> None:
    rows = table()
    rows.token_table[1, :5] = torch.tensor([7, 8, 9, 10, 11])
    sequences = [
        ScheduledSequence(0, ids(), ids(1, 2), ids(41, 42), ids()),
        rows.run(1, 2, 5, None, ids(2)),
        ScheduledSequence(0, ids(3), ids(4), ids(43), ids(0)),
        rows.run(1, 0, 1, None, ids()),
    ]
    batch = pack(StepKind.VERIFY, sequences, rows.token_table, CPU, pad_to=9)
    assert batch.ids.tolist() == [41, 42, 9, 10, 11, 43, 7, 0, 0]
    assert batch.keep_rows.tolist() == [4, 5]


def test_emitted_tokens_reach_the_table_and_nothing_is_written_behind_a_row_s_room() -> None:
    rows = table()
    rows.token_table[:] = 77
    tokens = np.array([[1, 2, -1], [3, -1, -1], [4, 5, 6]], np.int32)
    write_tokens(rows, np.array([1, 2, 3]), np.array([5, 39, 8]), np.array([2, 0, 2]), tokens)
    assert rows.token_table[1, 4:9].tolist() == [77, 1, 2, 0, 77]
    assert rows.token_table[2, 38:].tolist() == [77, 3]
    assert rows.token_table[3, 8:12].tolist() == [4, 5, 6, 77]


# Writes of the draft model.


async def shared_writes(make_rig: Any, generate_job: MakeJob) -> int:
    """Drafting writes into slots that the prefix tree owned, over rows that share prompts, answers and turns."""
    rig = make_rig(
        real_sampler=True,
        draft_blur=0.3,
        speculation=SpeculationConfig(method="draft_model", draft="toy", num_speculative_tokens=3),
    )
    found = 0

    def note(kind: StepKind, sequences: Any) -> None:
        nonlocal found
        owned = set()
        stack = list(rig.engine.core.kv_cache.prefix_cache._roots.values())
        while stack:
            node = stack.pop()
            owned |= set(node.slots.tolist())
            stack += node.children.values()
        if kind is not StepKind.PREFILL:
            found += sum(int(slot) in owned for run in sequences for slot in run.write)

    assert rig.draft is not None
    rig.draft.on_forward = note
    prompt = list(range(1, 20))
    first = await rig.run(generate_job(prompt, max_tokens=12, temperature=0.0))
    turn = [*prompt, *first.tokens, 3]
    await rig.together(
        *(generate_job(prompt, max_tokens=9, seed=seed) for seed in range(4)),
        generate_job(turn, max_tokens=9),
        generate_job(turn[:-3], max_tokens=9, n=1),
    )
    assert rig.engine.stats().cached_tokens > 0
    return found


async def test_a_draft_model_never_writes_a_shared_slot(make_rig: Any, generate_job: MakeJob) -> None:
    assert await shared_writes(make_rig, generate_job) == 0


async def test_a_draft_model_that_feeds_shared_tokens_again_is_caught(
    make_rig: Any, generate_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = DraftModel._first

    def careless(self: DraftModel, slots: Any, lengths: Any) -> torch.Tensor:
        requests = [self._table.sequences[slot] for slot in slots.tolist()]
        kept = [request.shared for request in requests if request is not None]
        for request in requests:
            if request is not None:
                request.shared = 0
        logits = honest(self, slots, lengths)
        for request, shared in zip(requests, kept, strict=True):
            if request is not None:
                request.shared = shared
        return logits

    monkeypatch.setattr(DraftModel, "_first", careless)
    assert await shared_writes(make_rig, generate_job) > 0


# Whether to draft at all.


def policy_of(*, adaptive: bool) -> StepPolicy:
    return StepPolicy(EngineConfig(speculation=SpeculationConfig(adaptive=adaptive)), CPU)


def share_drafted(policy: StepPolicy, seconds: Callable[[bool, int], float], steps: int) -> list[bool]:
    """Steps of three rows; drafted ones emit nine tokens; `seconds` of a step by way and number."""
    reported = []
    for step in range(steps):
        drafted = policy.drafts()
        reported.append(drafted)
        policy.decode_ended(drafted, 3, 9 if drafted else 3, seconds(drafted, step))
    return reported


@pytest.mark.parametrize(("factor", "worth"), [(1.5, True), (2.9, True), (3.1, False), (9.0, False)])
def test_drafts_are_made_while_a_step_with_them_takes_less_time_a_token(factor: float, worth: bool) -> None:
    reported = share_drafted(policy_of(adaptive=True), lambda drafted, _: factor if drafted else 1.0, 2 * DRAFT_PERIOD)
    assert reported.count(worth) >= 2 * DRAFT_PERIOD - 2 * DRAFT_TRIAL
    assert reported.count(not worth) == 2 * DRAFT_TRIAL  # both ways are tried again in every period


def test_what_becomes_worth_it_is_noticed_within_a_period() -> None:
    def seconds(drafted: bool, step: int) -> float:
        return (9.0 if step < DRAFT_PERIOD else 1.5) if drafted else 1.0

    reported = share_drafted(policy_of(adaptive=True), seconds, 4 * DRAFT_PERIOD)
    assert not any(reported[2 * DRAFT_TRIAL : DRAFT_PERIOD])
    assert all(reported[3 * DRAFT_PERIOD + 2 * DRAFT_TRIAL :])


def test_without_adaptive_every_step_drafts() -> None:
    assert all(share_drafted(policy_of(adaptive=False), lambda drafted, _: 99.0 if drafted else 1.0, 2 * DRAFT_PERIOD))


async def test_rows_that_must_be_repeatable_keep_their_drafts_while_others_go_without(
    make_rig: Any, generate_job: MakeJob
) -> None:
    spec = SpeculationConfig(
        method="draft_model", draft="toy", adaptive=True, seeded_rejection_sample_method="standard"
    )
    rig = make_rig(real_sampler=True, draft_blur=0.3, speculation=spec)
    rig.engine.core.scheduler.policy.drafts = lambda: False
    free = [chunk async for chunk in rig.engine.generate(generate_job([3, 4], max_tokens=20))]
    assert {len(chunk.tokens) for chunk in free} == {1}
    other = generate_job([3, 4], max_tokens=20)
    seeded = replace(other, params=replace(other.params, seed=other.seed))
    kept = await asyncio.gather(rig.engine.complete(seeded), rig.engine.complete(other))
    assert [chunks[0].drafted > 0 for chunks in kept] == [True, False]
