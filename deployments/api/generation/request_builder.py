"""Builds a call of GenerateRequests: prompts as ids, parameters with defaults, costs before allocation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from deployments.api.generation.prompt_logprobs import Echoed, OfPrompt, echoed
from deployments.api.handler import TEXT_COST, Api, check_ids, refuse
from deployments.api.request_context import Exchange, new_id, new_seed
from deployments.api.schemas.generation import REFUSED, CompletionRequest, GenerationRequest
from deployments.errors import ApiError, invalid, unsupported
from deployments.protocol import GenerateCall, ModelCard
from engine.requests import GenerateRequest
from gpu_sampler.sampling_params import SamplingParams

MASK = (1 << 64) - 1
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request ready to run: the call, and what the answer needs to know of the request."""

    id: str
    call: GenerateCall  # one request a prompt
    prompts: list[list[int]]
    seeds: list[int]  # as echoed
    stops: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    stop_ids: frozenset[int]  # those that the request named itself
    wants_logprobs: bool
    as_token_ids: bool  # token:id instead of text in log-probabilities
    return_ids: bool
    resumed: list[int]
    truncated: int | None  # tokens cut off; None unless the request allowed cutting
    of_prompt: OfPrompt
    echoed: list[Echoed]  # with `of_prompt.echo` one a prompt


class Prompts(NamedTuple):
    ids: list[list[int]]
    truncated: int | None  # tokens cut off; None unless the request allowed cutting


async def plan_completion(api: Api, body: CompletionRequest, card: ModelCard, exchange: Exchange) -> Plan:
    """Checks in the fixed order: fields, cost from lengths, token ids. Raises ApiError or ParamError."""
    check_fields(body)
    logprobs = 0 if body.logprobs is None and body.logprob_token_ids is not None else body.logprobs
    of_prompt = OfPrompt(echo=bool(body.echo), logprobs=body.prompt_logprobs, only=body.max_tokens == 0)
    of_prompt.check(api.settings.limits.sampling, body.min_tokens)
    params = numbers(api, body, max(_or(body.max_tokens, 16), 1), logprobs)
    params.validate(card.vocab_size, api.settings.limits.sampling)
    count = len(body.prompt)
    check_rows(api, count, params)
    new = of_prompt.new_tokens(params)
    prompts = cut_prompts(body, await _encode(api, body, exchange), card.max_model_len - new)
    check_context(card, prompts.ids, new, "prompt")
    return await plan_prompts(api, body, card, exchange, prompts, params, new_id("cmpl-"), of_prompt)


async def plan_prompts(
    api: Api,
    body: GenerationRequest,
    card: ModelCard,
    exchange: Exchange,
    given: Prompts,
    params: SamplingParams,
    id: str,
    of_prompt: OfPrompt,
) -> Plan:
    """What follows once the prompts are ids and `params` holds every number."""
    prompts, count = given.ids, len(given.ids)
    check_cost(api, body, sum(map(len, prompts)), count, params, of_prompt)
    resumed = _resumed(body, count, params, of_prompt)
    params = await _with_ids(api, body, params)
    _check_ranges(card.vocab_size, body, prompts, params)
    seeds = [_seed(body)] * count if _seeded(body) else [new_seed() for _ in prompts]
    own_seed = body.seed if _seeded(body) else None  # marks the row as one that must be repeatable
    params = replace(params, stop_token_ids=_stop_ids(body, card), seed=own_seed)
    params.validate(card.vocab_size, api.settings.limits.sampling)
    skip = body.skip_special_tokens is not False
    told: list[Echoed] = []
    if of_prompt.echo:
        told = await api.off_loop(
            TEXT_COST * sum(map(len, prompts)), echoed, api.tokenizer, prompts, skip_special_tokens=skip
        )
    common: dict[str, Any] = {
        "params": params,
        "emitted": (np.array(resumed, np.int32),) if resumed else (),
        "cache_salt": exchange.salt(body.cache_salt),
        "tenant": exchange.tenant,
        "priority": exchange.priority(body.priority),
        "timeout_s": exchange.timeout_s(api.settings.deadlines.generation_s),
        "prompt_logprobs": of_prompt.top(params),
        "prompt_only": of_prompt.only,
    }
    call = tuple(
        GenerateRequest(
            request_id=f"{id}/{q}" if count > 1 else id,
            prompt=np.array(prompts[q], np.int32),
            seed=seeds[q] & MASK,
            **common,
        )
        for q in range(count)
    )
    return Plan(
        id=id,
        call=call,
        prompts=prompts,
        seeds=seeds,
        stops=tuple(body.stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=skip,
        stop_ids=frozenset(body.stop_token_ids or ()),
        wants_logprobs=params.logprobs is not None,
        as_token_ids=bool(body.return_tokens_as_token_ids),
        return_ids=bool(body.return_token_ids),
        resumed=resumed,
        truncated=given.truncated,
        of_prompt=of_prompt,
        echoed=told,
    )


def check_fields(body: GenerationRequest) -> None:
    refuse(body, REFUSED)
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of", "other than `n` is not supported by this server")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "absent without `stream`", "an object")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "absent with `stream`", "a number")


def numbers(api: Api, body: GenerationRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """The parameters that are no lists of ids, with defaults filled in."""
    defaults = api.settings.sampling
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_k=_or(body.top_k, defaults.top_k),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        n=_or(body.n, 1),
        logprobs=logprobs,
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def check_rows(api: Api, count: int, params: SamplingParams) -> None:
    rows = count * params.n
    if rows > api.limits["max_rows"]:
        raise too_large("prompts times `n`", rows, api.limits["max_rows"], "rows", "n")


def cells_each(body: GenerationRequest, params: SamplingParams) -> int:
    """Log-probabilities of one position of the answer."""
    return 0 if params.logprobs is None else 1 + params.logprobs + len(body.logprob_token_ids or ())


def check_cost(
    api: Api, body: GenerationRequest, prompt_tokens: int, count: int, params: SamplingParams, of_prompt: OfPrompt
) -> None:
    """Refuses from lengths alone what would be too much work or too large an answer."""
    rows = count * params.n
    new = of_prompt.new_tokens(params)
    total = prompt_tokens + rows * new
    if total > api.limits["max_request_tokens"]:
        most = api.limits["max_request_tokens"]
        raise too_large("prompt tokens plus rows times `max_tokens`", total, most, "tokens", "max_tokens")
    cells, most = rows * new * cells_each(body, params), api.limits["max_answer_cells"]
    if cells > most:
        raise too_large("positions times log-probabilities", cells, most, "cells", "logprobs")
    cells += prompt_tokens * params.n * of_prompt.cells_each(params, len(body.logprob_token_ids or ()))
    if cells > most:
        field = "echo" if of_prompt.logprobs is None else "prompt_logprobs"
        raise too_large("positions times log-probabilities, prompts included,", cells, most, "cells", field)


def too_large(what: str, given: int, most: int, unit: str, field: str) -> ApiError:
    return ApiError("request_too_large", f"The request's {what} must be at most {most} {unit}. Given: {given}.", field)


def cut_prompts(body: GenerationRequest, prompts: list[list[int]], room: int) -> Prompts:
    """The prompts as `truncate_prompt_tokens` wants them; -1: at most `room` tokens."""
    if body.truncate_prompt_tokens is None:
        return Prompts(prompts, None)
    keep = room if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    kept = [_cut(prompt, max(keep, 1), body.truncation_side or "left") for prompt in prompts]
    return Prompts(kept, sum(map(len, prompts)) - sum(map(len, kept)))


def check_context(card: ModelCard, prompts: list[list[int]], max_tokens: int, field: str) -> None:
    longest = max(map(len, prompts))
    if longest > card.max_model_len - max_tokens:
        raise ApiError(
            "context_length_exceeded",
            f"`{field}` plus `max_tokens` must be at most {card.max_model_len} tokens. "
            f"Given: {longest} + {max_tokens}. Shorten one of them or set `truncate_prompt_tokens`.",
            field,
        )


async def _encode(api: Api, body: CompletionRequest, exchange: Exchange) -> list[list[int]]:
    if isinstance(body.prompt[0], list):
        return [prompt for prompt in body.prompt if isinstance(prompt, list)]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    size, limit_s = TEXT_COST * sum(map(len, texts)), api.settings.deadlines.generation_s
    prompts = await api.tokenize(exchange, limit_s, size, api.tokenizer.encode_batch, texts, add_special_tokens=special)
    for index, prompt in enumerate(prompts):
        if not prompt:
            if not special or api.tokenizer.bos_token_id is None:
                raise invalid(
                    "prompt", "not empty: this model has no token that begins a text", f"nothing at [{index}]"
                )
            prompts[index] = [api.tokenizer.bos_token_id]
    return prompts


def _cut(prompt: list[int], keep: int, side: str) -> list[int]:
    if len(prompt) <= keep:
        return prompt
    return prompt[-keep:] if side == "left" else prompt[:keep]


def _resumed(body: GenerationRequest, count: int, params: SamplingParams, of_prompt: OfPrompt) -> list[int]:
    ids = body.resume_token_ids
    if ids is None:
        return []
    if count != 1 or params.n != 1 or not _seeded(body):
        raise invalid("resume_token_ids", "given with one prompt, `n` 1 and `seed`", "otherwise")
    if of_prompt.top(params) is not None or of_prompt.echo:
        raise invalid("resume_token_ids", "absent with `echo` or `prompt_logprobs`", f"{len(ids)} entries")
    if len(ids) >= params.max_tokens:
        raise invalid("resume_token_ids", f"fewer than `max_tokens` ({params.max_tokens})", f"{len(ids)} entries")
    return ids


async def _with_ids(api: Api, body: GenerationRequest, params: SamplingParams) -> SamplingParams:
    return replace(
        params,
        logit_bias=body.logit_bias or (),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=await _bad_words(api, body.bad_words or []),
        logprob_token_ids=None if body.logprob_token_ids is None else tuple(body.logprob_token_ids),
    )


async def _bad_words(api: Api, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text and as it follows a space, which are different ids in most vocabularies."""
    if not words:
        return ()
    forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
    found = await api.off_loop(
        TEXT_COST * sum(map(len, forms)), api.tokenizer.encode_batch, forms, add_special_tokens=False
    )
    return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))


def _check_ranges(
    vocab_size: int, body: GenerationRequest, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    for index, prompt in enumerate(prompts):
        check_ids("prompt" if len(prompts) == 1 else f"prompt[{index}]", prompt, vocab_size)
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": body.allowed_token_ids or (),
        "stop_token_ids": body.stop_token_ids or (),
        "logprob_token_ids": body.logprob_token_ids or (),
        "resume_token_ids": body.resume_token_ids or (),
    }
    for name, ids in named.items():
        check_ids(name, ids, vocab_size)


def _seeded(body: GenerationRequest) -> bool:
    return body.seed is not None and body.seed != -1


def _seed(body: GenerationRequest) -> int:
    return body.seed if body.seed is not None else 0


def _stop_ids(body: GenerationRequest, card: ModelCard) -> tuple[int, ...]:
    """The request's own and the model's, unless the request ignores those."""
    ends = () if body.ignore_eos else card.eos_token_ids
    return tuple(dict.fromkeys((*(body.stop_token_ids or ()), *ends)))
