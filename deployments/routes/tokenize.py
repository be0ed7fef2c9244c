"""POST /tokenize and /detokenize, GET /tokenizer_info: the server's tokenizer from afar."""

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from deployments.exchange import Exchange
from deployments.routes.context import TEXT_COST, Api, check_ids, refuse
from deployments.wire.errors import invalid
from deployments.wire.tokenize import DetokenizeRequest, TokenizeRequest

REFUSED: dict[str, tuple[object, ...]] = {"messages": (), "add_generation_prompt": (True,)}


async def tokenize(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, TokenizeRequest)
    refuse(body, REFUSED)
    card = await api.served(body.model)
    special = body.add_special_tokens is not False
    size = TEXT_COST * len(body.prompt)
    [tokens] = await api.off_loop(size, api.tokenizer.encode_batch, [body.prompt], add_special_tokens=special)
    texts = await api.off_loop(size, api.tokenizer.token_texts, tokens) if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": texts}
    return api.json(exchange, answer)


async def detokenize(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, DetokenizeRequest)
    card = await api.served(body.model)
    if body.tokens is None:
        raise invalid("tokens", "a list of integers", "null")
    check_ids("tokens", body.tokens, card.vocab_size)
    text = await api.off_loop(8 * len(body.tokens), api.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return api.json(exchange, {"prompt": text})


async def tokenizer_info(api: Api, exchange: Exchange, request: Request) -> Response:
    info = asdict(api.tokenizer.info())
    if not api.settings.expose_chat_template:
        del info["chat_template"]
    return api.json(exchange, info)
