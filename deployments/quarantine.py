"""Keeps requests that ended two replicas away from all replicas, and suspects away from other requests.

The death of a replica makes every request that it held a suspect. Each suspect runs again on another replica, isolated:
no other request shares its steps. A replica takes one isolated request at a time, so that a second death identifies the
request that caused it, which is then quarantined.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import fields

from deployments.errors import ApiError
from deployments.protocol import AnyCall, GenerateCall, PromptChunk, common
from engine.requests import (
    EngineError,
    ErrorCode,
    GenerateChunk,
    Int32s,
    LikelihoodRequest,
    PoolingRequest,
    ScoreRequest,
)
from gpu_sampler.sampling_params import SamplingParams

PARAMS = tuple(item.name for item in fields(SamplingParams) if item.name != "seed")
MAX_ENTRIES = 4096  # beyond them the entry that ends first is dropped
Entries = tuple[tuple[bytes, float], ...]  # fingerprints and the seconds that are left: clocks differ
MESSAGE = "This request ended two replicas of the server. It is refused for a while: send another."
ISOLATED = "isolated"  # the field of an OVERLOADED that means: wait for the replica's isolated place


def fingerprint(call: AnyCall) -> bytes:
    """Returns the BLAKE2b-128 digest of token ids and parameters.

    The seed and the tokens that were emitted before are left out: a client that sends the request again draws another
    seed.
    """
    digest = hashlib.blake2b(digest_size=16, person=type(common(call)).__name__.encode()[:16])
    arrays: tuple[Int32s, ...]
    match call:
        case ScoreRequest():
            arrays, rest = (call.prefix, call.ids, call.starts, call.labels), repr((call.full, call.raw_logits))
        case PoolingRequest():
            arrays, rest = (call.prefix, call.ids, call.starts, call.positions, call.segments), call.task
        case LikelihoodRequest():
            arrays, rest = (call.prefix, call.ids, call.starts, call.shared, call.wanted), ""
        case _:
            first = call[0]
            arrays = tuple(request.prompt for request in call)
            params = [getattr(first.params, name, None) for name in PARAMS]  # a replica has not checked them yet
            rest = repr((params, first.prompt_logprobs, first.prompt_only))
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    digest.update(rest.encode("utf-8", "surrogatepass"))
    return digest.digest()


class Quarantine:
    """Holds the fingerprints that one process refuses, each until its time is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self.changed: Callable[[], None] = lambda: None  # is called when an entry is new

    def add(self, entries: Entries) -> None:
        now = self._clock()
        fresh = [mark for mark, _ in entries if self._until.get(mark, 0.0) <= now]
        for mark, seconds in entries:
            self._until[mark] = max(self._until.get(mark, 0.0), now + seconds)
        for mark in sorted(self._until, key=self._until.__getitem__)[: max(0, len(self._until) - MAX_ENTRIES)]:
            del self._until[mark]
        if any(mark in self._until for mark in fresh):
            self.changed()

    def entries(self) -> Entries:
        now = self._clock()
        self._until = {mark: until for mark, until in self._until.items() if until > now}
        return tuple((mark, until - now) for mark, until in self._until.items())

    def holds(self, call: AnyCall) -> bool:
        """Returns whether the call is quarantined. This costs nothing while there is no entry."""
        return bool(self._until) and self._until.get(fingerprint(call), 0.0) > self._clock()

    def check(self, call: AnyCall) -> None:
        """Raises ApiError `quarantined_request` for a quarantined call."""
        if self.holds(call):
            raise quarantined()


class IsolationGuard:
    """Admits calls to a replica: none that is quarantined, and one isolated call at a time."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self._isolated: IsolationLease | None = None
        self._shared = IsolationLease(self, ())  # of all calls that are not isolated: it holds no place

    def admit(self, call: AnyCall) -> "IsolationLease":
        """Returns a lease to release. Raises EngineError QUARANTINED, or OVERLOADED while the place is taken."""
        if self.quarantine.holds(call):
            raise EngineError(ErrorCode.QUARANTINED, MESSAGE)
        if not common(call).isolated:
            return self._shared
        if self._isolated is not None:
            raise EngineError(ErrorCode.OVERLOADED, "Another request is being run alone.", ISOLATED)
        self._isolated = IsolationLease(self, call)
        return self._isolated

    def release(self, lease: "IsolationLease") -> None:
        if self._isolated is lease:
            self._isolated = None


class IsolationLease:
    """Holds a replica's isolated place for a call, if the call is isolated; a `with` block releases it at its end."""

    __slots__ = ("_call", "_done", "_guard", "_tokens")

    def __init__(self, guard: IsolationGuard, call: AnyCall) -> None:
        self._guard = guard
        self._call: GenerateCall = call if isinstance(call, tuple) and call and call[0].isolated_tokens else ()
        self._tokens: dict[tuple[int, int], int] = {}  # by prompt and branch
        self._done: set[tuple[int, int]] = set()  # branches that the engine no longer isolates

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.release()

    def received(self, item: PromptChunk) -> None:
        """Gives the place back once the engine no longer isolates the call.

        Until then the engine gives its tokens as chunks.
        """
        if not self._call or not isinstance(item.chunk, GenerateChunk):
            return
        branch = (item.prompt, item.chunk.branch)
        self._tokens[branch] = self._tokens.get(branch, 0) + len(item.chunk.tokens)
        if item.chunk.finish is not None or self._tokens[branch] >= self._call[0].isolated_tokens:
            self._done.add(branch)
        if self._done and len(self._done) == len(self._call) * self._call[0].params.n:
            self.release()

    def release(self) -> None:
        self._guard.release(self)


def quarantined() -> ApiError:
    return ApiError("quarantined_request", MESSAGE)
