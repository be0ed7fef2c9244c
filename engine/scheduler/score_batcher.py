"""Score jobs cut into steps: the shared prefix once, then items as sequences `prefix + own tokens`, as many as fit.

A prefix and the items that share it may stand in the same step, since attention writes before it attends. An item that
is longer than a whole step is computed in chunks. A row of a likelihood job is cut wherever a step ends, because every
chunk of it has answers.
"""

from typing import NamedTuple

import numpy as np

from engine.batch.input_batch import ScheduledSequence
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix_cache import NO_SLOTS
from engine.requests import Int32s
from engine.scheduler.fair_queue import STOP
from engine.scheduler.request_state import LabelScoring, Likelihood, Scoring

MOST_PASSED = 16  # jobs whose items are too long for the rest of a step, before it is left empty
BLOCK = 64  # items of one query stay together, to keep its prefix hot
MAX_LOGITS = 160_000_000  # elements of one step's logits: 1,024 rows of 152k
NO_ROWS = np.empty(0, np.int32)


class ScorePart(NamedTuple):
    """One job's rows of a step: items (of a likelihood job: wanted tokens) first .. first + size, rows row .. row +
    size of the step's logits."""

    work: Scoring
    first: int
    size: int
    row: int


class ScoreSteps:
    """Builds one step at a time: `begin`, `give` for each job that the fair queue names, `end`."""

    def __init__(self, pool: KVCacheManager, vocab_size: int, max_targets: int | None = None) -> None:
        """`max_targets`: see `CausalLM`."""
        self._kv_cache = pool
        self._max_targets = max_targets
        self._max_rows = max(64, MAX_LOGITS // vocab_size)
        self.starving = False  # a job found no room: no new generation row is admitted before it did
        self.budget = 0
        self._runs: list[ScheduledSequence] = []
        self._scratch: list[Int32s] = []
        self._parts: list[ScorePart] = []
        self._rows = 0
        self._owner: Scoring | None = None  # whose terms the step's other jobs must share
        self._first: Scoring | None = None
        self._full_up = False
        self._passed = 0  # jobs in a row none of whose items fitted into what is left of the step
        self.touched: set[Scoring] = set()  # jobs that the step under construction may name
        self._named: set[Scoring] = set()  # those of its parts

    def begin(self, sequences: list[ScheduledSequence], scratch: list[Int32s], budget: int, first: Scoring) -> None:
        """`first`: the job that nobody may overtake."""
        self.budget = budget
        self._first = first
        self._runs, self._scratch, self._parts, self._rows = sequences, scratch, [], 0
        self._owner, self._full_up, self.starving = None, False, False
        self._passed = 0

    def end(self) -> list[ScorePart]:
        self.starving = self.starving and not self._runs
        self.touched.clear()
        self._named.clear()
        return self._parts

    def give(self, work: Scoring, allowance: int, left: int) -> int:
        """Spends about `allowance`, at most `left` tokens of the step on the job; returns how many, or STOP where no
        job can have more of it."""
        if self._full_up:
            return STOP
        if work.closed or work.launched or not self._agrees(work):
            return 0
        self.touched.add(work)
        parts = len(self._parts)
        spent = self._prefix(work, min(allowance, left))
        if len(work.prefix_slots) == len(work.job.prefix) and spent < left:
            if isinstance(work, LabelScoring):
                spent += self._items(work, allowance - spent, left - spent)
            elif isinstance(work, Likelihood):
                spent += self._rows_of(work, min(allowance, left) - spent)
        if spent and self._owner is None:
            self._owner = work
        if spent and len(self._parts) == parts and work not in self._named:
            self._parts.append(ScorePart(work, work.next_item, 0, self._rows))
        if spent:
            self._passed = 0
            self._named.add(work)
        elif work not in self._named:
            self.touched.discard(work)
        return spent

    def release(self, work: Scoring) -> None:
        """Lets go of what the job holds between steps: it can be matched or computed again."""
        if work.node is None and not len(work.prefix_slots) and not len(work.part_slots):
            return
        own, part = work.prefix_slots[work.prefix_owned :], work.part_slots
        node = work.node
        work.prefix_slots, work.part_slots, work.prefix_owned, work.node = NO_SLOTS, NO_SLOTS, 0, None

        def free() -> None:
            self._kv_cache.free(np.concatenate((own, part)))
            if node is not None:
                self._kv_cache.prefix_cache.unlock(node)

        self._kv_cache.free_later(free)

    def share_prefix(self, work: Scoring) -> None:
        """Puts what is computed of the prefix into the tree and goes over to the tree's slots."""
        done = len(work.prefix_slots)
        if work.prefix_owned == done:
            return
        found = self._kv_cache.prefix_cache.insert(work.domain, work.job.prefix[:done], work.prefix_slots)
        copies = work.prefix_slots[work.prefix_owned : max(found.present, work.prefix_owned)]
        old = work.node
        self._kv_cache.prefix_cache.lock(found.node)
        if old is not None:
            self._kv_cache.prefix_cache.unlock(old)
        work.node, work.prefix_slots, work.prefix_owned = found.node, found.slots, done
        self._kv_cache.free_later(lambda: self._kv_cache.free(copies))

    def _agrees(self, work: Scoring) -> bool:
        """Jobs of one step use one head, and a isolated job shares with nobody."""
        owner = self._owner
        if owner is None or owner is work:
            return True
        return not owner.isolated and not work.isolated and owner.head == work.head

    def _prefix(self, work: Scoring, most: int) -> int:
        prefix = work.job.prefix
        if work.node is None and not len(work.prefix_slots) and len(prefix):
            found = self._kv_cache.prefix_cache.match(work.domain, prefix)
            self._kv_cache.prefix_cache.lock(found.node)
            work.node, work.prefix_slots, work.prefix_owned = found.node, found.slots, found.present
            if not work.next_item:
                work.prefix_cached = found.present
        done = len(work.prefix_slots)
        n = min(len(prefix) - done, most)
        if n == 0:
            return 0
        taken = self._take(work, n)
        if taken is None:
            return 0
        self._runs.append(ScheduledSequence(0, work.prefix_slots, taken, prefix[done : done + n], NO_ROWS))
        work.prefix_slots = np.concatenate((work.prefix_slots, taken))
        return n

    def _items(self, work: LabelScoring, allowance: int, left: int) -> int:
        """As many whole items as the allowance buys, or a block of them; the first alone is cut if it must be."""
        if self._rows >= self._max_rows:
            self._full_up = True
            return 0
        at, base = work.next_item, int(work.ends[work.next_item]) + len(work.part_slots)
        count = self._fitting(work, base, allowance, left)
        if count == 0:
            # Only a step that holds nothing else may be too short for an item: otherwise the next one is longer.
            if not self._runs and left == self.budget:
                return self._cut_item(work, left)
            self._passed += 1
            self._full_up = self._passed >= MOST_PASSED
            return 0
        while True:
            need = int(work.ends[at + count]) - base
            taken = self._take(work, need) if count == 1 else self._kv_cache.allocate(need)
            if taken is not None:
                break
            if count == 1:
                return 0
            count //= 2
        self._append_items(work, at, count, taken)
        return need

    def _fitting(self, work: LabelScoring, base: int, allowance: int, left: int) -> int:
        """How many whole items; `base`: tokens of the job that are computed."""
        at, ends = work.next_item, work.ends
        if int(ends[at + 1]) - base > left:
            return 0
        if at + 1 == work.items:
            return 1
        bought = int(np.searchsorted(ends, base + allowance, "right")) - 1 - at
        fits = int(np.searchsorted(ends, base + left, "right")) - 1 - at
        return min(max(bought, BLOCK), fits, self._max_rows - self._rows)

    def _cut_item(self, work: LabelScoring, n: int) -> int:
        context, ids = work.item(work.next_item)
        taken = self._take(work, n)
        if taken is None:
            return 0
        done = len(work.part_slots)
        before = np.concatenate((work.prefix_slots[:context], work.part_slots))
        self._runs.append(ScheduledSequence(0, before, taken, ids[done : done + n], NO_ROWS))
        work.part_slots = np.concatenate((work.part_slots, taken))
        return n

    def _append_items(self, work: LabelScoring, at: int, count: int, taken: Int32s) -> None:
        used = 0
        common = NO_SLOTS
        for index in range(at, at + count):
            context, ids = work.item(index)
            done = len(work.part_slots) if index == at else 0
            if len(common) != context:  # neighbours that share it name the very same array
                common = work.prefix_slots[:context]
            before = np.concatenate((common, work.part_slots)) if done else common
            n = len(ids) - done
            self._runs.append(
                ScheduledSequence(0, before, taken[used : used + n], ids[done:], np.array([n - 1], np.int32))
            )
            work.cached[index] = min(work.prefix_cached if index == 0 else context, context)
            used += n
        self._scratch.append(taken)
        if len(work.part_slots):
            self._scratch.append(work.part_slots)
            work.part_slots = NO_SLOTS
        self._parts.append(ScorePart(work, at, count, self._rows))
        self._rows += count
        work.next_item = at + count
        work.pending += count

    def _rows_of(self, work: Likelihood, most: int) -> int:
        """Up to `most` tokens of a likelihood job's rows, one row after the other."""
        spent = 0
        while spent < most and not work.launched:
            n = self._chunk(work, most - spent)
            if n == 0:
                break
            spent += n
            if work.to_compute == 0:
                spare = work.advance()
                self._scratch.append(spare)
        return spent

    def _chunk(self, work: Likelihood, most: int) -> int:
        """The next up to `most` tokens of the row, and the wanted ones after them."""
        at, done = work.next_item, len(work.part_slots)
        start = max(done, work.first_wanted, work.asked)
        n = min(work.to_compute, most)
        if self._max_targets is not None:
            n = min(n, start - done + self._max_targets - self._rows)
        taken = self._take(work, n) if n > 0 else None
        if taken is None:
            return 0
        rows = np.arange(start - done, n, dtype=np.int32)
        before = np.concatenate((work.prefix_slots, work.part_slots))
        self._runs.append(ScheduledSequence(0, before, taken, work.own[done : done + n], rows))
        if not work.asked:
            work.cached[at] = work.prefix_cached if at == 0 else len(work.job.prefix) + work.job.shared[at]
        self._want(work, int(work.offsets[at]) + start - work.first_wanted, len(rows))
        work.part_slots = np.concatenate((work.part_slots, taken))
        work.asked = max(work.asked, done + n)
        return n

    def _want(self, work: Likelihood, first: int, size: int) -> None:
        """The next `size` rows of the step are the wanted tokens from `first` on."""
        last = self._parts[-1] if self._parts else None
        if last is not None and last.work is work and last.first + last.size == first:
            self._parts[-1] = last._replace(size=last.size + size)
        else:
            self._parts.append(ScorePart(work, first, size, self._rows))
        self._rows += size
        work.pending += size

    def keep_row(self, work: Likelihood) -> None:
        """Leaves the job's only row to the tree: its tokens are computed and sound."""
        slots = work.part_slots
        found = self._kv_cache.prefix_cache.insert(work.domain, work.own[: len(slots)], slots)
        work.part_slots = slots[: found.present]  # copies of what stood there already

    def _take(self, work: Scoring, n: int) -> Int32s | None:
        """Slots, or None. Where the first job finds none the step is closed, so that no smaller one overtakes it."""
        taken = self._kv_cache.allocate(n)
        if taken is None:
            self._full_up = work is self._first
            self.starving = True
        return taken
