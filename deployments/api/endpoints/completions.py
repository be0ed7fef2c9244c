"""POST /v1/completions, plain and streamed."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.generation.choices import Choice, Delta, merged_choice
from deployments.api.generation.request_builder import Plan, plan_completion
from deployments.api.generation.response import Run, answer
from deployments.api.handler import Api
from deployments.api.request_context import Exchange
from deployments.api.schemas.generation import CompletionRequest


async def completions(api: Api, exchange: Exchange, request: Request) -> Response:
    body = await api.parse(exchange, CompletionRequest)
    card = await api.served(body.model)
    plan = await plan_completion(api, body, card, exchange)
    return await answer(Run(api, plan, CompletionShape(), card.name, exchange), body)


class CompletionShape:
    whole = part = "text_completion"
    choice = Choice

    def merged(self, plan: Plan, choice: Choice, deltas: list[Delta]) -> dict[str, Any]:
        fields = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
        return merged_choice(plan, choice, deltas, {"text": "".join(delta.text for delta in deltas)}, fields)

    def parts(self, plan: Plan, choice: Choice, delta: Delta, first: bool) -> list[dict[str, Any]]:
        if not (first or delta.text or delta.finish_reason or plan.return_ids or delta.logprobs):
            return []
        found: dict[str, Any] = {
            "index": choice.index,
            "text": delta.text,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if first:
            found["seed"] = choice.seed
        if plan.return_ids:
            found["token_ids"] = delta.tokens
            if first:
                found["prompt_token_ids"] = plan.prompts[choice.prompt]
        return [found]
