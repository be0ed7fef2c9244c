"""Serves POST /tokenize and /detokenize and GET /tokenizer_info: the server's own tokenizer.

No route here builds a request of the engine.
"""

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from deployments.api.endpoints.scoring_common import refuse_chat_fields
from deployments.api.generation.chat_request_builder import chat_ids
from deployments.api.handler import TEXT_COST, RequestHandler, check_ids
from deployments.api.prompt_formats import chat_source
from deployments.api.request_context import RequestContext
from deployments.api.schemas.info import DetokenizeRequest, TokenizeRequest
from deployments.errors import invalid, too_many_tokens
from engine.tokenizer.tokenizer import TooManyTokens

LIMIT = "max_tokenize_tokens"


async def tokenize(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /tokenize. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, TokenizeRequest, handler.settings.deadlines.generation_s)
    card = await handler.served(body.model)
    try:
        tokens = await (_prompt_ids(handler, body) if body.messages is None else _message_ids(handler, context, body))
    except TooManyTokens as error:
        field = "prompt" if body.messages is None else "messages"
        raise too_many_tokens(error.count, error.maximum, LIMIT, field) from None

    def make() -> dict[str, Any]:
        texts = handler.tokenizer.token_texts(tokens) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": texts}

    return await handler.sized_json(context, TEXT_COST * len(tokens), make)


async def _prompt_ids(handler: RequestHandler, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        raise invalid("prompt", "given, or `messages`", "neither")
    refuse_chat_fields(body)
    special = body.add_special_tokens is not False
    size = TEXT_COST * len(body.prompt)
    encode, maximum = handler.tokenizer.encode_batch, handler.limits[LIMIT]
    [tokens] = await handler.off_loop(size, encode, [body.prompt], add_special_tokens=special, max_tokens=maximum)
    return tokens


async def _message_ids(handler: RequestHandler, context: RequestContext, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        raise invalid("messages", "absent with `prompt`", "both")
    limit_s = handler.settings.deadlines.generation_s
    return await chat_ids(handler, context, body, body.messages or [], limit_s, limit=LIMIT)


async def detokenize(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /detokenize. Raises ApiError for ids outside the vocabulary."""
    body = await handler.parse(context, DetokenizeRequest, handler.settings.deadlines.generation_s)
    card = await handler.served(body.model)
    if body.tokens is None:
        raise invalid("tokens", "a list of integers", "null")
    if len(body.tokens) > handler.limits[LIMIT]:
        raise too_many_tokens(len(body.tokens), handler.limits[LIMIT], LIMIT, "tokens")
    decode, tokens = handler.tokenizer.decode, body.tokens
    await handler.off_loop(TEXT_COST * len(tokens), check_ids, "tokens", tokens, card.vocab_size)
    return await handler.sized_json(
        context, TEXT_COST * len(tokens), lambda: {"prompt": decode(tokens, skip_special_tokens=False)}
    )


async def tokenizer_info(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers GET /tokenizer_info."""
    info = asdict(handler.tokenizer.info()) | {"chat_template": chat_source(handler.tokenizer, handler.settings)}
    if not handler.settings.chat.expose_template:
        del info["chat_template"]
    return handler.json(context, info)
