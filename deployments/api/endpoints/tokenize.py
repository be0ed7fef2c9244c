"""POST /tokenize and /detokenize, GET /tokenizer_info: the server's tokenizer from afar."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.chat_template import chat_source
from deployments.api.generation.chat_request_builder import chat_ids
from deployments.api.handler import TEXT_COST, Api, check_ids
from deployments.api.request_context import Exchange
from deployments.api.schemas.info import DetokenizeRequest, TokenizeRequest
from deployments.errors import invalid

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, TokenizeRequest)
    card = await api.served(body.model)
    tokens = await (_of_prompt(api, body) if body.messages is None else _of_messages(api, exchange, body))
    size = TEXT_COST * len(tokens)
    texts = await api.off_loop(size, api.tokenizer.token_texts, tokens) if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": texts}
    return api.json(exchange, answer)


async def _of_prompt(api: Api, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        raise invalid("prompt", "given, or `messages`", "neither")
    for field in CHAT_FIELDS:
        if getattr(body, field) is not None:
            raise invalid(field, "absent without `messages`", "given")
    special = body.add_special_tokens is not False
    size = TEXT_COST * len(body.prompt)
    [tokens] = await api.off_loop(size, api.tokenizer.encode_batch, [body.prompt], add_special_tokens=special)
    return tokens


async def _of_messages(api: Api, exchange: Exchange, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        raise invalid("messages", "absent with `prompt`", "both")
    return await chat_ids(
        api,
        exchange,
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        flags=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens,
    )


async def detokenize(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, DetokenizeRequest)
    card = await api.served(body.model)
    if body.tokens is None:
        raise invalid("tokens", "a list of integers", "null")
    check_ids("tokens", body.tokens, card.vocab_size)
    text = await api.off_loop(8 * len(body.tokens), api.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return api.json(exchange, {"prompt": text})


async def tokenizer_info(api: Api, exchange: Exchange, request: Request) -> Response:
    info = asdict(api.tokenizer.info()) | {"chat_template": chat_source(api.tokenizer, api.settings)}
    if not api.settings.chat.expose_template:
        del info["chat_template"]
    return api.json(exchange, info)
