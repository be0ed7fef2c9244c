"""RunningBatch: the sequences that hold a request slot, and everything that they take and return.

A sequence is admitted, prefilled, decoded, and closed; under memory pressure it is preempted and waits again. This
class takes and returns every pool slot, tree lock, request slot and sampler slot of a sequence. The step thread alone
touches it.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.kv_cache.manager import KVCacheManager, TreeNode
from engine.requests import EngineError, ErrorCode, Int32s, Int64s
from engine.scheduler.request_state import Phase, RequestTable, SequenceState
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import ParamError
from gpu_sampler.state.host_state import OverlayFull

ISOLATED_TURNS = 8  # steps of isolated requests for one of the others
GROWTH = 16  # pool slots that a running sequence takes together when it can


class DecodeRows(NamedTuple):
    """Names the rows that may share a decode step."""

    slots: Int64s  # [R] request slots
    sequences: list[SequenceState]  # [R]


class RunningBatch:
    """Admits, grows, preempts and closes sequences, and says which of them decode next."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager, table: RequestTable, sampler: Sampler) -> None:
        self._admission_tokens = config.admission_tokens
        self._kv_cache = kv_cache
        self._table = table
        self._sampler = sampler
        self.preemptions = 0
        self.prefilling: set[SequenceState] = set()  # admitted, with tokens to prefill
        self.decoding: dict[int, SequenceState] = {}  # by request slot, in the order in which they came
        self._rows: DecodeRows | None = None  # kept from step to step while the rows stay the same
        self._any_isolated = False
        self._turn = 0
        self._isolated_turns = 0  # since the others had theirs
        self._turns = 0  # of rows, in decode steps that held a part of them
        self._tenant_turns: dict[str, int] = {}  # the latest of each tenant that has rows

    # Which rows decode.

    def start_decoding(self, sequence: SequenceState) -> None:
        """Adds a sequence to the rows that decode."""
        self.decoding[sequence.slot] = sequence
        self._rows = None
        self._any_isolated = self._any_isolated or sequence.parent.isolated

    def discard(self, sequence: SequenceState) -> None:
        """Takes a sequence out of all further steps. Nothing happens to one that is in none."""
        if self.decoding.pop(sequence.slot, None) is not None:
            self._rows = None
        self.prefilling.discard(sequence)

    @property
    def isolated_first(self) -> bool:
        """Tells whether a step of an isolated request comes before everything.

        A replica runs one suspect at a time, and all that lost their replica with it wait for that place. A suspect has
        few tokens to come and short steps, while a step of the others may be long.
        """
        return self._any_isolated and self._isolated_turns < ISOLATED_TURNS

    def next_rows(self, max_rows: int | None = None) -> DecodeRows:
        """Returns the rows that share the next step: those of one isolated request, or all the others.

        Args:
            max_rows: Rows that the step holds at most, in equal shares of the tenants; None: any number. An isolated
                request is not cut.
        """
        if self._rows is None:
            self._rows = _rows_of(self.decoding.values())
            self._any_isolated = any(row.parent.isolated for row in self._rows.sequences)
        if self._any_isolated:
            return self._next_group(self._rows)
        if max_rows is None or len(self._rows.sequences) <= max_rows:
            return self._rows
        return self._next_part(self._rows.sequences, max_rows)

    def _next_part(self, every: list[SequenceState], max_rows: int) -> DecodeRows:
        """Takes a row of each tenant, then another of each that has more. The tenant comes first that has had no row
        for longest, and of its rows the one that has waited longest."""
        taken = Counter[str]()
        turns = {row.parent.tenant: self._tenant_turns.get(row.parent.tenant, 0) for row in every}
        ranked = list[tuple[int, int, int]]()  # place in the own tenant's order, the tenant's turn, place in the batch
        for at, row in sorted(enumerate(every), key=lambda one: one[1].turn):
            tenant = row.parent.tenant
            ranked.append((taken[tenant], turns[tenant], at))
            taken[tenant] += 1
        chosen = [at for *_, at in heapq.nsmallest(max_rows, ranked)]
        for at in chosen:
            self._turns += 1
            every[at].turn = turns[every[at].parent.tenant] = self._turns
        self._tenant_turns = turns
        return _rows_of(every[at] for at in sorted(chosen))

    def _next_group(self, every: DecodeRows) -> DecodeRows:
        """Lets isolated requests and the others take turns. A request may have ceased to be isolated meanwhile."""
        rows = self.decoding.values()
        alone = list(dict.fromkeys(id(row.parent) for row in rows if row.parent.isolated))
        if not alone:
            self._any_isolated = False
            return every
        self._isolated_turns = (self._isolated_turns + 1) % (ISOLATED_TURNS + 1)
        others = [row for row in rows if not row.parent.isolated]
        if others and not self._isolated_turns:
            return _rows_of(others)
        self._turn = (self._turn + 1) % len(alone)
        return _rows_of(row for row in rows if row.parent.isolated and id(row.parent) == alone[self._turn])

    # Slots that sequences take and return.

    def limit(self, sequence: SequenceState) -> int:
        """Returns the tokens, prompt included, at which the sequence ends."""
        return min(len(sequence.prompt) + sequence.parent.request.params.max_tokens, self._table.max_len)

    def admit(self, sequence: SequenceState) -> bool | EngineError:
        """Takes everything that a sequence needs to start.

        The sequence reserves pool slots for the tokens to compute and `admission_tokens` more. After two preemptions it
        reserves its full need, because it would otherwise be preempted again and again.

        Returns:
            True; False where it must wait; an error where it could never run.
        """
        if not self._table.free:
            return False
        tokens = sequence.tokens()
        fresh = not len(sequence.output)
        limit = self.limit(sequence)
        # A fresh sequence computes its last prompt token, whose logits it samples. A resumed one has sampled already:
        # the ordinary decode step computes its last token, exactly as if it had never been away.
        target = len(tokens) if fresh else len(tokens) - 1
        node, slots = self._kv_cache.prefix_cache.match(sequence.parent.domain, tokens[: len(tokens) - 1])
        self._kv_cache.prefix_cache.lock(node)
        present = len(slots)
        ahead = limit if sequence.preemptions >= 2 else target + self._admission_tokens
        taken = self._kv_cache.allocate(max(target, min(ahead, limit - 1)) - present)
        if taken is None:
            self._kv_cache.prefix_cache.unlock(node)
            return False
        slot = self._table.admit(sequence, tokens, limit)
        self._table.add_slots(slot, slots)
        self._table.add_slots(slot, taken)
        sequence.node, sequence.shared, sequence.computed = node, present, present
        if self._table.seen is not None:
            self._table.seen[slot] = present
        request = sequence.parent.request
        try:
            self._sampler.admit(
                slot,
                request.params,
                request.prompt,
                seed=request.seed,
                branch=sequence.branch,
                output_ids=sequence.output,
            )
        except (OverlayFull, ParamError) as error:
            self._release(sequence, present)
            if isinstance(error, ParamError):
                return EngineError(ErrorCode.INVALID_VALUE, str(error), error.field)
            return False
        sequence.target = target
        if not sequence.parent.prompt_done and not sequence.preemptions:
            sequence.parent.cached = min(present, len(sequence.prompt))
        if sequence.to_compute:
            sequence.phase = Phase.PREFILL
            self.prefilling.add(sequence)
        else:
            sequence.phase = Phase.DECODE
            sequence.parent.prompt_done = True  # it stands in the tree
            self.start_decoding(sequence)
        return True

    def share_prompt(self, sequence: SequenceState) -> None:
        """Puts the computed prompt into the tree.

        Where another sequence was quicker, this one goes over to the tree's slots and returns its own.
        """
        slot, end = sequence.slot, sequence.target
        slots = self._table.slots[slot]
        node, kept, present = self._insert(sequence, end)
        copies = slots[sequence.shared : present].copy()
        slots[sequence.shared : present] = kept[sequence.shared : present]
        old = sequence.node
        self._kv_cache.prefix_cache.lock(node)
        if old is not None:
            self._kv_cache.prefix_cache.unlock(old)
        sequence.node, sequence.shared = node, end
        self._kv_cache.free_later(lambda: self._kv_cache.free(copies))

    def grow(self, short: Int64s, missing: Int64s) -> bool:
        """Gives sequences the pool slots that they miss, several more if they can be had.

        Args:
            short: i64 [R], request slots of the sequences.
            missing: i64 [R], pool slots that each misses.

        Returns:
            False where there are not enough slots.
        """
        table = self._table
        room = table.limit[short] - 1 - table.capacity[short]
        for block in (GROWTH, 1):
            counts = np.maximum(missing, np.minimum(block, room))
            taken = self._kv_cache.allocate(int(counts.sum()))
            if taken is not None:
                table.add_slots_of_rows(short, counts, taken)
                return True
        return False

    def preempt(self, sequence: SequenceState) -> None:
        """Sends a sequence back to waiting. Its computed tokens stay in the tree until the room is needed."""
        self.discard(sequence)
        slot = sequence.slot
        decoding = sequence.phase is Phase.DECODE
        length = int(self._table.known[slot])
        sequence.output = self._table.tokens[slot, len(sequence.prompt) : length].copy()
        sequence.unsent_logprobs += self._table.logprobs.take(slot)
        self._sampler.release(slot)
        self._release(sequence, length - 1 if decoding else sequence.computed)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.preemptions += 1

    def close(self, sequence: SequenceState, *, keep: bool) -> None:
        """Ends a sequence. Its slots are freed once the steps that name it have finished.

        Args:
            sequence: the sequence.
            keep: its keys and values are sound and stay in the tree.
        """
        self.discard(sequence)
        phase, sequence.phase = sequence.phase, Phase.CLOSED
        if not sequence.slot:
            return
        self._table.open[sequence.slot] = False
        known = int(self._table.known[sequence.slot])
        sequence.output = self._table.tokens[sequence.slot, len(sequence.prompt) : known].copy()
        sequence.kept = sequence.shared
        if keep:
            sequence.kept = known - 1 if phase is Phase.DECODE else sequence.computed

        def release() -> None:
            self._sampler.release(sequence.slot)
            self._release(sequence, sequence.kept)

        self._kv_cache.free_later(release)

    def distrust(self, sequence: SequenceState) -> None:
        """Notes that what a closed sequence computed is not sound, so that the tree gets nothing of it."""
        sequence.kept = sequence.shared

    def _release(self, sequence: SequenceState, valid: int) -> None:
        """Returns the request slot and all pool slots but those of the first `valid` tokens.

        The tree keeps these, as far as every model has computed them.
        """
        slot = sequence.slot
        slots = self._table.slots[slot]
        valid = max(self._table.computed(slot, valid), sequence.shared)
        _, _, present = self._insert(sequence, valid)
        copies = slots[sequence.shared : max(present, sequence.shared)]
        spare = slots[valid : int(self._table.capacity[slot])]
        self._kv_cache.free(np.concatenate((copies, spare)))
        if sequence.node is not None:
            self._kv_cache.prefix_cache.unlock(sequence.node)
        sequence.node, sequence.shared, sequence.computed, sequence.target = None, 0, 0, 0
        self._table.release(sequence)

    def _insert(self, sequence: SequenceState, end: int) -> tuple[TreeNode, Int32s, int]:
        table = self._table
        ids, slots = table.tokens[sequence.slot, :end], table.slots[sequence.slot, :end]
        return self._kv_cache.prefix_cache.insert(sequence.parent.domain, ids, slots)


def _rows_of(sequences: Iterable[SequenceState]) -> DecodeRows:
    found = list(sequences)
    return DecodeRows(np.array([row.slot for row in found], np.int64), found)
