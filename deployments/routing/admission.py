"""Refuses work at the ingress that no replica could take in time (ingress admission).

Costs are those of `engine.request_cost`. A replica decides the same for itself when the request arrives (replica
admission, `engine.scheduler.request_tracker`), and its decision counts: an ingress only knows what replies reported,
and spares both sides the call.

Replicas serve tenants in equal shares, so the wait that counts is the tenant's own: its queue, and as much of every
other tenant's. A tenant with a full queue is no reason to refuse the small requests of another.

Under overload an ingress mostly refuses, and most of a refusal is to fetch, parse and tokenise a body in order to
learn its cost. The last part of a queue is therefore reserved for requests that have been read: while no queue has more
room than that, others are refused by their headers.
"""

import math
from collections.abc import Iterable, Sequence

from deployments.config.sections import AdmissionArgs
from deployments.errors import MAX_RETRY_AFTER_S, ApiError
from deployments.limits import PRIORITIES
from deployments.protocol import AnyCall, common
from deployments.routing.load_tracker import LoadTracker, QueueEstimate
from engine.config import Costs
from engine.request_cost import request_cost
from engine.requests import TenantTokens

# The part of the time left that the queue may take: a queue that is served fairly makes each wait up to twice as long.
MAX_WAIT_SHARE = 0.4
RESERVED_SHARE = 1 / 16  # of a tenant's bound, for requests that have been read: at most half a second of eight
MAX_JUDGED = 16  # replicas whose queues are looked at for one request: the least loaded
MIN_WAIT_S = 1.0  # retry-after of a queue whose speed is unknown


class Admission:
    """Decides for one ingress which calls to send."""

    def __init__(self, args: AdmissionArgs, costs: Costs, loads: LoadTracker) -> None:
        self._args = args
        self._costs = costs
        self._loads = loads

    def work(self, call: AnyCall) -> TenantTokens:
        """Returns the cost of all requests of the call, and whose they are."""
        first, costs = common(call), self._costs
        cost = request_cost(first, costs)
        if isinstance(call, tuple):
            cost += sum(request_cost(request, costs) for request in call[1:])
        return TenantTokens(first.tenant, first.priority, cost)

    def admit(self, call: AnyCall, blocks: int = 1) -> None:
        """Raises ApiError `deadline_exceeded` or `overloaded` for a call that no replica could take in time.

        The call will be cut into `blocks` blocks, each for another replica.
        """
        timeout_s = common(call).timeout_s
        if timeout_s <= 0:
            raise deadline_passed()
        work = self.work(call)
        block = work if blocks == 1 else work._replace(tokens=-(-work.tokens // blocks))
        wait_s = self.wait_s(block, timeout_s)
        if wait_s > 0:
            raise overloaded(wait_s)

    def check_open(self, timeout_s: float, tenant: str) -> None:
        """Raises ApiError `overloaded` where no queue has more room for the tenant than the reserved part.

        The request has not been read yet, so its cost and priority are unknown. The tenants share the reserved part.
        """
        wait_s = _least(self._closed_s(name, timeout_s, tenant) for name in self._least_loaded())
        if wait_s > 0:
            raise overloaded(wait_s)

    def _least_loaded(self) -> Sequence[str]:
        if len(self._loads.replicas) <= MAX_JUDGED:
            return self._loads.replicas
        names, tokens, _ = self._loads.loads()
        return [names[place] for place in tokens.argpartition(MAX_JUDGED)[:MAX_JUDGED].tolist()]

    def _closed_s(self, name: str, timeout_s: float, tenant: str) -> float:
        queue = self._loads.queue(name)
        limit = float(queue.max_tokens)
        if queue.tokens_per_s > 0:
            limit = min(limit, queue.tokens_per_s * MAX_WAIT_SHARE * timeout_s)
        cost = int(RESERVED_SHARE * limit / max(1, queue.tenants))
        return self._queue_wait_s(name, queue, TenantTokens(tenant, PRIORITIES[0], cost), timeout_s)

    def wait_s(self, work: TenantTokens, timeout_s: float) -> float:
        """Returns the seconds until some replica would take the work: 0 where one would now, or none is known."""
        loads = self._loads
        return _least(self._queue_wait_s(name, loads.queue(name), work, timeout_s) for name in self._least_loaded())

    def _queue_wait_s(self, name: str, queue: QueueEstimate, work: TenantTokens, timeout_s: float) -> float:
        """Returns the wait at one replica, all of whose work is `queue`.

        The part of the queue that is served before the work is found out only if the whole would be a wait.
        """
        if self._wait_s(queue, work.tokens, timeout_s) <= 0:
            return 0.0
        return self._wait_s(self._loads.queue_before(name, work), work.tokens, timeout_s)

    def _wait_s(self, queue: QueueEstimate, cost: float, timeout_s: float) -> float:
        """Returns the wait at one queue, `queue` being what it serves before.

        An idle replica takes whatever the limits allow: waiting would not help.
        """
        tokens, rate = queue.tokens, queue.tokens_per_s
        if tokens < 1:
            return 0.0
        excess = min(tokens, tokens + cost - queue.max_tokens) if queue.max_tokens else 0.0
        if rate <= 0:
            return MIN_WAIT_S if excess > 0 else 0.0
        late_s = min(tokens / rate, (tokens + cost) / rate - MAX_WAIT_SHARE * timeout_s)
        return max(0.0, excess / rate, tokens / rate - self._args.max_wait_s, late_s)


def _least(waits: Iterable[float]) -> float:
    """Returns the shortest wait, without asking further after a replica that would take the work now."""
    least = math.inf
    for wait_s in waits:
        if wait_s <= 0:
            return 0.0
        least = min(least, wait_s)
    return 0.0 if least == math.inf else least


def overloaded(wait_s: float) -> ApiError:
    wait_s = min(MAX_RETRY_AFTER_S, max(MIN_WAIT_S, wait_s))
    return ApiError("overloaded", "The queue is full. Try again later.", retry_after_s=wait_s)


def deadline_passed() -> ApiError:
    return ApiError("deadline_exceeded", "The deadline passed. Ask for less work in one request.")
