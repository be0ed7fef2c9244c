"""Philox and the noise of the kernels: word for word Random123's and the reference's, and no word makes an infinity."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.philox import NoiseKey, gumbel, gumbel_from_0, log1p, noise_of
from gpu_sampler.reference import philox as reference
from gpu_sampler.reference.philox import Purpose
from tests.gpu_sampler.random123 import KNOWN, ONES

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
EDGE_WORDS = (0, 1, 2, 255, 65535, 65536, 65537, 2**24, 2**31 - 1, 2**31, ONES - 256, ONES - 255, ONES - 1, ONES)
GUMBEL_LEAST, GUMBEL_MOST = -2.82, 22.88


@triton.jit
def _words_kernel(seeds, counters, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    seed = tl.load(seeds).to(tl.uint64, bitcast=True)
    w0, w1, w2, w3 = tl.philox(
        seed,
        tl.load(counters + at),
        tl.load(counters + COUNT + at),
        tl.load(counters + 2 * COUNT + at),
        tl.load(counters + 3 * COUNT + at),
    )
    tl.store(out + at, w0.to(tl.int32, bitcast=True))
    tl.store(out + COUNT + at, w1.to(tl.int32, bitcast=True))
    tl.store(out + 2 * COUNT + at, w2.to(tl.int32, bitcast=True))
    tl.store(out + 3 * COUNT + at, w3.to(tl.int32, bitcast=True))


@triton.jit
def _gumbel_kernel(seeds, ids, out, ordered, position, round_, branch, PURPOSE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    noise_key = NoiseKey(tl.load(seeds).to(tl.uint64, bitcast=True), position, branch)
    tl.store(out + at, gumbel(tl.load(ids + at), noise_key, PURPOSE, round_))
    tl.store(ordered + at, gumbel_from_0(COUNT, noise_key, PURPOSE, round_))


@triton.jit
def _noise_kernel(words, out, CLOSED: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words + at).to(tl.uint32, bitcast=True)
    if CLOSED:  # the fault: a uniform that may be 1
        u = word.to(tl.float32) * (1.0 / 4294967295.0)
        tl.store(out + at, -tl.log(-tl.log(1.0 - u)))
    else:
        tl.store(out + at, noise_of(word))


@triton.jit
def _log1p_kernel(x, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, log1p(tl.load(x + at)))


def on(device: str, values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def seed_word(seed: int, device: str) -> torch.Tensor:
    return on(device, np.array([seed], np.uint64).view(np.int64))


def words_of_kernel(device: str, seed: int, counters_4N: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    out = torch.zeros(counters_4N.shape, dtype=torch.int32, device=device)
    _words_kernel[(1,)](seed_word(seed, device), on(device, counters_4N.view(np.int32)), out, counters_4N.shape[1])
    return out.cpu().numpy().view(np.uint32)


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_known_answers_of_random123(
    device: str, key: tuple[int, int], counter: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    counters_4N = np.repeat(np.array(counter, np.uint32)[:, None], 16, axis=1)
    found = words_of_kernel(device, key[1] << 32 | key[0], counters_4N)
    assert (found == np.array(expected, np.uint32)[:, None]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_words_are_the_references_word_for_word(device: str, seed: int) -> None:
    counters = np.random.default_rng(seed % 97).integers(0, 2**32, (4, 256), np.uint32, endpoint=False)
    counters[:, :4] = [0, 1, ONES - 1, ONES]
    expected = np.stack(reference.philox4x32(np.uint64(seed), *counters))
    assert (words_of_kernel(device, seed, counters) == expected).all()


def noise_agrees(device: str, given: tuple[int, int, int, int], taken: tuple[int, int, int, int]) -> bool:
    """Noise of the kernels for one (seed, position, round, branch) against the reference's for another."""
    for purpose in (Purpose.SAMPLE_GROUP, Purpose.SAMPLE_TOKEN):
        ids = np.random.default_rng(1).integers(0, 2**31, 256).astype(np.int32)
        ids[:6] = [0, 1, 2, 3, 151_935, 2**31 - 1]
        out = torch.zeros(2, 256, device=device)
        seed, position, round_, branch = given
        _gumbel_kernel[(1,)](
            seed_word(seed, device), on(device, ids), out[0], out[1], position, round_, branch, int(purpose), 256
        )
        seed, position, round_, branch = taken
        wanted = [reference.words(np.uint64(seed), x, position, purpose, round_, branch) for x in (ids, np.arange(256))]
        if not np.allclose(out.cpu().numpy(), reference.gumbel(np.stack(wanted)), rtol=2e-6, atol=2e-6):
            return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_references(device: str, seed: int) -> None:
    for rest in ((0, 0, 0), (17, 0, 3), (2**31 - 1, 4096, 127), (0, 5, 1)):
        assert noise_agrees(device, (seed, *rest), (seed, *rest))


@pytest.mark.parametrize("place", range(4))
def test_noise_of_any_other_address_is_seen(device: str, place: int) -> None:
    given = (3, 1, 2, 1)
    for other in (1, 1 << 31) if place == 0 else (1, 1 << 8):
        taken = list(given)
        taken[place] ^= other
        assert not noise_agrees(device, given, (taken[0], taken[1], taken[2], taken[3]))


def noise_of_words(device: str, words: npt.NDArray[np.uint32], closed: bool) -> npt.NDArray[np.float32]:
    out = torch.zeros(len(words), device=device)
    _noise_kernel[(1,)](on(device, words.view(np.int32)), out, closed, len(words))
    return out.cpu().numpy()


def edge_words() -> npt.NDArray[np.uint32]:
    drawn = np.random.default_rng(5).integers(0, 2**32, 4096 - len(EDGE_WORDS), np.uint32, endpoint=False)
    drawn[::2] >>= np.uint32(18)
    return np.concatenate([np.array(EDGE_WORDS, np.uint32), drawn])


def test_noise_is_finite_and_the_references_from_the_smallest_word_to_the_largest(device: str) -> None:
    words = edge_words()
    found = noise_of_words(device, words, False)
    assert np.isfinite(found).all() and GUMBEL_LEAST < found.min() < -2.8 and 22.8 < found.max() < GUMBEL_MOST
    np.testing.assert_allclose(found, reference.gumbel(words), rtol=2e-6, atol=2e-6)


def test_uniform_that_may_be_1_fails_the_same_check(device: str) -> None:
    assert not np.isfinite(noise_of_words(device, edge_words(), True)).all()


def test_log1p_keeps_its_relative_error_from_minus_1_to_0(device: str) -> None:
    x = -np.concatenate([np.logspace(-38, -0.0001, 4000), [0.0] * 95, [float(reference.LARGEST_U)]]).astype(np.float32)
    out = torch.zeros(len(x), device=device)
    _log1p_kernel[(1,)](on(device, x), out, len(x))
    np.testing.assert_allclose(out.cpu().numpy(), np.log1p(x.astype(np.float64)), rtol=4e-7, atol=0)
