"""The kernels' Gumbel noise, word by word: finite at both ends, and tails of their weight."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl

from gpu_sampler.kernels.philox import log1p, noise_of
from gpu_sampler.reference.philox import gumbel
from tests.support.tails import Noise, extreme_words_are_harmless, rate_of_tail

BLOCK = 4096


@triton.jit
def _noise_kernel(words, out, count, CLOSED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
    if CLOSED:  # the planted fault: the largest word gives 1
        noise = -tl.log(-log1p(-(word.to(tl.float32) * (1.0 / 4294967295.0))))
    else:
        noise = noise_of(word)
    tl.store(out + at, noise, mask=at < count)


def noise_on(device: str, closed: bool = False) -> Noise:
    def noise(words: npt.NDArray[np.uint32]) -> npt.NDArray[Any]:
        there = torch.from_numpy(words.view(np.int32).copy()).to(device)
        out = torch.empty(len(words), dtype=torch.float32, device=device)
        grid = (triton.cdiv(len(words), BLOCK),)
        _noise_kernel[grid](there, out, len(words), CLOSED=closed, BLOCK=BLOCK)
        return np.asarray(out.cpu().numpy())

    return noise


def test_no_word_wins_outright(device: str) -> None:
    assert extreme_words_are_harmless(noise_on(device))


def test_uniform_that_reaches_one_is_rejected(device: str) -> None:
    assert not extreme_words_are_harmless(noise_on(device, closed=True))


def test_noise_is_that_of_the_reference(device: str) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 20_000, np.uint32, endpoint=False)
    words[:4] = (0, 1, 2**32 - 2, 2**32 - 1)
    np.testing.assert_allclose(noise_on(device)(words), gumbel(words), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nats", [0.0, 12.0, 18.0, 20.0])
def test_token_far_below_the_top_is_drawn_at_its_rate(nats: float, device: str) -> None:
    assert rate_of_tail(noise_on(device), nats) * (1 + np.exp(nats)) == pytest.approx(1, abs=0.02)
