"""Sampler, one call a step: its output's shapes and types, its plan, its counts, what it refuses and reports."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.output import RowFlag, SampleOutput
from gpu_sampler.sampler import BRANCHES, LogprobsMode, Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from tests.support.distribution import expected_logprobs

V = 111
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")
ALL = tuple(range(V))
ROWS = (
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(logprob_token_ids=(3, 110, 3)),
    SamplingParams(top_k=5, logprobs=20),
    SamplingParams(top_p=0.8, logprobs=0),
    SamplingParams(),
)


def logits(rows: int, size: int = V, seed: int = 0) -> npt.NDArray[np.float32]:
    drawn = np.random.default_rng([rows, size, seed]).normal(0, 2, (rows, size))
    return ((drawn * 8).round() / 8).astype(np.float32)  # exact in float16 and bfloat16


def sampler_of(*params: SamplingParams, mode: LogprobsMode = "raw_logprobs", size: int = V) -> Sampler:
    sampler = Sampler(num_slots=len(params) + 1, vocab_size=size, logprobs_mode=mode)
    for slot, one in enumerate(params, start=1):
        sampler.admit(slot, one, [3, 4], seed=slot)
    return sampler


def same(a: SampleOutput, b: SampleOutput) -> bool:
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True))


def test_output_has_the_shapes_and_types_that_its_description_promises() -> None:
    found: Any = sampler_of(*ROWS).sample(logits(5), range(1, 6))
    shapes = [(part.dtype.name, part.shape) for part in found]
    assert shapes == [
        ("int32", (5,)),
        ("float32", (5,)),
        ("int32", (5,)),
        ("int32", (5, 20)),
        ("float32", (5, 20)),
        ("float32", (5, 3)),
        ("uint32", (5,)),
    ]
    assert (found.top_ids[[1, 3, 4]] == INVALID_TOKEN).all() and (found.top_ids[0, 2:] == INVALID_TOKEN).all()
    assert (found.top_logprobs[0, 2:] == -np.inf).all() and (found.chosen_logprobs[[0, 2, 3, 4]] == -np.inf).all()
    assert found.chosen_logprobs[1, 0] == found.chosen_logprobs[1, 2] > -np.inf
    assert found.logprobs[4] == -np.inf and found.ranks[4] == 0  # it did not ask
    assert (found.ranks[:4] >= 1).all()


def test_rows_that_ask_for_no_logprobs_are_given_none() -> None:
    found = sampler_of(SamplingParams(), SamplingParams(temperature=0)).sample(logits(2), [2, 1])
    assert found[1:6] == (None,) * 5
    assert Sampler(num_slots=1, vocab_size=V).sample(logits(2), [0, 0]).tokens.tolist() == logits(2).argmax(1).tolist()


def test_no_rows_are_no_fault() -> None:
    found = sampler_of(*ROWS).sample(np.empty((0, V), np.float32), [])
    assert found.tokens.shape == found.flags.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["dense", "columns", "rows", "transposed"])
def test_logits_of_any_float_type_and_stride_give_the_same_bits(dtype: torch.dtype, layout: str) -> None:
    z = torch.from_numpy(logits(5)).to(dtype)
    given = {
        "dense": z,
        "columns": torch.cat([torch.full((5, 7), torch.nan, dtype=dtype), z, z], 1)[:, 7 : 7 + V],
        "rows": torch.stack([z, torch.full_like(z, torch.nan)], 1).flatten(0, 1)[::2],
        "transposed": z.T.contiguous().T,
    }[layout]
    before = given.clone()
    found = sampler_of(*ROWS).sample(given, range(1, 6))
    assert same(found, sampler_of(*ROWS).sample(logits(5), range(1, 6)))
    assert torch.equal(given, before)


def test_logits_and_their_guard_rows_are_left_alone_by_rows_that_change_theirs() -> None:
    buffer = np.full((7, V), np.float32(12345.0))
    buffer[1:6] = logits(5)
    before = buffer.copy()
    edges = SamplingParams(
        logit_bias=((0, 1.0), (V - 1, -1.0)),
        bad_words_ids=((0,), (V - 1,)),
        stop_token_ids=(0, V - 1),
        min_tokens=3,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        allowed_token_ids=(0, 5, V - 1),
        logprob_token_ids=(0, V - 1),
        logprobs=3,
    )
    for mode in MODES:
        sampler = sampler_of(*[edges] * 5, mode=mode)
        for _ in range(3):
            found = sampler.sample(buffer[1:6], range(1, 6))
            assert (found.tokens == 5).all()  # 0 and V - 1 are banned
        np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize("shape", [(2, V), (1, V + 1), (1, V - 1), (V,), (1, 1, V), (0, V)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"expected \(1, {V}\)"):
        sampler_of(*ROWS).sample(np.zeros(shape, np.float32), [1])


@pytest.mark.parametrize("slot", [-1, 6, 2**31 - 1])
def test_slots_that_do_not_exist_are_refused_before_anything_advances(slot: int) -> None:
    sampler = sampler_of(*ROWS)
    with pytest.raises(ValueError, match=r"`slots` must be in \[0, 6\)"):
        sampler.sample(logits(2), [1, slot])
    assert not sampler.state.position.any()


def test_plan_is_a_function_of_each_rows_own_parameters() -> None:
    sampler = sampler_of(*ROWS)
    plan = {name: rows.tolist() for name, rows in sampler.plan_rows([5, 4, 3, 2, 1, 0]).branches}
    assert plan == {"greedy": [4, 5], "plain": [0, 3], "candidates": [2], "nucleus": [1]}
    for slot, name in ((1, "greedy"), (2, "plain"), (3, "candidates"), (4, "nucleus")):
        assert [part[0] for part in sampler.plan_rows([slot]).branches] == [name]
    assert sampler.plan_rows([]).branches == ()
    sampler.release(3)
    assert [part[0] for part in sampler.plan_rows([3]).branches] == ["greedy"]


def test_stats_count_rows_by_branch_and_flags_once_for_each_fetch() -> None:
    sampler = sampler_of(*ROWS)
    assert set(sampler.stats().rows) == set(BRANCHES) and not any(sampler.stats().rows.values())
    assert set(sampler.stats().flags) == {str(flag.name).lower() for flag in RowFlag}
    z = logits(5)
    z[1, 3], z[2] = np.nan, -np.inf
    fetched = sampler.fetch(sampler.sample(z, range(1, 6)))
    assert not any(sampler.stats().flags.values())
    assert fetched.result().flags.tolist() == [0, RowFlag.BAD_VALUE, RowFlag.NO_TOKEN, 0, 0]
    counts = {name: count for name, count in sampler.stats().flags.items() if count}
    assert counts == {"bad_value": 1, "no_token": 1}
    assert sampler.stats().rows == {"greedy": 1, "plain": 2, "candidates": 1, "nucleus": 1, "flashinfer": 0}


def test_positions_advance_with_every_row_and_padding_does_not() -> None:
    sampler = sampler_of(*ROWS)
    sampler.sample(logits(3), [2, 0, 5])
    sampler.sample(logits(3), [2, 0, 0])
    assert sampler.state.position.tolist() == [0, 0, 2, 0, 0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 3, 128, 129, 300])
def test_token_has_one_float_wherever_it_is_reported(mode: LogprobsMode, size: int) -> None:
    top, chosen = min(20, size), tuple(range(min(size, 128)))
    rows = [replace(row, logprobs=top, logprob_token_ids=chosen) for row in ROWS]
    rows.append(replace(rows[0], temperature=2.0, top_p=0.99, presence_penalty=1.0, repetition_penalty=1.5))
    sampler = sampler_of(*rows, mode=mode, size=size)
    for step in range(5):
        found: Any = sampler.sample(logits(6, size, step), range(1, 7))
        for i in range(6):
            token, rank = int(found.tokens[i]), int(found.ranks[i])
            assert np.isfinite(found.logprobs[i])
            if token in chosen:
                assert found.logprobs[i].tobytes() == found.chosen_logprobs[i, token].tobytes()
            if rank <= top:
                assert found.top_ids[i, rank - 1] == token
                assert found.logprobs[i].tobytes() == found.top_logprobs[i, rank - 1].tobytes()
            for token, value in zip(found.top_ids[i], found.top_logprobs[i], strict=True):
                assert token not in chosen or found.chosen_logprobs[i, token].tobytes() == value.tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_reported_logprobs_are_those_of_the_enumeration_and_sum_to_1(mode: LogprobsMode) -> None:
    rows = [replace(row, logprobs=20, logprob_token_ids=ALL) for row in ROWS]
    rows.append(replace(rows[3], min_p=0.01, frequency_penalty=1.0, logit_bias=((9, 4.0),), allowed_token_ids=ALL[::2]))
    z = logits(6)
    found: Any = sampler_of(*rows, mode=mode).sample(z, range(1, 7))
    for i, params in enumerate(rows):
        exact, order = expected_logprobs(z[i], params, mode, [3, 4])
        np.testing.assert_allclose(found.chosen_logprobs[i], exact, atol=2e-5)
        assert np.exp(found.chosen_logprobs[i].astype(np.float64)).sum() == pytest.approx(1, abs=2e-5)
        assert found.top_ids[i].tolist() == (order + [INVALID_TOKEN] * 20)[:20]
        assert order[found.ranks[i] - 1] == found.tokens[i]


def test_processed_logprobs_look_at_the_rows_temperature_and_raw_ones_do_not() -> None:
    z = logits(2)
    z[1] = z[0]
    warm, cold = (SamplingParams(temperature=t, logprob_token_ids=ALL) for t in (2.0, 0.5))
    by_mode: dict[str, Any] = {mode: sampler_of(warm, cold, mode=mode).sample(z, [1, 2]) for mode in MODES}
    raw, processed = by_mode["raw_logprobs"].chosen_logprobs, by_mode["processed_logprobs"].chosen_logprobs
    assert raw[0].tobytes() == raw[1].tobytes()
    assert not np.allclose(processed[0], processed[1], atol=0.1)
    assert by_mode["raw_logprobs"].tokens.tolist() == by_mode["processed_logprobs"].tokens.tolist()


def test_top_n_and_chosen_ids_of_one_row_do_not_change_those_of_another() -> None:
    z = np.repeat(logits(1), 3, 0)
    both, top, ids = (
        SamplingParams(temperature=0, logprobs=7, logprob_token_ids=(4, 4, 110)),
        SamplingParams(temperature=0, logprobs=7),
        SamplingParams(temperature=0, logprob_token_ids=(4, 4, 110)),
    )
    found: Any = sampler_of(both, top, ids).sample(z, [1, 2, 3])
    assert found.top_ids[0].tolist() == found.top_ids[1].tolist()
    assert found.chosen_logprobs[0].tolist() == found.chosen_logprobs[2].tolist()
    assert (found.top_ids[2] == INVALID_TOKEN).all() and (found.chosen_logprobs[1] == -np.inf).all()


@pytest.mark.parametrize("mode", MODES)
def test_every_limit_at_its_bound_in_one_row(mode: LogprobsMode) -> None:
    size = 3001
    params = SamplingParams(
        temperature=2.0,
        top_k=size + 1,
        top_p=1 - 2**-24,
        min_p=1e-9,
        repetition_penalty=10,
        frequency_penalty=-2,
        presence_penalty=2,
        logit_bias=tuple((token, (-100.0, 100.0)[token % 2]) for token in range(1024)),
        allowed_token_ids=tuple(range(1, 2048, 2)),
        bad_words_ids=tuple((token,) * 16 for token in range(64)),
        max_tokens=2**31 - 1,
        min_tokens=2**31 - 1,
        stop_token_ids=tuple(range(128)),
        seed=-(2**63),
        logprobs=20,
        logprob_token_ids=(size - 1,) * 128,
    )
    sampler = sampler_of(params, mode=mode, size=size)
    for _ in range(3):
        found: Any = sampler.sample(logits(1, size), [1])
        assert found.tokens[0] % 2 == 1 and 128 <= found.tokens[0] < 1024 and found.flags[0] == RowFlag.WIDE
        assert np.isfinite(found.logprobs[0])


class Forgetful(Sampler):
    """Planted: keeps its last plan although a slot has changed."""

    def _note(self, slot: int) -> None:
        kept = self._planned
        super()._note(slot)
        self._planned = kept


def stale_plans(sampler: Sampler, seed: int) -> int:
    """Steps whose plan is not what would be planned anew, while slots are admitted, staged and released at random."""
    rng, stale = np.random.default_rng(seed), 0
    kinds = [SamplingParams(temperature=0), SamplingParams(top_p=0.9, logprobs=3), SamplingParams(top_k=2, logprobs=1)]
    used: set[int] = set()
    for _ in range(60):
        slot, move = int(rng.integers(1, 6)), rng.random()
        if move < 0.3:
            sampler.admit(slot, kinds[int(rng.integers(3))], [1, 2], seed=1)
            used.add(slot)
        elif move < 0.4 and slot in used:
            sampler.stage(slot, temperature=float(rng.integers(2)))
        elif move < 0.5:
            sampler.release(slot)
            used.discard(slot)
        slots = np.array(sorted(used), np.int64)
        found, anew = sampler.plan_rows(slots), sampler._plan(slots)
        stale += found[1:] != anew[1:] or str(found.branches) != str(anew.branches)
    return stale


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_kept_only_as_long_as_it_is_what_would_be_planned_anew(seed: int) -> None:
    assert not stale_plans(Sampler(num_slots=6, vocab_size=V), seed)


def test_a_plan_kept_too_long_is_found() -> None:
    assert sum(stale_plans(Forgetful(num_slots=6, vocab_size=V), seed) for seed in range(5))
