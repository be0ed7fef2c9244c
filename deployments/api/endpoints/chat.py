"""Serves POST /v1/chat/completions, plain and streamed.

A request builds one `engine.requests.GenerateRequest`.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.generation.chat_request_builder import plan_chat
from deployments.api.generation.choices import ChatChoiceState, ChoiceState, Delta, merged_choice
from deployments.api.generation.request_builder import GenerationPlan
from deployments.api.generation.response import answer, begin
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext
from deployments.api.schemas.chat import ChatRequest


async def chat_completions(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/chat/completions. Raises ApiError, ParamError or ScoringError for one that is refused."""
    body = await handler.parse(context, ChatRequest, handler.settings.deadlines.generation_s)
    card = await handler.language_model(body.model, context.route)
    plan = await plan_chat(handler, body, card, context)
    return await answer(await begin(handler, plan, ChatFormat(), card.name, context), body)


class ChatFormat:
    """Writes the choices of a chat. See `ChoiceFormat`."""

    whole = "chat.completion"
    part = "chat.completion.chunk"
    choice: type[ChoiceState] = ChatChoiceState

    def merged(self, plan: GenerationPlan, choice: ChoiceState, deltas: list[Delta]) -> dict[str, Any]:
        """Returns the choice of a plain answer."""
        content = "".join(delta.text for delta in deltas)
        message = {"role": "assistant", "content": content, "refusal": None}
        return merged_choice(plan, choice, deltas, {"message": message}, ["content"])

    def parts(self, plan: GenerationPlan, choice: ChoiceState, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """Returns the choice's entry of each event. A choice begins with an entry that names the role."""
        found = [self._opening(plan, choice)] if first else []
        if delta.text or delta.finish_reason or plan.body.return_token_ids or delta.logprobs:
            part: dict[str, Any] = {
                "index": choice.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": delta.logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            if plan.body.return_token_ids:
                part["token_ids"] = delta.tokens
            found.append(part)
        return found

    @staticmethod
    def _opening(plan: GenerationPlan, choice: ChoiceState) -> dict[str, Any]:
        opening: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "seed": choice.seed,
        }
        if plan.body.return_token_ids:
            opening["prompt_token_ids"] = plan.prompts[choice.prompt]
        return opening
