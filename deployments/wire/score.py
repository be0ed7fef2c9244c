"""POST /v1/score: the request as parsed, and the shape of its answer."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel

from deployments.wire.fields import Body, Name, absent, ids, text_or_ids, texts_or_ids
from deployments.wire.generative_scoring import ScoringUsage

Pooling = Annotated[None, absent("this route takes `query`, `items` and `label_token_ids`; /rerank ranks documents")]


class ScoreRequest(Body):
    """A bare string of `items` is one item. `null` means absent everywhere but in the three required fields."""

    # First, so that a body for the pooling servers' route of this name is told so and not that `query` is missing.
    text_1: Pooling = None
    data_1: Pooling = None
    queries: Pooling = None
    documents: Pooling = None
    model: Name | None = None
    query: Annotated[str | list[int], text_or_ids()]
    items: Annotated[list[str] | list[list[int]], texts_or_ids("max_items", 0, one=True)]
    label_token_ids: Annotated[list[int], ids("max_labels", 1, null=False)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    # Known and refused unless they ask for nothing.
    embed_override_token_id: Any = None
    query_embed_overrides: Any = None
    item_embed_overrides: Any = None
    return_pooled_hidden_states: Any = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "embed_override_token_id": (),
    "query_embed_overrides": (),
    "item_embed_overrides": (),
    "return_pooled_hidden_states": (False,),
}


class ScoreResponse(BaseModel):
    scores: list[list[float]]
    """By item, by label."""
    pooled_hidden_states: None
    model: str
    object: Literal["scoring"]
    usage: ScoringUsage
    truncated: list[bool]
    """By item."""
