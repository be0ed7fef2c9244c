"""Ranks documents by how they suit a query; `rerank_dialects` has the routes.

`deployments.api.endpoints.pair_scores` builds one `engine.requests.ScoreRequest`, whose labels are the rerank
template's yes and no, or its single label, whose logit is the score. It builds one `engine.requests.PoolingRequest`
where the model has a pooling head, as `deployments.api.endpoints.conversation_scores` does for conversations.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from starlette.responses import Response

from deployments.api.endpoints.conversation_scores import score_conversations
from deployments.api.endpoints.pair_scores import PairScores, pair_template, score_pairs
from deployments.api.endpoints.scoring_common import (
    CHAT_FIELDS,
    ServedRequest,
    check_size,
    refuse_chat_fields,
    report_items,
)
from deployments.api.handler import RequestHandler
from deployments.api.json_body import HALF
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.chat import Message
from deployments.api.schemas.pooling import PoolingInput
from deployments.api.schemas.rerank import RerankRequest
from deployments.errors import describe, invalid
from deployments.protocol import ModelCard
from scoring.errors import ItemError
from scoring.prompts.templates import Template, fill
from scoring.rerank import Ranked, document_text, ranked
from scoring.row_builder import FieldNames, PromptSpec

TEXTS_ROUTE, V2_ROUTE = "/rerank", "/v2/rerank"
INSTRUCTIONS = ("instruction", "instruct")
OF_COHERE = ("rank_fields", "max_chunks_per_doc")  # fields of Cohere's first version alone
OF_TEXTS = ("query", "texts", *INSTRUCTIONS, "max_tokens_per_doc", "max_tokens_per_query", "truncate")
ENTRY_BYTES = 64  # of an answer, without its document


class Documents(NamedTuple):
    """Holds the texts to rank, the field that held them, and whether the answer repeats them."""

    texts: list[str]
    field: str
    echoed: bool


class Ranking(NamedTuple):
    """Holds everything that the answer is made of."""

    request_id: str
    order: list[Ranked]
    truncated: list[int]  # tokens cut off each document
    prompt_tokens: int
    cached_tokens: int


Render = Callable[[RerankRequest, ModelCard, Documents, Ranking, str], Any]


async def rank(
    handler: RequestHandler, context: RequestContext, body: RerankRequest, render: Render, field: str = "documents"
) -> Response:
    """Ranks the documents of a request, and answers in the form that `render` gives the ranking.

    Args:
        handler: Holds the backend.
        context: The HTTP request.
        body: The request in the common form.
        render: Makes the answer.
        field: The client's own name of `documents`, for errors.

    Raises:
        ApiError, ScoringError: The request is refused.
    """
    card = await handler.served(body.model)
    served = ServedRequest(handler, context, card, new_id("rerank-"), body.cache_salt, body.priority)
    raw = _wants_raw(body)
    if body.messages is None:
        documents, scored = await _scored_texts(served, body, field)
    else:
        documents, scored = await _scored_conversations(served, body, field)
    order = ranked(scored.raw if raw else scored.activated, scored.raw, body.top_n, scored.errors)
    ranking = Ranking(served.id, order, scored.truncated, scored.prompt_tokens, scored.cached_tokens)
    report_items(handler, context, scored.truncated, scored.errors)
    size = context.body_bytes + ENTRY_BYTES * len(ranking.order)

    def make() -> Any:
        answer = render(body, card, documents, ranking, context.route)
        return answer | _failures(scored.errors) if isinstance(answer, dict) else answer

    return await handler.sized_json(context, size, make)


async def _scored_texts(served: ServedRequest, body: RerankRequest, field: str) -> tuple[Documents, PairScores]:
    """Scores each text beside the query."""
    handler, context, card = served.handler, served.context, served.card
    if body.query is None:
        raise invalid("query", "given", "nothing")
    refuse_chat_fields(body)
    template = pair_template(handler, card)
    documents = await handler.off_loop(context.body_bytes, _documents, handler, context, body, field)
    labels = 1 if template is None or card.head is not None else len(template.labels)
    check_size(handler, len(documents.texts), labels, documents.field)

    def spec_of(query: str) -> PromptSpec:
        return _prompt_spec(handler, body, query, template, documents)

    return documents, await score_pairs(served, [body.query], documents.texts, spec_of, all_or_nothing=False)


def _failures(errors: Mapping[int, ItemError]) -> dict[str, Any]:
    """Returns the field of an answer that lists the documents without a score; no field if each has one."""
    listed = [{"index": index, **error._asdict()} for index, error in sorted(errors.items())]
    return {"errors": listed} if listed else {}


async def _scored_conversations(served: ServedRequest, body: RerankRequest, field: str) -> tuple[Documents, PairScores]:
    """Scores conversations by a reward model: those of `messages`, or its only one with each document as an answer."""
    for name in OF_TEXTS:
        if getattr(body, name) is not None:
            raise invalid(name, "absent beside `messages`", describe(getattr(body, name)))
    given: Any = body.messages
    single = isinstance(given[0], Message)
    if single != (body.documents is not None):
        rule = "a list of conversations, or one conversation that each of `documents` answers"
        raise invalid("messages", rule, "one without `documents`" if single else "several with `documents`")
    documents = Documents([], "messages", False)
    conversations = given
    if single:
        documents = _documents(served.handler, served.context, body, field)
        if HALF in documents.texts:
            place = f"{documents.field}[{documents.texts.index(HALF)}]"
            raise invalid(place, "Unicode text", "half of a surrogate pair")
        conversations = [[*given, Message.model_construct(role="assistant", content=text)] for text in documents.texts]
    elif body.return_documents or body.return_text:
        raise invalid("return_documents", "false without `documents`", "true")
    check_size(served.handler, len(conversations), 1, documents.field)
    options = {name: getattr(body, name) for name in (*CHAT_FIELDS, "truncate_prompt_tokens")}
    options["truncation_side"] = _either(body, "truncation_side", "truncation_direction")
    read = PoolingInput.model_construct(**options)
    return documents, await score_conversations(served, conversations, read, documents.field)


def _documents(handler: RequestHandler, context: RequestContext, body: RerankRequest, field: str) -> Documents:
    """Reads either dialect: `texts` on one path, `documents` on all. Raises ApiError for both or neither."""
    if (body.documents is None) == (body.texts is None):
        given = "neither" if body.documents is None else "both"
        raise invalid("documents", "given, or `texts`, but not both", given)
    echoed = _echoed(handler, context, body)
    if body.texts is not None:
        if context.route != TEXTS_ROUTE:
            raise invalid("texts", f"absent here: send `documents`, or `texts` to {TEXTS_ROUTE}", describe(body.texts))
        return Documents(body.texts, "texts", echoed)
    return Documents(_document_texts(body, field), field, echoed)


def _echoed(handler: RequestHandler, context: RequestContext, body: RerankRequest) -> bool:
    """Returns whether the answer repeats the documents: as the request says, else the configuration, else as the
    client's own service does. Those of Jina, vLLM and SGLang do; Cohere's and text-embeddings-inference do not."""
    echo: bool | None = _either(body, "return_documents", "return_text")
    echo = handler.settings.rerank.return_documents if echo is None else echo
    if echo is not None:
        return echo
    cohere = context.cohere or context.route == V2_ROUTE or any(getattr(body, name) is not None for name in OF_COHERE)
    return not cohere and body.texts is None


def _document_texts(body: RerankRequest, field: str) -> list[str]:
    fields = body.rank_fields
    if fields is not None and len(set(fields)) < len(fields):
        raise invalid("rank_fields", "distinct", "a name twice")
    return [document_text(one, fields, f"{field}[{i}]") for i, one in enumerate(body.documents or [])]


def _prompt_spec(
    handler: RequestHandler, body: RerankRequest, query: str, template: Template | None, documents: Documents
) -> PromptSpec:
    if template is None and (name := next((one for one in INSTRUCTIONS if getattr(body, one) is not None), None)):
        raise invalid(name, "absent: the model's head reads the two texts alone", describe(getattr(body, name)))
    values = {"query": query, "instruction": _either(body, "instruction", "instruct"), "system": None}
    maximum = body.truncate_prompt_tokens
    capped = bool(body.max_tokens_per_doc) or maximum is not None  # a request with a length wants texts cut to it
    policy = "item" if capped or body.truncate else handler.settings.truncation
    return PromptSpec(
        truncate="error" if body.truncate is False else policy,
        truncation_side=_either(body, "truncation_side", "truncation_direction") or "right",
        max_item_tokens=body.max_tokens_per_doc or None,
        max_query_tokens=body.max_tokens_per_query or None,
        max_row_tokens=None if maximum == -1 else maximum,
        template=None if template is None else fill(template, values),
        names=FieldNames(documents.field, "max_tokens_per_doc", "max_tokens_per_query"),
    )


def _either(body: RerankRequest, name: str, other: str) -> Any:
    """Returns the value of a field with two names. Raises ApiError if both have values, and these differ."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        raise invalid(other, f"absent beside another `{name}`", "both")
    return second if first is None else first


def _wants_raw(body: RerankRequest) -> bool:
    """Returns whether the request asks for scores without activation. Raises ApiError if two fields contradict."""
    activated = _either(body, "use_activation", "activation")
    if activated is not None and body.raw_scores is not None and activated == body.raw_scores:
        raise invalid("raw_scores", "absent beside `use_activation`, or its opposite", "the same")
    return bool(body.raw_scores) or activated is False


def answer(body: RerankRequest, card: ModelCard, documents: Documents, ranking: Ranking, route: str) -> Any:
    """Returns the answer in Cohere's form, or for `texts` in that of text-embeddings-inference."""
    if body.texts is not None:
        return _texts_answer(documents, ranking)
    results = [
        {"index": index, "relevance_score": value}
        | ({"document": {"text": documents.texts[index]}} if documents.echoed else {})
        | _cut(ranking, index)
        for index, value in ranking.order
    ]
    meta: dict[str, Any] = {
        "api_version": {"version": "2" if route == "/v2/rerank" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": ranking.prompt_tokens, "output_tokens": 0},
        "cached_tokens": ranking.cached_tokens,
    }
    if body.max_chunks_per_doc not in (None, 1):
        meta["warnings"] = ["`max_chunks_per_doc` is ignored: a document is one chunk, cut where it is too long."]
    return {
        "id": ranking.request_id,
        "object": "rerank",
        "model": card.name,
        "results": results,
        "usage": {"prompt_tokens": ranking.prompt_tokens, "total_tokens": ranking.prompt_tokens},
        "meta": meta,
    }


def _texts_answer(documents: Documents, ranking: Ranking) -> list[dict[str, Any]]:
    return [
        {"index": index, "score": value}
        | ({"text": documents.texts[index]} if documents.echoed else {})
        | _cut(ranking, index)
        for index, value in ranking.order
    ]


def _cut(ranking: Ranking, index: int) -> dict[str, bool]:
    return {"truncated": True} if ranking.truncated[index] else {}
