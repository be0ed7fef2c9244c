"""/pooling, /v1/embeddings, /embed, /predict and pairs on /score over a scripted backend."""

import base64
import math
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from deployments.api.schemas.embeddings import EmbeddingsResponse
from deployments.api.schemas.pooling import PoolingResponse
from deployments.api.schemas.score import ScoreResponse
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.limits import Limits, WireLimits
from engine.model.heads.info import EmbeddingInfo, HeadInfo, HeadKind
from scoring.prompts.templates import TemplateSpec
from tests.support.toy_model import ByteTokenizer

BOS, EOS = 256, 257
ANY_ID = {"id": ANY}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
REWARD = HeadInfo(HeadKind.SEQUENCE, 1, ("reward",))
CROSS = REWARD._replace(encoder=True, whole_rows=True)
STEPS = HeadInfo(HeadKind.TOKEN, 2, ("bad", "good"))
PROMPTS = EmbeddingInfo(dimensions=(2,), prompts=(("query", "find: "),))
VECTORS = HeadInfo(HeadKind.POOLED, 4, (), embedding=PROMPTS, whole_rows=True)
THREE = STEPS._replace(width=3, labels=("bad", "so-so", "good"))
LONG_CHAT = [{"role": "user", "content": "x" * 900}]
TAG = ord("#")
SAID = {"role": "user", "content": "a"}
BOTH = {"input": "a", "normalize": True, "use_activation": False}
ITEMS = {"query": "a", "items": ["b"], "label_token_ids": [1]}


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(chat=ChatSettings(template=TEMPLATE))


def numbers(label_logprob: Any, ids: list[int], width: int) -> list[float]:
    return [label_logprob(bytes(token % 251 for token in ids), label) for label in range(width)]


def text_ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


def pair_ids(first: str, second: str) -> list[int]:
    return [BOS, *first.encode(), EOS, *second.encode(), EOS]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


async def ask(client: Any, path: str, /, **body: Any) -> Any:
    response = await client.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(client: Any, path: str, /, **body: Any) -> tuple[int, str, str | None]:
    found = await client.post(path, body)
    error = found.json()["error"]
    return found.status_code, error["code"], error["param"]


async def test_each_step_has_the_share_of_its_second_label(client: Any, backend: Any, label_logprob: Any) -> None:
    backend.head = STEPS
    text = "one#two#"
    ends = [index + 1 for index, char in enumerate(text) if char == "#"]
    wanted = []
    for end in ends:
        bad, good = numbers(label_logprob, text_ids(text[:end]), 2)
        wanted.append(sigmoid(good - bad))
    for how, score in (("min", min(wanted)), ("last", wanted[-1]), ("product", math.prod(wanted))):
        found = await ask(client, "/pooling", input=[text, "#"], step_tag_id=TAG, steps=True, aggregate=how)
        PoolingResponse.model_validate(found)
        assert found["data"][0]["data"] == pytest.approx(wanted, abs=1e-6)
        assert found["data"][0]["score"] == pytest.approx(score, abs=1e-6)
        assert len(found["data"][1]["data"]) == 1
    plain = await ask(client, "/pooling", input=text, step_tag_id=TAG)
    assert [pair[1] for pair in plain["data"][0]["data"]] == pytest.approx(wanted, abs=1e-6)
    every = await ask(client, "/pooling", input=text, use_activation=False, task="token_classify")
    assert len(every["data"][0]["data"]) == len(text) + 1
    assert every["data"][0]["data"][-1] == pytest.approx(numbers(label_logprob, text_ids(text), 2), abs=1e-6)
    assert every["usage"]["prompt_tokens"] == len(text) + 1


async def test_solutions_share_their_question_up_to_the_first_step(client: Any, backend: Any) -> None:
    backend.head = STEPS
    await ask(client, "/pooling", input=["ask: a#b#", "ask: a#c#"], step_tag_id=TAG, steps=True)
    [task] = backend.pooling_tasks
    assert task.prefix.tolist() == text_ids("ask: a")
    assert task.ids[task.positions].tolist() == [TAG] * 4


async def test_messages_are_scored_too(client: Any, backend: Any, label_logprob: Any) -> None:
    backend.head = REWARD
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    found = await ask(client, "/pooling", messages=messages, task="classify")
    raw = numbers(label_logprob, list(b"user: hi;assistant: yo;"), 1)[0]
    assert found["data"][0]["data"] == pytest.approx([sigmoid(raw)], abs=1e-6)


async def test_vectors_are_cut_and_normalised_as_the_request_says(
    client: Any, backend: Any, label_logprob: Any
) -> None:
    backend.head = VECTORS
    raw = np.array([numbers(label_logprob, text_ids(text), 4) for text in ("a", "bc")])
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    found = await ask(client, "/v1/embeddings", input=["a", "bc"])
    EmbeddingsResponse.model_validate(found)
    assert np.abs(np.array([one["embedding"] for one in found["data"]]) - unit).max() < 1e-6
    plain = await ask(client, "/v1/embeddings", input=["a", "bc"], normalize=False, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in plain["data"]]
    assert np.abs(np.array(decoded) - raw).max() < 1e-6
    short = await ask(client, "/pooling", input="a", dimensions=2)
    assert short["data"][0]["data"] == pytest.approx(raw[0, :2] / np.linalg.norm(raw[0, :2]), abs=1e-6)
    assert await ask(client, "/embed", inputs="a") == [pytest.approx(unit[0], abs=1e-6)]
    await ask(client, "/embed", inputs=["a"], prompt_name="query")
    assert backend.pooling_tasks[-1].ids.tolist() == text_ids("find: a")
    assert not any(len(task.prefix) for task in backend.pooling_tasks)


async def test_a_pair_is_one_row_with_two_segments(client: Any, backend: Any, label_logprob: Any) -> None:
    backend.head = CROSS
    body = {"text_1": "q", "text_2": ["one", "<eos>"]}
    found = await ask(client, "/v1/score", **body)
    ScoreResponse.model_validate(found)
    raw = [numbers(label_logprob, pair_ids("q", text), 1)[0] for text in body["text_2"]]
    assert [one["score"] for one in found["data"]] == pytest.approx([sigmoid(one) for one in raw], abs=1e-6)
    [task] = backend.pooling_tasks
    assert task.segments.tolist() == [3, 3]
    assert task.ids.tolist() == pair_ids("q", "one") + pair_ids("q", "<eos>")  # no control token but the frame's
    ranked = await ask(client, "/rerank", query="q", texts=body["text_2"], raw_scores=True)
    assert {one["index"]: one["score"] for one in ranked} == pytest.approx(dict(enumerate(raw)), abs=1e-6)
    predicted = await ask(client, "/predict", inputs=["q", "one"], raw_scores=True)
    assert predicted == [{"score": pytest.approx(raw[0], abs=1e-6), "label": "reward"}]
    facts = (await client.get("/v1/models")).json()["data"][0]["assay"]
    assert facts["prompt_source"] == "tokenizer"


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")])
async def test_many_pairs_are_scored_side_by_side(
    client: Any, backend: Any, label_logprob: Any, names: tuple[str, str]
) -> None:
    backend.head = CROSS
    first, second = names
    given: dict[str, Any] = {first: ["q", "longer"], second: ["one", "two"], "use_activation": False}
    found = await ask(client, "/score", **given)
    pairs = zip(given[first], given[second], strict=True)
    wanted = [numbers(label_logprob, pair_ids(*pair), 1)[0] for pair in pairs]
    assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=1e-6)


async def test_the_longer_text_of_a_pair_is_cut_first(client: Any, backend: Any) -> None:
    backend.head, backend.max_model_len = CROSS, 11  # 8 tokens of text
    for first, second, kept in (
        ("ab", "cdefghij", ("ab", "cdefgh")),
        ("abcdefghij", "kl", ("abcdef", "kl")),
        ("abcdefgh", "ijklmnop", ("abcd", "ijkl")),
    ):
        found = await ask(client, "/score", text_1=first, text_2=second)
        assert backend.pooling_tasks[-1].ids.tolist() == pair_ids(*kept)
        assert found["data"][0].get("truncated", False) is (kept[1] != second)


async def test_a_pair_that_is_too_long_is_named_by_its_place(client_of: Any, backend: Any) -> None:
    client = client_of(ApiSettings(truncation="error"))
    backend.head, backend.max_model_len = CROSS, 11
    for first in (["a", "b"], "a"):
        found = await client.post("/score", {"text_1": first, "text_2": ["c", "much too long"]})
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, "text_2[1]")
        assert "`text_2[1]` must be at most 7 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/score", {"text_1": "a", "text_2": "long enough", "truncate_prompt_tokens": 2}, "text_1"),
        ("/rerank", {"query": "long enough", "texts": ["a"], "truncate": False}, "query"),
        ("/predict", {"inputs": [["a", "b"], ["long enough", "a"]]}, "inputs[1]"),
    ],
)
async def test_a_pair_without_room_for_its_first_text_is_refused(
    client: Any, backend: Any, path: str, body: dict[str, Any], field: str
) -> None:
    backend.head, backend.max_model_len = CROSS, 11
    found = await client.post(path, body)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert f"`{field}` must leave room in " in error["message"]
    assert not backend.pooling_tasks


async def test_vectors_score_pairs_by_their_cosine(client: Any, backend: Any, label_logprob: Any) -> None:
    backend.head = VECTORS
    query = np.array(numbers(label_logprob, text_ids("find: q"), 4))
    texts = ["a", "bc", "q"]
    raw = np.array([numbers(label_logprob, text_ids(text), 4) for text in texts])
    wanted = raw @ query / np.linalg.norm(raw, axis=1) / np.linalg.norm(query)
    found = await ask(client, "/score", queries="q", documents=texts)
    assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=1e-6)
    ranked = await ask(client, "/v1/rerank", query="q", documents=texts)
    assert [one["index"] for one in ranked["results"]] == np.argsort(-wanted).tolist()


@pytest.mark.parametrize("head", [CROSS, VECTORS])
async def test_a_document_that_is_no_unicode_is_left_out_of_a_ranking(
    client: Any, backend: Any, head: HeadInfo
) -> None:
    backend.head = head
    clean = await ask(client, "/v1/rerank", query="q", documents=["a", "bc"])
    found = await ask(client, "/v1/rerank", query="q", documents=["\ud83d", "a", "bc"])
    values = [(one["index"] - 1, one["relevance_score"]) for one in found["results"]]
    assert values == [(one["index"], pytest.approx(one["relevance_score"])) for one in clean["results"]]
    assert [one["index"] for one in found["errors"]] == [0]


async def test_a_document_that_the_model_cannot_read_fails_alone_and_moves_no_segment(
    client: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.head = CROSS
    documents = ["a", "!", "bcd"]
    wanted = await ask(client, "/v1/rerank", query="query", documents=documents)
    encode = ByteTokenizer.encode_batch

    def foreign(self: ByteTokenizer, texts: Any, **options: Any) -> list[list[int]]:
        return [
            [9_999] if text == "!" else ids for text, ids in zip(texts, encode(self, texts, **options), strict=True)
        ]

    monkeypatch.setattr(ByteTokenizer, "encode_batch", foreign)
    found = await ask(client, "/v1/rerank", query="query", documents=documents)
    assert [one["index"] for one in found["errors"]] == [1]
    assert found["results"] == [one for one in wanted["results"] if one["index"] != 1]
    task = backend.pooling_tasks[-1]
    assert len(task.segments) == len(task.starts) - 1 == 2


@pytest.mark.parametrize("head", [CROSS, VECTORS])
async def test_a_query_is_cut_to_its_own_bound_whatever_cuts_documents(
    client_of: Any, backend: Any, head: HeadInfo
) -> None:
    backend.head = head
    body = {"query": "a long query", "documents": ["ab", "c"], "max_tokens_per_query": 9}
    wanted = await ask(client_of(ApiSettings(truncation="item")), "/v1/rerank", **body)
    assert await ask(client_of(ApiSettings(truncation="item")), "/v1/rerank", **body, truncate=False) == wanted | ANY_ID
    assert await ask(client_of(ApiSettings(truncation="error")), "/v1/rerank", **body) == wanted | ANY_ID


@pytest.mark.parametrize(
    ("route", "head", "body", "field"),
    [
        ("/v1/rerank", REWARD, {"messages": LONG_CHAT, "documents": ["y"] * 1_000}, "documents"),
        ("/generative_scoring", None, {"messages": [LONG_CHAT] * 1_000, "label_token_ids": [5, 6]}, "messages"),
    ],
)
async def test_conversations_of_a_list_are_counted_as_they_are_made(
    client_of: Any,
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    head: HeadInfo | None,
    body: dict[str, Any],
    field: str,
) -> None:
    backend.head, backend.max_model_len = head, 4096
    limits = Limits(wire=WireLimits(max_request_tokens=2_000))
    client = client_of(ApiSettings(chat=ChatSettings(template=TEMPLATE), limits=limits))
    made, encode = [], ByteTokenizer.encode_batch

    def counted(self: ByteTokenizer, texts: Any, **options: Any) -> list[list[int]]:
        made.append(len(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", counted)
    assert await refusal(client, route, **body) == (413, "request_too_large", field)
    assert sum(made) <= 3


async def test_an_input_without_tokens_is_named_alone(client_of: Any, backend: Any) -> None:
    backend.head = REWARD
    found = await client_of(ApiSettings()).post("/classify", {"input": [""], "add_special_tokens": False})
    assert found.json()["error"]["message"] == "`input[0]` must not be empty. Given: no tokens."


async def test_a_refused_document_is_told_the_limit_that_it_passes(client_of: Any, backend: Any) -> None:
    backend.head, backend.max_model_len = CROSS, 60
    client = client_of(ApiSettings(truncation="error"))
    for length, more, words in (
        (30, {"max_tokens_per_doc": 9}, "must be at most 9 tokens (max_tokens_per_doc)"),
        (90, {}, "(the model's context, query included)"),
        (90, {"max_tokens_per_doc": 80}, "(the model's context, query included)"),
    ):
        body = {"query": "q", "documents": ["a" * length], "truncate": False, **more}
        found = await client.post("/v1/rerank", body)
        assert found.status_code == 400 and words in found.json()["error"]["message"], found.json()


async def test_lengths_of_vectors_texts_are_counted_by_side(client_of: Any, backend: Any) -> None:
    client = client_of(ApiSettings(truncation="error"))
    backend.head, backend.max_model_len = VECTORS, 11
    for body, place in (
        ({"text_1": "much too long", "text_2": ["a"]}, "text_1"),
        ({"text_1": ["a", "much too long"], "text_2": ["a", "b"]}, "text_1[1]"),
        ({"text_1": "a", "text_2": ["b", "much too long"]}, "text_2[1]"),
    ):
        found = await client.post("/score", body)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, place) and f"`{place}` must be at most" in error["message"]
    backend.max_model_len = 99
    query, text, prompt = "abcd", "efghijklmn", len("find: ") + 1  # with the token that begins each text
    for caps, kept in (
        ({"max_tokens_per_doc": 3, "max_tokens_per_query": prompt + 2}, (2, 2)),
        ({"truncate_prompt_tokens": prompt + 1}, (1, prompt)),
    ):
        cut = await ask(client, "/score", text_1=query, text_2=[text], **caps)
        short = await ask(client, "/score", text_1=query[: kept[0]], text_2=[text[: kept[1]]])
        assert cut["data"][0]["score"] == short["data"][0]["score"] and cut["data"][0]["truncated"]


@pytest.mark.parametrize("head", [CROSS, VECTORS])
async def test_tokens_of_all_pairs_are_bounded_together(client_of: Any, backend: Any, head: HeadInfo) -> None:
    client = client_of(ApiSettings(limits=Limits(wire=WireLimits(max_request_tokens=60))))
    backend.head = head
    for count, status in ((2, 200), (9, 413)):
        body = {"text_1": ["ab"] * count, "text_2": ["cd"] * count}
        found = await client.post("/score", body)
        assert found.status_code == status, found.text
    assert found.json()["error"]["code"] == "request_too_large"


async def test_a_cut_to_no_tokens_is_none(client: Any, backend: Any) -> None:
    backend.head = CROSS
    pair = {"text_1": "query", "text_2": "document"}
    whole = await ask(client, "/score", **pair)
    uncut = await ask(client, "/score", **pair, max_tokens_per_doc=0, max_tokens_per_query=0)
    assert uncut["data"] == whole["data"]


async def test_tokens_of_all_predicted_pairs_are_bounded_together(client_of: Any, backend: Any) -> None:
    client = client_of(ApiSettings(limits=Limits(wire=WireLimits(max_request_tokens=60))))
    backend.head = CROSS
    assert await ask(client, "/predict", inputs=[["ab", "cd"]] * 8)
    assert await refusal(client, "/predict", inputs=[["ab", "cd"]] * 9) == (413, "request_too_large", "inputs")


@pytest.mark.parametrize("caps", [{}, {"max_tokens_per_doc": 6}, {"truncate_prompt_tokens": 11}])
async def test_tokens_of_pairs_are_counted_after_they_are_cut(
    client_of: Any, backend: Any, caps: dict[str, int]
) -> None:
    client = client_of(ApiSettings(limits=Limits(wire=WireLimits(max_request_tokens=22))))
    backend.head, backend.max_model_len = CROSS, 99 if caps else 11
    found = await ask(client, "/score", text_1="ab", text_2=["c" * 50] * 2, **caps)
    assert found["usage"]["prompt_tokens"] == 22
    assert (await client.post("/score", {"text_1": "ab", "text_2": ["c" * 50] * 3, **caps})).status_code == 413


async def test_a_language_model_scores_pairs_by_its_prompt(client_of: Any, backend: Any, label_logprob: Any) -> None:
    spec = TemplateSpec(prefix="{{ query }}|", suffix="?", labels=("y", "n"))
    client = client_of(ApiSettings(templates={"ask": spec}, rerank=RerankArgs(template="ask")))
    given = {"text_1": ["q", "r"], "text_2": ["one", "two"]}
    found = await ask(client, "/v1/score", **given)
    for text, query, one in zip(given["text_2"], given["text_1"], found["data"], strict=True):
        row = f"{query}|{text}?".encode()
        odds = label_logprob(row, ord("y")) - label_logprob(row, ord("n"))
        assert one["score"] == pytest.approx(sigmoid(odds), abs=1e-5)


@pytest.mark.parametrize(
    ("head", "path", "body", "wanted"),
    [
        (REWARD, "/pooling", {"input": "a", "task": "embed"}, (422, "invalid_value", "task")),
        (REWARD, "/pooling", {"input": "a", "dimensions": 2}, (422, "invalid_value", "dimensions")),
        (REWARD, "/pooling", {"input": "a", "steps": True}, (422, "invalid_value", "steps")),
        (STEPS, "/pooling", {"input": "a", "steps": True}, (422, "invalid_value", "step_tag_id")),
        (REWARD, "/pooling", {"input": "a", "step_tag_id": 0}, (422, "invalid_value", "step_tag_id")),
        (STEPS, "/pooling", {"input": ["a#", "b"], "step_tag_id": TAG}, (422, "invalid_value", "input[1]")),
        (STEPS, "/pooling", {"input": "a", "encoding_format": "base64"}, (422, "invalid_value", "encoding_format")),
        (THREE, "/pooling", {"input": "#", "step_tag_id": TAG, "steps": True}, (422, "invalid_value", "steps")),
        (VECTORS, "/pooling", {"input": "a", "aggregate": "min"}, (422, "invalid_value", "aggregate")),
        (VECTORS, "/v1/embeddings", {"input": "a", "dimensions": 3}, (422, "invalid_value", "dimensions")),
        (VECTORS, "/v1/embeddings", {"input": "a", "prompt_name": "x"}, (422, "invalid_value", "prompt_name")),
        (VECTORS, "/v1/embeddings", {"input": [1], "prompt_name": "query"}, (422, "invalid_value", "prompt_name")),
        (VECTORS, "/pooling", {"messages": [SAID], "prompt_name": "query"}, (422, "invalid_value", "prompt_name")),
        (VECTORS, "/embed", {"inputs": [[1]], "prompt_name": "query"}, (422, "invalid_value", "prompt_name")),
        (VECTORS, "/v1/embeddings", BOTH, (422, "invalid_value", "normalize")),
        (REWARD, "/v1/embeddings", {"input": "a"}, (404, "not_found", None)),
        (VECTORS, "/classify", {"input": "a"}, (404, "not_found", None)),
        (STEPS, "/predict", {"inputs": "a"}, (404, "not_found", None)),
        (REWARD, "/predict", {"inputs": ["a", "b"]}, (422, "invalid_value", "inputs")),
        (REWARD, "/predict", {"inputs": ["a", "b", "c"]}, (422, "invalid_value", "inputs")),
        (STEPS, "/score", {"text_1": "a", "text_2": "b"}, (404, "not_found", None)),
        (CROSS._replace(width=2), "/rerank", {"query": "a", "texts": ["b"]}, (404, "not_found", None)),
        (CROSS, "/rerank", {"query": "a", "texts": ["b"], "instruction": "c"}, (422, "invalid_value", "instruction")),
        (CROSS, "/score", {"text_1": "a"}, (422, "invalid_value", "text_2")),
        (CROSS, "/score", {"text_2": "a"}, (422, "invalid_value", "text_1")),
        (CROSS, "/score", {"text_1": ["a", "b"], "text_2": ["c"]}, (422, "invalid_value", "text_1")),
        (CROSS, "/score", {"text_1": "a", "documents": ["c"]}, (422, "invalid_value", "documents")),
        (CROSS, "/score", {"text_1": "a", "text_2": "b", "items": ["c"]}, (422, "invalid_value", "items")),
        (None, "/pooling", {"input": "a"}, (404, "not_found", None)),
        (None, "/score", ITEMS | {"activation": False}, (422, "invalid_value", "activation")),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused_by_name(
    client: Any, backend: Any, head: HeadInfo | None, path: str, body: dict[str, Any], wanted: tuple[int, str, Any]
) -> None:
    backend.head = head
    assert await refusal(client, path, **body) == wanted
    assert not backend.pooling_tasks


async def test_an_encoder_takes_no_template(client_of: Any, backend: Any) -> None:
    spec = TemplateSpec(prefix="{{ query }}|", suffix="?")
    client = client_of(ApiSettings(templates={"ask": spec}, rerank=RerankArgs(template="ask")))
    backend.head = CROSS
    found = await client.post("/rerank", {"query": "a", "texts": ["b"]})
    assert (found.status_code, "Remove `rerank.template`" in found.text) == (404, True)
