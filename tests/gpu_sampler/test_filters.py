"""Which tokens a row keeps and draws: edges of top-k, top-p, min-p and temperature against plain enumeration."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.output import RowFlag
from gpu_sampler.reference import filters as select
from gpu_sampler.reference.filters import nucleus_scan
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from tests.support.distribution import kept_tokens
from tests.support.draws import DrawRow, LawCase, reference_reports
from tests.support.slow import slow_token

Float32s = npt.NDArray[np.float32]
BELOW_1 = 1 - 2**-24
FILTERS: list[dict[str, Any]] = [
    *({"top_k": k} for k in (1, 2, 64, 65, 256, 257, 100_000)),
    *({"top_p": p} for p in (1e-9, 0.5, 0.75, BELOW_1)),
    *({"min_p": p} for p in (1e-9, 0.5, 1.0)),
    {"top_k": 1, "top_p": 1e-9, "min_p": 1.0},
    {"top_k": 100_000, "top_p": BELOW_1, "min_p": 1e-9},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 300, "min_p": 0.2},
    {"top_p": 0.9, "min_p": 0.05},
    {},
]
TEMPERATURES = (0.0, 1e-5, 1.0, 2.0)


def rows() -> dict[str, Float32s]:
    rng = np.random.default_rng(8)
    found = {
        "one token": np.array([-7.0]),
        "two": np.array([1.0, 1.0]),
        "all equal": np.full(129, 0.5),
        "all equal and wide": np.full(640, 0.5),
        "ties at k and p": np.array([2, 1, 1, 3, 1, 1, 0, 1, -1, 1]),
        "one finite": np.where(np.arange(131) == 130, -3e38, -np.inf),
        "blocks of -inf": np.where(np.arange(515) // 64 % 2 == 0, -np.inf, rng.integers(0, 3, 515)),
        "zeros of both signs": np.where(np.arange(300) % 3 == 0, -0.0, 0.0),
        "bf16 ties, V = 300": np.round(rng.normal(0, 2, 300) * 4) / 4,
        "V = 1003": rng.normal(0, 0.5, 1003),
        "peaked": np.concatenate([[30.0], np.zeros(300)]),
        "extremes": np.array([3e38, -3e38, 0, 3e38, -np.inf]),
    }
    return {name: row.astype(np.float32) for name, row in found.items()}


def as_kept(z_V: Float32s, params: SamplingParams) -> select.Row:
    temperature, best = max(params.temperature, 1e-6), float(z_V.max())
    return select.Row(
        z_V, best, temperature, params.top_k, params.top_p, params.min_p, np.uint64(1), 0, 0, np.empty(0, np.int64)
    )


@pytest.mark.parametrize("name", rows())
def test_kept_tokens_are_those_of_the_enumeration(name: str) -> None:
    z_V = rows()[name]
    for filters in FILTERS[:-1]:
        for temperature in TEMPERATURES[1:]:
            params = SamplingParams(temperature=temperature, **filters)
            expected = kept_tokens(z_V.tolist(), params)
            row = as_kept(z_V, params)
            kept, flags = select.keep(row)
            assert (flags == RowFlag.WIDE) is (params.top_k > select.WIDE)
            if kept is None:
                assert len(expected) > select.CANDIDATES and not params.top_k
                kept = nucleus_scan(z_V, temperature, params.top_p, row.log_min_p)
            assert kept.tolist() == expected, params


@pytest.mark.parametrize("name", rows())
def test_tokens_are_those_of_the_slow_computation(name: str) -> None:
    z_V = rows()[name]
    cases = [
        LawCase(logits_V=z_V, params=SamplingParams(temperature=temperature, **filters))
        for filters in FILTERS
        for temperature in TEMPERATURES
    ]
    drawn = [DrawRow(case, 17 + i, i % 3) for i, case in enumerate(cases)]
    found = reference_reports(drawn)
    assert found.tokens.tolist() == [slow_token(row) for row in drawn]
    assert not (found.flags & (RowFlag.BAD_VALUE | RowFlag.NO_TOKEN)).any()


def test_top_k_keeps_exactly_k_under_ties() -> None:
    for k in (1, 2, 127, 128, 129, 299, 300, 301):
        kept, _ = select.keep(as_kept(np.zeros(300, np.float32), SamplingParams(top_k=k)))
        assert kept is not None and kept.tolist() == list(range(min(k, 300)))


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4), (1e-9, 1), (BELOW_1, 4)])
def test_token_stays_iff_the_mass_strictly_before_it_is_below_p(top_p: float, count: int) -> None:
    kept, _ = select.keep(as_kept(np.zeros(4, np.float32), SamplingParams(top_p=top_p)))
    assert kept is not None and kept.tolist() == list(range(count))


def test_min_p_of_1_keeps_what_ties_with_the_best() -> None:
    z_V = np.array([1, 3, 3, -0.0, 3], np.float32)
    kept, _ = select.keep(as_kept(z_V, SamplingParams(min_p=1.0)))
    assert kept is not None and kept.tolist() == [1, 2, 4]


def test_top_p_looks_at_the_renormalised_top_k() -> None:
    z_V = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    kept, _ = select.keep(as_kept(z_V, SamplingParams(top_k=2, top_p=0.57)))
    assert kept is not None and kept.tolist() == [0]  # 0.4 of 0.7 is above 0.57; of the whole row it is not
    kept, _ = select.keep(as_kept(z_V, SamplingParams(top_p=0.57)))
    assert kept is not None and kept.tolist() == [0, 1]


def test_temperature_near_zero_draws_only_among_what_ties_with_the_best() -> None:
    z_V = np.array([1, 3, 0, 3, 3], np.float32)
    rows_ = [DrawRow(LawCase(logits_V=z_V, params=SamplingParams(temperature=1e-5)), seed) for seed in range(200)]
    assert set(reference_reports(rows_).tokens.tolist()) == {1, 3, 4}


def test_greedy_takes_the_lowest_id_among_equals_whatever_the_filters() -> None:
    z_V = np.array([-0.0, -1, 0.0, 0.0], np.float32)
    for filters in FILTERS:
        case = LawCase(logits_V=z_V, params=SamplingParams(temperature=0, **filters))
        assert reference_reports([DrawRow(case, 1)]).tokens.tolist() == [0]


def test_draws_that_never_stop_being_refused_end_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    z_V = np.random.default_rng(1).normal(0, 0.2, 700).astype(np.float32)
    row = as_kept(z_V, SamplingParams(top_p=0.7))
    kept = nucleus_scan(z_V, 1.0, 0.7, -np.inf)
    monkeypatch.setattr(select, "_mass_before", lambda row, weights_V, token: np.inf)
    found = select.draw_by_rejection(row)
    assert found.flags == RowFlag.REJECTION | RowFlag.NUCLEUS_SCAN
    assert found.kept is not None and found.kept.tolist() == kept.tolist()
    assert found.token in kept


@pytest.mark.parametrize("params", [SamplingParams(**filters) for filters in (*FILTERS, {"temperature": 0.0})])
def test_row_without_a_finite_token_gives_no_token(params: SamplingParams) -> None:
    sampler = Sampler(num_slots=2, vocab_size=129)
    sampler.admit(1, params, [], seed=0)
    found = sampler.sample(np.full((1, 129), -np.inf, np.float32), [1])
    assert found.tokens.tolist() == [INVALID_TOKEN] and found.flags.tolist() == [RowFlag.NO_TOKEN]
