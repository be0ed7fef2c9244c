"""Jobs as the caller gave them become work that the step loop holds."""

from collections.abc import Hashable

import numpy as np

from engine.config import Costs
from engine.jobs import GenerateJob, Int32s, Int64s, LikelihoodJob, ScoreJob
from engine.mailbox import Receiver
from engine.requests import Generation, LabelScoring, Likelihood, Request
from engine.targets import TargetRows


def score_cost(job: ScoreJob, ends: Int64s) -> int:
    """Tokens to compute, as if nothing were cached."""
    return len(job.prefix) + int(ends[-1])


def item_ends(lengths: Int64s) -> Int64s:
    """i64 [N + 1]: tokens computed of the items before, of items of so many tokens; an empty one computes one."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.maximum(lengths, 1, out=ends[1:])
    return ends if len(lengths) == 1 else np.cumsum(ends, out=ends)


def likelihood_cost(job: LikelihoodJob) -> int:
    """Tokens to compute, as if nothing were cached: of each row all but the last."""
    return len(job.prefix) + len(job.ids) - len(job.wanted)


def scoring_cost(job: ScoreJob | LikelihoodJob) -> int:
    """Tokens to compute, as if nothing were cached. Of a job that may not have been checked yet."""
    if isinstance(job, LikelihoodJob):
        return likelihood_cost(job)
    starts = job.starts.astype(np.int64)
    return score_cost(job, item_ends(starts[1:] - starts[:-1]))


def generate_cost(job: GenerateJob, costs: Costs) -> int:
    """Tokens to compute, as if nothing were cached, and what the answers are expected to cost beside them."""
    emitted = [len(branch) for branch in job.emitted] or [0] * job.params.n
    return len(job.prompt) + sum(emitted) + sum(answer_cost(job, had, costs) for had in emitted)


def answer_cost(job: GenerateJob, had: int, costs: Costs) -> int:
    """Of one branch that has `had` tokens already."""
    return int(costs.decode_token_cost * min(job.params.max_tokens - had, costs.expected_tokens))


def scoring(
    job: ScoreJob, ends: Int64s, receiver: Receiver, arrival: int, submitted: float, deadline: float, domain: Hashable
) -> LabelScoring:
    """`ends` are the job's `item_ends`."""
    n, labels = len(ends) - 1, len(job.labels)
    label_logprobs = np.empty((n, labels), np.float32)
    label_logprobs.fill(np.nan)
    return LabelScoring(
        job_id=job.job_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        solo=job.solo,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=score_cost(job, ends),
        job=job,
        head="labels" if job.full else job.labels.tobytes(),
        label_logprobs=label_logprobs,
        status=np.zeros(n, np.uint8),
        cached=np.zeros(n, np.int32),
        items=n,
        ends=ends,
    )


def likelihood(
    job: LikelihoodJob, receiver: Receiver, arrival: int, submitted: float, deadline: float, domain: Hashable
) -> Likelihood:
    n, chosen = len(job.wanted), len(job.chosen)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(job.wanted, dtype=np.int64)))
    return Likelihood(
        job_id=job.job_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        solo=job.solo,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=likelihood_cost(job),
        job=job,
        head=("targets", bool(job.top or chosen)),  # alone they may come from another kernel
        status=np.zeros(n, np.uint8),
        cached=np.zeros(n, np.int32),
        items=n,
        targets=_targets(job),
        offsets=offsets,
        found=TargetRows.blank(int(offsets[-1]), job.top, chosen),
        own=job.ids[: job.starts[1]],
    )


def _targets(job: LikelihoodJob) -> Int32s:
    """The wanted tokens of all rows. None of them is shared."""
    ends = zip(job.starts[1:].tolist(), job.wanted.tolist(), strict=True)
    return np.concatenate([job.ids[end - wanted : end] for end, wanted in ends])


def generation(
    job: GenerateJob,
    receiver: Receiver,
    arrival: int,
    submitted: float,
    deadline: float,
    domain: Hashable,
    every: int,
    cost: int,
) -> Generation:
    work = Generation(
        job_id=job.job_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant,
        solo=job.solo,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=cost,
        job=job,
        every=every,
        wants_logprobs=job.params.logprobs is not None or job.params.logprob_token_ids is not None,
        open=job.params.n,
    )
    empty = np.empty(0, np.int32)
    for branch in range(job.params.n):
        output = job.emitted[branch] if job.emitted else empty
        work.branches.append(Request(parent=work, branch=branch, output=output, new_from=len(output)))
    return work
