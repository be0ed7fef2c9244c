"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Annotated

from pydantic import BaseModel

from deployments.wire.chat import Flags, Messages
from deployments.wire.fields import Body, Name, ids, text


class TokenizeRequest(Body):
    """Either `prompt` or `messages` and what goes with them."""

    model: Name | None = None
    prompt: Annotated[str | None, text()] = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Flags = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Annotated[list[int], ids("max_request_tokens")]


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizerInfoResponse(BaseModel):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = None
