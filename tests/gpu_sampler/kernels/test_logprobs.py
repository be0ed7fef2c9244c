"""Log-probabilities of rows that nothing is drawn from: tokens, first N and chosen ids against float64 on the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.device_logprobs import MAX_TOP, report
from gpu_sampler.logprobs import chosen_logprobs, token_logprobs, topk_logprobs
from gpu_sampler.output import OutputWords, SampleOutput
from gpu_sampler.sampling_params import SamplingParams
from tests.support.agreement import allowed_error, step_agrees
from tests.support.edges import as_given, pair_of_samplers, values

KINDS = ("smooth", "tied", "flat", "blocks", "one", "none", "nan", "inf", "bad", "all bad", "steep", "zeros")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 0x5EED
Float32s = npt.NDArray[np.float32]
Report = Callable[..., SampleOutput]


def rows_of(size: int, count: int = len(KINDS)) -> Float32s:
    rng = np.random.default_rng(size)
    return np.stack([values(KINDS[row % len(KINDS)], size, rng) for row in range(count)])


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    own, wanted = found.cpu().numpy(), expected.numpy()
    shown = np.isfinite(wanted)
    gap = np.abs(own - wanted, where=shown, out=np.zeros_like(wanted))
    return own.shape == wanted.shape and bool(
        (np.isneginf(own) == np.isneginf(wanted)).all() and (gap[shown] <= allowed_error(wanted[shown])).all()
    )


def tokens_agree(logits: torch.Tensor, tokens: torch.Tensor, by: Report = report) -> bool:
    found: Any = by(logits, tokens_R=tokens.to(logits.device))
    expected, flags, ranks = token_logprobs(logits.cpu(), tokens)
    same = torch.equal(found.ranks.cpu(), ranks) and torch.equal(found.flags.cpu(), flags)
    return same and near(found.logprobs[:, None], expected)


def first_agree(logits: torch.Tensor, n: int, by: Report = report) -> bool:
    found: Any = by(logits, n_top=n)
    ids, logprobs = topk_logprobs(logits.cpu(), n)
    return torch.equal(found.top_ids.cpu(), ids) and near(found.top_logprobs, logprobs)


def chosen_agree(logits: torch.Tensor, ids: torch.Tensor, by: Report = report) -> bool:
    found: Any = by(logits, ids_RC=ids.to(logits.device))
    expected, flags = chosen_logprobs(logits.cpu(), ids)
    return torch.equal(found.flags.cpu(), flags) and near(found.chosen_logprobs, expected)


def some_tokens(rows: Float32s, seed: int = 0) -> torch.Tensor:
    """A token of each row with a finite value; -1 where it has none."""
    rng = np.random.default_rng(seed)
    finite = [np.flatnonzero(np.isfinite(row)) for row in rows]
    return torch.tensor([int(rng.choice(ids)) if len(ids) else -1 for ids in finite])


F32, BF16, F16 = DTYPES
LONG = [
    pytest.param(size, dtype, layout, marks=pytest.mark.gpu)
    for size, dtype in ((129, BF16), (32_003, BF16), (151_936, F32), (151_936, BF16), (262_144, F16))
    for layout in (0, 1)
]


@pytest.mark.parametrize(("size", "dtype", "layout"), [(1, F32, 0), (129, BF16, 1), (1111, F16, 0), *LONG])
def test_token_has_its_logprob_and_rank(device: str, size: int, dtype: torch.dtype, layout: int) -> None:
    rows = rows_of(size)
    assert tokens_agree(list(as_given(rows, dtype, device))[layout], some_tokens(rows))


def test_token_without_probability_has_the_same_rank_on_the_cpu(device: str) -> None:
    logits = torch.tensor([[0.5, -torch.inf, 1.5]], device=device)
    assert tokens_agree(logits, torch.tensor([1]))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("size", "dtype", "layout"), [(1, BF16, 1), (17, F16, 0), (128, F32, 1), (1111, F32, 0), (1111, BF16, 1), *LONG]
)
def test_first_tokens_are_those_of_the_order_and_padding_behind_them(
    device: str, size: int, dtype: torch.dtype, layout: int
) -> None:
    logits = list(as_given(rows_of(size), dtype, device))[layout]
    for n in (0, 20) if layout else (1, MAX_TOP):
        assert first_agree(logits, n)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (17, 0),
        (17, 300),
        (700, 1),
        (700, 128),
        (700, 129),
        *(pytest.param(151_936, n, marks=pytest.mark.gpu) for n in (1, 128, 300)),
    ],
)
def test_chosen_ids_of_any_number_in_any_order_and_twice(device: str, size: int, count: int) -> None:
    rows = rows_of(size)
    ids = torch.from_numpy(np.random.default_rng(count).integers(-3, size + 3, (len(rows), count)))
    assert chosen_agree(torch.from_numpy(rows).to(device), ids)


OUTSIDE = (-1, -2, -(2**31), -(2**31) - 1, -(2**63), 2**31 - 1, 2**31, 2**32, 2**32 + 3, 2**63 - 1)


@pytest.mark.risk("S4")
@pytest.mark.parametrize("size", [3, 700])
def test_ids_out_of_range_are_nothing_and_no_row_beside_is_read(device: str, size: int) -> None:
    """Rows before and after hold values that would show."""
    buffer = torch.full((9, size), 1e30, device=device)
    rows = torch.from_numpy(rows_of(size, 3)).to(device)
    buffer[3:6] = rows
    outside = (*OUTSIDE, size, size + 1, -size)
    assert chosen_agree(buffer[3:6], torch.tensor([[*outside, 0, size - 1]] * 3))
    found: Any = report(buffer[3:4].expand(len(outside), -1), tokens_R=torch.tensor(outside, device=device))
    assert (found.logprobs == -torch.inf).all() and (found.ranks == 0).all()
    assert torch.equal(buffer[3:6].nan_to_num(7), rows.nan_to_num(7)) and (buffer[:3] == 1e30).all()


def test_nothing_is_written_outside_of_the_output(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[torch.Tensor] = []

    def guarded(rows: int, n_top: int | None, n_chosen: int, device: torch.device) -> OutputWords:
        size = len(empty(rows, n_top, n_chosen, device).words)
        buffers.append(torch.full((size + 2048,), POISON, dtype=torch.int32, device=device))
        return OutputWords(buffers[-1][1024:-1024], rows, n_top, n_chosen)

    empty = OutputWords.empty
    monkeypatch.setattr(OutputWords, "empty", guarded)
    logits = torch.from_numpy(rows_of(700)).to(device)
    ids = torch.zeros((len(logits), 130), dtype=torch.int64, device=device)
    report(logits, tokens_R=torch.full((len(logits),), 3, device=device), n_top=5, ids_RC=ids)
    report(logits, n_top=MAX_TOP)
    for buffer in buffers:
        assert (buffer[:1024] == POISON).all() and (buffer[-1024:] == POISON).all()
    given = OutputWords.parts(len(logits), 0, 0)[0]  # the tokens of the first output are those that it was given
    for buffer, unwritten in zip(buffers, (given, 0), strict=True):
        assert not (buffer[1024 + unwritten : -1024] == POISON).any()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("check", ["tokens", "first", "chosen"])
def test_planted_fault_fails_the_same_check(device: str, check: str) -> None:
    rows = rows_of(129)[[0, 1, 10]]
    logits, tokens = torch.from_numpy(rows).to(device), some_tokens(rows)
    ids = torch.arange(129).expand(len(rows), -1)

    def other_row(given: torch.Tensor, **asked: Any) -> SampleOutput:
        return report(given.roll(1, 0), **asked)

    def colder(given: torch.Tensor, **asked: Any) -> SampleOutput:
        return report(given * 1.0001, **asked)

    for fault in (other_row, colder):
        wrong = {
            "tokens": not tokens_agree(logits, tokens, fault),
            "first": not first_agree(logits, 20, fault),
            "chosen": not chosen_agree(logits, ids, fault),
        }
        assert wrong[check], fault


def test_row_has_the_same_bits_alone_and_beside_others(device: str) -> None:
    logits = torch.from_numpy(rows_of(1111)).to(device)
    tokens = some_tokens(logits.cpu().numpy()).to(device)
    ids = torch.arange(140, device=device).expand(len(logits), -1)
    whole: Any = report(logits, tokens_R=tokens, n_top=20, ids_RC=ids)
    for row in (0, 3, 8):
        alone = report(logits[row : row + 1], tokens_R=tokens[row : row + 1], n_top=20, ids_RC=ids[row : row + 1])
        for one, other in zip(alone, whole, strict=True):
            assert torch.equal(one[0].view(-1).view(torch.int32), other[row].view(-1).view(torch.int32))


def test_more_than_256_first_tokens_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"`n` must be in \[0, 256\]. Given: 257."):
        report(torch.zeros((1, 300), device=device), n_top=257)
    assert len(report(torch.zeros((0, 300), device=device), n_top=2).tokens) == 0


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_rows_with_and_without_chosen_ids_stand_beside_each_other(device: str, mode: Any) -> None:
    size = 300
    everything = tuple(np.random.default_rng(1).integers(0, size, 128).tolist())
    asked: list[dict[str, Any]] = [
        {"logprob_token_ids": everything},
        {},
        {"logprob_token_ids": (7,), "logprobs": 3, "top_k": 4},
        {"logprobs": 20},
        {"logprob_token_ids": everything[:65], "logit_bias": ((everything[0], 5.0),), "top_p": 0.5},
        {"temperature": 0, "logprob_token_ids": everything, "allowed_token_ids": everything[::2]},
        {"temperature": 0},
    ]
    ours, reference = pair_of_samplers(len(asked) + 1, size, device, mode)
    for slot, params in enumerate(asked, start=1):
        for sampler in (ours, reference):
            sampler.admit(slot, SamplingParams(**params), [], seed=slot)
    logits = torch.from_numpy(rows_of(size, len(asked))[[0, 1, 0, 1, 0, 1, 2]]).to(device)
    found = step_agrees(ours, reference, logits, range(1, len(asked) + 1))
    assert found.holds, found
