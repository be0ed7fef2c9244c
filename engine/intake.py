"""Jobs as the caller gave them become work that the step loop holds."""

from collections.abc import Hashable

import numpy as np

from engine.jobs import GenerateJob, ScoreJob
from engine.mailbox import Receiver
from engine.requests import Generation, Request, Scoring


def score_cost(job: ScoreJob) -> int:
    """Tokens to compute, as if nothing were cached."""
    return len(job.prefix) + int(np.maximum(np.diff(job.starts), 1).sum())


def generate_cost(job: GenerateJob) -> int:
    return len(job.prompt) + sum(map(len, job.emitted))


def scoring(
    job: ScoreJob, receiver: Receiver, arrival: int, submitted: float, deadline: float, domain: Hashable
) -> Scoring:
    lengths = np.maximum(np.diff(job.starts.astype(np.int64)), 1)
    n = len(lengths)
    return Scoring(
        job_id=job.job_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant or arrival,
        solo=job.solo,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=score_cost(job),
        job=job,
        label_logprobs=np.full((n, len(job.labels)), np.nan, np.float32),
        status=np.zeros(n, np.uint8),
        cached=np.zeros(n, np.int32),
        ends=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
    )


def generation(
    job: GenerateJob,
    receiver: Receiver,
    arrival: int,
    submitted: float,
    deadline: float,
    domain: Hashable,
    whole: bool,
) -> Generation:
    work = Generation(
        job_id=job.job_id,
        arrival=arrival,
        priority=job.priority,
        tenant=job.tenant or arrival,
        solo=job.solo,
        deadline=deadline,
        submitted=submitted,
        receiver=receiver,
        domain=domain,
        queued=generate_cost(job),
        job=job,
        whole=whole,
        open=job.params.n,
    )
    empty = np.empty(0, np.int32)
    for branch in range(job.params.n):
        output = job.emitted[branch] if job.emitted else empty
        work.branches.append(Request(parent=work, branch=branch, output=output, new_from=len(output)))
    return work
