"""The engine's own check of a job. The wire checked it before; another caller, or a fault there, must harm no step."""

import math
from typing import Any

import numpy as np

from engine.requests import EngineError, ErrorCode, GenerateRequest, Int32s, Int64s, LikelihoodRequest, ScoreRequest
from gpu_sampler.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    ParamError,
    SamplingLimits,
    SamplingParams,
)

MAX_LABELS = 256
MAX_TEXT = 1_024  # characters of an id, a salt or a tenant


class Bounds:
    """What a job is checked against."""

    def __init__(self, vocab_size: int, max_model_len: int, room: int, limits: SamplingLimits) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.room = room  # pool slots
        self.limits = limits


def check_score(job: ScoreRequest, bounds: Bounds) -> Int64s:
    """The rows' own tokens, i64 [N]. Raises EngineError naming the field."""
    _common(job)
    _ids("prefix", job.prefix, bounds.vocab_size)
    _ids("ids", job.ids, bounds.vocab_size)
    _ids("labels", job.labels, bounds.vocab_size)
    if not 1 <= len(job.labels) <= MAX_LABELS:
        raise _invalid("labels", f"{len(job.labels)} labels", f"1 to {MAX_LABELS} token ids")
    if len(set(job.labels.tolist())) != len(job.labels):
        raise _invalid("labels", "an id given twice", "distinct token ids")
    if not isinstance(job.full, bool):
        raise _invalid("full", f"a {type(job.full).__name__}", "a boolean")
    starts = _array("starts", job.starts)
    lengths: Int64s = np.subtract(starts[1:], starts[:-1], dtype=np.int64)
    shortest, most = _extremes(lengths)
    if shortest < 0 or starts[0] != 0 or starts[-1] != len(job.ids):
        raise _invalid("starts", f"{len(starts)} offsets", "offsets that rise from 0 to the number of ids")
    if not len(job.prefix) and shortest == 0:
        raise _invalid("ids", "an empty row", "rows of at least one token where there is no prefix")
    longest = len(job.prefix) + most
    slots = max(longest, len(job.prefix) + 1)  # an empty row computes the prefix's last token again
    _fits("ids", longest, slots if shortest == 0 else longest, bounds, 0)
    return lengths


def check_likelihood(job: LikelihoodRequest, bounds: Bounds) -> None:
    """Raises EngineError naming the field."""
    _common(job)
    for name in ("prefix", "ids", "chosen"):
        _ids(name, getattr(job, name), bounds.vocab_size)
    for name, value, most in (("top", job.top, MAX_TOP_LOGPROBS), ("chosen", len(job.chosen), MAX_LOGPROB_TOKEN_IDS)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise _invalid(name, str(value) if isinstance(value, int) else "another type", f"0 to {most}")
    starts, shared, wanted = (_array(name, getattr(job, name)) for name in ("starts", "shared", "wanted"))
    fresh = np.diff(starts.astype(np.int64))
    rows = len(fresh)
    if rows < 1 or starts[0] != 0 or starts[-1] != len(job.ids) or (fresh < 0).any():
        raise _invalid("starts", f"{len(starts)} offsets", "offsets that rise from 0 to the number of ids")
    if len(shared) != rows or len(wanted) != rows or shared[0] != 0 or shared.min() < 0 or wanted.min() < 1:
        raise _invalid("shared", "other numbers", f"{rows} counts >= 0 that begin with 0, beside as many `wanted` >= 1")
    own = shared.astype(np.int64) + fresh
    if (shared[1:] >= own[:-1]).any():
        raise _invalid("shared", "more than the row before has computed", "less than the length of the row before")
    if (own - wanted <= shared).any():
        raise _invalid("wanted", "too many tokens of a row", "fewer than the tokens that a row does not share")
    if not isinstance(job.keep, bool) or (job.keep and (rows > 1 or len(job.prefix))):
        raise _invalid("keep", f"{rows} rows or a prefix", "false, or a job of one row without a prefix")
    longest = len(job.prefix) + int(own.max())
    _fits("ids", longest, longest - 1, bounds, 0)


def check_generate(job: GenerateRequest, bounds: Bounds) -> None:
    """Raises EngineError naming the field."""
    _common(job)
    if not isinstance(job.params, SamplingParams):
        raise _invalid("params", f"a {type(job.params).__name__}", "SamplingParams")
    try:
        job.params.validate(bounds.vocab_size, bounds.limits)
    except ParamError as error:
        raise EngineError(ErrorCode.INVALID_VALUE, str(error), error.field) from error
    if isinstance(job.seed, bool) or not isinstance(job.seed, int | np.integer) or not 0 <= job.seed < 2**64:
        raise _invalid("seed", "another value", "an integer in [0, 2^64)")
    for name, number, least in (("every", job.every, 1), ("isolated_tokens", job.isolated_tokens, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise _invalid(name, "another value", f"an integer >= {least}")
    _ids("prompt", job.prompt, bounds.vocab_size)
    if not len(job.prompt):
        raise _invalid("prompt", "0 tokens", "at least one token")
    _fits("prompt", len(job.prompt), len(job.prompt), bounds, 1)
    if not isinstance(job.emitted, tuple) or len(job.emitted) not in (0, job.params.n):
        raise _invalid("emitted", "another number of branches", f"0 or {job.params.n} arrays")
    for branch in job.emitted:
        _ids("emitted", branch, bounds.vocab_size)
        if len(branch) > job.params.max_tokens or len(job.prompt) + len(branch) > bounds.max_model_len:
            raise _invalid("emitted", f"{len(branch)} tokens", "at most `max_tokens` and the context")


def _common(job: ScoreRequest | LikelihoodRequest | GenerateRequest) -> None:
    for field in ("request_id", "salt", "tenant"):
        value: Any = getattr(job, field)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise _invalid(field, f"a {type(value).__name__}", f"a string of at most {MAX_TEXT} characters")
    if isinstance(job.priority, bool) or not isinstance(job.priority, int) or abs(job.priority) > 2**31:
        raise _invalid("priority", f"a {type(job.priority).__name__}", "an integer in [-2^31, 2^31]")
    left: Any = job.remaining_s
    if left is None:
        return
    if isinstance(left, bool) or not isinstance(left, int | float) or math.isnan(left):
        raise _invalid("remaining_s", f"a {type(left).__name__}", "a number of seconds")
    if left <= 0:
        raise EngineError(ErrorCode.DEADLINE_EXCEEDED, "The deadline had passed on arrival.", "remaining_s")


def _array(field: str, value: Any) -> Int32s:
    if not isinstance(value, np.ndarray) or value.dtype != np.int32 or value.ndim != 1:
        given = f"{value.dtype} of {value.ndim} dimensions" if isinstance(value, np.ndarray) else type(value).__name__
        raise _invalid(field, given, "a one-dimensional int32 array")
    return value


def _ids(field: str, value: Any, vocab_size: int) -> None:
    ids = _array(field, value)
    if len(ids) and np.maximum.reduce(ids.view(np.uint32)) >= vocab_size:  # as which negative ones are large
        message = f"`{field}` must be made of token ids in [0, {vocab_size}). Given: {ids.min()} to {ids.max()}."
        raise EngineError(ErrorCode.INVALID_TOKEN_ID, message, field)


def _extremes(lengths: Int64s) -> tuple[int, int]:
    """The least and the most, -1 of none. Most jobs are of one row."""
    if len(lengths) == 1:
        return (only := int(lengths[0])), only
    return (int(lengths.min()), int(lengths.max())) if len(lengths) else (-1, -1)


def _fits(field: str, tokens: int, slots: int, bounds: Bounds, more: int) -> None:
    """A row of `tokens` tokens that needs `slots` pool slots, with room for `more` tokens after it."""
    most = bounds.max_model_len - more
    if tokens > most:
        message = f"`{field}` must be a row of at most {most} tokens. Given: {tokens}."
        raise EngineError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field)
    if slots + more > bounds.room:
        message = f"`{field}` must fit the KV pool of {bounds.room} tokens. Given: {slots + more}."
        raise EngineError(ErrorCode.REQUEST_TOO_LARGE, message, field)


def _invalid(field: str, given: str, allowed: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_VALUE, f"`{field}` must be {allowed}. Given: {given}.", field)
