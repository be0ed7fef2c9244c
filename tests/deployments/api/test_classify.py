"""POST /classify and /v1/classify over a scripted backend whose numbers are a pure function of the row."""

import math
from typing import Any

import numpy as np
import pytest

from deployments.api.schemas.classify import ClassifyResponse
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.limits import Limits
from engine.model.heads.info import HeadInfo, HeadKind
from scoring.errors import ScoringLimits
from scoring.prompts.templates import TemplateSpec

BOS = 256
PATHS = ("/classify", "/v1/classify")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
HEAD = HeadInfo(HeadKind.SEQUENCE, 3, ("bad", "so-so", "good"))
REWARD = HeadInfo(HeadKind.SEQUENCE, 1, ("reward",))


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(chat=ChatSettings(template=TEMPLATE), limits=Limits(scoring=ScoringLimits(max_items=4)))


@pytest.fixture(autouse=True)
def head(backend: Any) -> None:
    backend.head = HEAD


def numbers(label_logprob: Any, text: str, width: int = 3, bos: bool = True) -> list[float]:
    row = bytes(x % 251 for x in [*([BOS] * bos), *text.encode()])
    return [label_logprob(row, label) for label in range(width)]


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / sum(weights) for weight in weights]


async def classify(client: Any, path: str = "/classify", /, **body: Any) -> Any:
    response = await client.post(path, body)
    assert response.status_code == 200, response.text
    ClassifyResponse.model_validate_json(response.content, strict=True)
    return response.json()


async def refusal(client: Any, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post("/v1/classify", body)
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


@pytest.mark.parametrize("path", PATHS)
async def test_each_text_gets_the_softmax_and_the_name_of_the_largest(
    client: Any, label_logprob: Any, path: str
) -> None:
    texts = ["", "a text", "another"]
    found = await classify(client, path, input=texts)
    assert found["id"].startswith("classify-")
    for index, (text, one) in enumerate(zip(texts, found["data"], strict=True)):
        wanted = softmax(numbers(label_logprob, text))
        assert one["probs"] == pytest.approx(wanted, abs=1e-6)
        assert (one["index"], one["num_classes"]) == (index, 3)
        assert one["label"] == HEAD.labels[wanted.index(max(wanted))]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] == sum(len(text) + 1 for text in texts)


async def test_an_input_may_be_one_text_or_token_ids(client: Any, label_logprob: Any) -> None:
    one = await classify(client, input="a text")
    ids = [BOS, *b"a text"]
    for given in (ids, [ids]):
        assert (await classify(client, input=given))["data"] == one["data"]
    bare = await classify(client, input="a text", add_special_tokens=False)
    assert bare["data"][0]["probs"] == pytest.approx(softmax(numbers(label_logprob, "a text", bos=False)), abs=1e-6)


@pytest.mark.parametrize("name", ["use_activation", "activation"])
async def test_raw_numbers_stay_reachable(client: Any, label_logprob: Any, name: str) -> None:
    given: dict[str, Any] = {"input": "a", name: False}
    found = await classify(client, **given)
    assert found["data"][0]["probs"] == pytest.approx(numbers(label_logprob, "a"), abs=1e-6)
    given[name] = True
    assert (await classify(client, **given))["data"] == (await classify(client, input="a"))["data"]


@pytest.mark.parametrize(
    ("head", "activated"),
    [
        (REWARD, lambda raw: [1 / (1 + math.exp(-raw[0]))]),
        (REWARD._replace(problem_type="regression"), lambda raw: raw),
        (HEAD._replace(problem_type="regression"), lambda raw: raw),
        (HEAD._replace(problem_type="single_label_classification"), softmax),
        (HEAD._replace(problem_type="multi_label_classification"), lambda raw: [1 / (1 + math.exp(-x)) for x in raw]),
    ],
)
async def test_the_activation_is_that_of_the_heads_loss(
    client: Any, backend: Any, label_logprob: Any, head: HeadInfo, activated: Any
) -> None:
    backend.head = head
    found = await classify(client, input="a text")
    assert found["data"][0]["probs"] == pytest.approx(activated(numbers(label_logprob, "a text", head.width)), abs=1e-6)


async def test_messages_are_written_by_the_chat_template_without_an_open_turn(client: Any, label_logprob: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = "user: hi;assistant: yo;"
    found = await classify(client, messages=messages)
    assert found["data"][0]["probs"] == pytest.approx(softmax(numbers(label_logprob, text, bos=False)), abs=1e-6)
    opened = await classify(client, messages=messages, add_generation_prompt=True)
    wanted = softmax(numbers(label_logprob, text + ">", bos=False))
    assert opened["data"][0]["probs"] == pytest.approx(wanted, abs=1e-6)


async def test_a_text_is_cut_only_where_the_request_says_so(client: Any, backend: Any) -> None:
    backend.max_model_len = 8
    assert await refusal(client, input="much too long") == (400, "context_length_exceeded", "input[0]")
    await classify(client, input="much too long", truncate_prompt_tokens=-1)
    await classify(client, input="much too long", truncate_prompt_tokens=4, truncation_side="left")
    whole, left = ([*task.prefix.tolist(), *task.ids.tolist()] for task in backend.pooling_tasks)
    assert whole == [BOS, *b"much to"]
    assert left == [BOS, *b"ong"]


async def test_rows_share_what_they_begin_with(client: Any, backend: Any) -> None:
    await classify(client, input=["the same a", "the same b"], cache_salt="s", priority=-3)
    [task] = backend.pooling_tasks
    assert task.prefix.tolist() == [BOS, *b"the same "]
    assert (task.cache_salt, task.priority) == ("s", -3)


async def test_a_number_that_is_not_finite_fails_the_request(client: Any, backend: Any) -> None:
    backend.nonfinite = frozenset([1])
    assert await refusal(client, input=["a", "b"]) == (500, "nonfinite_logits", "input[1]")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, (422, "invalid_value", "input")),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, (422, "invalid_value", "input")),
        ({"input": []}, (422, "invalid_value", "input")),
        ({"input": ["a"] * 5}, (422, "invalid_value", "input")),
        ({"input": [[]]}, (422, "invalid_value", "input")),
        ({"input": [[300]]}, (422, "invalid_token_id", "input[0]")),
        ({"input": "a", "add_generation_prompt": True}, (422, "invalid_value", "add_generation_prompt")),
        ({"input": "a", "use_activation": True, "activation": False}, (422, "invalid_value", "activation")),
        ({"input": "a", "truncate_prompt_tokens": 0}, (422, "invalid_value", "truncate_prompt_tokens")),
        ({"input": "a", "chat_template": "x"}, (400, "unsupported_parameter", "chat_template")),
        ({"input": "a", "padding": "max_length"}, (400, "unsupported_parameter", "padding")),
        ({"input": "a", "model": "other"}, (404, "model_not_found", "model")),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: Any, backend: Any, body: dict[str, Any], wanted: tuple[int, str, str]
) -> None:
    assert await refusal(client, **body) == wanted
    assert not backend.pooling_tasks


OTHERS: dict[str, dict[str, Any]] = {
    "/generative_scoring": {"query": "q", "items": ["a"], "label_token_ids": [5]},
    "/v1/score": {"query": "q", "items": ["a"], "label_token_ids": [5]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "Is it?"}]},
}


@pytest.mark.parametrize("path", OTHERS)
async def test_routes_of_language_models_say_that_there_is_none(client: Any, backend: Any, path: str) -> None:
    found = await client.post(path, OTHERS[path])
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (404, "not_found"), error
    assert path in error["message"]
    assert "sequence head" in error["message"]
    assert not backend.score_tasks
    assert not backend.tasks


async def test_a_language_model_classifies_nothing(client: Any, backend: Any) -> None:
    backend.head = None
    found = await client.post("/classify", {"input": "a"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    assert "language-model head" in found.json()["error"]["message"]


async def test_the_models_page_names_the_head(client: Any, client_of: Any, backend: Any) -> None:
    facts = (await client.get("/v1/models")).json()["data"][0]["assay"]["head"]
    assert facts == {"kind": "sequence", "labels": ["bad", "so-so", "good"], "problem_type": None}
    backend.head = None
    language_model = client_of(ApiSettings())
    facts = (await language_model.get("/v1/models/toy")).json()["assay"]["head"]
    assert facts == {"kind": "lm", "labels": None, "problem_type": None}


def ask(client_of: Any, activation: Any = None, **template: Any) -> Any:
    spec = TemplateSpec(prefix="{{ query }}|", suffix="?", **template)
    return client_of(ApiSettings(templates={"ask": spec}, rerank=RerankArgs(template="ask", activation=activation)))


async def test_one_number_ranks_documents(client_of: Any, backend: Any, label_logprob: Any) -> None:
    backend.head = REWARD
    documents = ["alpha", "be", "gamma ray"]
    client = ask(client_of)
    raw = {i: numbers(label_logprob, f"q|{text}?", 1, bos=False)[0] for i, text in enumerate(documents)}
    best = sorted(raw, key=lambda index: -raw[index])
    found = (await client.post("/v1/rerank", {"query": "q", "documents": documents})).json()["results"]
    assert [one["index"] for one in found] == best
    for one in found:
        assert one["relevance_score"] == pytest.approx(1 / (1 + math.exp(-raw[one["index"]])), abs=1e-6)
    texts = (await client.post("/rerank", {"query": "q", "texts": documents, "raw_scores": True})).json()
    assert [one["score"] for one in texts] == pytest.approx([raw[index] for index in best], abs=1e-6)
    assert not backend.score_tasks


async def test_large_numbers_are_ranked_although_the_sigmoid_of_each_is_1(
    client_of: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.head, scripted = REWARD, backend.pooling

    async def large(*given: Any, **options: Any) -> Any:
        return (await scripted(*given, **options))._replace(values=np.array([[40], [60], [50]], np.float32))

    monkeypatch.setattr(backend, "pooling", large)
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    found = (await ask(client_of).post("/v1/rerank", body)).json()["results"]
    assert [(one["index"], one["relevance_score"]) for one in found] == [(1, 1.0), (2, 1.0)]


async def test_ranking_needs_one_number_and_a_template(client: Any, client_of: Any, backend: Any) -> None:
    body = {"query": "q", "documents": ["a"]}
    found = await ask(client_of).post("/v1/rerank", body)
    assert (found.status_code, "3 numbers" in found.text) == (404, True)
    backend.head = REWARD
    found = await client.post("/v1/rerank", body)
    assert (found.status_code, "rerank: {template:" in found.text) == (404, True)
    ask_softmax = ask(client_of, activation="softmax", labels=("a", "b"))
    found = await ask_softmax.post("/v1/rerank", body)
    assert (found.status_code, "its head has one" in found.text) == (404, True)
    facts = (await ask_softmax.get("/v1/models")).json()["data"][0]["assay"]
    assert facts["prompt_source"] is None  # where the route answers 404
    backend.head = None
    found = await ask(client_of).post("/v1/rerank", body)
    assert (found.status_code, "no labels" in found.text) == (404, True)


LANGUAGE_MODEL, TOKEN = None, HeadInfo(HeadKind.TOKEN, 1, ("good",))
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("head", "remedy"),
    [(LANGUAGE_MODEL, "/generative_scoring"), (HEAD, "/classify"), (TOKEN, "/pooling")],
)
async def test_conversations_need_a_head_of_one_number(client: Any, backend: Any, head: Any, remedy: str) -> None:
    backend.head = head
    found = await client.post("/score", {"messages": CHAT})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    assert remedy in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"messages": CHAT, "items": ["a"]}, (422, "invalid_value", "items")),
        ({"messages": CHAT, "text_2": "a"}, (422, "invalid_value", "text_2")),
        ({"messages": CHAT, "instruction": "a"}, (422, "invalid_value", "instruction")),
        ({"messages": CHAT, "chat_template_kwargs": {"odd": 1}}, (422, "invalid_value", "chat_template_kwargs")),
        ({"messages": [CHAT] * 5}, (422, "invalid_value", "messages")),
        ({"messages": [CHAT, []]}, (422, "invalid_value", "messages[1]")),
        ({"messages": [CHAT, [{"role": "user", "content": 3}]]}, (422, "invalid_value", "messages[1][0].content")),
        ({"messages": [CHAT, [CHAT[0] | {"tool_calls": [1]}]]},
         (400, "unsupported_parameter", "messages[1][0].tool_calls")),
        ({"text_1": "a", "text_2": "b", "add_generation_prompt": True},
         (422, "invalid_value", "add_generation_prompt")),
    ],
)  # fmt: skip
async def test_bad_conversations_are_refused_with_their_place(
    client: Any, backend: Any, body: Any, wanted: tuple[int, str, str]
) -> None:
    backend.head = REWARD
    found = await client.post("/score", body)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == wanted
    assert not backend.pooling_tasks
