"""Philox4x32-10 against the known answers of Random123, and the noise made of its words."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_sampler.reference import philox
from gpu_sampler.reference.philox import LARGEST_U, Purpose, gumbel, log1p, philox4x32, uniform, words
from tests.gpu_sampler.random123 import KNOWN, ONES

EDGE_WORDS = [0, 1, 2, 255, 65535, 65536, 65537, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, ONES - 256, ONES]


def edge_words() -> npt.NDArray[np.uint32]:
    drawn = np.random.default_rng(5).integers(0, 2**32, 100_000, np.uint32, endpoint=False)
    return np.concatenate([np.array(EDGE_WORDS, np.uint32), drawn, drawn >> np.uint32(20)])


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_known_answers_of_random123(key: tuple[int, int], counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    found = philox4x32(np.uint64(key[1] << 32 | key[0]), *counter)
    assert tuple(int(word) for word in found) == expected


def test_counters_and_keys_broadcast_and_each_element_is_as_alone() -> None:
    seeds = np.array([[0], [1], [2**64 - 1]], np.uint64)
    ids = np.array([[0, 7, 2**32 - 1, 5]], np.int64)
    found = philox4x32(seeds, ids, 3, 1 << 16, 2)
    assert {word.shape for word in found} == {(3, 4)}
    for i, j in itertools.product(range(3), range(4)):
        alone = philox4x32(seeds[i, 0], ids[0, j], 3, 1 << 16, 2)
        assert [int(word[i, j]) for word in found] == [int(word) for word in alone]


def test_word_of_an_id_is_one_of_the_four_words_of_its_counter() -> None:
    ids = np.array([0, 1, 2, 3, 4, 111, 151_935, 2**31 - 1])
    found = words(np.uint64(99), ids, 17, Purpose.SAMPLE_TOKEN, 2, 3)
    for token, word in zip(ids.tolist(), found.tolist(), strict=True):
        assert word == int(philox4x32(np.uint64(99), token >> 2, 17, 1 << 16 | 2, 3)[token & 3])


def test_words_do_not_depend_on_how_many_are_asked_for() -> None:
    whole = words(np.uint64(5), np.arange(1003), 4, Purpose.SAMPLE_TOKEN)
    for first, last in ((0, 1), (17, 128), (128, 1003), (1002, 1003)):
        assert (words(np.uint64(5), np.arange(first, last), 4, Purpose.SAMPLE_TOKEN) == whole[first:last]).all()
    shuffled = np.random.default_rng(0).permutation(1003)
    assert (words(np.uint64(5), shuffled, 4, Purpose.SAMPLE_TOKEN) == whole[shuffled]).all()


def counters_of(purposes: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(addresses asked for, different counters used) over purposes, rounds, branches, positions and ids."""
    seen: set[tuple[int, ...]] = set()

    def record(seed: Any, *counter: Any) -> tuple[npt.NDArray[np.uint32], ...]:
        seen.add(tuple(int(c) for c in counter))
        return (np.zeros((), np.uint32),) * 4

    monkeypatch.setattr(philox, "philox4x32", record)
    axes = (range(0, 12, 4), (0, 1, 65535, 2**31 - 1), purposes, (0, 1, 4096, 65535), (0, 1, 127))
    for token, position, purpose, round_, branch in itertools.product(*axes):
        words(np.uint64(1), token, position, Purpose(purpose), round_, branch)
    return int(np.prod([len(list(axis)) for axis in axes])), len(seen)


def test_purposes_rounds_branches_positions_and_ids_never_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = counters_of([int(purpose) for purpose in Purpose], monkeypatch)
    assert asked == used == 3 * 4 * 7 * 4 * 3


def test_purpose_used_twice_fails_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = counters_of([int(Purpose.SAMPLE_TOKEN), int(Purpose.SAMPLE_TOKEN)], monkeypatch)
    assert used < asked


def test_seed_position_branch_round_and_purpose_each_change_the_words() -> None:
    ids = np.arange(64)
    base = words(np.uint64(1), ids, 0, Purpose.SAMPLE_TOKEN)
    for other in (
        words(np.uint64(1 << 32 | 1), ids, 0, Purpose.SAMPLE_TOKEN),  # the high half of the seed counts
        words(np.uint64(1), ids, 1, Purpose.SAMPLE_TOKEN),
        words(np.uint64(1), ids, 0, Purpose.SAMPLE_TOKEN, 1),
        words(np.uint64(1), ids, 0, Purpose.SAMPLE_TOKEN, 0, 1),
        words(np.uint64(1), ids, 0, Purpose.SAMPLE_GROUP),
    ):
        assert np.count_nonzero(base == other) <= 1


def test_uniforms_lie_strictly_between_0_and_1() -> None:
    u = uniform(np.array([0, ONES, ONES - 1, ONES - 128], np.uint32))
    assert u.dtype == np.float32
    assert u[0] == np.float32(0.5 / 2**32)
    assert u[1] == LARGEST_U < 1


def test_uniforms_keep_their_precision_where_they_are_small() -> None:
    word = edge_words()
    exact = np.minimum((word.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    assert (np.abs(uniform(word) / exact - 1)).max() <= 2**-22
    naive = word.astype(np.float32) / np.float32(2**32)  # what the two halves are for
    assert naive[0] == 0 and uniform(word)[0] > 0


def test_log1p_is_close_to_float64() -> None:
    x = -uniform(edge_words())
    exact = np.log1p(x.astype(np.float64))
    assert (np.abs(log1p(x) / exact - 1)).max() <= 5e-7
    with np.errstate(divide="ignore"):
        plain = np.log(np.float32(1) + x)  # what the identity is for
    assert np.abs(plain[0] / exact[0] - 1) > 0.5


def test_gumbel_noise_stays_in_its_range_and_is_close_to_float64() -> None:
    word = edge_words()
    noise = gumbel(word)
    assert noise.dtype == np.float32 and np.isfinite(noise).all()
    assert -2.82 < noise.min() == noise[list(EDGE_WORDS).index(ONES)] < -2.80
    assert 22.86 < noise.max() == noise[0] < 22.88
    exact = -np.log(-np.log1p(-uniform(word).astype(np.float64)))
    assert np.abs(noise - exact).max() <= 4e-6
