"""Serves POST /v1/completions, plain and streamed.

A request builds one `engine.requests.GenerateRequest` for each prompt.
"""

from typing import Any

from starlette.responses import Response

from deployments.api.generation.choices import ChoiceState, Delta, merged_choice
from deployments.api.generation.request_builder import GenerationPlan, plan_completion
from deployments.api.generation.response import answer, begin
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext
from deployments.api.schemas.generation import CompletionRequest


async def completions(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /v1/completions. Raises ApiError or ParamError for a request that is refused."""
    body = await handler.parse(context, CompletionRequest, handler.settings.deadlines.generation_s)
    card = await handler.language_model(body.model, context.route)
    plan = await plan_completion(handler, body, card, context)
    return await answer(await begin(handler, plan, CompletionFormat(), card.name, context), body)


class CompletionFormat:
    """Writes the choices of a completion. See `ChoiceFormat`."""

    whole = part = "text_completion"
    choice = ChoiceState

    def merged(self, plan: GenerationPlan, choice: ChoiceState, deltas: list[Delta]) -> dict[str, Any]:
        """Returns the choice of a plain answer."""
        fields = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
        return merged_choice(plan, choice, deltas, {"text": "".join(delta.text for delta in deltas)}, fields)

    def parts(self, plan: GenerationPlan, choice: ChoiceState, delta: Delta, first: bool) -> list[dict[str, Any]]:
        """Returns the choice's entry of the event, none if there is nothing to send."""
        if not (first or delta.text or delta.finish_reason or plan.body.return_token_ids or delta.logprobs):
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
        if plan.body.return_token_ids:
            found["token_ids"] = delta.tokens
            if first:
                found["prompt_token_ids"] = plan.prompts[choice.prompt]
        return [found]
