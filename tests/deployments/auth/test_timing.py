"""S7: how long a refusal takes tells nothing about the keys. Counted exactly, and measured."""

import gc
import hmac
import math
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from deployments.auth.api_keys import ApiKey, digest_of
from deployments.auth.authenticator import Authenticator, AuthSettings

KEYS = 64
LONG = 16_384  # characters: a comparison that stops early saves enough to be measured in one call
BLOCKS, BLOCK = 40, 25
TRIALS = 3
DEVIATIONS = 1.4826 * math.sqrt(math.pi / 2)  # from a median deviation to a median's standard error, if normal
SUSPECT = 4.5  # |t| beyond which times differ, as in test vector leakage assessment
LEAST_NS = 60  # half of what one comparison takes: less is how the inputs lie in the processor's caches
Look = Callable[[bytes], object]


@pytest.fixture(scope="module")
def secrets() -> list[bytes]:
    return [b"assay-%05d" % number + b"k" * LONG for number in range(KEYS)]


@pytest.fixture(scope="module")
def access(secrets: list[bytes]) -> Authenticator:
    keys = [ApiKey(name=f"k{number}", digest=digest_of(secret)) for number, secret in enumerate(secrets)]
    return Authenticator(AuthSettings(mode="keys", keys=tuple(keys)))


def looks(access: Authenticator) -> Look:
    def look(secret: bytes) -> object:
        try:
            return access.identify([(b"authorization", b"Bearer " + secret)], "/v1/score").name
        except Exception:
            return None

    return look


def wrong_at(secret: bytes, place: int) -> bytes:
    place %= len(secret)
    return secret[:place] + b"X" + secret[place + 1 :]


class Leak(NamedTuple):
    t: float  # of the blocks' paired differences: their median over its standard error
    ns: float  # median difference


def leak(look: Look, one: bytes, other: bytes) -> Leak:
    """Measures processor time, since other processes are no leak. The two are looked up in random order, each as a new
    object every time, so that neither lies better in memory. A block's median is not moved by interrupts, and the
    spread, which comes from the median deviation, is not moved by blocks of a slow moment."""
    order = [False, True] * (BLOCKS * BLOCK)
    random.Random(7).shuffle(order)
    times: dict[bool, list[int]] = {False: [], True: []}
    gc.collect()
    gc.disable()
    try:
        for which in order:
            given = bytes(bytearray(other if which else one))
            started = time.thread_time_ns()
            look(given)
            times[which].append(time.thread_time_ns() - started)
    finally:
        gc.enable()
    a, b = (np.median(np.array(found, float).reshape(BLOCKS, BLOCK), axis=1) for found in times.values())
    middle = float(np.median(a - b))
    deviation = max(float(np.median(np.abs(a - b - middle))), 1.0)  # ns: the clock has no finer steps
    return Leak(middle / (DEVIATIONS * deviation / math.sqrt(BLOCKS)), middle)


def leaks(look: Look, one: bytes, other: bytes) -> bool:
    """One that is there every time, in the same direction: that of a machine which is busy with something else is not.
    The trials are judged together, so that none of them needs to stand out of the noise by itself."""
    found = [leak(look, one, other) for _ in range(TRIALS)]
    together = sum(trial.t for trial in found) / math.sqrt(TRIALS)
    print(*(f"t = {trial.t:.2f}, {trial.ns:.0f} ns;" for trial in found), f"together {together:.2f}")
    large = all(trial.ns > LEAST_NS for trial in found) or all(trial.ns < -LEAST_NS for trial in found)
    return large and abs(together) > SUSPECT


@pytest.mark.risk("S7")
def test_a_key_that_is_nearly_right_takes_as_long_as_one_that_is_not_at_all(
    access: Authenticator, secrets: list[bytes]
) -> None:
    assert not leaks(looks(access), wrong_at(secrets[0], 0), wrong_at(secrets[0], -1))


@pytest.mark.full
def test_the_first_key_takes_as_long_as_the_last(access: Authenticator, secrets: list[bytes]) -> None:
    assert not leaks(looks(access), secrets[0], secrets[-1])


@pytest.mark.parametrize("place", [0, KEYS // 2, KEYS - 1, None])
def test_one_comparison_in_constant_time_decides_however_many_keys_there_are(
    access: Authenticator, secrets: list[bytes], monkeypatch: pytest.MonkeyPatch, place: int | None
) -> None:
    compared = 0
    own = hmac.compare_digest

    def counted(left: Any, right: Any) -> bool:
        nonlocal compared
        compared += 1
        return own(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    found = looks(access)(b"other" if place is None else secrets[place])
    assert (found, compared) == (None if place is None else f"k{place}", 1)


def test_the_digest_of_no_key_opens_nothing(access: Authenticator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key is compared with zeros; a client that could send their digest must not get in."""
    monkeypatch.setattr("deployments.auth.authenticator.digest_of", lambda secret: bytes(32))
    assert looks(access)(b"any") is None


# Planted faults.


@pytest.mark.full
@pytest.mark.risk("S7", planted=True)
def test_comparing_with_equals_would_be_measured(secrets: list[bytes]) -> None:
    def look(secret: bytes) -> object:
        return any(secret == known for known in secrets[:1])

    assert leaks(look, wrong_at(secrets[0], 0), wrong_at(secrets[0], -1))


@pytest.mark.full
def test_stopping_at_the_first_match_would_be_measured(access: Authenticator, secrets: list[bytes]) -> None:
    digests = [digest_of(secret) for secret in secrets]

    def look(secret: bytes) -> object:
        digest = digest_of(secret)
        return next((number for number, known in enumerate(digests) if hmac.compare_digest(known, digest)), None)

    assert leaks(look, secrets[0], secrets[-1])
