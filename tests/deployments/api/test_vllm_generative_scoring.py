"""vLLM's generative scoring end to end, written anew from its documentation: its bodies, answers and refusals, with a
real model. Scores are those of the library's logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.model_folder import BUILTIN

QUERY = "Query: red chair\nDocument: "
ITEMS = ["A pine chair, sturdy and red.\nRelevant:", "A pine lamp, sturdy and blue.\nRelevant:", " chair", "x"]
CLOSE = 1e-5


@pytest.fixture
async def client(replica_client: Callable[..., Any]) -> Any:
    """The built-in model, with errors in OpenAI's statuses."""
    return await replica_client(
        model={"path": "builtin", "device": "cpu", "served_name": "m"},
        engine={"kv_slots": 4096, "token_budget": 256},
        wire={"errors": "openai"},
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUILTIN)


@pytest.fixture(scope="module")
def probabilities() -> Callable[[list[int]], torch.Tensor]:
    """The library's distribution over the token after a prompt."""
    library = AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32).eval()

    def after(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = library(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        return found

    return after


async def scores(client: Any, **body: Any) -> list[float]:
    found = await client.post("/generative_scoring", {"model": "m", **body})
    assert found.status_code == 200, found.text
    return [one["score"] for one in found.json()["data"]]


async def test_the_documented_request_and_answer(client: Any, tokenizer: Any, probabilities: Any) -> None:
    """Two labels: the score is the share of the first one among both."""
    yes, no = (tokenizer(text, add_special_tokens=False).input_ids[0] for text in (" yes", " no"))
    body = {"model": "m", "query": QUERY, "items": ITEMS, "label_token_ids": [yes, no], "apply_softmax": True}
    found = (await client.post("/generative_scoring", body | {"item_first": False})).json()
    assert found["id"].startswith("generative-scoring-") and found["object"] == "list" and found["model"] == "m"
    assert isinstance(found["created"], int)
    assert [(one["index"], one["object"]) for one in found["data"]] == [(i, "score") for i in range(len(ITEMS))]
    prompts = [tokenizer(QUERY).input_ids + tokenizer(item, add_special_tokens=False).input_ids for item in ITEMS]
    wanted = [float(p[yes] / (p[yes] + p[no])) for p in map(probabilities, prompts)]
    assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=CLOSE)
    usage = found["usage"]
    assert usage["prompt_tokens"] == sum(map(len, prompts)) == usage["total_tokens"] - usage["completion_tokens"]


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("labels", [[300], [300, 326], [300, 326, 328, 5]])
async def test_token_ids_labels_order_and_softmax(
    client: Any, probabilities: Any, item_first: bool, softmax: bool, labels: list[int]
) -> None:
    query, items = [40, 41, 42], [[43, 44], [45], [46, 47, 48]]
    body = {"query": query, "items": items, "label_token_ids": labels}
    found = await scores(client, **body, item_first=item_first, apply_softmax=softmax, add_special_tokens=False)
    wanted = []
    for item in items:
        p = probabilities(item + query if item_first else query + item)
        wanted.append(float(p[labels[0]] / p[labels].sum() if softmax else p[labels[0]]))
    assert found == pytest.approx(wanted, abs=CLOSE)
    assert all(0 <= one <= 1 for one in found)


async def test_scores_do_not_depend_on_the_batch_or_the_time(client: Any) -> None:
    body: dict[str, Any] = {"query": QUERY, "label_token_ids": [328, 326]}
    whole = await scores(client, **body, items=ITEMS)
    assert await scores(client, **body, items=ITEMS) == pytest.approx(whole, abs=CLOSE)  # from the cache
    alone = [(await scores(client, **body, items=[item]))[0] for item in ITEMS]
    assert alone == pytest.approx(whole, abs=CLOSE)
    assert await scores(client, **body, items=ITEMS[::-1]) == pytest.approx(whole[::-1], abs=CLOSE)
    assert whole[0] > 0.9 > 0.1 > whole[1]  # the model knows its chairs
    assert np.ptp(whole) > 0.5


async def test_text_and_its_token_ids_score_alike(client: Any, tokenizer: Any) -> None:
    body: dict[str, Any] = {"label_token_ids": [328, 326]}
    by_text = await scores(client, **body, query=QUERY, items=ITEMS)
    query = tokenizer(QUERY).input_ids
    items = [tokenizer(item, add_special_tokens=False).input_ids for item in ITEMS]
    assert await scores(client, **body, query=query, items=items, add_special_tokens=False) == pytest.approx(
        by_text, abs=CLOSE
    )


@pytest.mark.parametrize(
    "change",
    [
        {"label_token_ids": []},
        {"label_token_ids": None},
        {"label_token_ids": [10**9]},
        {"label_token_ids": [-1]},
        {"label_token_ids": ["yes"]},
        {"items": []},
        {"items": None},
        {"items": [[1], "a"]},
        {"query": None},
        {"query": [1, 2]},
        {"query": {"text": "q"}},
    ],
)
async def test_bad_requests_are_400(client: Any, change: dict[str, Any]) -> None:
    body = {"model": "m", "query": QUERY, "items": ITEMS, "label_token_ids": [328, 326]} | change
    found = await client.post("/generative_scoring", body)
    assert found.status_code == 400 and found.json()["error"]["message"]


async def test_another_model_is_404(client: Any) -> None:
    body = {"model": "other", "query": QUERY, "items": ITEMS, "label_token_ids": [328, 326]}
    assert (await client.post("/generative_scoring", body)).status_code == 404
