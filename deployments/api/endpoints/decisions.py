"""POST /v1/decisions: typed questions about one input, answered with probabilities."""

import hashlib
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.handler import TEXT_COST, Api
from deployments.api.request_context import Exchange, new_id
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
from deployments.protocol import ModelCard, ScoreReply
from engine.requests import ScoreRequest
from scoring.decision_prompts import FORMAT_VERSION, Entry, Option, Question
from scoring.decisions import Plan, Room, answer, confidence, expected_level


async def decisions(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, wire.DecisionRequest)
    card = await api.served(body.model)
    plan = await _prepare(api, exchange, body, card)
    async with api.deadline(exchange, api.settings.deadlines.scoring_s):
        requests = _requests(api, exchange, body, plan)
        replies = [await api.backend.score(one, all_or_nothing=True) for one in requests]
    compute_s, head_s = (sum(getattr(reply, name) for reply in replies) for name in ("compute_s", "head_s"))
    api.computed(exchange, replies[0].queue_s, compute_s, head_s)
    api.observer.items(exchange.route, len(body.questions), 0)
    size = 16 * sum(one.size for one in plan.readers)
    found = await api.off_loop(size, _answer, api, body, card, plan, replies)
    masses = [one["label_mass"] for one in found["answers"] if "label_mass" in one]
    api.observer.label_mass(exchange.route, np.array(masses, np.float64))
    return await api.off_loop(size, api.json, exchange, found)


async def _prepare(api: Api, exchange: Exchange, body: wire.DecisionRequest, card: ModelCard) -> Plan:
    """Prompts as ids. Tokenising happens off the event loop."""
    room = Room(
        max_model_len=card.max_model_len,
        max_request_tokens=api.limits["max_request_tokens"],
        max_rows=api.limits["max_rows"],
        max_labels=api.limits["max_labels"],
        max_cells=api.limits["max_answer_cells"],
    )
    given = body.input if isinstance(body.input, str) else [_entry(item) for item in body.input]
    questions = [_question(one) for one in body.questions]
    limit_s, size = api.settings.deadlines.scoring_s, TEXT_COST * len(exchange.body)
    return await api.tokenize(exchange, limit_s, size, api.decisions.plan, given, questions, room)


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


def _requests(api: Api, exchange: Exchange, body: wire.DecisionRequest, plan: Plan) -> Any:
    """Yields one request a batch, made when it is sent: a second one, which is rare, finds the prefix computed."""
    id = new_id("decision-")
    for number, batch in enumerate(plan.batches):
        yield ScoreRequest(
            request_id=f"{id}/{number}" if number else id,
            prefix=plan.prefix,
            ids=batch.ids,
            starts=batch.starts,
            labels=batch.labels,
            cache_salt=exchange.salt(_salt(body.prompt_cache_key)),
            tenant=exchange.tenant,
            priority=exchange.priority(None),
            timeout_s=exchange.timeout_s(api.settings.deadlines.scoring_s),
        )


def _salt(key: str | None) -> str:
    return hashlib.sha256(f"decisions\0{key}".encode()).hexdigest() if key else ""


def _answer(
    api: Api, body: wire.DecisionRequest, card: ModelCard, plan: Plan, replies: list[ScoreReply]
) -> dict[str, Any]:
    found = plan.logprobs([reply.label_logprobs for reply in replies], [reply.status.astype(bool) for reply in replies])
    least = api.settings.decisions.min_label_mass
    cached = sum(int(reply.cached.sum()) for reply in replies)
    return {
        "model": card.name,
        "answers": [_one(index, *pair, least) for index, pair in enumerate(zip(body.questions, found, strict=True))],
        "usage": {
            "input_tokens": plan.input_tokens,
            "output_tokens": 0,
            "total_tokens": plan.input_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "prompt_format_version": FORMAT_VERSION,
    }


def _one(index: int, question: wire.Question, logprobs: np.ndarray[Any, Any], least: float) -> dict[str, Any]:
    found = answer(logprobs)
    if found is None:
        raise ApiError("nonfinite_logits", "The model gave no finite number for this question.", f"questions[{index}]")
    named = {"type": question.type, "name": question.name}
    if found.label_mass < least:
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
