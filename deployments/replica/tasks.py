"""Tasks to jobs: the replica's own check of what another process sent, whoever it was.

The engine checks what a job holds; here is checked that a task can be cut into jobs at all. Arrays are copied once,
where they are views of Ray's message: those are read-only, and torch takes no read-only memory.
"""

from typing import Any

import numpy as np

from deployments.limits import Limits
from deployments.protocol import GenerateTask, LikelihoodTask, ScoreTask
from engine.requests import EngineError, ErrorCode, GenerateRequest, LikelihoodRequest, ScoreRequest
from gpu_sampler.sampling_params import ParamError, SamplingParams


def score_job(task: Any, limits: Limits) -> ScoreRequest:
    """Raises EngineError naming the field."""
    if not isinstance(task, ScoreTask):
        raise _invalid("task", _type(task), "a ScoreTask")
    starts = _array("starts", task.starts, np.int32)
    rows = len(starts) - 1
    if not 1 <= rows <= limits.wire.max_rows:
        raise _too_large("starts", f"{rows} rows", f"1 to {limits.wire.max_rows} rows")
    labels = _array("labels", task.labels, np.int32)
    if not 1 <= len(labels) <= limits.scoring.max_labels:
        raise _invalid("labels", f"{len(labels)} labels", f"1 to {limits.scoring.max_labels} token ids")
    if (cells := rows * len(labels)) > limits.wire.max_answer_cells:
        raise _too_large("labels", f"{cells} cells", f"at most {limits.wire.max_answer_cells} rows x labels")
    prefix, ids = _array("prefix", task.prefix, np.int32), _array("ids", task.ids, np.int32)
    _check_tokens("ids", len(prefix) + len(ids), limits)
    return ScoreRequest(
        request_id=task.task_id,
        prefix=prefix,
        ids=ids,
        starts=starts,
        labels=labels,
        full=task.full,
        salt=task.salt,
        priority=task.priority,
        tenant=task.tenant,
        remaining_s=task.remaining_s,
        isolated=task.isolated,
        already_admitted=task.accepted,
    )


def likelihood_job(task: Any, limits: Limits) -> LikelihoodRequest:
    """Raises EngineError naming the field."""
    if not isinstance(task, LikelihoodTask):
        raise _invalid("task", _type(task), "a LikelihoodTask")
    names = ("prefix", "ids", "starts", "shared", "wanted")
    prefix, ids, starts, shared, wanted = (_array(name, getattr(task, name), np.int32) for name in names)
    rows = len(starts) - 1
    if not 1 <= rows <= limits.wire.max_rows:
        raise _too_large("starts", f"{rows} rows", f"1 to {limits.wire.max_rows} rows")
    if len(wanted) and wanted.max() > limits.scoring.max_continuation_tokens:
        raise _too_large("wanted", f"{wanted.max()} tokens", f"at most {limits.scoring.max_continuation_tokens} each")
    if (cells := int(wanted.sum(dtype=np.int64))) > limits.wire.max_answer_cells:
        raise _too_large("wanted", f"{cells} cells", f"at most {limits.wire.max_answer_cells} tokens in all")
    _check_tokens("ids", len(prefix) + len(ids) - rows, limits)
    return LikelihoodRequest(
        request_id=task.task_id,
        prefix=prefix,
        ids=ids,
        starts=starts,
        shared=shared,
        wanted=wanted,
        salt=task.salt,
        priority=task.priority,
        tenant=task.tenant,
        remaining_s=task.remaining_s,
        isolated=task.isolated,
        already_admitted=task.accepted,
    )


def scoring_job(task: ScoreTask | LikelihoodTask, limits: Limits) -> ScoreRequest | LikelihoodRequest | None:
    """None where none can be made of the task."""
    try:
        return score_job(task, limits) if isinstance(task, ScoreTask) else likelihood_job(task, limits)
    except EngineError:
        return None


def prompt_job(job: GenerateRequest, top: int) -> LikelihoodRequest | None:
    """The log-probabilities of a generation's prompt, as a job that leaves the prompt in the cache for it; None for a
    prompt of one token, which has none."""
    size = len(job.prompt)
    chosen = job.params.logprob_token_ids or ()
    if size < 2:
        return None
    return LikelihoodRequest(
        request_id=job.request_id,
        prefix=job.prompt[:0],
        ids=job.prompt,
        starts=np.array([0, size], np.int32),
        shared=np.zeros(1, np.int32),
        wanted=np.array([size - 1], np.int32),
        top=top,
        chosen=np.array(chosen, np.int32),
        keep=True,
        salt=job.salt,
        priority=job.priority,
        tenant=job.tenant,
        remaining_s=job.remaining_s,
        isolated=job.isolated,
        already_admitted=job.already_admitted,
    )


def generate_jobs(task: Any, limits: Limits, vocab_size: int) -> list[GenerateRequest]:
    """One job a prompt. Raises EngineError naming the field."""
    if not isinstance(task, GenerateTask):
        raise _invalid("task", _type(task), "a GenerateTask")
    prompts, starts = _array("prompts", task.prompts, np.int32), _array("starts", task.starts, np.int32)
    count = len(starts) - 1
    if not 1 <= count <= limits.wire.max_prompts:
        raise _too_large("starts", f"{count} prompts", f"1 to {limits.wire.max_prompts} prompts")
    lengths = np.diff(starts.astype(np.int64))
    if starts[0] != 0 or starts[-1] != len(prompts) or (lengths < 1).any():
        raise _invalid("starts", f"{len(starts)} offsets", "offsets that rise from 0 to the number of ids")
    seeds = _array("seeds", task.seeds, np.uint64)
    if len(seeds) != count:
        raise _invalid("seeds", f"{len(seeds)} seeds", f"{count} seeds")
    _check_params(task.params, count, len(prompts), limits, vocab_size)
    if not isinstance(task.emitted, tuple) or len(task.emitted) not in (0, count):
        raise _invalid("emitted", _type(task.emitted), f"a tuple of 0 or {count} entries")
    if isinstance(task.epoch, bool) or not isinstance(task.epoch, int) or task.epoch < 0:
        raise _invalid("epoch", _type(task.epoch), "an integer >= 0")
    _check_prompt_scores(task, len(prompts), limits)
    return [
        GenerateRequest(
            request_id=f"{task.task_id}/{q}" if count > 1 else task.task_id,
            prompt=prompts[starts[q] : starts[q + 1]],
            params=task.params,
            seed=int(seeds[q]),
            already_admitted=task.accepted,
            emitted=_own(task.emitted[q]) if task.emitted else (),
            salt=task.salt,
            priority=task.priority,
            tenant=task.tenant,
            remaining_s=task.remaining_s,
            isolated=task.isolated,
            isolated_tokens=task.isolated_tokens,
            every=task.every,
        )
        for q in range(count)
    ]


def _check_prompt_scores(task: GenerateTask, tokens: int, limits: Limits) -> None:
    top: Any = task.prompt_top
    most = limits.sampling.max_logprobs
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= most):
        raise _invalid("prompt_top", _type(top), f"None or an integer in [0, {most}]")
    if not isinstance(task.prompt_only, bool) or (task.prompt_only and top is None):
        raise _invalid("prompt_only", _type(task.prompt_only), "false without `prompt_top`")
    cells = tokens * (1 + (top or 0) + len(task.params.logprob_token_ids or ()))
    if top is not None and cells > limits.wire.max_answer_cells:
        raise _too_large("prompt_top", f"{cells} cells", f"at most {limits.wire.max_answer_cells} cells in all")


def _check_params(params: Any, prompts: int, tokens: int, limits: Limits, vocab_size: int) -> None:
    if not isinstance(params, SamplingParams):
        raise _invalid("params", _type(params), "SamplingParams")
    try:
        params.validate(vocab_size, limits.sampling)
    except ParamError as error:
        raise EngineError(ErrorCode.INVALID_VALUE, str(error), error.field) from error
    except (TypeError, ValueError) as error:  # a field of a type that no wire model lets through
        raise _invalid("params", "a field of another type", "SamplingParams") from error
    if prompts * params.n > limits.wire.max_rows:
        raise _too_large("n", f"{prompts * params.n} rows", f"at most {limits.wire.max_rows} prompts x n")
    _check_tokens("prompts", tokens, limits)


def _check_tokens(field: str, tokens: int, limits: Limits) -> None:
    if tokens > limits.wire.max_request_tokens:
        raise _too_large(field, f"{tokens} tokens", f"at most {limits.wire.max_request_tokens} tokens in all")


def _array(field: str, value: Any, dtype: type[np.generic]) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1:
        return value if value.flags.writeable else value.copy()
    given = f"{value.dtype} of {value.ndim} dimensions" if isinstance(value, np.ndarray) else _type(value)
    raise _invalid(field, given, f"a one-dimensional {dtype.__name__} array")


def _own(branches: Any) -> Any:
    """A prompt's emitted tokens; what is no tuple of arrays is left for the engine to refuse."""
    if not isinstance(branches, tuple):
        return branches
    return tuple(branch.copy() if isinstance(branch, np.ndarray) else branch for branch in branches)


def _type(value: Any) -> str:
    return f"a {type(value).__name__}"


def _invalid(field: str, given: str, allowed: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_VALUE, f"`{field}` must be {allowed}. Given: {given}.", field)


def _too_large(field: str, given: str, allowed: str) -> EngineError:
    return EngineError(ErrorCode.REQUEST_TOO_LARGE, f"`{field}` must be {allowed}. Given: {given}.", field)
