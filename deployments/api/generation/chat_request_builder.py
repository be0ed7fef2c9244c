"""Builds the GenerateRequest of a chat request: renders the messages as one prompt, fills in an open `max_tokens`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployments.api.generation.request_builder import (
    EncodedPrompts,
    GenerationPlan,
    PromptOptions,
    cells_each,
    check_context,
    check_fields,
    check_rows,
    cut_prompts,
    number_params,
    plan_prompts,
)
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.chat import ChatRequest, Message
from deployments.api.schemas.generative_scoring import ScoringRequest
from deployments.api.schemas.info import TokenizeRequest
from deployments.api.schemas.pooling import PoolingInput
from deployments.errors import ApiError, describe, invalid
from deployments.protocol import ModelCard
from gpu_sampler.sampling_params import SamplingParams
from scoring.prompts.chat_template import ChatTemplate, RenderedPart, encode_parts
from scoring.row_builder import check_tokens


async def plan_chat(
    handler: RequestHandler, body: ChatRequest, card: ModelCard, context: RequestContext
) -> GenerationPlan:
    """Checks and plans a chat in the order of `plan_completion`, with messages in place of prompts.

    Raises:
        ApiError: A field is wrong, or the request is too large.
        ParamError: A sampling parameter is out of range.
        ScoringError: The chat template refuses the messages.
    """
    check_fields(body)
    max_tokens = _max_tokens(body)
    logprobs = _logprobs(handler, body)
    limit = card.max_model_len if max_tokens is None else max_tokens
    options = PromptOptions.of(body, handler.settings.limits.sampling, logprobs, only=max_tokens == 0)
    params = number_params(handler, body, limit, logprobs, options)
    params.validate(card.vocab_size, handler.settings.limits.sampling)
    check_rows(handler, 1, params)
    prompt = await chat_ids(handler, context, body, body.messages, handler.settings.deadlines.generation_s)
    new = 1 if max_tokens is None else options.new_tokens(params)
    prompts = cut_prompts(body, [prompt], card.max_model_len - new)
    if max_tokens is None:
        params = replace(params, max_tokens=_rest(handler, body, card, prompts, params, options))
    check_context(card, body, prompts.ids, options.new_tokens(params), "messages")
    return await plan_prompts(handler, body, card, context, prompts, params, new_id("chatcmpl-"), options)


async def conversation_ids(
    handler: RequestHandler,
    context: RequestContext,
    body: PoolingInput | ScoringRequest,
    conversations: Sequence[Sequence[Message]],
    field: str,
    max_model_len: int,
    answer: str = "",
) -> list[list[int]]:
    """Returns the token ids of each conversation, which are counted as they are made.

    Args:
        handler: Holds the chat template.
        context: The HTTP request.
        body: Says how the messages are rendered.
        conversations: At least one.
        field: Name of the request's field that has an entry for each, for errors.
        max_model_len: A longer one counts as many tokens: it is cut to them, or refused.
        answer: Text with which each answer begins.

    Raises:
        ApiError: `chat_ids` raises it.
        ScoringError: The chat template refuses a conversation, or all of them have too many tokens.
    """
    found, tokens = list[list[int]](), 0
    for messages in conversations:
        found.append(await chat_ids(handler, context, body, messages, handler.settings.deadlines.scoring_s, answer))
        tokens += min(len(found[-1]), max_model_len)
        check_tokens(tokens, handler.limits["max_request_tokens"], field)
    return found


async def chat_ids(
    handler: RequestHandler,
    context: RequestContext,
    body: ChatRequest | TokenizeRequest | PoolingInput | ScoringRequest,
    messages: Sequence[Message],
    limit_s: float,
    answer: str = "",
    limit: str = "max_request_tokens",
) -> list[int]:
    """Renders and encodes the messages of `body`, off the event loop. `limit`: of their tokens.

    Args:
        handler: Holds the chat template.
        context: The HTTP request.
        body: Says how the messages are rendered.
        messages: The conversation.
        limit_s: The route's deadline.
        answer: Text with which the answer begins.

    Raises:
        ApiError: There is no chat template, a field is wrong, or the deadline passed.
        ScoringError: The chat template refuses the messages.
        TooManyTokens: The messages have more than the limit.
    """
    template, prompting = _template(handler), body.add_generation_prompt is not False
    values = body.chat_template_kwargs
    if body.continue_final_message and prompting:
        raise invalid("continue_final_message", "false unless `add_generation_prompt` is false", "true")
    _check_values(handler, template, values or {})
    data = [message.data() for message in messages]

    def encode() -> list[int]:
        parts = template.parts(
            data,
            add_generation_prompt=prompting,
            continue_final_message=bool(body.continue_final_message),
            values=values,
        )
        parts += [RenderedPart(answer, False)] if answer else []
        special, maximum = bool(body.add_special_tokens), handler.limits[limit]
        return encode_parts(handler.tokenizer, parts, add_special_tokens=special, max_tokens=maximum)

    with handler.deadline(context, limit_s), handler.observer.timed("tokenize"):
        ids = await handler.in_thread(encode)
    if not ids:
        raise invalid("messages", "such that the chat template writes something", "messages without text")
    return ids


def _template(handler: RequestHandler) -> ChatTemplate:
    if handler.chat is None:
        message = "`messages` needs a chat template, and this model has none. Use `/v1/completions`."
        raise ApiError("unsupported_parameter", message, "messages")
    return handler.chat


def _check_values(handler: RequestHandler, template: ChatTemplate, values: Mapping[str, Any]) -> None:
    allowed = handler.settings.chat.template_flags
    known = template.variables if allowed is None else template.variables & set(allowed)
    if not values.keys() <= known:
        rule = (
            f"made of names among {', '.join(sorted(known))}" if known else "empty: the chat template reads no others"
        )
        raise invalid("chat_template_kwargs", rule, "another name")


def _max_tokens(body: ChatRequest) -> int | None:
    """Returns how many tokens the answer may have, which the request says by either name, or by both alike."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"absent, or equal to `max_completion_tokens` ({new})", str(old))
    return old if new is None else new


def _logprobs(handler: RequestHandler, body: ChatRequest) -> int | None:
    """Returns how many alternatives each token's log-probability has; None for no log-probabilities."""
    maximum = handler.limits["max_logprobs"]
    for field, value in (("top_logprobs", body.top_logprobs), ("logprob_token_ids", body.logprob_token_ids)):
        if value and not body.logprobs:
            raise invalid(field, "absent without `logprobs`", describe(value))
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= maximum:
        raise invalid("top_logprobs", f"in [0, {maximum}]", str(body.top_logprobs))
    return (body.top_logprobs or 0) if body.logprobs else None


def _rest(
    handler: RequestHandler,
    body: ChatRequest,
    card: ModelCard,
    prompts: EncodedPrompts,
    params: SamplingParams,
    options: PromptOptions,
) -> int:
    """Returns `max_tokens` of a request that names none: the rest of the context, or as much as a request may cost."""
    [prompt] = prompts.ids
    maximum = [card.max_model_len - len(prompt), (handler.limits["max_request_tokens"] - len(prompt)) // params.n]
    cells = cells_each(body, params)
    if cells:
        of_prompt = len(prompt) * params.n * options.cells_each(params, len(body.logprob_token_ids or ()))
        maximum.append((handler.limits["max_answer_cells"] - of_prompt) // (cells * params.n))
    return max(1, min(maximum))
