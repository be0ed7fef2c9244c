"""Serves POST /predict: the labels of texts or pairs of texts, in the dialect of text-embeddings-inference.

A request builds one `engine.requests.PoolingRequest`.
"""

import numpy as np
from starlette.responses import Response

from deployments.api.endpoints.pooling_common import text_spec
from deployments.api.endpoints.scoring_common import (
    ServedRequest,
    check_items,
    check_size,
    report_items,
    submit_pooling,
    tokenize_rows,
)
from deployments.api.handler import RequestHandler
from deployments.api.request_context import RequestContext, new_id
from deployments.api.schemas.embeddings import PredictRequest
from deployments.errors import invalid
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.activation import default_activation, pooled_items
from scoring.row_builder import PromptSpec, ScoringRows, check_tokens, joined, unshared


async def predict(handler: RequestHandler, context: RequestContext) -> Response:
    """Answers POST /predict. Raises ApiError or ScoringError for a request that is refused."""
    body = await handler.parse(context, PredictRequest, handler.settings.deadlines.scoring_s)
    card, head = await handler.pooling_head(body.model, context.route, (HeadKind.SEQUENCE,))
    served = ServedRequest(handler, context, card, new_id("predict-"), body.cache_salt, body.priority)
    check_size(handler, len(body.inputs.texts), head.width, "inputs")
    side = body.truncation_direction or "right"
    single = text_spec("inputs", cut=bool(body.truncate), cut_field="truncate", side=side)
    rows = await _rows(served, head, body.inputs.texts, single)
    check_items(rows.errors, "inputs")
    reply = await submit_pooling(served, rows, head)
    activation = "none" if body.raw_scores else default_activation(head.width, head.problem_type)
    scores = pooled_items(rows, reply.values, reply.status, reply.cached, activation)
    check_items(scores.errors, "inputs")
    report_items(handler, context, rows.truncated)

    def make() -> object:
        order = np.argsort(-scores.probabilities, axis=1, kind="stable").tolist()
        found = [
            [{"score": one[label], "label": head.labels[label]} for label in labels]
            for one, labels in zip(scores.probabilities.tolist(), order, strict=True)
        ]
        return found if body.inputs.batch else found[0]

    return await handler.sized_json(context, 4 * scores.probabilities.nbytes, make)


async def _rows(served: ServedRequest, head: HeadInfo, texts: list[list[str]], single: PromptSpec) -> ScoringRows:
    """Builds a row of each text, or pair of texts, which only an encoder reads."""
    if all(len(one) == 1 for one in texts):
        rows = await tokenize_rows(served, "", [one[0] for one in texts], single)
        return unshared(rows) if head.whole_rows else rows
    if not head.encoder:
        raise invalid(
            "inputs", "single texts, since the model is no encoder: nothing says how it reads pairs", "a pair"
        )
    pair = PromptSpec(pairs=True, truncate=single.truncate, truncation_side=single.truncation_side)
    names = single.names._replace(query_tokens=single.names.item_tokens)
    parts = [
        await tokenize_rows(served, one[0], [one[1]], pair._replace(names=names._replace(query=f"inputs[{index}]")))
        if len(one) == 2
        else await tokenize_rows(served, "", one, single)
        for index, one in enumerate(texts)
    ]
    rows = _with_segments(parts)
    check_tokens(len(rows.ids), served.handler.limits["max_request_tokens"], "inputs")
    return rows


def _with_segments(parts: list[ScoringRows]) -> ScoringRows:
    """Joins rows of pairs and of single texts, whose tokens are all of the first segment."""
    ready = [one if len(one.segments) else one._replace(segments=np.array(one.lengths(), np.int32)) for one in parts]
    return joined(ready, "inputs")
