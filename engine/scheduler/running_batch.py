"""The life of a generation row: admitted, its prompt shared, grown, preempted, closed. Every pool slot, tree lock,
request slot and sampler slot that a row takes is taken and returned here.

Decoding: the rows that decode, and which of them share the next step.
"""

from collections.abc import Iterable

import numpy as np

from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix_cache import PrefixMatch
from engine.requests import EngineError, ErrorCode, Int64s
from engine.sampler_interface import RowSampler
from engine.scheduler.request_state import Phase, Request, RequestTable
from gpu_sampler.sampling_params import ParamError
from gpu_sampler.state.host_state import OverlayFull

Together = tuple[Int64s, list[Request]]  # request slots, and their rows


class Decoding:
    """Rows by request slot, in the order in which they came."""

    def __init__(self) -> None:
        self._rows: dict[int, Request] = {}
        self._all: Together | None = None  # kept from step to step while nobody comes or goes
        self._solo = False  # some of them may be a isolated job's
        self._turn = 0

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, slot: int) -> Request:
        return self._rows[slot]

    def values(self) -> Iterable[Request]:
        return self._rows.values()

    def add(self, request: Request) -> None:
        self._rows[request.slot] = request
        self._all = None

    def discard(self, request: Request) -> None:
        """Nothing happens for a row that is not there."""
        if self._rows.pop(request.slot, None) is not None:
            self._all = None

    def next(self) -> Together:
        """The rows that may share the next step: one isolated job's, or all the others."""
        if self._all is None:
            self._all = _together(self._rows.values())
            self._solo = any(row.parent.isolated for row in self._rows.values())
        return self._of_turn(self._all) if self._solo else self._all

    def _of_turn(self, all_rows: Together) -> Together:
        """A job may have ceased to be isolated since the last step."""
        rows = self._rows.values()
        groups: list[int | None] = list(dict.fromkeys(id(row.parent) for row in rows if row.parent.isolated))
        if not groups:
            self._solo = False
            return all_rows
        if any(not row.parent.isolated for row in rows):
            groups.append(None)
        self._turn = (self._turn + 1) % len(groups)
        chosen = groups[self._turn]
        return _together([row for row in rows if (id(row.parent) if row.parent.isolated else None) == chosen])


def _together(rows: Iterable[Request]) -> Together:
    found = list(rows)
    return np.array([row.slot for row in found], np.int64), found


GROW = 16  # pool slots that a running row takes at once when it can


class Rows:
    def __init__(
        self, config: EngineConfig, pool: KVCacheManager, table: RequestTable, sampler: RowSampler, max_len: int
    ) -> None:
        self._config = config
        self._kv_cache = pool
        self._table = table
        self._sampler = sampler
        self.max_len = max_len
        self.preemptions = 0

    def limit(self, request: Request) -> int:
        """Tokens, prompt included, at which the row ends."""
        return min(len(request.prompt) + request.parent.job.params.max_tokens, self.max_len)

    def admit(self, request: Request) -> bool | EngineError:
        """Takes all that the row needs to start. False where it must wait; an error where it could never run.

        Reserved are the tokens to compute and `admission_tokens` more; the full need after two preemptions, because
        the row would otherwise be thrown out again and again.
        """
        if not self._table.free:
            return False
        tokens = request.tokens()
        fresh = not len(request.output)
        limit = self.limit(request)
        # A fresh row computes its last prompt token, whose logits it samples. A resumed one has sampled already: its
        # last token is computed by the ordinary decode step, exactly as if it had never been away.
        target = len(tokens) if fresh else len(tokens) - 1
        found = self._kv_cache.prefix_cache.match(request.parent.domain, tokens[: len(tokens) - 1])
        self._kv_cache.prefix_cache.lock(found.node)
        ahead = limit if request.preemptions >= 2 else target + self._config.admission_tokens
        taken = self._kv_cache.allocate(max(target, min(ahead, limit - 1)) - found.present)
        if taken is None:
            self._kv_cache.prefix_cache.unlock(found.node)
            return False
        slot = self._table.admit(request, tokens, limit)
        self._table.add_slots(slot, found.slots)
        self._table.add_slots(slot, taken)
        request.node, request.shared, request.computed = found.node, found.present, found.present
        if self._table.seen is not None:
            self._table.seen[slot] = found.present
        error = self._admit_to_sampler(request)
        if error is not None:
            self._settle(request, found.present)
            request.phase = Phase.WAITING
            return False if isinstance(error, OverlayFull) else error
        request.target = target
        if not request.parent.prompt_done and not request.preemptions:
            request.parent.cached = min(found.present, len(request.prompt))
        request.phase = Phase.DECODE if request.to_compute == 0 else Phase.PREFILL
        return True

    def _admit_to_sampler(self, request: Request) -> OverlayFull | EngineError | None:
        job = request.parent.job
        try:
            self._sampler.admit(
                request.slot, job.params, job.prompt, seed=job.seed, branch=request.branch, output_ids=request.output
            )
        except OverlayFull as error:
            return error
        except ParamError as error:
            return EngineError(ErrorCode.INVALID_VALUE, str(error), error.field)
        return None

    def share(self, request: Request) -> None:
        """Puts the computed prompt into the tree. Where another row was quicker, the row goes over to the tree's slots
        and returns its own."""
        slot, end = request.slot, request.target
        slots = self._table.slots[slot]
        found = self._insert(request, end)
        copies = slots[request.shared : found.present].copy()
        slots[request.shared : found.present] = found.slots[request.shared : found.present]
        old = request.node
        self._kv_cache.prefix_cache.lock(found.node)
        if old is not None:
            self._kv_cache.prefix_cache.unlock(old)
        request.node, request.shared = found.node, end
        self._kv_cache.free_later(lambda: self._kv_cache.free(copies))

    def grow(self, short: Int64s, missing: Int64s) -> bool:
        """Gives rows, by request slot, the pool slots that each misses, several more if they can be had. False where
        there are not as many."""
        table = self._table
        most = table.limit[short] - 1 - table.capacity[short]
        for block in (GROW, 1):
            counts = np.maximum(missing, np.minimum(block, most))
            taken = self._kv_cache.allocate(int(counts.sum()))
            if taken is not None:
                for slot, more in zip(short.tolist(), np.split(taken, np.cumsum(counts)[:-1]), strict=True):
                    table.add_slots(slot, more)
                return True
        return False

    def preempt(self, request: Request) -> None:
        """The row goes back to waiting; what it computed stays in the tree until someone needs the room."""
        slot = request.slot
        decoding = request.phase is Phase.DECODE
        length = int(self._table.known[slot])
        request.output = self._table.tokens[slot, len(request.prompt) : length].copy()
        request.kept += self._table.kept.take(slot)
        self._sampler.release(slot)
        self._settle(request, length - 1 if decoding else request.computed)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1

    def close(self, request: Request, *, keep: bool) -> None:
        """Ends the row. `keep`: its keys and values are sound and stay in the tree. Everything it holds is freed, but
        not before the steps that name it have finished."""
        phase, request.phase = request.phase, Phase.CLOSED
        if not request.slot:
            return
        self._table.open[request.slot] = False
        known = int(self._table.known[request.slot])
        request.output = self._table.tokens[request.slot, len(request.prompt) : known].copy()
        valid = request.shared
        if keep:
            valid = known - 1 if phase is Phase.DECODE else request.computed

        def release() -> None:
            self._sampler.release(request.slot)
            self._settle(request, valid)

        self._kv_cache.free_later(release)

    def _settle(self, request: Request, valid: int) -> None:
        """Gives the first `valid` tokens to the tree, as far as every model has computed them, the other pool slots
        back, and the request slot."""
        slot = request.slot
        slots = self._table.slots[slot]
        valid = max(self._table.computed(slot, valid), request.shared)
        found = self._insert(request, valid)
        copies = slots[request.shared : max(found.present, request.shared)]
        spare = slots[valid : int(self._table.capacity[slot])]
        self._kv_cache.free(np.concatenate((copies, spare)))
        if request.node is not None:
            self._kv_cache.prefix_cache.unlock(request.node)
        request.node, request.shared, request.computed, request.target = None, 0, 0, 0
        self._table.release(request)

    def _insert(self, request: Request, end: int) -> PrefixMatch:
        table = self._table
        ids, slots = table.tokens[request.slot, :end], table.slots[request.slot, :end]
        return self._kv_cache.prefix_cache.insert(request.parent.domain, ids, slots)
