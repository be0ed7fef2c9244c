"""Admission: what a task costs, and gate 1: whether any replica could take it in time.

Costs are tokens to be read, as if nothing were cached; a token to be generated counts as several. A replica decides the
same for itself when the task arrives (gate 2, `engine.scheduler.request_tracker`) and has the last word: an ingress
only knows what replies
told it, and spares both sides the call.

Under overload most of what an ingress does is to refuse, and most of a refusal is to fetch, parse and tokenise a body
in order to learn its cost. So the last part of a queue is kept for requests that have been read: while no queue has
more room than that, others are refused by their headers.
"""

from collections.abc import Iterable

import numpy as np

from deployments.config.sections import AdmissionArgs
from deployments.errors import MAX_RETRY_AFTER_S, ApiError
from deployments.protocol import AnyTask, LikelihoodTask, ScoreTask
from deployments.routing.errors import deadline_passed
from deployments.routing.load_tracker import Loads, Waiting
from engine.config import Costs

# Of the time left, for the queue: where work is shared out among all who wait, each waits up to twice as long.
IN_TIME = 0.4
KEPT = 1 / 16  # of a queue's bound, for what has been read: half a second's work, of eight
LEAST_WAIT_S = 1.0  # retry-after of a queue whose speed is unknown


class Admission:
    """Gate 1 of one ingress."""

    def __init__(self, args: AdmissionArgs, costs: Costs, loads: Loads) -> None:
        self._args = args
        self._costs = costs
        self._loads = loads

    def cost(self, task: AnyTask) -> int:
        return cost_of(task, self._costs)

    def admit(self, task: AnyTask, shares: int = 1) -> None:
        """Raises ApiError: `deadline_exceeded`, `overloaded`. The task will be cut into `shares`
        blocks, each for another replica."""
        if task.remaining_s <= 0:
            raise deadline_passed()
        wait_s = self.wait_s(-(-self.cost(task) // shares), task.remaining_s)
        if wait_s > 0:
            raise overloaded(wait_s)

    def check_open(self, remaining_s: float) -> None:
        """Raises ApiError `overloaded` where nobody has more room than what is kept for requests that have been read;
        the cost of this one is not known yet."""
        wait_s = min((self._wait_s(queue, KEPT * queue.most, remaining_s) for queue in self._queues()), default=0.0)
        if wait_s > 0:
            raise overloaded(wait_s)

    def wait_s(self, cost: int, remaining_s: float) -> float:
        """Seconds until some replica would take the cost; 0 where one would now, or none is known."""
        return min((self._wait_s(queue, cost, remaining_s) for queue in self._queues()), default=0.0)

    def _queues(self) -> Iterable[Waiting]:
        return map(self._loads.waiting, self._loads.replicas)

    def _wait_s(self, queue: Waiting, cost: float, remaining_s: float) -> float:
        """An idle replica takes whatever the limits allow: if that is too much for the deadline, no later attempt would
        fare better."""
        tokens, rate = queue.tokens, queue.per_s
        if tokens < 1:
            return 0.0
        over = min(tokens, tokens + cost - queue.most) if queue.most else 0.0
        if rate <= 0:
            return LEAST_WAIT_S if over > 0 else 0.0
        late_s = min(tokens / rate, (tokens + cost) / rate - IN_TIME * remaining_s)
        return max(0.0, over / rate, tokens / rate - self._args.max_wait_s, late_s)


def cost_of(task: AnyTask, costs: Costs) -> int:
    """Tokens, of all jobs that a replica makes of the task together."""
    if isinstance(task, ScoreTask):
        return len(task.prefix) + int(np.maximum(np.diff(task.starts), 1).sum())
    if isinstance(task, LikelihoodTask):
        return len(task.prefix) + len(task.ids) - len(task.wanted)
    had = [len(branch) for branches in task.emitted for branch in branches]
    had += [0] * (len(task.seeds) * task.params.n - len(had))
    left = sum(min(task.params.max_tokens - tokens, costs.expected_tokens) for tokens in had)
    answers = 0 if task.prompt_only else int(costs.decode_token_cost * left)
    return len(task.prompts) + sum(had) + answers


def overloaded(wait_s: float) -> ApiError:
    wait_s = min(MAX_RETRY_AFTER_S, max(LEAST_WAIT_S, wait_s))
    return ApiError("overloaded", "The queue is full. Try again later.", retry_after_s=wait_s)
