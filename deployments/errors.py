"""Defines errors as clients see them: a closed list of codes, and messages that never hold a request's text."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from deployments.protocol import Failure
from engine.requests import EngineError, ErrorCode
from engine.tokenizer.tokenizer import TooManyTokens
from gpu_sampler.sampling_params import ParamError
from scoring.errors import ItemError, ScoringError

Code = Literal[
    "invalid_json",
    "invalid_header",
    "unsupported_parameter",
    "context_length_exceeded",
    "invalid_api_key",
    "permission_denied",
    "model_not_found",
    "not_found",
    "method_not_allowed",
    "deadline_exceeded",
    "body_too_large",
    "request_too_large",
    "unsupported_media_type",
    "invalid_value",
    "invalid_token_id",
    "label_not_single_token",
    "duplicate_label",
    "quarantined_request",
    "overloaded",
    "quota_exceeded",
    "internal_error",
    "nonfinite_logits",
    "not_ready",
    "draining",
    "no_replica",
    "replica_lost",
]

# LiteLLM and LangChain (under the OpenAI SDK 3.54, whose exceptions show only the message) recognise an overlong prompt
# by these words, and then fall back to a model with a longer context.
OVERLONG = "This model's maximum context length is exceeded (context_length_exceeded)."
MAX_DETAILS = 8
MAX_RETRY_AFTER_S = 60


class ErrorKind(NamedTuple):
    """Holds how a code is answered."""

    status: int
    type: str
    retry: bool | None = None  # x-should-retry; None: not sent


_INVALID = "invalid_request_error"


def _kinds(status: int, type: str, *codes: Code, retry: bool | None = None) -> dict[Code, ErrorKind]:
    return dict.fromkeys(codes, ErrorKind(status, type, retry))


ERROR_KINDS: dict[Code, ErrorKind] = {
    **_kinds(400, _INVALID, "invalid_json", "invalid_header", "unsupported_parameter", "context_length_exceeded"),
    **_kinds(401, "authentication_error", "invalid_api_key"),
    **_kinds(403, "permission_error", "permission_denied"),
    **_kinds(404, "not_found_error", "model_not_found", "not_found"),
    **_kinds(405, _INVALID, "method_not_allowed"),
    **_kinds(408, "timeout_error", "deadline_exceeded", retry=False),
    **_kinds(413, _INVALID, "body_too_large", "request_too_large"),
    **_kinds(415, _INVALID, "unsupported_media_type"),
    **_kinds(422, _INVALID, "invalid_value", "invalid_token_id", "label_not_single_token", "duplicate_label"),
    **_kinds(422, _INVALID, "quarantined_request"),
    **_kinds(429, "rate_limit_error", "overloaded", "quota_exceeded", retry=True),
    **_kinds(500, "server_error", "internal_error"),
    **_kinds(500, "server_error", "nonfinite_logits", retry=False),
    **_kinds(503, "server_error", "not_ready", "draining", "no_replica", "replica_lost", retry=True),
}
_RENAMED: dict[ErrorCode, Code] = {  # codes of the engine that clients see under another name
    ErrorCode.STEP_FAILED: "internal_error",
    ErrorCode.QUARANTINED: "quarantined_request",
    ErrorCode.LOST: "replica_lost",
}


class ErrorDetail(BaseModel):
    """Names one field at fault."""

    param: str | None
    message: str


OPENAI_STATUSES = {422: 400}
"""Statuses that replace others where `wire.errors` is openai."""


class ApiError(Exception):
    """Refuses or fails a request with an HTTP status. The message names the field, the value and the allowed range."""

    def __init__(
        self,
        code: Code,
        message: str,
        param: str | None = None,
        *,
        details: Sequence[ErrorDetail] = (),
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keeps what the answer needs.

        Args:
            code: One of the closed list of codes.
            message: Sent as it is.
            param: The field at fault, if there is one.
            details: Every field at fault; empty means `param` only.
            retry_after_s: Seconds until a retry may succeed, for 429 and 503.
            headers: More headers of the answer.
        """
        super().__init__(code, message, param)
        self.code: Code = code
        self.message = message
        self.param = param
        self.details = tuple(details)[:MAX_DETAILS] or (ErrorDetail(param=param, message=message),)
        self.retry_after_s = retry_after_s
        self._extra = dict(headers or {})
        self.flat = False  # rerank clients look for `detail` and `message` beside `error`

    @property
    def status(self) -> int:
        """The HTTP status."""
        return ERROR_KINDS[self.code].status

    def body(self, request_id: str) -> dict[str, Any]:
        """Returns the JSON body."""
        message = f"{self.message} {OVERLONG}" if self.code == "context_length_exceeded" else self.message
        error = {
            "message": message,
            "type": ERROR_KINDS[self.code].type,
            "param": self.param,
            "code": self.code,
            "details": [detail.model_dump() for detail in self.details],
        }
        beside = {"detail": message, "message": message} if self.flat else {}
        return {"error": error, "request_id": request_id, **beside}

    def event(self, request_id: str) -> dict[str, Any]:
        """Returns the last event of a stream that fails after its start."""
        body = self.body(request_id)
        del body["error"]["details"]
        return body

    def headers(self) -> dict[str, str]:
        """Returns the headers of the answer."""
        headers = dict(self._extra)
        kind = ERROR_KINDS[self.code]
        if kind.status in (429, 503):
            wait = 1.0 if self.retry_after_s is None else self.retry_after_s
            headers["retry-after"] = str(int(min(MAX_RETRY_AFTER_S, max(1.0, -(-wait // 1)))))
        if kind.retry is not None:
            headers["x-should-retry"] = "true" if kind.retry else "false"
        if kind.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self, request_id: str) -> Response:
        """Returns the HTTP response."""
        body = to_json(self.body(request_id))
        return Response(body, self.status, self.headers(), media_type="application/json")


class EventErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: Code


class ErrorInfo(EventErrorInfo):
    details: list[ErrorDetail]


class ErrorBody(BaseModel):
    """The answer of every refusal and failure."""

    error: ErrorInfo
    request_id: str


class ErrorEvent(BaseModel):
    """The last event of a stream that fails after its start."""

    error: EventErrorInfo
    request_id: str


def invalid(field: str, allowed: str, given: str) -> ApiError:
    """Returns the error for a field whose value is not allowed."""
    return ApiError("invalid_value", f"`{field}` must be {allowed}. Given: {given}.", field)


def unsupported(field: str, why: str = "is not supported by this server") -> ApiError:
    """Returns the error for a known field that this server does not support."""
    return ApiError("unsupported_parameter", f"`{field}` {why}. Leave it out.", field)


def internal_error() -> ApiError:
    """Returns the error for an unhandled exception."""
    return ApiError("internal_error", "The server failed to handle this request. Its log names the request id.")


def too_many_tokens(count: int, maximum: int, limit: str, field: str | None = None) -> ApiError:
    """Returns the error for text of more tokens than a limit of the configuration allows."""
    message = f"The request's text must be at most {maximum} tokens (`limits.{limit}`). Given: {count}."
    return ApiError("request_too_large", message, field)


def from_failure(failure: Failure | EngineError) -> ApiError:
    """Returns the error for a request that a replica refused or lost."""
    code: Any = ErrorCode(failure.code)
    return ApiError(_RENAMED.get(code, code.value), failure.message, failure.field)


def from_item_error(error: ItemError, field: str) -> ApiError:
    """Returns the error of a request that fails because of its item `field`."""
    return ApiError(error.code.value, error.message, field)


def as_api_error(error: ApiError | EngineError | ParamError | ScoringError | TooManyTokens) -> ApiError:
    """Returns the HTTP error for an error of any of our packages."""
    match error:
        case ApiError():
            return error
        case EngineError():
            return from_failure(error)
        case ScoringError():
            return ApiError(error.code.value, error.message, error.field)
        case TooManyTokens():
            return too_many_tokens(error.count, error.maximum, "max_request_tokens")
    return ApiError("invalid_value", str(error), error.field)


_TYPES = {
    "missing": "given",
    "int_type": "an integer",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def describe(value: object) -> str:
    """Describes a value without its text: numbers as they are, anything else by type and length."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() if abs(value) >= 1 << 64:
            return "an integer of more than 64 bits"
        case int() | float():
            return str(value)
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)} entries"
        case dict():
            return f"an object of {len(value)} fields"
    return "another type"


def path_of(loc: Sequence[int | str]) -> str:
    """Returns a path as text: `("items", 3, "text")` becomes `items[3].text`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def from_validation(error: ValidationError) -> ApiError:
    """Returns a 422 that names the first field at fault, and up to eight fields in `details`."""
    details: list[ErrorDetail] = []
    code: Code = "invalid_value"
    for found in error.errors(include_url=False)[:MAX_DETAILS]:
        path = path_of(found["loc"]) or "body"
        context = found.get("ctx", {})
        if found["type"] == "refused":
            allowed, given = str(context["allowed"]), str(context["given"])
            code = context.get("code", code) if not details else code
        elif found["type"] == "literal_error":
            allowed, given = f"one of {context['expected']}", describe(found["input"])
        else:
            allowed = _TYPES.get(found["type"], "valid")
            given = "nothing" if found["type"] == "missing" else describe(found["input"])
        details.append(ErrorDetail(param=path, message=f"`{path}` must be {allowed}. Given: {given}."))
    return ApiError(code, details[0].message, details[0].param, details=details)
