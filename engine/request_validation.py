"""Checks requests at the engine's door.

The wire checks them first, with messages for its users. This check keeps a faulty caller from harming the steps that
other requests share.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from engine.requests import (
    EngineError,
    EngineRequest,
    ErrorCode,
    GenerateRequest,
    Int32s,
    Int64s,
    LikelihoodRequest,
    PoolingRequest,
    PoolingTask,
    RowsRequest,
    ScoreRequest,
)
from gpu_sampler.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    ParamError,
    SamplingLimits,
    SamplingParams,
)

INT32 = np.dtype(np.int32)
MAX_LABELS = 256
FEW = 8  # ids that are read faster one by one
MAX_INTERVAL = 2**31 - 1  # tokens
MAX_TEXT = 1_024  # characters of a request id, a cache salt or a tenant
ARRAYS: dict[type[EngineRequest], tuple[str, ...]] = {
    ScoreRequest: ("prefix", "ids", "starts", "labels"),
    LikelihoodRequest: ("prefix", "ids", "starts", "shared", "wanted", "chosen"),
    PoolingRequest: ("prefix", "ids", "starts", "positions", "segments"),
    GenerateRequest: ("prompt",),
}
Request = TypeVar("Request", bound=EngineRequest)


class RequestLimits(NamedTuple):
    """Holds what a request is checked against."""

    vocab_size: int
    max_model_len: int
    room: int  # slots of the KV pool
    limits: SamplingLimits


def with_writable_arrays(request: Request, kind: type[Request]) -> Request:
    """Copies the arrays of a request that are views of a message, since torch takes no read-only memory.

    Args:
        request: Any object: it may come from another process.
        kind: The class that the request must have.

    Returns:
        The request, or a copy of it whose arrays may be written to. Only the shapes are checked.

    Raises:
        EngineError: INVALID_VALUE for another class or for a field that is no one-dimensional int32 array.
    """
    if not isinstance(request, kind):
        raise _invalid("request", f"a {type(request).__name__}", f"a {kind.__name__}")
    own: dict[str, Any] = {}
    for name in ARRAYS[kind]:
        value = _array(name, getattr(request, name))
        if not value.flags.writeable:
            own[name] = value.copy()
    if isinstance(request, GenerateRequest) and request.emitted and isinstance(request.emitted, tuple):
        own["emitted"] = tuple(_array("emitted", branch).copy() for branch in request.emitted)
    return replace(request, **own) if own else request


def check_score(request: ScoreRequest, bounds: RequestLimits) -> Int64s:
    """Checks a score request.

    Returns:
        i64 [N], the number of tokens of each row without the prefix.

    Raises:
        EngineError: names the field.
    """
    _check_common(request, ScoreRequest)
    labels = _check_ids("labels", request.labels, bounds.vocab_size)
    if not 1 <= len(labels) <= MAX_LABELS:
        raise _invalid("labels", f"{len(labels)} labels", f"1 to {MAX_LABELS} token ids")
    if len(set(labels.tolist())) != len(labels):
        raise _invalid("labels", "an id given twice", "distinct token ids")
    for name, value in (("full", request.full), ("raw_logits", request.raw_logits)):
        if not isinstance(value, bool):
            raise _invalid(name, f"a {type(value).__name__}", "a boolean")
    if request.full and request.raw_logits:
        raise _invalid("raw_logits", "true beside `full`", "false, or true without `full`")
    return _check_rows(request, bounds, may_be_empty=len(request.prefix) > 0)


def check_pooling(
    request: PoolingRequest, bounds: RequestLimits, task: PoolingTask, *, whole_rows: bool = False
) -> Int64s:
    """Checks a pooling request against the head that answers it: its task, and whether it reads whole rows.

    Returns:
        i64 [N], the number of tokens of each row without the prefix.

    Raises:
        EngineError: names the field.
    """
    _check_common(request, PoolingRequest)
    if request.task is not task:
        raise _invalid("task", str(request.task)[:MAX_TEXT], f"{task}, which the model's head serves")
    lengths = _check_rows(request, bounds, may_be_empty=False)
    if whole_rows and len(request.prefix):
        raise _invalid("prefix", f"{len(request.prefix)} tokens", "empty: this head reads each row as a whole")
    _check_positions(request, lengths, several=task is PoolingTask.TOKEN_CLASSIFY)
    segments = _array("segments", request.segments)
    if len(segments) and (len(segments) != len(lengths) or segments.min() < 0 or (segments > lengths).any()):
        raise _invalid("segments", f"{len(segments)} lengths", "empty, or for each row a number of its own tokens")
    return lengths


def _check_positions(request: PoolingRequest, lengths: Int64s, *, several: bool) -> None:
    positions = _array("positions", request.positions)
    if not several:
        if len(positions):
            raise _invalid("positions", f"{len(positions)} places", "empty: this head has one answer a row")
        return
    ascending = len(positions) > 0 and positions[0] >= 0 and (np.diff(positions) > 0).all()
    if not ascending or positions[-1] >= len(request.ids):
        raise _invalid("positions", f"{len(positions)} places", "ascending places in `ids`")
    if len(np.unique(np.searchsorted(request.starts, positions, "right"))) != len(lengths):
        raise _invalid("positions", "a row without one", "at least one place in each row")


def _check_rows(request: RowsRequest, bounds: RequestLimits, *, may_be_empty: bool) -> Int64s:
    """Checks the tokens of a request's rows; `may_be_empty`: a row may have no token but the prefix.

    Returns:
        i64 [N], the number of tokens of each row without the prefix.
    """
    _check_ids("prefix", request.prefix, bounds.vocab_size)
    _check_ids("ids", request.ids, bounds.vocab_size)
    starts = _array("starts", request.starts)
    lengths = _lengths(starts)
    shortest, longest = _extremes(lengths)
    if shortest < 0 or starts.item(0) != 0 or starts.item(-1) != len(request.ids):
        raise _invalid("starts", f"{len(starts)} offsets", "offsets that rise from 0 to the number of ids")
    if shortest == 0 and not may_be_empty:
        where = "" if len(request.prefix) else " where there is no prefix"
        raise _invalid("ids", "an empty row", f"rows of at least one token{where}")
    tokens = len(request.prefix) + longest
    slots = max(tokens, len(request.prefix) + 1)  # an empty row computes the prefix's last token again
    _check_fit("ids", tokens, slots if shortest == 0 else tokens, bounds)
    return lengths


def check_likelihood(request: LikelihoodRequest, bounds: RequestLimits) -> None:
    """Checks a likelihood request. Raises EngineError naming the field."""
    _check_common(request, LikelihoodRequest)
    for name in ("prefix", "ids", "chosen"):
        _check_ids(name, getattr(request, name), bounds.vocab_size)
    _check_integer("top", request.top, 0, MAX_TOP_LOGPROBS)
    _check_integer("chosen", len(request.chosen), 0, MAX_LOGPROB_TOKEN_IDS)
    starts, shared, wanted = (_array(name, getattr(request, name)) for name in ("starts", "shared", "wanted"))
    fresh = np.diff(starts.astype(np.int64))
    rows = len(fresh)
    if rows < 1 or starts[0] != 0 or starts[-1] != len(request.ids) or (fresh < 0).any():
        raise _invalid("starts", f"{len(starts)} offsets", "offsets that rise from 0 to the number of ids")
    if len(shared) != rows or len(wanted) != rows or shared[0] != 0 or shared.min() < 0 or wanted.min() < 1:
        raise _invalid("shared", "other numbers", f"{rows} counts >= 0 that begin with 0, beside as many `wanted` >= 1")
    own = shared.astype(np.int64) + fresh
    if (shared[1:] >= own[:-1]).any():
        raise _invalid("shared", "more than the row before has computed", "less than the length of the row before")
    if (own - wanted <= shared).any():
        raise _invalid("wanted", "too many tokens of a row", "fewer than the tokens that a row does not share")
    if not isinstance(request.keep, bool) or (request.keep and (rows > 1 or len(request.prefix))):
        raise _invalid("keep", f"{rows} rows or a prefix", "false, or a request of one row without a prefix")
    tokens = len(request.prefix) + int(own.max())
    _check_fit("ids", tokens, tokens - 1, bounds)


def check_generate(request: GenerateRequest, bounds: RequestLimits, new_tokens: int = 1) -> None:
    """Checks a generate request with room for `new_tokens` after the prompt. Raises EngineError naming the field."""
    _check_common(request, GenerateRequest)
    if not isinstance(request.params, SamplingParams):
        raise _invalid("params", f"a {type(request.params).__name__}", "SamplingParams")
    try:
        request.params.validate(bounds.vocab_size, bounds.limits)
    except ParamError as error:
        raise EngineError(ErrorCode.INVALID_VALUE, str(error), error.field) from error
    except (TypeError, ValueError) as error:  # a field of a type that no wire model lets through
        raise _invalid("params", "a field of another type", "SamplingParams") from error
    seed = request.seed
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise _invalid("seed", "another value", "an integer in [0, 2^64)")
    _check_integer("stream_interval", request.stream_interval, 1, MAX_INTERVAL)
    _check_integer("isolated_tokens", request.isolated_tokens, 0, None)
    if request.prompt_logprobs is not None:
        _check_integer("prompt_logprobs", request.prompt_logprobs, 0, bounds.limits.max_logprobs)
    if not isinstance(request.prompt_only, bool) or (request.prompt_only and request.prompt_logprobs is None):
        raise _invalid("prompt_only", f"a {type(request.prompt_only).__name__}", "false without `prompt_logprobs`")
    _check_ids("prompt", request.prompt, bounds.vocab_size)
    if not len(request.prompt):
        raise _invalid("prompt", "0 tokens", "at least one token")
    _check_fit("prompt", len(request.prompt), len(request.prompt), bounds, new_tokens)
    if not isinstance(request.emitted, tuple) or len(request.emitted) not in (0, request.params.n):
        raise _invalid("emitted", "another number of branches", f"0 or {request.params.n} arrays")
    for branch in request.emitted:
        _check_ids("emitted", branch, bounds.vocab_size)
        if len(branch) > request.params.max_tokens or len(request.prompt) + len(branch) > bounds.max_model_len:
            raise _invalid("emitted", f"{len(branch)} tokens", "at most `max_tokens` and the context")


def _check_common(request: EngineRequest, kind: type[EngineRequest]) -> None:
    if not isinstance(request, kind):
        raise _invalid("request", f"a {type(request).__name__}", f"a {kind.__name__}")
    _check_text("request_id", request.request_id)
    _check_text("cache_salt", request.cache_salt)
    _check_text("tenant", request.tenant)
    if isinstance(request.priority, bool) or not isinstance(request.priority, int) or abs(request.priority) > 2**31:
        raise _invalid("priority", f"a {type(request.priority).__name__}", "an integer in [-2^31, 2^31]")
    timeout_s: Any = request.timeout_s
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise _invalid("timeout_s", f"a {type(timeout_s).__name__}", "a number of seconds")
    if timeout_s <= 0:
        raise EngineError(ErrorCode.DEADLINE_EXCEEDED, "The deadline had passed on arrival.", "timeout_s")


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _invalid(field, f"a {type(value).__name__}", f"a string of at most {MAX_TEXT} characters")


def _check_integer(field: str, value: Any, low: int, high: int | None) -> None:
    """Raises unless the value is an integer of at least `low` and, if there is a bound, at most `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer >= {low}" if high is None else f"{low} to {high}"
        raise _invalid(field, str(value) if isinstance(value, int) else f"a {type(value).__name__}", allowed)


def _array(field: str, value: Any) -> Int32s:
    if not isinstance(value, np.ndarray) or value.dtype != INT32 or value.ndim != 1:
        given = f"{value.dtype} of {value.ndim} dimensions" if isinstance(value, np.ndarray) else type(value).__name__
        raise _invalid(field, given, "a one-dimensional int32 array")
    return value


def _check_ids(field: str, value: Any, vocab_size: int) -> Int32s:
    """Returns the ids, i32 [n]. Raises EngineError unless all are in the vocabulary."""
    ids = _array(field, value)
    if len(ids) > FEW:
        inside = np.maximum.reduce(ids.view(np.uint32)) < vocab_size  # a negative id reads as a large one
    else:
        inside = not len(ids) or 0 <= min(listed := ids.tolist()) <= max(listed) < vocab_size
    if not inside:
        message = f"`{field}` must be made of token ids in [0, {vocab_size}). Given: {ids.min()} to {ids.max()}."
        raise EngineError(ErrorCode.INVALID_TOKEN_ID, message, field)
    return ids


def _lengths(starts: Int32s) -> Int64s:
    """Returns the length of each row that begins where the one before ends. Most requests have one row."""
    if len(starts) == 2:
        first, last = starts.tolist()
        return np.array((last - first,), np.int64)
    found: Int64s = np.subtract(starts[1:], starts[:-1], dtype=np.int64)
    return found


def _extremes(lengths: Int64s) -> tuple[int, int]:
    """Returns the smallest and the largest length, -1 where there is none. Most requests have one row."""
    if len(lengths) == 1:
        return (only := int(lengths[0])), only
    return (int(lengths.min()), int(lengths.max())) if len(lengths) else (-1, -1)


def _check_fit(field: str, tokens: int, slots: int, bounds: RequestLimits, new: int = 0) -> None:
    """Checks a row of `tokens` tokens that needs `slots` pool slots, with room for `new` tokens after it."""
    max_tokens = bounds.max_model_len - new
    if tokens > max_tokens:
        message = f"`{field}` must be a row of at most {max_tokens} tokens. Given: {tokens}."
        raise EngineError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, field)
    if slots + new > bounds.room:
        message = f"`{field}` must fit the KV pool of {bounds.room} tokens. Given: {slots + new}."
        raise EngineError(ErrorCode.REQUEST_TOO_LARGE, message, field)


def _invalid(field: str, given: str, allowed: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_VALUE, f"`{field}` must be {allowed}. Given: {given}.", field)
