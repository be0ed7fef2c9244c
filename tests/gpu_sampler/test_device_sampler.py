"""The torch sampler: its tokens against a slow computation of the same noise, its routes, its isolation of rows.

The same tests run on CUDA with `-m gpu`. Its law is tested in test_law.py, on the CPU.
"""

import math

import numpy as np
import pytest
import torch

from gpu_sampler import device_draws
from gpu_sampler.device_draws import first_candidates, read
from gpu_sampler.device_noise import RowNoise
from gpu_sampler.device_sampler import device_branch
from gpu_sampler.output import RowFlag
from gpu_sampler.params import SamplingParams
from gpu_sampler.reference import select
from gpu_sampler.sampler import Sampler
from gpu_sampler.testing.cases import CASES, MIXED, coarse_logits
from gpu_sampler.testing.draws import (
    LAW_ALPHA,
    DrawRow,
    LawCase,
    check,
    device_plan,
    reference_draws,
    rows_of,
    torch_draws,
    torch_sample,
)
from gpu_sampler.testing.law import expected_logprobs, total_order
from gpu_sampler.testing.slow import slow_token

ON = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SEEDS = (0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF)


@ON
@pytest.mark.parametrize("size", [1, 3, 17, 111, 128, 129, 700])
def test_tokens_are_those_of_the_slow_computation(size: int, device: str) -> None:
    rows = []
    for i in range(48 if size < 700 else 24):
        logits_V = coarse_logits(size, i, 0.3 if i % 2 else 1.5)
        case = LawCase(logits_V=logits_V, params=MIXED[i % len(MIXED)], outputs=(0,) * (i % 5))
        rows.append(DrawRow(case, SEEDS[i % len(SEEDS)] ^ i, i % 3))
    tokens = torch_draws(rows, 1, device)[:, 0]
    assert tokens.tolist() == [slow_token(row) for row in rows]


@ON
@pytest.mark.parametrize("size", [40, 700])
def test_tokens_are_those_of_the_reference_sampler(size: int, device: str) -> None:
    """Two best perturbed values within 1e-4 would excuse a difference; one in some ten thousand rows has them."""
    rows = []
    for i, seed in enumerate(np.random.default_rng(size).integers(0, 2**64, 1000, np.uint64, endpoint=False)):
        logits_V = coarse_logits(size, i, 0.3 if i % 2 else 1.5)
        rows.append(DrawRow(LawCase(logits_V=logits_V, params=MIXED[i % len(MIXED)]), int(seed), i % 3))
    differ = torch_draws(rows, 2, device) != reference_draws(rows, 2)
    assert differ.sum() <= 2


@ON
def test_sampler_with_the_torch_backend_draws_what_the_numpy_backend_draws(device: str) -> None:
    """Rows of every kind in one batch, those that need the reference among them, for three steps."""
    rows = [case for name, case in CASES.items() if len(case.logits_V) == 700 or "group" in name]
    rows += [LawCase(logits_V=coarse_logits(700, i), params=params) for i, params in enumerate(MIXED)]
    width = max(len(case.logits_V) for case in rows)
    logits = torch.full((len(rows), width), -math.inf)
    for i, case in enumerate(rows):
        logits[i, : len(case.logits_V)] = torch.from_numpy(case.logits_V)
    drawn = []
    for backend, where in (("numpy", "cpu"), ("torch", device)):
        sampler = Sampler(num_slots=len(rows) + 1, vocab_size=width, device=where, backend=backend)  # type: ignore[arg-type]
        for slot, case in enumerate(rows, start=1):
            sampler.admit(slot, case.params, case.prompt, seed=99 * slot, branch=slot % 3, output_ids=case.outputs)
        slots, there = np.arange(1, len(rows) + 1), logits.to(where)
        drawn.append([sampler.fetch(sampler.sample(there, slots)).result().tokens.tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]


@ON
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 17, 128, 301, 32003])
def test_greedy_takes_the_lowest_id_of_the_largest_logits(size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = (torch.randn(7, 2 * size, generator=generator) * 4).round().to(dtype) / 4
    logits = wide.to(device)[:, :size]  # rows are not contiguous
    sampled = torch_sample([SamplingParams(temperature=0.0)] * 7, logits)
    values = logits.cpu().float()
    expected = [int((row == row.max()).nonzero()[0]) for row in values]
    assert sampled.output.tokens.tolist() == expected
    assert not sampled.unresolved.any()
    mixed = torch_sample([SamplingParams(temperature=0.0)] * 6 + [SamplingParams()], logits)
    assert mixed.output.tokens.tolist()[:6] == expected[:6]


def lone_rows_agree(device: str) -> bool:
    """Whether 16 rows of every kind draw the same alone, together and in the opposite order."""
    rows = [
        DrawRow(LawCase(logits_V=coarse_logits(300, i), params=MIXED[i % 8]), 2**60 + 77 * i, i % 2) for i in range(16)
    ]
    together = torch_draws(rows, 3, device)
    alone = np.concatenate([torch_draws([row], 3, device) for row in rows])
    backwards = torch_draws(rows[::-1], 3, device)[::-1]
    return bool((together == alone).all() and (together == backwards).all())


@ON
def test_row_does_not_depend_on_its_neighbours_slot_or_place(device: str) -> None:
    assert lone_rows_agree(device)


def test_noise_keyed_by_the_place_in_the_batch_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RowNoise.__init__

    def keyed_by_place(
        self: RowNoise, seeds_R: torch.Tensor, positions_R: torch.Tensor, branches_R: torch.Tensor
    ) -> None:
        right(self, seeds_R + torch.arange(len(seeds_R)), positions_R, branches_R)

    monkeypatch.setattr(RowNoise, "__init__", keyed_by_place)
    assert not lone_rows_agree("cpu")


@ON
@pytest.mark.parametrize("params", MIXED, ids=lambda params: device_branch(params))
def test_values_that_are_no_numbers_flag_their_row_and_no_other(params: SamplingParams, device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(300, i) for i in range(5)])).to(device)
    clean = torch_sample([params] * 5, logits)
    logits[1, 7], logits[2, 299], logits[3] = math.nan, math.inf, -math.inf
    # one plain row more, so that greedy rows are tested in company; alone they are below
    dirty = torch_sample([params] * 5 + [SamplingParams()], torch.cat([logits, logits[:1]]))
    bad, none = int(RowFlag.BAD_VALUE), int(RowFlag.NO_TOKEN)
    assert (dirty.output.flags & (bad | none)).tolist() == [0, bad, bad, none, 0, 0]
    assert dirty.output.tokens[[0, 4]].tolist() == clean.output.tokens[[0, 4]].tolist()
    assert int(dirty.output.tokens[3]) == -1
    assert not dirty.unresolved.any()
    removed = logits.clone()
    removed[1, 7] = removed[2, 299] = -math.inf
    assert dirty.output.tokens[:3].tolist() == torch_sample([params] * 5, removed).output.tokens[:3].tolist()


@ON
def test_greedy_batch_leaves_rows_with_bad_values_to_the_reference(device: str) -> None:
    logits = torch.zeros(4, 200, device=device)
    logits[0, 150], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    sampled = torch_sample([SamplingParams(temperature=0.0)] * 4, logits)
    assert sampled.unresolved.tolist() == [True, True, False, False]
    assert sampled.output.tokens.tolist() == [-1, -1, -1, 0]
    bad, none = int(RowFlag.BAD_VALUE), int(RowFlag.NO_TOKEN)
    assert sampled.output.flags.tolist() == [bad, bad, none, 0]


@ON
@pytest.mark.parametrize("count", [1, 20, 64, 256])
def test_groups_with_the_largest_maxima_hold_the_first_tokens(count: int, device: str) -> None:
    rng = np.random.default_rng(count)
    rows = [
        rng.normal(size=1200),
        np.round(rng.normal(size=1200)),  # ties in every group
        np.zeros(1200),
        np.repeat(rng.normal(size=60), 20),
        np.where(np.arange(1200) < 300, 5.0, rng.normal(size=1200)),
        np.where(np.arange(1200) % 7 == 0, 0.0, -np.inf),
        np.where(np.arange(1200) == 1199, -0.0, 0.0),
    ]
    logits = torch.from_numpy(np.stack(rows).astype(np.float32)).to(device)
    found = first_candidates(read(logits), count)
    for i, row in enumerate(rows):
        order = total_order(row.astype(np.float32).tolist())[:count]
        assert found.ids_RC[i, : len(order)].tolist() == order
        assert found.values_RC[i, : len(order)].tolist() == row[order].astype(np.float32).tolist()


@ON
def test_bucket_of_candidates_does_not_change_a_token(device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i) for i in range(40)])).to(device)
    params = [SamplingParams(top_k=k) for k in range(1, 41)]
    small, large = torch_sample(params, logits), torch_sample(params, logits, n_top=100)
    assert small.output.tokens.tolist() == large.output.tokens.tolist()


@ON
def test_wide_nucleus_is_left_unresolved_where_the_host_may_not_wait(device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i, 0.3) for i in range(3)])).to(device)
    params = [SamplingParams(top_p=0.9), SamplingParams(), SamplingParams(top_p=0.1)]
    waited, not_waited = torch_sample(params, logits), torch_sample(params, logits, wait=False)
    assert (waited.output.flags & int(RowFlag.REJECTION) != 0).tolist() == [True, False, False]
    assert not waited.unresolved.any()
    assert not_waited.unresolved.tolist() == [True, False, False]
    assert not_waited.output.tokens.tolist() == [-1, *waited.output.tokens.tolist()[1:]]


@ON
@pytest.mark.parametrize("at_once", [1, 5])
def test_number_of_rounds_tried_at_once_does_not_change_a_token(
    at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(700, i, 0.2) for i in range(20)])).to(device)
    params = [SamplingParams(top_p=0.45)] * 20
    expected = torch_sample(params, logits)
    assert (expected.output.flags & int(RowFlag.REJECTION)).bool().any()
    monkeypatch.setattr(device_draws, "DRAWS_AT_ONCE", at_once)
    assert torch_sample(params, logits).output.tokens.tolist() == expected.output.tokens.tolist()


@ON
def test_row_that_no_round_accepts_is_drawn_from_its_listed_nucleus(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_draws, "MAX_DRAWS", 0)
    monkeypatch.setattr(select, "MOST_DRAWS", 0)
    case = LawCase(logits_V=coarse_logits(700, 1, 0.2), params=SamplingParams(top_p=0.9))
    sampled = torch_sample([case.params] * 2, torch.from_numpy(np.stack([case.logits_V] * 2)).to(device))
    assert sampled.output.flags.tolist() == [int(RowFlag.REJECTION | RowFlag.NUCLEUS_SCAN)] * 2
    assert not sampled.unresolved.any()
    assert check(case, lambda rows, steps: torch_draws(rows, steps, device)).p_value > LAW_ALPHA
    rows = rows_of(case, 50)
    np.testing.assert_array_equal(torch_draws(rows, 2, device), reference_draws(rows, 2))


@ON
@pytest.mark.parametrize("size", [17, 300])
def test_logprobs_ranks_and_first_tokens_are_those_of_the_raw_logits(size: int, device: str) -> None:
    logits = torch.from_numpy(np.stack([coarse_logits(size, i) for i in range(8)])).to(device)
    chosen = torch.tensor([[0, size - 1, size, -1, 2**31 - 1, 3, 3]] * 8, device=device)
    output = torch_sample(MIXED, logits, n_top=5, chosen_RL=chosen).output
    for i in range(8):
        expected = expected_logprobs(logits[i].cpu().numpy(), MIXED[i], "raw_logprobs")
        token = int(output.tokens[i])
        assert output.logprobs is not None and output.ranks is not None and output.chosen_logprobs is not None
        assert output.top_ids is not None and output.top_logprobs is not None
        assert float(output.logprobs[i]) == pytest.approx(expected.logprobs[token], abs=2e-5)
        assert expected.order[int(output.ranks[i]) - 1] == token
        assert output.top_ids[i].tolist() == expected.order[:5]
        np.testing.assert_allclose(output.top_logprobs[i].cpu(), expected.logprobs[expected.order[:5]], atol=2e-5)
        wanted = [expected.logprobs[t] if 0 <= t < size else -np.inf for t in chosen[i].tolist()]
        np.testing.assert_allclose(output.chosen_logprobs[i].cpu(), wanted, atol=2e-5)
        if token in expected.order[:5]:  # the same float wherever a token's number appears
            assert float(output.top_logprobs[i, expected.order.index(token)]) == float(output.logprobs[i])


def test_branch_is_a_function_of_the_parameters() -> None:
    assert [device_branch(params) for params in MIXED] == [
        *("greedy", "plain", "candidates", "nucleus", "plain", "candidates", "nucleus", "plain")
    ]
    for other in (
        SamplingParams(logit_bias=((1, 1.0),)),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(bad_words_ids=((1,),)),
        SamplingParams(min_tokens=1, stop_token_ids=(2,)),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=257),
    ):
        assert device_branch(other) is None
    with pytest.raises(ValueError, match="row 0 needs the reference"):
        device_plan([SamplingParams(min_p=0.1)])
