"""From a chat request to a GenerateRequest: messages to one prompt, and the lengths that a chat leaves open."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from deployments.api.generation.prompt_logprobs import OfPrompt
from deployments.api.generation.request_builder import (
    Plan,
    Prompts,
    cells_each,
    check_context,
    check_fields,
    check_rows,
    cut_prompts,
    numbers,
    plan_prompts,
)
from deployments.api.handler import Api, refuse
from deployments.api.request_context import Exchange, new_id
from deployments.api.schemas.chat import MESSAGE_REFUSED, REFUSED, ChatRequest, Message
from deployments.errors import ApiError, invalid
from deployments.protocol import ModelCard
from gpu_sampler.sampling_params import SamplingParams
from scoring.chat_template import ChatTemplate, encode_parts


async def plan_chat(api: Api, body: ChatRequest, card: ModelCard, exchange: Exchange) -> Plan:
    """Checks in the order of completions, messages where those have prompts. Raises ApiError or ParamError."""
    refuse(body, REFUSED)
    check_fields(body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = numbers(api, body, card.max_model_len if asked is None else asked, _logprobs(api, body))
    params.validate(card.vocab_size, api.settings.limits.sampling)
    check_rows(api, 1, params)
    prompt = await chat_ids(
        api,
        exchange,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        flags=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens,
    )
    prompts = cut_prompts(body, [prompt], card.max_model_len - (1 if asked is None else asked))
    if asked is None:
        params = replace(params, max_tokens=_rest(api, body, card, prompts, params))
    check_context(card, prompts.ids, params.max_tokens, "messages")
    of_prompt = OfPrompt(logprobs=body.prompt_logprobs)
    of_prompt.check(api.settings.limits.sampling, body.min_tokens)
    return await plan_prompts(api, body, card, exchange, prompts, params, new_id("chatcmpl-"), of_prompt)


async def chat_ids(
    api: Api,
    exchange: Exchange,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    flags: Mapping[str, bool] | None,
    add_special_tokens: bool | None,
) -> list[int]:
    """Ids of the rendered messages; arguments as in a request. Rendering and tokenising happen off the event loop."""
    template, prompting = _template(api), add_generation_prompt is not False
    for index, message in enumerate(messages):
        refuse(message, MESSAGE_REFUSED, f"messages[{index}].")
    if continue_final_message and prompting:
        raise invalid("continue_final_message", "false unless `add_generation_prompt` is false", "true")
    _check_flags(api, flags or {})
    data = [message.data() for message in messages]

    def encode() -> list[int]:
        parts = template.parts(
            data,
            add_generation_prompt=prompting,
            continue_final_message=bool(continue_final_message),
            flags=flags,
        )
        return encode_parts(api.tokenizer, parts, add_special_tokens=bool(add_special_tokens))

    async with api.deadline(exchange, api.settings.deadlines.generation_s):
        with api.stage(exchange, "tokenize"):
            ids = await api.in_thread(encode)
    if not ids:
        raise invalid("messages", "such that the chat template writes something", "messages without text")
    return ids


def _template(api: Api) -> ChatTemplate:
    if api.chat is None:
        message = "`messages` needs a chat template, and this model has none. Use `/v1/completions`."
        raise ApiError("unsupported_parameter", message, "messages")
    return api.chat


def _check_flags(api: Api, flags: Mapping[str, bool]) -> None:
    known = api.settings.chat.template_flags
    if not flags.keys() <= set(known):
        allowed = f"made of names among {', '.join(known)}" if known else "empty: this server has no template flags"
        raise invalid("chat_template_kwargs", allowed, "another name")


def _logprobs(api: Api, body: ChatRequest) -> int | None:
    """How many log-probabilities beside the token's own; None for none at all."""
    most = api.limits["max_logprobs"]
    for field, value in (("top_logprobs", body.top_logprobs), ("logprob_token_ids", body.logprob_token_ids)):
        if value and not body.logprobs:
            raise invalid(field, "absent without `logprobs`", "given")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= most:
        raise invalid("top_logprobs", f"in [0, {most}]", str(body.top_logprobs))
    return (body.top_logprobs or 0) if body.logprobs else None


def _rest(api: Api, body: ChatRequest, card: ModelCard, prompts: Prompts, params: SamplingParams) -> int:
    """`max_tokens` of a request that names none: the rest of the context, or as much as a request may cost."""
    [prompt] = prompts.ids
    most = [card.max_model_len - len(prompt), (api.limits["max_request_tokens"] - len(prompt)) // params.n]
    cells = cells_each(body, params)
    if cells:
        most.append(api.limits["max_answer_cells"] // (cells * params.n))
    return max(1, min(most))
