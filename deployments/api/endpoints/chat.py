"""POST /v1/chat/completions, plain and streamed."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.generation.chat_request_builder import plan_chat
from deployments.api.generation.choices import ChatChoice, Choice, Delta, merged_choice
from deployments.api.generation.request_builder import Plan
from deployments.api.generation.response import Run, answer
from deployments.api.handler import Api
from deployments.api.request_context import Exchange
from deployments.api.schemas.chat import ChatRequest


async def chat_completions(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, ChatRequest)
    card = await api.served(body.model)
    plan = await plan_chat(api, body, card, exchange)
    return await answer(Run(api, plan, ChatShape(), card.name, exchange), body)


class ChatShape:
    whole = "chat.completion"
    part = "chat.completion.chunk"
    choice: type[Choice] = ChatChoice

    def merged(self, plan: Plan, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        content = "".join(delta.text for delta in deltas)
        message = {"role": "assistant", "content": content, "refusal": None}
        return merged_choice(plan, choice, deltas, {"message": message}, ["content"])

    def parts(self, plan: Plan, choice: Choice, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """A choice begins with an entry that says who speaks."""
        found = [self._opening(plan, choice)] if first else []
        if delta.text or delta.finish_reason or plan.return_ids or delta.logprobs:
            part: dict[str, Any] = {
                "index": choice.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": delta.logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            if plan.return_ids:
                part["token_ids"] = delta.tokens
            found.append(part)
        return found

    @staticmethod
    def _opening(plan: Plan, choice: Choice) -> dict[str, Any]:
        opening: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "seed": choice.seed,
        }
        if plan.return_ids:
            opening["prompt_token_ids"] = plan.prompts[choice.prompt]
        return opening
