"""SmallLoads: where little waits, steps are no larger than those that cost the host little.

Of a few thousand tokens a large step would be one, whose kernels the host launches while the device waits for them;
small ones are replayed (`engine.small_steps`), several of them in less time. And whoever is answered by one large step
comes again with all the others, to the next large step: the load would never come apart by itself.
"""

from collections.abc import Iterable

from engine.batch import StepSize
from engine.requests import Generation, Phase, Scoring

MOST_STEPS = 4  # small steps that together take about as long as a large one of their tokens


class SmallLoads:
    def __init__(self) -> None:
        self.largest: StepSize | None = None  # of the steps that cost little; None: none do

    def budget(self, most: int, prompts: Iterable[Generation], scores: Iterable[Scoring]) -> int | None:
        """The tokens of a small step, where all that waits is cut into few of them and each of its steps would be one;
        None where a step of `most` tokens is to be had, or would be as small."""
        largest = self.largest
        if largest is None or most <= largest.tokens:
            return None
        tokens = runs = attended = 0
        for sizes in (map(_of_prompt, prompts), map(_of_scores, scores)):
            for size in sizes:
                tokens, runs, attended = tokens + size.tokens, runs + size.runs, attended + size.attended
                if tokens > MOST_STEPS * largest.tokens:
                    return None
        # Cut at any token they are alike: else a step would be cut, and be none of those that cost little.
        steps = max(1.0, tokens / largest.tokens)
        return largest.tokens if runs <= steps * largest.runs and attended <= steps * largest.attended else None


def _of_prompt(work: Generation) -> StepSize:
    """What is left of the job's prompts, nothing of which is known to be cached before its row is admitted."""
    filling = [row for row in work.branches if row.phase is Phase.PREFILL and row.to_compute]
    tokens, before = sum(row.to_compute for row in filling), sum(row.computed for row in filling)
    waits = any(row.phase is Phase.WAITING for row in work.branches)  # the first computes it for the others
    new = tokens + (len(work.job.prompt) if waits else 0)
    return StepSize(new, len(filling) + waits, new + before)


def _of_scores(work: Scoring) -> StepSize:
    """What is left of the job's rows, with what the steps in flight compute."""
    rows = work.items - work.next_item
    return StepSize(work.queued, rows, work.queued + rows * len(work.job.prefix) + len(work.part_slots))
