"""Serves POST /v1/decisions: typed questions about one input, answered with probabilities.

A request builds one `engine.requests.ScoreRequest` for each batch of rows, nearly always a single one.
"""

import hashlib
from typing import Any

import numpy as np
from starlette.responses import Response

from deployments.api.endpoints.scoring_common import prompt_limits
from deployments.api.handler import TEXT_COST, RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas import decisions as wire
from deployments.api.schemas.decisions import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    text_of,
)
from deployments.errors import ApiError
from deployments.protocol import ModelCard
from engine.requests import ScoreRequest, ScoreResult
from scoring.decisions import DecisionPlan, answer_probabilities, confidence, expected_level
from scoring.prompts.decision_prompts import FORMAT_VERSION, Entry, Option, Question


async def decisions(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/decisions. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, wire.DecisionRequest, handler.settings.deadlines.scoring_s)
    card = await handler.language_model(body.model, context.route)
    plan = await _prepare(handler, context, body, card)
    with handler.deadline(context, handler.settings.deadlines.scoring_s):
        requests = _requests(handler, context, body, plan)
        replies = [await handler.backend.score(request, all_or_nothing=True) for request in requests]
    compute_s, head_s = (sum(getattr(reply, name) for reply in replies) for name in ("compute_s", "head_s"))
    handler.report_compute(context, replies[0].queue_s, compute_s, head_s)
    handler.observer.items(context.route, len(body.questions), 0)
    size = 16 * sum(one.size for one in plan.readers)
    found = await handler.off_loop(size, _answer, handler, body, card, plan, replies)
    masses = [one["label_mass"] for one in found["answers"] if "label_mass" in one]
    handler.observer.label_mass(context.route, np.array(masses, np.float64))
    return await handler.sized_json(context, size, lambda: found)


async def _prepare(
    handler: RequestHandler, context: RequestContext, body: wire.DecisionRequest, card: ModelCard
) -> DecisionPlan:
    """Builds the prompts as ids, off the event loop."""
    given = body.input if isinstance(body.input, str) else [_entry(item) for item in body.input]
    questions = [_question(one) for one in body.questions]
    limit_s, size = handler.settings.deadlines.scoring_s, TEXT_COST * context.body_bytes
    return await handler.tokenize(
        context, limit_s, size, handler.decisions.plan, given, questions, prompt_limits(handler, card)
    )


def _entry(item: InputItem) -> Entry:
    match item:
        case InputMessage():
            return Entry(item.role, text_of(item.content))
        case FunctionCall():
            return Entry(item.type, item.arguments, (("name", item.name), ("call_id", item.call_id)))
        case CustomToolCall():
            return Entry(item.type, item.input, (("name", item.name), ("call_id", item.call_id)))
        case FunctionCallOutput() | CustomToolCallOutput():
            return Entry(item.type, text_of(item.output), (("call_id", item.call_id),))


def _question(one: wire.Question) -> Question:
    match one:
        case wire.PredicateQuestion():
            options: tuple[Option, ...] = ()
        case wire.ChoiceQuestion():
            options = tuple(Option(choice.value, choice.description) for choice in one.choices)
        case wire.ScoreQuestion():
            options = tuple(Option(level.label, level.description) for level in one.levels)
    return Question(kind=one.type, instructions=text_of(one.instructions), options=options)


def _requests(handler: RequestHandler, context: RequestContext, body: wire.DecisionRequest, plan: DecisionPlan) -> Any:
    """Yields one request for each batch, made when it is sent: a second one finds the prefix computed."""
    id = new_id("decision-")
    for number, batch in enumerate(plan.batches):
        yield ScoreRequest(
            request_id=f"{id}/{number}" if number else id,
            prefix=plan.prefix,
            ids=batch.ids,
            starts=batch.starts,
            labels=batch.labels,
            cache_salt=context.salt(_salt(body.prompt_cache_key)),
            tenant=context.tenant,
            priority=context.priority(None),
            timeout_s=context.timeout_s(handler.settings.deadlines.scoring_s),
        )


def _salt(key: str | None) -> str:
    return hashlib.sha256(f"decisions\0{key}".encode()).hexdigest() if key else ""


def _answer(
    handler: RequestHandler, body: wire.DecisionRequest, card: ModelCard, plan: DecisionPlan, replies: list[ScoreResult]
) -> dict[str, Any]:
    found = plan.logprobs([reply.label_logprobs for reply in replies], [reply.status.astype(bool) for reply in replies])
    min_mass = handler.settings.decisions.min_label_mass
    cached = sum(int(reply.cached.sum()) for reply in replies)
    return {
        "model": card.name,
        "answers": [
            _one_answer(index, *pair, min_mass) for index, pair in enumerate(zip(body.questions, found, strict=True))
        ],
        "usage": {
            "input_tokens": plan.input_tokens,
            "output_tokens": 0,
            "total_tokens": plan.input_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "prompt_format_version": FORMAT_VERSION,
    }


def _one_answer(index: int, question: wire.Question, logprobs: np.ndarray[Any, Any], min_mass: float) -> dict[str, Any]:
    """Writes the answer to one question. Raises ApiError if the model gave no usable number."""
    found = answer_probabilities(logprobs)
    if found is None:
        raise ApiError("nonfinite_logits", "The model gave no finite number for this question.", f"questions[{index}]")
    named = {"type": question.type, "name": question.name}
    if found.label_mass < min_mass:
        return named | {"type": "refusal", "label_mass": found.label_mass}
    values = found.probabilities.tolist()
    match question:
        case wire.PredicateQuestion():
            return named | {"probability": values[0], "label_mass": found.label_mass}
        case wire.ChoiceQuestion():
            options = [choice.value for choice in question.choices]
            own: dict[str, Any] = {"choice": options[values.index(max(values))]}
            rows = [{"value": value, "probability": p} for value, p in zip(options, values, strict=True)]
        case wire.ScoreQuestion():
            own = {"score": expected_level(found.probabilities)}
            labels = [level.label for level in question.levels]
            rows = [
                {"value": i, "label": label, "probability": p}
                for i, (label, p) in enumerate(zip(labels, values, strict=True))
            ]
    more = {"confidence": confidence(found.probabilities), "probabilities": rows, "label_mass": found.label_mass}
    return named | own | more
