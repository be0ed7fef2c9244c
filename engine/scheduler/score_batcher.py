"""ScoreBatcher: cuts scoring requests into steps.

The shared prefix is computed once, then the items as sequences `prefix + own tokens`, as many as fit. A prefix and the
items that share it may stand in the same step, because attention writes before it attends. An item that is longer than
a whole step is computed in chunks. A row of a likelihood request is cut wherever a step ends, because every chunk of it
has answers.
"""

import numpy as np

from engine.batch.input_batch import ScheduledSequence
from engine.kv_cache.manager import NO_SLOTS, KVCacheManager
from engine.requests import Int32s
from engine.scheduler.fair_queue import STOP
from engine.scheduler.request_state import ItemState, LikelihoodState, RequestState, ScoringState

MAX_PASSED = 16  # requests whose items are too long for the rest of a step, before it is left empty
MAX_NO_ROOM = 16  # requests that find too few free slots, before a step is closed: each looks for slots to free
BLOCK = 64  # items of one query stay together, to keep its prefix hot
MAX_STEP_LOGITS = 160_000_000  # elements of one step's logits: 1,024 rows of 152k
MAX_STEP_ATTENDED = 1 << 26  # slots that a step names before no row is added: each takes four bytes on host and device
NO_ROWS = np.empty(0, np.int32)
# The next rows of a step's logits, and the answers of a request that they are: by default an item has one; a likelihood
# request has one a wanted token.
ScorePart = tuple[ScoringState, range]
Rank = tuple[int, int]  # priority and arrival


class ScoreBatcher:
    """Builds one score step at a time: `begin`, `give` for each request that the fair queue names, `end`."""

    def __init__(
        self, kv_cache: KVCacheManager, vocab_size: int, max_targets: int | None = None, *, whole_rows: bool = False
    ) -> None:
        """Makes a batcher without a step.

        Args:
            kv_cache: the pool slots.
            vocab_size: ids of the vocabulary, which bound the rows of a step.
            max_targets: rows of one call of `CausalLM.target_logprobs`; None: any number.
            whole_rows: no item is cut: one that is longer than a step makes a longer step.
        """
        self._kv_cache = kv_cache
        self._whole_rows = whole_rows
        self._max_targets = max_targets
        self._max_rows = max(64, MAX_STEP_LOGITS // vocab_size)
        self.starving = False  # a request found no room: no new generation row is admitted before it did
        self.budget = 0
        self._scheduled: list[ScheduledSequence] = []
        self._scratch: list[Int32s] = []
        self._parts: list[ScorePart] = []
        self._rows = 0
        self._attended = 0  # slots that the step names
        self._owner: ScoringState | None = None  # the other requests of the step must agree with it
        self._first: ScoringState | None = None
        self._full = False  # no request can have more of the step
        self._passed = 0  # requests in a row none of whose items fitted into the rest of the step
        self._no_room = 0  # requests of the step that found too few slots
        self._named: set[ScoringState] = set()  # requests that have parts of the step under construction
        self._first_named: Rank | None = None
        self._current: ScoringState | None = None  # the request that is being given something
        self._holders: set[ScoringState] = set()  # requests that hold slots or a node of the tree
        self._released_after: Rank | None = None  # all later ones hold nothing, but for those of the step

    def begin(
        self, scheduled: list[ScheduledSequence], scratch: list[Int32s], budget: int, first: ScoringState
    ) -> None:
        """Begins a step.

        Args:
            scheduled: takes the sequences of the step.
            scratch: takes the pool slots to free once the step has finished.
            budget: tokens of the step.
            first: the request that no other may overtake.
        """
        self.budget = budget
        self._first, self._current = first, None
        self._scheduled, self._scratch, self._parts, self._rows = scheduled, scratch, [], 0
        self._attended = 0
        self._owner, self._full, self.starving = None, False, False
        self._passed = self._no_room = 0
        self._first_named = self._released_after = None

    def end(self) -> list[ScorePart]:
        """Ends the step and returns its parts."""
        self.starving = self.starving and not self._scheduled
        self._named.clear()
        self._first_named = self._released_after = None
        return self._parts

    def give(self, state: ScoringState, allowance: int, left: int) -> int:
        """Spends about `allowance`, and at most `left`, tokens of the step on a request.

        Returns:
            The tokens spent; STOP where no request can have more of the step. An empty step always takes the first one.
        """
        if self._full and (self._scheduled or state is not self._first):
            return STOP
        if state.closed or state.launched or not self._may_share(state):
            return 0
        self._current, held = state, state in self._holders
        spent = self._prefix(state, min(allowance, left), left)
        if len(state.prefix_slots) == len(state.request.prefix) and spent < left and not state.launched:
            if isinstance(state, ItemState):
                spent += self._items(state, allowance - spent, left - spent)
            elif isinstance(state, LikelihoodState):
                spent += self._rows_within(state, min(allowance, left) - spent)
        self._current = None
        if state.node is not None or len(state.prefix_slots) or len(state.part_slots):
            self._holders.add(state)
        if spent:
            self._note(state)
        elif not held:
            self.release(state)  # a node that it only found would be locked for as long as it waits
        return spent

    def _note(self, state: ScoringState) -> None:
        """Notes that a request has a share of the step."""
        self._passed = 0
        if state in self._named:
            return
        if self._owner is None:
            self._owner = state
        if not self._parts or self._parts[-1][0] is not state:
            self._parts.append((state, range(state.next_item, state.next_item)))
        self._named.add(state)
        own = rank(state)
        self._first_named = own if self._first_named is None else min(self._first_named, own)

    def release_idle(self) -> None:
        """Makes requests that no step is computing release what they hold. No step is in flight.

        A request never releases for one whose turn comes later: two that do not fit together would otherwise throw each
        other out without end.
        """
        first = self._first_named
        if self._current is not None:
            first = min(first or rank(self._current), rank(self._current))
        if self._released_after is not None and first is not None and first >= self._released_after:
            return
        for state in list(self._holders):
            if state not in self._named and state is not self._current and (first is None or first < rank(state)):
                self.release(state)
        self._released_after = first

    def release(self, state: ScoringState) -> None:
        """Releases what a request holds between steps: it can be matched or computed again."""
        if state not in self._holders:
            return
        self._holders.remove(state)
        own, part = state.prefix_slots[state.prefix_owned :], state.part_slots
        node = state.node
        state.prefix_slots, state.part_slots, state.prefix_owned, state.node = NO_SLOTS, NO_SLOTS, 0, None

        def free() -> None:
            if len(own) or len(part):
                self._kv_cache.free(np.concatenate((own, part)))
            if node is not None:
                self._kv_cache.prefix_cache.unlock(node)

        self._kv_cache.free_later(free)

    def share_prefix(self, state: ScoringState, done: int) -> None:
        """Puts the first `done` tokens of the prefix into the tree, and goes over to the tree's slots.

        They are computed. A step that is in flight may be computing others, and may fail.
        """
        if state.prefix_owned >= done:
            return
        tree, own, old = self._kv_cache.prefix_cache, state.prefix_slots, state.node
        ids, known = state.request.prefix[:done], state.prefix_owned
        node, slots, present = tree.insert(state.domain, ids, own[:done], old, known)
        copies = own[known:present]
        tree.lock(node)
        if old is not None:
            tree.unlock(old)
        state.node, state.prefix_owned = node, done
        state.prefix_slots = np.concatenate((slots, own[done:])) if len(own) > done else slots
        self._kv_cache.free_later(lambda: self._kv_cache.free(copies))

    def _may_share(self, state: ScoringState) -> bool:
        """Tells whether a request may join the step: all use one part of the head, and an isolated one is alone."""
        owner = self._owner
        if owner is None or owner is state:
            return True
        return not owner.isolated and not state.isolated and owner.head_key == state.head_key

    def _prefix(self, state: ScoringState, limit: int, left: int) -> int:
        """Computes up to `limit` tokens of the prefix, with its last ones also the next item; returns how many."""
        prefix = state.request.prefix
        if state.node is None and not len(state.prefix_slots) and len(prefix):
            state.node, state.prefix_slots = self._kv_cache.prefix_cache.match(state.domain, prefix)
            self._kv_cache.prefix_cache.lock(state.node)
            state.prefix_owned = len(state.prefix_slots)
            if not state.next_item:
                state.prefix_cached = state.prefix_owned
        done = len(state.prefix_slots)
        n = min(len(prefix) - done, limit)
        if n == 0:
            return 0
        if isinstance(state, ItemState) and done + n == len(prefix) and self._item_fits(state, left - n):
            return self._prefix_and_item(state, n)
        taken = self._take(state, n)
        if taken is None:
            return 0
        self._scheduled.append(ScheduledSequence(0, state.prefix_slots, taken, prefix[done : done + n], NO_ROWS))
        state.prefix_slots = np.concatenate((state.prefix_slots, taken))
        return n

    def _item_fits(self, state: ItemState, left: int) -> bool:
        """Tells whether `left` tokens hold the next item, which attends to the whole prefix."""
        context, ids = state.item(state.next_item)
        room = self._rows < self._max_rows and self._attended < MAX_STEP_ATTENDED
        return room and context == len(state.request.prefix) and len(ids) <= left

    def _prefix_and_item(self, state: ItemState, n: int) -> int:
        """Computes the last `n` tokens of the prefix and the next item as one sequence; returns how many.

        Two sequences would cost attention and the host twice, which a request with one item feels most.
        """
        at, before = state.next_item, state.prefix_slots
        context, ids = state.item(at)
        spent = n + len(ids)
        taken = self._take(state, spent)
        if taken is None:
            return 0
        number, places = state.answers(at, -n, len(ids))
        tokens = np.concatenate((state.request.prefix[-n:], ids))
        self._scheduled.append(ScheduledSequence(0, before, taken, tokens, places))
        self._attended += len(before) + spent
        self._scratch.append(taken[n:])
        state.cached[at] = state.prefix_cached if at == 0 else context
        state.prefix_slots = np.concatenate((before, taken[:n]))
        state.next_item = at + 1
        self._answer(state, number, len(places))
        return spent

    def _items(self, state: ItemState, allowance: int, left: int) -> int:
        """Computes as many whole items as the allowance buys, or a block of them; the first is cut if it must be."""
        if self._rows >= self._max_rows or self._attended >= MAX_STEP_ATTENDED:
            self._full = True
            return 0
        at, base = state.next_item, int(state.ends[state.next_item]) + len(state.part_slots)
        count = self._fitting(state, base, allowance, left)
        if count == 0:
            # Only a step that holds nothing else may be too short for an item: otherwise the next one is longer.
            if self._scheduled or left < self.budget:
                self._passed += 1
                self._full = self._passed >= MAX_PASSED
                return 0
            if not self._whole_rows:
                return self._cut_item(state, left)
            count = 1
        while True:
            need = int(state.ends[at + count]) - base
            taken = self._take(state, need) if count == 1 else self._kv_cache.allocate(need)
            if taken is not None:
                break
            if count == 1:
                return 0
            count //= 2
        self._append_items(state, at, count, taken)
        return need

    def _fitting(self, state: ItemState, base: int, allowance: int, left: int) -> int:
        """Returns how many whole items fit. `base`: tokens of the request that are computed."""
        at, ends = state.next_item, state.ends
        if int(ends[at + 1]) - base > left:
            return 0
        if at + 1 == state.items:
            return 1
        bought = int(np.searchsorted(ends, base + allowance, "right")) - 1 - at
        fits = int(np.searchsorted(ends, base + left, "right")) - 1 - at
        return min(max(bought, BLOCK), fits, self._max_rows - self._rows)

    def _cut_item(self, state: ItemState, n: int) -> int:
        """Computes the next `n` tokens of an item that is longer than a step."""
        context, ids = state.item(state.next_item)
        taken = self._take(state, n)
        if taken is None:
            return 0
        done = len(state.part_slots)
        before = np.concatenate((state.prefix_slots[:context], state.part_slots))
        first, places = state.answers(state.next_item, done, done + n)
        self._scheduled.append(ScheduledSequence(0, before, taken, ids[done : done + n], places))
        state.part_slots = np.concatenate((state.part_slots, taken))
        if len(places):
            self._answer(state, first, len(places))
        return n

    def _append_items(self, state: ItemState, at: int, count: int, taken: Int32s) -> None:
        used = answers = 0
        first, common = None, NO_SLOTS
        for index in range(at, at + count):
            context, ids = state.item(index)
            done = len(state.part_slots) if index == at else 0
            if len(common) != context:  # neighbours that share it name the very same array
                common = state.prefix_slots[:context]
            before = np.concatenate((common, state.part_slots)) if done else common
            n = len(ids) - done
            number, places = state.answers(index, done, len(ids))
            first, answers = number if first is None else first, answers + len(places)
            self._scheduled.append(
                ScheduledSequence(0, before, taken[used : used + n], ids[done:], places, state.first_segment(index))
            )
            state.cached[index] = min(state.prefix_cached if index == 0 else context, context)
            used += n
        self._attended += count * len(state.prefix_slots) + len(taken)
        self._scratch.append(taken)
        if len(state.part_slots):
            self._scratch.append(state.part_slots)
            state.part_slots = NO_SLOTS
        state.next_item = at + count
        self._answer(state, first or 0, answers)

    def _rows_within(self, state: LikelihoodState, limit: int) -> int:
        """Computes up to `limit` tokens of a likelihood request, one row after the other."""
        spent = 0
        while spent < limit and not state.launched and self._attended < MAX_STEP_ATTENDED:
            n = self._cut_row(state, limit - spent)
            if n == 0:
                break
            spent += n
            if state.to_compute == 0:
                spare = state.advance()
                self._scratch.append(spare)
        return spent

    def _cut_row(self, state: LikelihoodState, limit: int) -> int:
        """Computes up to `limit` tokens of the row, and answers the wanted ones after them; returns how many."""
        at, done = state.next_item, len(state.part_slots)
        start = max(done, state.first_wanted, state.answered)
        n = min(state.to_compute, limit)
        if self._max_targets is not None:
            n = min(n, start - done + self._max_targets - self._rows)
        taken = self._take(state, n) if n > 0 else None
        if taken is None:
            return 0
        rows = np.arange(start - done, n, dtype=np.int32)
        before = np.concatenate((state.prefix_slots, state.part_slots))
        self._attended += len(before) + n
        self._scheduled.append(ScheduledSequence(0, before, taken, state.own[done : done + n], rows))
        if not state.answered:
            state.cached[at] = state.prefix_cached if at == 0 else len(state.request.prefix) + state.request.shared[at]
        self._answer(state, int(state.offsets[at]) + start - state.first_wanted, len(rows))
        state.part_slots = np.concatenate((state.part_slots, taken))
        state.answered = max(state.answered, done + n)
        return n

    def _answer(self, state: ScoringState, first: int, size: int) -> None:
        """Makes the next `size` rows of the step the answers of a request from number `first` on."""
        last, tokens = self._parts[-1] if self._parts else (None, range(0))
        if last is state and tokens.stop == first:
            self._parts[-1] = (state, range(tokens.start, first + size))
        else:
            self._parts.append((state, range(first, first + size)))
        self._rows += size
        state.pending += size

    def keep_row(self, state: LikelihoodState) -> None:
        """Leaves the only row of a request to the tree. Its tokens are computed and sound."""
        slots = state.part_slots
        _, _, present = self._kv_cache.prefix_cache.insert(state.domain, state.own[: len(slots)], slots)
        state.part_slots = slots[:present]  # copies of what stood there already

    def _take(self, state: ScoringState, n: int) -> Int32s | None:
        """Takes `n` pool slots, or none: where the first request finds none no smaller one overtakes it."""
        taken = self._kv_cache.allocate(n)
        if taken is None:
            self._no_room += 1
            self._full = state is self._first or self._no_room >= MAX_NO_ROOM
            self.starving = True
        return taken


def rank(state: RequestState) -> Rank:
    """Returns the place of a request in a strict order: the first is never thrown out and never overtaken."""
    return state.queue_priority, state.arrival
