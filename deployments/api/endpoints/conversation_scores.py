"""Scores conversations by the model's sequence head of one number, as a reward model judges them."""

from collections.abc import Sequence

from deployments.api.endpoints.pair_scores import PairScores
from deployments.api.endpoints.pooling_common import input_spec, pool_items
from deployments.api.endpoints.scoring_common import ServedRequest, check_items
from deployments.api.generation.chat_request_builder import conversation_ids
from deployments.api.handler import RequestHandler
from deployments.api.schemas.chat import Message
from deployments.api.schemas.pooling import PoolingInput
from deployments.errors import ApiError
from deployments.protocol import ModelCard
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import pooled_items
from scoring.rerank import relevance

ELSEWHERE = {  # by kind of head: why there is no score, and where its answer is
    None: "a language-model head, which needs labels. Send `messages` and `labels` to /generative_scoring.",
    HeadKind.SEQUENCE: "a head of several numbers. Send `messages` to /classify.",
    HeadKind.TOKEN: "a head that scores tokens. Send `messages` to /pooling.",
    HeadKind.POINTER: "a head that chooses among marked tokens. Send `messages` to /classify.",
    HeadKind.POOLED: "a head that makes vectors. Send `messages` to /v1/embeddings.",
}


def conversation_head(handler: RequestHandler, card: ModelCard) -> HeadInfo:
    """Returns the head that scores conversations. Raises ApiError, 404, for a head that gives no single number."""
    head = card.head
    if head is None or head.kind is not HeadKind.SEQUENCE or head.width != 1:
        why = ELSEWHERE[None if head is None else head.kind]
        raise ApiError("not_found", f"This server gives conversations no single score: its model has {why}")
    if handler.rerank.activation in (None, "softmax"):
        message = "This server scores no conversations: `rerank.activation` must be none or sigmoid for one number."
        raise ApiError("not_found", message)
    return head


async def score_conversations(
    served: ServedRequest, conversations: Sequence[Sequence[Message]], options: PoolingInput, field: str = "messages"
) -> PairScores:
    """Scores each conversation as the chat template writes it.

    Args:
        served: The request.
        conversations: At least one, [N].
        options: Says how the messages are rendered and cut.
        field: Name of the request's field that has an entry for each conversation, for errors.

    Raises:
        ApiError: The head gives no single number; or a conversation is too long, or gave a number that is not finite.
        ScoringError: The chat template refuses a conversation.
    """
    handler = served.handler
    head = conversation_head(handler, served.card)
    prompting = bool(options.add_generation_prompt)  # a head judges what was said
    options = options.model_copy(update={"add_generation_prompt": prompting})
    # Each answer of a list has its conversation before it.
    items = await conversation_ids(handler, served.context, options, conversations, field, served.card.max_model_len)
    found = await pool_items(served, head, items, input_spec(options, field))
    scores = pooled_items(found.rows, found.reply.values, found.reply.status, found.reply.cached, "none")
    check_items(scores.errors, field)
    raw = scores.probabilities[:, 0]
    return PairScores(
        raw,
        raw if handler.rerank.activation == "none" else relevance(raw),
        found.rows.truncated,
        int(scores.prompt_tokens.sum()),
        int(scores.cached_tokens.sum()),
        {},
    )
