"""The three rerank paths over a scripted backend: every dialect's request and answer, limits and refusals."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.schemas.rerank import RerankErrorBody, RerankResponse
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings
from deployments.limits import Limits, WireLimits
from scoring.errors import ScoringLimits
from scoring.prompts.templates import TemplateSpec

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
ASK = TemplateSpec(
    prefix="{{ instruction }}|{{ query }}|",
    suffix="?",
    labels=("y", "n"),
    defaults={"instruction": "match"},
)
BARE = TemplateSpec(prefix="{{ query }}|", suffix="?", labels=("y", "n"))
DOCS = ["alpha", "be", "", "gamma ray"]
BODY = {"query": "q", "documents": DOCS}


def settings_with(**fields: Any) -> ApiSettings:
    return replace(ApiSettings(templates={"ask": ASK, "bare": BARE}, rerank=RerankArgs(template="ask")), **fields)


@pytest.fixture
def settings() -> ApiSettings:
    return settings_with(
        limits=Limits(scoring=ScoringLimits(max_items=5, max_instruction_chars=20), wire=WireLimits(max_name_chars=30))
    )


def odds(label_logprob: Any, text: str) -> float:
    row = bytes(x % 251 for x in text.encode())
    return float(label_logprob(row, ord("y"))) - float(label_logprob(row, ord("n")))


def expected(label_logprob: Any, texts: list[str], query: str = "q", instruction: str = "match") -> dict[int, float]:
    """Log-odds by index, best first, ties by lower index."""
    found = {i: odds(label_logprob, f"{instruction}|{query}|{text}?") for i, text in enumerate(texts)}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


async def ranks(client: Any, path: str = "/v2/rerank", **body: Any) -> Any:
    response = await client.post(path, {**BODY, **body})
    assert response.status_code == 200, response.text
    found = response.json()
    if isinstance(found, dict):
        RerankResponse.model_validate_json(response.content, strict=True)
    return found


async def refusal(client: Any, path: str = "/v1/rerank", **body: Any) -> tuple[int, str, str | None]:
    found = await client.post(path, {**BODY, **body})
    parsed = RerankErrorBody.model_validate_json(found.content, strict=True)
    assert parsed.detail == parsed.message == parsed.error.message
    return found.status_code, parsed.error.code, parsed.error.param


@pytest.mark.parametrize("path", PATHS)
async def test_documents_are_ranked_by_the_share_of_yes(
    client: Any, backend: Any, label_logprob: Any, path: str
) -> None:
    found = await ranks(client, path)
    wanted = expected(label_logprob, DOCS)
    assert [result["index"] for result in found["results"]] == list(wanted)
    for result, value in zip(found["results"], wanted.values(), strict=True):
        assert set(result) - {"document"} == {"index", "relevance_score"}
        assert result["relevance_score"] == pytest.approx(sigmoid(value), abs=1e-6)
    [task] = backend.score_tasks
    assert task.labels.tolist() == [ord("y"), ord("n")] and not task.full
    tokens = sum(len(f"match|q|{text}?") for text in DOCS)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert found["meta"] == {
        "api_version": {"version": "2" if path == "/v2/rerank" else "1"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
        "cached_tokens": len("match|q|") * (len(DOCS) - 1),
    }
    assert (found["object"], found["model"]) == ("rerank", "toy") and found["id"].startswith("rerank-")


# Golden requests: the bodies that each client sends, as its own code builds them.
COHERE_2 = {"model": "toy", "query": "q", "documents": DOCS, "top_n": 2, "max_tokens_per_doc": 4096, "priority": 5}
COHERE_1 = {
    "model": "toy", "query": "q", "documents": [{"text": text} for text in DOCS], "top_n": 3,
    "return_documents": True, "max_chunks_per_doc": 10,
}  # fmt: skip
JINA = {"model": "toy", "query": "q", "documents": DOCS, "top_n": 4, "return_documents": True}
VLLM = {
    "model": "toy", "query": "q", "documents": DOCS, "top_n": 0, "truncate_prompt_tokens": -1, "instruction": "find",
    "additional_data": None, "activation": None, "use_activation": None, "mm_processor_kwargs": None,
}  # fmt: skip
SGLANG = {"query": "q", "documents": DOCS, "top_n": None, "return_documents": True, "instruct": "find"}
TEI = {
    "query": "q", "texts": DOCS, "raw_scores": False, "return_text": False, "truncate": True,
    "truncation_direction": "Right",
}  # fmt: skip


PARTS = [{"type": "text", "text": text} for text in DOCS]


@pytest.mark.parametrize(
    "documents",
    [
        [{"text": text} for text in DOCS],
        PARTS,
        [{"content": [part]} for part in PARTS],
        [{"content": [{"type": "text", "text": half} for half in (text[:2], text[2:])]} for text in DOCS],
        {"content": PARTS},
    ],
)
@pytest.mark.parametrize("query", ["q", {"type": "text", "text": "q"}, {"content": [{"type": "text", "text": "q"}]}])
async def test_content_parts_are_their_text(client: Any, documents: Any, query: Any) -> None:
    plain = await ranks(client, return_documents=True, query="q", documents=DOCS)
    found = await ranks(client, return_documents=True, query=query, documents=documents)
    assert found["results"] == plain["results"]


async def test_vllms_use_activation_is_the_opposite_of_raw_scores(client: Any, backend: Any) -> None:
    raw = await client.post("/rerank", {"query": "q", "texts": DOCS, "raw_scores": True})
    for name in ("use_activation", "activation"):
        body: dict[str, Any] = {"query": "q", "documents": DOCS}
        found = await ranks(client, **body | {name: False})
        assert [result["relevance_score"] for result in found["results"]] == [one["score"] for one in raw.json()]
        assert (await ranks(client, **body | {name: True}))["results"] != found["results"]
    body = {"query": "q", "documents": DOCS, "raw_scores": True, "use_activation": True}
    asked = len(backend.score_tasks)
    assert (await client.post("/rerank", body)).status_code == 422
    assert len(backend.score_tasks) == asked


async def test_cohere_v2(client: Any, backend: Any, label_logprob: Any) -> None:
    found = await ranks(client, "/v2/rerank", **COHERE_2)
    assert [result["index"] for result in found["results"]] == list(expected(label_logprob, DOCS))[:2]
    assert backend.score_tasks[0].priority == 5 and "warnings" not in found["meta"]


async def test_cohere_v1(client: Any, label_logprob: Any) -> None:
    found = await ranks(client, "/v1/rerank", **COHERE_1)
    order = list(expected(label_logprob, DOCS))[:3]
    assert [(result["index"], result["document"]) for result in found["results"]] == [
        (index, {"text": DOCS[index]}) for index in order
    ]
    assert found["meta"]["warnings"] and "max_chunks_per_doc" in found["meta"]["warnings"][0]
    quiet = await ranks(client, "/v1/rerank", **COHERE_1 | {"max_chunks_per_doc": 1})
    assert "warnings" not in quiet["meta"]


async def test_jina(client: Any) -> None:
    found = await ranks(client, "/v1/rerank", **JINA)
    assert [result["document"]["text"] for result in found["results"]] == [
        DOCS[result["index"]] for result in found["results"]
    ]
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("body", [VLLM, SGLANG])
async def test_vllm_and_sglang(client: Any, label_logprob: Any, body: dict[str, Any]) -> None:
    found = await ranks(client, "/v1/rerank", **body)
    assert [result["index"] for result in found["results"]] == list(expected(label_logprob, DOCS, instruction="find"))


async def test_text_embeddings_inference(client: Any, label_logprob: Any) -> None:
    found = (await client.post("/rerank", TEI)).json()
    wanted = expected(label_logprob, DOCS)
    assert [entry["index"] for entry in found] == list(wanted)
    assert (await client.post("/rerank", TEI | {"top_n": 1})).json() == found[:1]  # not of this dialect, but asked for
    assert all(set(entry) == {"index", "score"} for entry in found)
    assert [entry["score"] for entry in found] == pytest.approx(list(map(sigmoid, wanted.values())), abs=1e-6)
    raw = (await client.post("/rerank", TEI | {"raw_scores": True, "return_text": True})).json()
    assert [entry["score"] for entry in raw] == pytest.approx(list(wanted.values()), abs=1e-5)
    assert [entry["text"] for entry in raw] == [DOCS[index] for index in wanted]


async def test_raw_scores_are_log_odds_in_the_same_order(client: Any, label_logprob: Any) -> None:
    found = await ranks(client, raw_scores=True)
    wanted = expected(label_logprob, DOCS)
    assert [result["index"] for result in found["results"]] == list(wanted)
    assert [result["relevance_score"] for result in found["results"]] == pytest.approx(list(wanted.values()), abs=1e-5)


async def test_equal_documents_keep_the_requests_order(client: Any) -> None:
    found = await ranks(client, documents=["x", "y", "x", "y"])
    order = [result["index"] for result in found["results"]]
    assert order in ([0, 2, 1, 3], [1, 3, 0, 2])


@pytest.mark.parametrize(("top_n", "count"), [(None, 4), (0, 4), (1, 1), (4, 4), (99, 4)])
async def test_top_n(client: Any, top_n: int | None, count: int) -> None:
    assert len((await ranks(client, top_n=top_n))["results"]) == count


async def test_objects_are_ranked_by_text_or_by_their_rank_fields(client: Any, label_logprob: Any) -> None:
    documents = [{"title": "A", "text": "alpha", "n": 1}, {"text": "be", "title": "B", "n": 2.5}]
    by_text = await ranks(client, documents=documents, return_documents=True)
    assert [result["index"] for result in by_text["results"]] == list(expected(label_logprob, ["alpha", "be"]))
    assert {result["document"]["text"] for result in by_text["results"]} == {"alpha", "be"}
    texts = ["title: A\nn: 1", "title: B\nn: 2.5"]
    by_fields = await ranks(client, documents=documents, rank_fields=["title", "n"], return_documents=True)
    assert [result["index"] for result in by_fields["results"]] == list(expected(label_logprob, texts))
    assert {result["document"]["text"] for result in by_fields["results"]} == set(texts)
    assert by_fields["usage"]["prompt_tokens"] == sum(len(f"match|q|{text}?") for text in texts)
    spelt_out = await ranks(client, documents=documents, rank_fields=["text"], return_documents=True)
    assert spelt_out["results"] == by_text["results"]


async def test_caps_cut_documents_and_queries_and_say_so(client: Any, backend: Any) -> None:
    def rows(task: Any) -> list[str]:
        head = bytes(task.prefix.tolist())
        return [
            (head + bytes(task.ids[start:end].tolist())).decode()
            for start, end in zip(task.starts[:-1], task.starts[1:], strict=True)
        ]

    found = await ranks(client, max_tokens_per_doc=3)
    assert rows(backend.score_tasks[-1]) == ["match|q|alp?", "match|q|be?", "match|q|?", "match|q|gam?"]
    assert {result["index"] for result in found["results"] if result.get("truncated")} == {0, 3}
    assert all(result.get("truncated", True) is True for result in found["results"])
    await ranks(client, max_tokens_per_doc=3, truncation_side="left")
    assert rows(backend.score_tasks[-1])[3] == "match|q|ray?"
    await ranks(client, max_tokens_per_doc=3, truncation_direction="LEFT")
    assert rows(backend.score_tasks[-1])[3] == "match|q|ray?"
    await ranks(client, query="what is it", max_tokens_per_query=4, max_tokens_per_doc=0)
    assert rows(backend.score_tasks[-1])[0] == "match|what|alpha?"
    await ranks(client, truncate_prompt_tokens=11)
    assert rows(backend.score_tasks[-1]) == ["match|q|al?", "match|q|be?", "match|q|?", "match|q|ga?"]
    await ranks(client, truncate_prompt_tokens=-1)
    assert rows(backend.score_tasks[-1])[3] == "match|q|gamma ray?"


async def test_a_cut_text_says_so_in_every_shape(client: Any, backend: Any) -> None:
    backend.max_model_len = 12
    found = (await client.post("/rerank", TEI)).json()
    assert {entry["index"] for entry in found if entry.get("truncated")} == {0, 3}


async def test_refusing_to_cut(client: Any, backend: Any, client_of: Any) -> None:
    backend.max_model_len = 12
    long = (400, "context_length_exceeded")
    assert await refusal(client, truncate=False) == (*long, "documents[0]")
    assert await refusal(client, "/rerank", documents=None, texts=DOCS, truncate=False) == (*long, "texts[0]")
    assert await refusal(client, query="q" * 30) == (*long, "query")
    assert await refusal(client, truncate_prompt_tokens=3) == (*long, "query")
    strict = client_of(settings_with(truncation="error"))
    assert await refusal(strict) == (*long, "documents[0]")
    await ranks(strict, max_tokens_per_doc=3)  # who gives a length wants it cut to
    await ranks(strict, truncate=True)


async def test_control_strings_in_queries_and_documents_are_characters(client: Any, backend: Any) -> None:
    await ranks(client, query="<eos>", documents=["<bos>", "{{ query }}"])
    [task] = backend.score_tasks
    assert max(*task.prefix.tolist(), *task.ids.tolist()) < 256


HALF = "cut \ud83d"  # as JavaScript makes it of a text that is cut inside a character
UNREAD = "must be Unicode text. Given: half of a surrogate pair."


@pytest.mark.risk("Q6")
@pytest.mark.parametrize(
    "bad", [HALF, {"text": HALF}, {"text": "a", "title": HALF}, {"text": "a", "more": [{HALF: 1}]}]
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_document_that_is_no_unicode_fails_alone(client: Any, backend: Any, path: str, bad: Any) -> None:
    clean = await ranks(client, path, return_documents=True)
    found = await client.post(path, BODY | {"documents": [*DOCS[:2], bad, *DOCS[2:]], "return_documents": True})
    parsed = RerankResponse.model_validate_json(found.content, strict=True)
    assert [(one.index - (one.index > 2), one.relevance_score) for one in parsed.results] == [
        (one["index"], one["relevance_score"]) for one in clean["results"]
    ]
    assert found.json()["errors"] == [{"index": 2, "code": "invalid_value", "message": f"`documents[2]` {UNREAD}"}]
    assert found.headers["x-assay-failed-items"] == "2" and "errors" not in clean
    assert parsed.usage.prompt_tokens == clean["usage"]["prompt_tokens"]
    first, second = backend.score_tasks
    assert (first.ids.tolist(), first.starts.tolist()) == (second.ids.tolist(), second.starts.tolist())


async def test_it_fails_alone_in_a_large_body_too(client: Any) -> None:
    found = await client.post("/rerank", {"query": "q", "texts": ["a", HALF, "b " * 50_000, "c"], "x": ["y" * 60_000]})
    assert (found.status_code, found.headers["x-assay-failed-items"]) == (200, "1")


async def test_a_text_that_is_no_unicode_is_left_out_of_a_list_and_named_by_a_header(client: Any) -> None:
    found = await client.post("/rerank", {"query": "q", "texts": [HALF, *DOCS[:3], HALF]})
    assert found.status_code == 200 and sorted(one["index"] for one in found.json()) == [1, 2, 3]
    assert found.headers["x-assay-failed-items"] == "0, 4"


async def test_a_request_of_which_no_document_can_be_read_fails(client: Any, backend: Any) -> None:
    assert await refusal(client, documents=[HALF, HALF]) == (422, "invalid_value", "documents[0]")
    assert backend.score_tasks == []


async def test_a_document_that_is_too_long_and_may_not_be_cut_fails_the_request(client: Any, backend: Any) -> None:
    backend.max_model_len = 20
    body: dict[str, Any] = {"documents": [HALF, "x" * 40, "a"], "truncate": False}
    assert await refusal(client, **body) == (400, "context_length_exceeded", "documents[1]")


async def test_any_failed_document_fails_the_request(client: Any, backend: Any) -> None:
    backend.nonfinite = frozenset({2})
    assert await refusal(client) == (500, "nonfinite_logits", "documents[2]")


BAD = [
    ({"query": None}, 422, "invalid_value", "query"),
    ({"query": ["q"]}, 422, "invalid_value", "query"),
    ({"documents": None}, 422, "invalid_value", "documents"),
    ({"texts": ["a"]}, 422, "invalid_value", "documents"),
    ({"documents": []}, 422, "invalid_value", "documents"),
    ({"documents": ["a"] * 6}, 422, "invalid_value", "documents"),
    ({"documents": "a"}, 422, "invalid_value", "documents"),
    ({"documents": ["a", 3]}, 422, "invalid_value", "documents"),
    ({"documents": ["a", None]}, 422, "invalid_value", "documents"),
    ({"documents": ["a", {"title": "b"}]}, 422, "invalid_value", "documents[1].text"),
    ({"documents": [{"text": 3, "title": True}], "rank_fields": ["title"]}, 422, "invalid_value", "documents[0]"),
    ({"documents": [{"text": ["a"]}]}, 422, "invalid_value", "documents[0].text"),
    ({"documents": [{"image": "u"}]}, 400, "unsupported_parameter", "documents"),
    ({"documents": [{"content": [{"type": "image_url"}]}]}, 400, "unsupported_parameter", "documents"),
    ({"rank_fields": []}, 422, "invalid_value", "rank_fields"),
    ({"rank_fields": ["a", "a"]}, 422, "invalid_value", "rank_fields"),
    ({"rank_fields": ["a" * 31]}, 422, "invalid_value", "rank_fields"),
    ({"rank_fields": "text"}, 422, "invalid_value", "rank_fields"),
    ({"top_n": -1}, 422, "invalid_value", "top_n"),
    ({"top_n": 1.0}, 422, "invalid_value", "top_n"),
    ({"top_n": True}, 422, "invalid_value", "top_n"),
    ({"return_documents": 1}, 422, "invalid_value", "return_documents"),
    ({"return_documents": True, "return_text": False}, 422, "invalid_value", "return_text"),
    ({"instruction": "a", "instruct": "b"}, 422, "invalid_value", "instruct"),
    ({"instruction": "a" * 21}, 422, "invalid_value", "instruction"),
    ({"instruct": 3}, 422, "invalid_value", "instruct"),
    ({"max_tokens_per_doc": -1}, 422, "invalid_value", "max_tokens_per_doc"),
    ({"max_tokens_per_query": -1}, 422, "invalid_value", "max_tokens_per_query"),
    ({"truncate_prompt_tokens": 0}, 422, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, 422, "invalid_value", "truncate_prompt_tokens"),
    ({"truncation_side": "Left"}, 422, "invalid_value", "truncation_side"),
    ({"truncation_direction": "up"}, 422, "invalid_value", "truncation_direction"),
    ({"truncation_side": "left", "truncation_direction": "Right"}, 422, "invalid_value", "truncation_direction"),
    ({"truncate": "END"}, 422, "invalid_value", "truncate"),
    ({"raw_scores": "yes"}, 422, "invalid_value", "raw_scores"),
    ({"priority": -1}, 422, "invalid_value", "priority"),
    ({"priority": 1000}, 422, "invalid_value", "priority"),
    ({"max_chunks_per_doc": "2"}, 422, "invalid_value", "max_chunks_per_doc"),
    ({"relevant_spans": True}, 400, "unsupported_parameter", "relevant_spans"),
    ({"model": "rerank-v3.5"}, 404, "model_not_found", "model"),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD)
async def test_every_bad_field_is_named(
    client: Any, backend: Any, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    for path in PATHS:
        assert await refusal(client, path, **body) == (status, code, param)
    assert not backend.score_tasks


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_texts_belong_to_one_path(client: Any, path: str) -> None:
    assert await refusal(client, path, documents=None, texts=["a"]) == (422, "invalid_value", "texts")
    body = {"documents": None, "texts": ["a"] * 6}
    assert await refusal(client, "/rerank", **body) == (422, "invalid_value", "texts")


async def test_text_of_the_request_is_never_in_an_error(client: Any) -> None:
    secret = "Zx9secret"
    for body in (
        {"documents": [{secret: secret}]},
        {"documents": [{"text": "a"}], "rank_fields": [secret]},
        {"documents": [{"image": secret}]},
        {"model": secret},
        {"truncation_side": secret},
    ):
        found = await client.post("/rerank", {**BODY, **body})
        assert found.status_code >= 400 and secret not in found.text


async def test_errors_before_the_route_also_carry_the_message_where_rerank_clients_look(client: Any) -> None:
    found = await client.post("/v1/rerank", b"{")
    assert found.json()["detail"] == found.json()["message"] == found.json()["error"]["message"]
    found = await client.http.post("/v2/rerank", content=b"x", headers={"content-type": "text/plain"})
    assert found.status_code == 415 and found.json()["detail"]
    other = await client.post("/v1/completions", b"{")
    assert "detail" not in other.json()


async def test_an_instruction_that_the_template_does_not_use_is_refused(client_of: Any) -> None:
    bare = client_of(settings_with(rerank=RerankArgs(template="bare")))
    await ranks(bare)
    assert await refusal(bare, instruct="a") == (422, "invalid_value", "instruction")


async def test_documents_are_returned_where_the_server_says_so(client_of: Any) -> None:
    generous = client_of(settings_with(rerank=RerankArgs(template="ask", return_documents=True)))
    assert all("document" in result for result in (await ranks(generous))["results"])
    assert all("text" in entry for entry in (await generous.post("/rerank", TEI | {"return_text": None})).json())
    silent = await ranks(generous, return_documents=False)
    assert not any("document" in result for result in silent["results"])


DEFAULTS: dict[str, tuple[str, dict[str, Any], dict[str, str], bool]] = {  # path, fields, headers, documents
    "Jina": ("/v1/rerank", {"documents": DOCS, "model": "toy", "top_n": 2}, {}, True),
    "vLLM": ("/rerank", {"documents": DOCS, "model": "toy"}, {}, True),
    "vLLM at v1": ("/v1/rerank", {"documents": DOCS, "truncate_prompt_tokens": -1}, {}, True),
    "SGLang": ("/v1/rerank", {"documents": DOCS, "instruct": "find"}, {}, True),
    "Cohere v1 by its SDK": ("/v1/rerank", {"documents": DOCS}, {"x-fern-sdk-name": "cohere"}, False),
    "Cohere v1 by its Node SDK": ("/v1/rerank", {"documents": DOCS}, {"x-fern-sdk-name": "cohere-ai"}, False),
    "Cohere v1 by its fields": ("/v1/rerank", {"documents": [{"text": "a"}], "rank_fields": ["text"]}, {}, False),
    "Cohere v1 by its chunks": ("/v1/rerank", {"documents": DOCS, "max_chunks_per_doc": 1}, {}, False),
    "Cohere v2": ("/v2/rerank", {"documents": DOCS, "model": "toy"}, {}, False),
    "TEI": ("/rerank", {"texts": DOCS}, {}, False),
    "Voyage": ("/v1/rerank", {"documents": DOCS, "top_k": 2}, {}, False),
    "Pinecone": ("/rerank", {"documents": [{"text": "a"}]}, {"x-pinecone-api-version": "2025-10"}, True),
    "Mixedbread": ("/v1/reranking", {"input": DOCS}, {}, False),
}


@pytest.mark.parametrize("dialect", DEFAULTS)
async def test_documents_are_returned_where_the_clients_own_service_does(client_of: Any, dialect: str) -> None:
    path, fields, headers, returned = DEFAULTS[dialect]
    client = client_of(settings_with(rerank=RerankArgs(template="ask")))
    found = await client.http.post(path, json={"query": "q"} | fields, headers=headers)
    assert found.status_code == 200, found.text
    answer = found.json()
    entries = answer if isinstance(answer, list) else answer.get("results") or answer["data"]
    shown = [one.get("document") or one.get("text") or one.get("input") for one in entries]
    assert entries and [one is not None for one in shown] == [returned] * len(entries)
    if dialect in ("Pinecone", "Mixedbread"):
        return
    name = "return_text" if "texts" in fields else "return_documents"
    other = (await client.http.post(path, json={"query": "q", name: not returned} | fields, headers=headers)).json()
    entries = other if isinstance(other, list) else other.get("results") or other["data"]
    assert [not one.keys().isdisjoint(("document", "text")) for one in entries] == [not returned] * len(entries)


async def test_conversations_need_a_reward_model(client: Any) -> None:
    chat, fields = [{"role": "user", "content": "2 + 2?"}], dict[str, Any]()
    for fields in ({"messages": [chat]}, {"messages": chat, "documents": ["4"]}):
        found = await client.post("/rerank", fields)
        assert found.status_code == 404 and "/generative_scoring" in found.json()["error"]["message"]
    for fields, param in (
        ({"messages": chat}, "messages"),
        ({"messages": [chat], "documents": ["a"]}, "messages"),
        ({"messages": [chat], "query": "q"}, "query"),
        ({"messages": [chat], "texts": ["a"]}, "texts"),
        ({"messages": [chat], "instruction": "i"}, "instruction"),
        ({"messages": [chat], "return_documents": True}, "return_documents"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"documents": ["a"]}, "query"),
        ({"documents": ["a"], "query": "q", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"documents": ["a"], "query": "q", "add_generation_prompt": True}, "add_generation_prompt"),
    ):
        refused = await client.post("/rerank", fields)
        assert (refused.status_code, str(refused.json()["error"]["param"]).partition("[")[0]) == (422, param), fields


@pytest.mark.parametrize(("wire", "enough"), [({"max_rows": 3}, 4), ({"max_answer_cells": 7}, 8)])
async def test_sizes_are_refused_from_lengths(backend: Any, client_of: Any, wire: dict[str, int], enough: int) -> None:
    exact = client_of(settings_with(limits=Limits(wire=WireLimits(**dict.fromkeys(wire, enough)))))
    await ranks(exact)
    small = client_of(settings_with(limits=Limits(wire=WireLimits(**wire))))
    assert await refusal(small) == (413, "request_too_large", "documents")
    assert len(backend.score_tasks) == 1


async def test_the_rows_of_a_request_are_bounded_together(backend: Any, client_of: Any) -> None:
    tokens = sum(len(f"{text}?") for text in DOCS) + len("match|q|")
    exact = client_of(settings_with(limits=Limits(wire=WireLimits(max_request_tokens=tokens))))
    await ranks(exact)
    small = client_of(settings_with(limits=Limits(wire=WireLimits(max_request_tokens=tokens - 1))))
    assert await refusal(small) == (413, "request_too_large", "documents")


async def test_a_server_without_a_template_ranks_nothing(client_of: Any) -> None:
    none = client_of(ApiSettings())
    found = await none.post("/v1/rerank", BODY)
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
    assert "rerank: {template:" in found.json()["detail"]


async def test_unknown_fields_are_named_and_refused_if_strict(client: Any) -> None:
    found = await client.post("/rerank", VLLM | {"odd": 1})
    assert found.headers["x-assay-ignored-fields"] == "odd"
    strict = await client.post("/rerank", VLLM | {"odd": 1}, x_assay_strict="1")
    assert strict.status_code == 422 and json.loads(strict.content)["error"]["param"] == "odd"
