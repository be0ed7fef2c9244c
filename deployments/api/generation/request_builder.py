"""Builds the GenerateRequests of a completion: prompts as ids, parameters with defaults, checks before allocation.

Chat requests share everything that follows once their messages are one prompt (see `chat_request_builder`).

Shape legend: Q prompts, P tokens of a prompt, B tokens of all prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from deployments.api.handler import TEXT_COST, RequestHandler, check_ids
from deployments.api.request_context import RequestContext, new_id, new_seed
from deployments.api.schemas.generation import CompletionRequest, GenerationRequest
from deployments.errors import ApiError, invalid, unsupported
from deployments.protocol import GenerateCall, ModelCard
from engine.requests import GenerateRequest
from engine.tokenizer.detokenizer import BranchText
from engine.tokenizer.tokenizer import Tokenizer
from gpu_sampler.sampling_params import SamplingLimits, SamplingParams
from scoring.row_builder import cut_ids

MASK = (1 << 64) - 1
TOKEN_BYTES = 8  # of an answer for each token that it shows, as an id or as text, roughly
N = TypeVar("N", int, float)


class EncodedPrompts(NamedTuple):
    """Holds the prompts of a request as ids."""

    ids: list[list[int]]  # [Q] lists of [P]
    truncated: int | None  # tokens cut off; None unless the request allowed cutting


class EchoedPrompt(NamedTuple):
    """Holds a prompt's ids as text, which is how its answer repeats it."""

    text: str
    offsets: list[int]  # [P] characters before each token


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Holds what the answer says about its prompts: their text, their log-probabilities, or nothing else."""

    echo: bool = False
    logprobs: int | None = None  # the request's `prompt_logprobs`
    only: bool = False  # nothing is generated: `max_tokens` is 0
    next_top: int | None = None  # with `only`: alternatives at the position behind the prompt; None: it is not wanted

    @classmethod
    def of(
        cls,
        body: GenerationRequest,
        limits: SamplingLimits,
        logprobs: int | None,
        *,
        only: bool,
        echo: bool = False,
    ) -> "PromptOptions":
        """Reads the options of a request.

        Args:
            body: The request.
            limits: The server's limits.
            logprobs: How many alternatives each token of the answer has; None for no log-probabilities.
            only: Whether `max_tokens` is 0.
            echo: Whether the answer repeats the prompt.

        Raises:
            ApiError: A value is out of range, or two fields exclude each other.
        """
        if body.prompt_logprobs is not None and not 0 <= body.prompt_logprobs <= limits.max_logprobs:
            raise invalid("prompt_logprobs", f"in [0, {limits.max_logprobs}]", str(body.prompt_logprobs))
        if only and body.min_tokens:
            raise invalid("min_tokens", f"0 with `{body.length_field}` 0", str(body.min_tokens))
        behind = only and (not echo or body.logprob_token_ids is not None)
        return cls(echo=echo, logprobs=body.prompt_logprobs, only=only, next_top=logprobs if behind else None)

    def top(self, params: SamplingParams) -> int | None:
        """Returns how many alternatives a replica adds to each prompt token; None if it sends no prompt scores."""
        counts = [] if self.logprobs is None else [self.logprobs]
        if self.echo and params.logprobs is not None:
            counts.append(params.logprobs)
        return max(counts, default=None)

    def skips_generation(self, params: SamplingParams) -> bool:
        """Tells whether the prompt's scores are all that a replica computes.

        Otherwise a request that generates nothing runs one step, whose token is left out of the answer: its logits are
        those behind the prompt, and the prompt stays in the cache.
        """
        return self.only and self.next_top is None and self.top(params) is not None

    def new_tokens(self, params: SamplingParams) -> int:
        """Returns how many tokens a branch may generate."""
        return 0 if self.skips_generation(params) else params.max_tokens

    def cells_each(self, params: SamplingParams, chosen: int) -> int:
        """Returns the log-probabilities of one prompt token in one choice. `chosen`: length of `logprob_token_ids`."""
        top = self.top(params)
        if top is None:
            return 0
        lists = (self.logprobs is not None) + (self.echo and params.logprobs is not None)
        return max(lists, 1) * (1 + top + chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """Holds a request ready to run, and what its answer needs."""

    id: str  # of the answer
    body: GenerationRequest
    call: GenerateCall  # one request for each prompt
    prompts: list[list[int]]  # [Q] lists of [P]
    seeds: list[int]  # [Q] as the answer shows them
    truncated: int | None  # tokens cut off; None unless the request allowed cutting
    prompt_options: PromptOptions
    echoed: list[EchoedPrompt]  # [Q] with `prompt_options.echo`, else empty

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities of its tokens."""
        return self.call[0].params.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token of the answer has. A replica may be asked for one more: the token itself."""
        asked = self.prompt_options.next_top
        return self.call[0].params.logprobs if asked is None else asked


async def plan_completion(
    handler: RequestHandler, body: CompletionRequest, card: ModelCard, context: RequestContext
) -> GenerationPlan:
    """Checks and plans a completion. The order is fixed: fields, cost from lengths, token ids.

    Raises:
        ApiError: A field is wrong, or the request is too large.
        ParamError: A sampling parameter is out of range.
    """
    check_fields(body)
    logprobs = 0 if body.logprobs is None and body.logprob_token_ids is not None else body.logprobs
    limits, only, echo = handler.settings.limits.sampling, body.max_tokens == 0, bool(body.echo)
    options = PromptOptions.of(body, limits, logprobs, only=only, echo=echo)
    params = number_params(handler, body, _or(body.max_tokens, 16), logprobs, options)
    params.validate(card.vocab_size, limits)
    check_rows(handler, len(body.prompt), params)
    new = options.new_tokens(params)
    prompts = cut_prompts(body, await _encode(handler, body, context), card.max_model_len - new)
    check_context(card, body, prompts.ids, new, "prompt")
    return await plan_prompts(handler, body, card, context, prompts, params, new_id("cmpl-"), options)


async def plan_prompts(
    handler: RequestHandler,
    body: GenerationRequest,
    card: ModelCard,
    context: RequestContext,
    given: EncodedPrompts,
    params: SamplingParams,
    id: str,
    prompt_options: PromptOptions,
) -> GenerationPlan:
    """Plans a request whose prompts are ids and whose `params` holds every number. Errors: see `plan_completion`."""
    prompts, count = given.ids, len(given.ids)
    check_cost(handler, body, sum(map(len, prompts)), count, params, prompt_options)
    resumed = _resumed(body, count, params, prompt_options)
    params = await _with_ids(handler, body, params)
    _check_ranges(card.vocab_size, body, prompts, params)
    seeds = [new_seed() for _ in prompts] if body.seed is None else [body.seed] * count
    params = replace(params, stop_token_ids=_stop_ids(body, card), seed=body.seed)  # None: need not be repeatable
    if ended := set(resumed).intersection(params.stop_token_ids):
        raise invalid("resume_token_ids", "tokens before one that ends the answer", f"{min(ended)}")
    params.validate(card.vocab_size, handler.settings.limits.sampling)
    echoed: list[EchoedPrompt] = []
    if prompt_options.echo:
        skip = body.skip_special_tokens is not False
        echoed = await handler.off_loop(TEXT_COST * sum(map(len, prompts)), _echo, handler.tokenizer, prompts, skip)
    common: dict[str, Any] = {
        "params": params,
        "emitted": (np.array(resumed, np.int32),) if resumed else (),
        "cache_salt": context.salt(body.cache_salt),
        "tenant": context.tenant,
        "priority": context.priority(body.priority),
        "timeout_s": context.timeout_s(handler.settings.deadlines.generation_s),
        "prompt_logprobs": prompt_options.top(params),
        "prompt_only": prompt_options.skips_generation(params),
    }
    call = tuple(
        GenerateRequest(
            request_id=f"{id}/{q}" if count > 1 else id,
            prompt=np.array(prompt, np.int32),
            seed=seeds[q] & MASK,
            **common,
        )
        for q, prompt in enumerate(prompts)
    )
    return GenerationPlan(
        id=id,
        body=body,
        call=call,
        prompts=prompts,
        seeds=seeds,
        truncated=given.truncated,
        prompt_options=prompt_options,
        echoed=echoed,
    )


def check_fields(body: GenerationRequest) -> None:
    """Raises ApiError for fields that are not supported, or exclude each other."""
    if body.do_sample is not None and (body.do_sample or body.temperature != 0):
        raise unsupported("do_sample", "is not supported by this server, where `temperature` 0 means greedy")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of", "other than `n` is not supported by this server")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "absent without `stream`", "an object")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "absent with `stream`", "a number")


def number_params(
    handler: RequestHandler,
    body: GenerationRequest,
    max_tokens: int,
    logprobs: int | None,
    prompt_options: PromptOptions,
) -> SamplingParams:
    """Returns the parameters that are numbers, with defaults. Those that are lists of ids are added later."""
    defaults = handler.settings.sampling
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_k=_or(body.top_k, defaults.top_k),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        max_tokens=max(max_tokens, 1),
        min_tokens=_or(body.min_tokens, 0),
        n=_or(body.n, 1),
        # The entry of the position behind the prompt names the most probable token there.
        logprobs=logprobs if prompt_options.next_top is None else max(1, prompt_options.next_top),
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def check_rows(handler: RequestHandler, count: int, params: SamplingParams) -> None:
    """Raises ApiError for too many rows: prompts times `n`."""
    check_size(handler, "prompts times `n`", count * params.n, "rows", "max_rows", "n")


def cells_each(body: GenerationRequest, params: SamplingParams) -> int:
    """Returns the log-probabilities of one position of the answer."""
    return 0 if params.logprobs is None else 1 + params.logprobs + len(body.logprob_token_ids or ())


def check_cost(
    handler: RequestHandler,
    body: GenerationRequest,
    prompt_tokens: int,
    count: int,
    params: SamplingParams,
    prompt_options: PromptOptions,
) -> None:
    """Raises ApiError for too much work or too large an answer, from lengths alone."""
    rows = count * params.n
    new = prompt_options.new_tokens(params)
    total = prompt_tokens + rows * new
    what = f"prompt tokens plus rows times `{body.length_field}`"
    check_size(handler, what, total, "tokens", "max_request_tokens", body.length_field)
    what, cells = "positions times log-probabilities", rows * new * cells_each(body, params)
    check_size(handler, what, cells, "cells", "max_answer_cells", "logprobs")
    cells += prompt_tokens * params.n * prompt_options.cells_each(params, len(body.logprob_token_ids or ()))
    field = "echo" if prompt_options.logprobs is None else "prompt_logprobs"
    check_size(handler, f"{what}, prompts included,", cells, "cells", "max_answer_cells", field)
    field, repeated = "echo" if prompt_options.echo else "return_token_ids", repeats(body, prompt_options)
    what, size = f"answer, at {TOKEN_BYTES} bytes for each repeated prompt token,", prompt_tokens * params.n * repeated
    check_size(handler, what, TOKEN_BYTES * size, "bytes", "max_answer_bytes", field)


def repeats(body: GenerationRequest, prompt_options: PromptOptions) -> int:
    """Returns how often each choice shows its prompt: as text, as ids, or as both."""
    return prompt_options.echo + bool(body.return_token_ids)


def check_size(handler: RequestHandler, what: str, given: int, unit: str, limit: str, field: str) -> None:
    """Raises ApiError if a request has more than the limit of that name allows. `field`: the one to make smaller."""
    maximum = handler.limits[limit]
    if given > maximum:
        message = f"The request's {what} must be at most {maximum} {unit} (`limits.{limit}`). Given: {given}."
        raise ApiError("request_too_large", message, field)


def cut_prompts(body: GenerationRequest, prompts: list[list[int]], room: int) -> EncodedPrompts:
    """Cuts the prompts to `truncate_prompt_tokens`; -1 means at most `room` tokens."""
    if body.truncate_prompt_tokens is None:
        return EncodedPrompts(prompts, None)
    keep = room if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    kept = [cut_ids(prompt, max(keep, 1), body.truncation_side or "left") for prompt in prompts]
    return EncodedPrompts(kept, sum(map(len, prompts)) - sum(map(len, kept)))


def check_context(
    card: ModelCard, body: GenerationRequest, prompts: list[list[int]], max_tokens: int, field: str
) -> None:
    """Raises ApiError if a prompt plus `max_tokens` is longer than the model's context. `field`: of the prompts."""
    longest = max(map(len, prompts))
    if longest > card.max_model_len - max_tokens:
        raise ApiError(
            "context_length_exceeded",
            f"`{field}` plus `{body.length_field}` must be at most {card.max_model_len} tokens. "
            f"Given: {longest} + {max_tokens}. Shorten one of them or set `truncate_prompt_tokens`.",
            field,
        )


async def _encode(handler: RequestHandler, body: CompletionRequest, context: RequestContext) -> list[list[int]]:
    if isinstance(body.prompt[0], list):
        return [prompt for prompt in body.prompt if isinstance(prompt, list)]
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    size, limit_s = TEXT_COST * sum(map(len, texts)), handler.settings.deadlines.generation_s
    encode, maximum = handler.tokenizer.encode_batch, handler.limits["max_request_tokens"]
    prompts = await handler.tokenize(
        context, limit_s, size, encode, texts, add_special_tokens=special, max_tokens=maximum
    )
    for index, prompt in enumerate(prompts):
        if not prompt:
            if not special or handler.tokenizer.bos_token_id is None:
                raise invalid(
                    "prompt", "not empty: this model has no token that begins a text", f"nothing at [{index}]"
                )
            prompts[index] = [handler.tokenizer.bos_token_id]
    return prompts


def _resumed(body: GenerationRequest, count: int, params: SamplingParams, prompt_options: PromptOptions) -> list[int]:
    ids = body.resume_token_ids
    if ids is None:
        return []
    if count != 1 or params.n != 1 or body.seed is None:
        raise invalid("resume_token_ids", "given with one prompt, `n` 1 and `seed`", "otherwise")
    if prompt_options.top(params) is not None or prompt_options.echo:
        raise invalid("resume_token_ids", "absent with `echo` or `prompt_logprobs`", f"{len(ids)} entries")
    if len(ids) >= params.max_tokens:
        rule = f"fewer than `{body.length_field}` ({params.max_tokens})"
        raise invalid("resume_token_ids", rule, f"{len(ids)} entries")
    return ids


async def _with_ids(handler: RequestHandler, body: GenerationRequest, params: SamplingParams) -> SamplingParams:
    return replace(
        params,
        logit_bias=body.logit_bias or (),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=await _bad_words(handler, body.bad_words or []),
        logprob_token_ids=None if body.logprob_token_ids is None else tuple(body.logprob_token_ids),
    )


async def _bad_words(handler: RequestHandler, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Encodes each word at the start of a text and after a space: in most vocabularies these are different ids."""
    if not words:
        return ()
    forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
    found = await handler.off_loop(
        TEXT_COST * sum(map(len, forms)), handler.tokenizer.encode_batch, forms, add_special_tokens=False
    )
    return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))


def _check_ranges(
    vocab_size: int, body: GenerationRequest, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    given = getattr(body, "prompt", None)  # absent from a chat, whose messages are text
    text = not given or isinstance(given[0], str)
    for index, prompt in enumerate(prompts):
        check_ids("prompt" if len(prompts) == 1 else f"prompt[{index}]", prompt, vocab_size, text=text)
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": body.allowed_token_ids or (),
        "stop_token_ids": body.stop_token_ids or (),
        "logprob_token_ids": body.logprob_token_ids or (),
        "resume_token_ids": body.resume_token_ids or (),
    }
    for name, ids in named.items():
        check_ids(name, ids, vocab_size)


def _stop_ids(body: GenerationRequest, card: ModelCard) -> tuple[int, ...]:
    """Returns the request's stop ids and the model's, unless the request ignores those."""
    ends = () if body.ignore_eos else card.eos_token_ids
    return tuple(dict.fromkeys((*(body.stop_token_ids or ()), *ends)))


def _echo(tokenizer: Tokenizer, prompts: Sequence[list[int]], skip_special_tokens: bool) -> list[EchoedPrompt]:
    """Decodes the prompts token by token."""
    found = []
    for ids in prompts:
        text = BranchText(tokenizer.decoder(skip_special_tokens=skip_special_tokens), offsets=True)
        piece = text.push(ids)
        found.append(EchoedPrompt(piece.text + text.finish().text, piece.offsets))
    return found
