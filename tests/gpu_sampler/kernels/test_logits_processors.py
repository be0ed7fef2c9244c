"""`apply_logits_processors` against its reference: the row that logits and side list make together, bit for bit."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gpu_sampler.kernels import logits_processors as kernel
from gpu_sampler.reference import logits_processors as reference
from gpu_sampler.reference.filters import clean
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state import overlay as wanted
from gpu_sampler.state.device_state import DeviceState
from gpu_sampler.state.host_state import SamplingState
from gpu_sampler.state.layout import Word
from tests.support.states import mixed_state, rough_logits

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # of the interpreter
INF = np.inf
POISON = 7.25
V = 111
Float32s = npt.NDArray[np.float32]
Break = Callable[[DeviceState], None]


class Patched(NamedTuple):
    """Holds what the kernel has left of each row."""

    logits_RV: Float32s
    sides: list[tuple[npt.NDArray[Any], ...]]  # ids, raw, processed
    bad_R: npt.NDArray[np.int32]


def patch(state: SamplingState, device_state: DeviceState, logits_RV: torch.Tensor, slots: list[int]) -> Patched:
    """Everything around what the kernel may write is poisoned, and must be so afterwards."""
    rows, vocab_size = logits_RV.shape
    guarded = torch.full((rows + 1, vocab_size + 5), POISON, dtype=logits_RV.dtype, device=device_state.device)
    guarded[:rows, :vocab_size] = logits_RV.to(device_state.device)
    lengths = torch.full((2, rows + 1), -77, dtype=torch.int32, device=device_state.device)
    for side in (device_state.side_ids, device_state.side_raw, device_state.side_processed):
        side.fill_(-77)
    own = torch.tensor(slots, dtype=torch.int32, device=device_state.device)
    kernel.apply_logits_processors(guarded[:rows, :vocab_size], device_state, own, lengths[0, :rows], lengths[1, :rows])
    side_len, side_bad = lengths.cpu().numpy()
    assert (guarded[rows:] == POISON).all() and (guarded[:, vocab_size:] == POISON).all()
    assert side_len[rows] == side_bad[rows] == -77
    sides, free = [], np.ones(len(device_state.side_ids), bool)
    for row, slot in enumerate(slots):
        at = slice(int(state.overlay_start[slot]), int(state.overlay_start[slot]) + int(side_len[row]))
        assert side_len[row] <= state.overlay_cap[slot] + state.n_stops[slot] + state.n_words[slot]
        free[at] = False
        sides.append(
            tuple(
                x.cpu().numpy()[at] for x in (device_state.side_ids, device_state.side_raw, device_state.side_processed)
            )
        )
    assert all(
        (x.cpu().numpy()[free] == -77).all()
        for x in (device_state.side_ids, device_state.side_raw, device_state.side_processed)
    )
    return Patched(guarded[:rows, :vocab_size].float().cpu().numpy(), sides, side_bad[:rows])


def same_bits(a: Float32s, b: Float32s) -> bool:
    return bool((a.view(np.int32) == b.view(np.int32)).all())


def rows_agree(state: SamplingState, logits_RV: torch.Tensor, slots: list[int], patched: Patched) -> bool:
    """Whether each row, of what is left and its side list, is the row as it was, and the reference's after steps 1 and
    2."""
    given = logits_RV.float().cpu().numpy()
    cleaned, _ = clean(given)
    left_RV, _ = clean(patched.logits_RV)
    for row, slot in enumerate(slots):
        ids, raw, processed = patched.sides[row]
        as_given, as_penalised = left_RV[row].copy(), left_RV[row].copy()
        if slot in state.masks:
            as_penalised[~state.allowed(slot)] = -INF
        np.maximum.at(as_given, ids, raw)
        np.maximum.at(as_penalised, ids, processed)
        once = len(set(ids[raw > -INF].tolist())) == (raw > -INF).sum()
        hidden_bad = bool((~(given[row][ids] < INF)).any())
        if not (
            once
            and (left_RV[row][ids] == -INF).all()
            and same_bits(as_given, cleaned[row])
            and same_bits(as_penalised, reference.apply_logits_processors(cleaned[row], state, slot))
            and hidden_bad == bool(patched.bad_R[row])
        ):
            return False
    return True


def mixed_rows_agree(device: str, seed: int, dtype: torch.dtype, spoil: Break | None = None) -> bool:
    state = mixed_state(seed, 14, V)
    device_state = DeviceState(state, device)
    device_state.apply()
    if spoil is not None:
        spoil(device_state)
    slots = [0, *np.random.default_rng(seed).permutation(np.arange(1, 15)).tolist(), 0]
    logits = torch.from_numpy(rough_logits(np.random.default_rng(seed), len(slots), V)).to(dtype)
    return rows_agree(state, logits, slots, patch(state, device_state, logits, slots))


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_all_features_mixed_are_the_reference_bit_for_bit(device: str, seed: int, dtype: torch.dtype) -> None:
    assert mixed_rows_agree(device, seed, dtype)


def setting(word: int, value: float) -> Break:
    """Makes a fault that is one wrong word of every slot; a float is stored as its bits."""

    def spoil(device_state: DeviceState) -> None:
        table = device_state.table.view(torch.float32) if isinstance(value, float) else device_state.table
        table[1:, word] = value

    return spoil


def shifted_last(device_state: DeviceState) -> None:
    last = device_state.table[:, Word.LAST : Word.LAST + 16]
    last.copy_(last.roll(1, dims=1))


def prompt_taken_for_output(device_state: DeviceState) -> None:
    device_state.entry_counts += (device_state.entry_counts >= 1 << 30).to(torch.int32)


def no_bias(device_state: DeviceState) -> None:
    device_state.entry_bias.zero_()


def entry_missing(device_state: DeviceState) -> None:
    device_state.table[1:, Word.OVERLAY_LEN].sub_(1).clamp_(min=0)


FAULTS: dict[str, Break] = {
    "the mask is forgotten": setting(Word.MASK_ROW, -1),
    "another slot's mask": setting(Word.MASK_ROW, 0),
    "stop ids are forgotten": setting(Word.N_STOPS, 0),
    "stop ids are banned for ever": setting(Word.MIN_TOKENS, 1000),
    "bad words are forgotten": setting(Word.N_WORDS, 0),
    "the last tokens are off by one": shifted_last,
    "no repetition": setting(Word.REPETITION, 1.0),
    "no frequency": setting(Word.FREQUENCY, 0.0),
    "no presence": setting(Word.PRESENCE, 0.0),
    "no bias": no_bias,
    "the prompt is counted": prompt_taken_for_output,
    "one entry is missing": entry_missing,
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_fails_the_same_check(device: str, fault: str) -> None:
    assert not all(mixed_rows_agree(device, seed, torch.float32, FAULTS[fault]) for seed in range(4))


def one_row(device: str, z_V: Float32s, params: SamplingParams, prompt: Any = (), output: Any = ()) -> tuple[bool, Any]:
    state = SamplingState(num_slots=2, vocab_size=len(z_V), overlay_entries=1 << 14)
    state.admit(1, params, prompt, seed=0, output_ids=output)
    device_state = DeviceState(state, device)
    device_state.apply()
    logits = torch.from_numpy(z_V[None])
    patched = patch(state, device_state, logits, [1])
    return rows_agree(state, logits, [1], patched), patched


def test_token_that_is_entry_stop_id_and_end_of_bad_words_is_processed_once(device: str) -> None:
    params = SamplingParams(
        logit_bias=((5, 100.0), (7, 3.0)),
        presence_penalty=1.0,
        min_tokens=9,
        stop_token_ids=(5, 6, 6),
        bad_words_ids=((1, 2, 5), (2, 5), (2, 6), (1, 2, 8), (2, 8), (1, 9), (2, 8)),
        max_tokens=20,
    )
    z_V = np.arange(17, dtype=np.float32)
    agrees, patched = one_row(device, z_V, params, [], [1, 2])
    assert agrees
    found = sorted(zip(*(part.tolist() for part in patched.sides[0]), strict=True))
    # entries 1, 2, 5, 7; stop ids 5, 6; and of the words that match, those that no other ends: they end at 5, 6, 8
    assert found == [(1, 1, 0), (2, 2, 1), *[(5, -INF, -INF)] * 2, (5, 5, -INF), (6, -INF, -INF), (6, 6, -INF),
                     (7, 7, 10), (8, 8, -INF)]  # fmt: skip


def test_two_words_that_match_together_and_end_alike_would_fail_the_same_check(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, z_V = SamplingParams(bad_words_ids=((1, 2, 5), (2, 5)), max_tokens=20), np.ones(17, np.float32)
    assert one_row(device, z_V, params, [], [1, 2])[0]
    monkeypatch.setattr(wanted, "_long_words", lambda words: words)
    assert not one_row(device, z_V, params, [], [1, 2])[0]


@pytest.mark.parametrize("bad", [np.nan, INF])
@pytest.mark.parametrize("token", [5, 6, 8, 7])
def test_bad_value_that_the_patch_hides_is_reported(device: str, bad: float, token: int) -> None:
    params = SamplingParams(
        logit_bias=((5, 1.0),), min_tokens=9, stop_token_ids=(6,), bad_words_ids=((2, 8),), max_tokens=20
    )
    z_V = np.zeros(17, np.float32)
    z_V[token] = bad
    agrees, patched = one_row(device, z_V, params, [], [2])
    assert agrees and patched.bad_R.tolist() == [int(token != 7)]  # one that is left is reported by its reader


@pytest.mark.parametrize("entries", [1023, 1024, 1025, 2100])
def test_overlay_of_more_than_one_block_is_processed_whole(device: str, entries: int) -> None:
    z_V = rough_logits(np.random.default_rng(entries), 1, 2500)[0]
    params = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.3, max_tokens=40)
    prompt = np.random.default_rng(1).permutation(2500)[:entries]
    agrees, patched = one_row(device, z_V, params, prompt, [3, 3, 2499])
    assert agrees and entries <= len(patched.sides[0][0]) <= entries + 2


def test_more_stop_ids_and_bad_words_than_one_block_are_all_banned(device: str) -> None:
    params = SamplingParams(
        min_tokens=9,
        max_tokens=40,
        stop_token_ids=tuple(range(0, 300, 2))[:150],
        bad_words_ids=tuple((1, token) for token in range(1, 250)),
    )
    z_V = np.arange(300, dtype=np.float32)
    agrees, patched = one_row(device, z_V, params, [], [0, 1])
    assert agrees and len(patched.sides[0][0]) == 150 + 249
    agrees, patched = one_row(device, z_V, params, [], [0, 2])
    assert agrees and len(patched.sides[0][0]) == 150


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("length", range(2, 17))
def test_bad_word_of_any_length_is_matched_whole(device: str, length: int) -> None:
    word = tuple(range(3, 3 + length))
    params = SamplingParams(bad_words_ids=(word,), max_tokens=40)
    for output, banned in (([1, *word[:-1]], True), ([*word[1:-1]], False), ([*word[:-2], 2], False)):
        agrees, patched = one_row(device, np.ones(V, np.float32), params, word, output)
        assert agrees and len(patched.sides[0][0]) == int(banned)


def extreme_row() -> tuple[Float32s, SamplingParams]:
    largest = float(np.finfo(np.float32).max)
    z_V = np.array([largest, -largest, 0.0, -0.0, -INF, 1e-45, 1.0, -1.0, 3e-5, 1 / 3], np.float32)
    return z_V, SamplingParams(
        repetition_penalty=1e-30,
        frequency_penalty=-2,
        presence_penalty=-0.3,
        logit_bias=tuple((token, 100 / 3) for token in range(10)),
    )


@pytest.mark.parametrize("repetition", [1e-300, 1e-30, 0.3, 10.0])
def test_no_penalty_makes_nan_or_plus_inf_and_each_is_rounded_once(device: str, repetition: float) -> None:
    z_V, params = extreme_row()
    agrees, patched = one_row(device, z_V, dataclasses.replace(params, repetition_penalty=repetition), range(9))
    assert agrees and (patched.sides[0][2] < INF).all()


def test_arithmetic_in_float32_fails_the_same_check(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in float32 is another function of these rows: the check sees each rounding."""

    def in_float32(z_n: Float32s, overlay: Any, state: SamplingState, slot: int) -> Float32s:
        counts, x = overlay.counts & ((1 << 30) - 1), z_n + overlay.bias
        repetition = state.repetition[slot]
        x = np.where(overlay.counts != 0, np.where(x > 0, x / repetition, x * repetition), x)
        x = x - counts.astype(np.float32) * state.frequency[slot]
        x = x - np.where(counts > 0, state.presence[slot], np.float32(0))
        processed: Float32s = np.minimum(x, np.finfo(np.float32).max, dtype=np.float32)
        return processed

    monkeypatch.setattr(reference, "penalised", in_float32)
    with np.errstate(over="ignore"):
        assert not all(mixed_rows_agree(device, seed, torch.float32) for seed in range(4))


def test_padding_rows_and_rows_without_features_end_with_an_empty_list(device: str) -> None:
    state = SamplingState(num_slots=3, vocab_size=V)
    state.admit(2, SamplingParams(allowed_token_ids=(3,), top_k=4), [], seed=0)
    device_state = DeviceState(state, device)
    device_state.apply()
    logits = torch.full((5, V), INF)
    patched = patch(state, device_state, logits, [0, 2, 0, 0, 2])
    assert rows_agree(state, logits, [0, 2, 0, 0, 2], patched)
    assert not any(len(side[0]) for side in patched.sides) and not patched.bad_R.any()


def test_slots_that_do_not_exist_touch_nothing(device: str) -> None:
    state = mixed_state(1, 3, V)
    device_state = DeviceState(state, device)
    device_state.apply()
    lengths = torch.full((2, 3), 9, dtype=torch.int32, device=device)
    logits, before = torch.ones(3, V, device=device), device_state.words.clone()
    slots = torch.tensor([-1, 4, 2**31 - 1], dtype=torch.int32, device=device)
    kernel.apply_logits_processors(logits, device_state, slots, lengths[0], lengths[1])
    assert (logits == 1).all() and (lengths == 0).all() and (device_state.words == before).all()


def test_tensors_of_another_kind_are_refused_by_name(device: str) -> None:
    device_state = DeviceState(SamplingState(num_slots=3, vocab_size=V), device)
    logits, ints = torch.zeros(2, V, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    kernel.apply_logits_processors(logits[:0], device_state, ints[:0], ints[:0], ints[:0])
    for wrong in (logits.double(), logits[0], torch.zeros(V, 2, device=device).T):
        with pytest.raises(ValueError, match=r"got logits .* expected bf16, fp16 or f32 \(R, V\)"):
            kernel.apply_logits_processors(wrong, device_state, ints, ints, ints)
    with pytest.raises(ValueError, match=r"got logits \(2, 110\) on .*, expected \(R, 111\)"):
        kernel.apply_logits_processors(logits[:, 1:], device_state, ints, ints, ints)
    for name, given in (
        ("slots", (ints.long(), ints, ints)),
        ("side_len", (ints, ints[:1], ints)),
        ("side_bad", (ints, ints, ints[None])),
    ):
        with pytest.raises(ValueError, match=rf"got {name} .*, expected contiguous int32 \(2,\)"):
            kernel.apply_logits_processors(logits, device_state, *given)
