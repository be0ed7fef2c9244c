"""Lists the requests that `tools/compare_answers.py` sends, in a fixed order, with fixed seeds.

A request belongs to one of the services of `SERVICES`. Requests of one service share its prefix cache, so the order
matters: append new requests to the end of a table, and record both checkouts again.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Body = Mapping[str, Any]

SCORING = "/generative_scoring"
SCORE = "/v1/score"
DECISIONS = "/v1/decisions"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
POST_PATHS = (SCORING, SCORE, *RERANK_PATHS, DECISIONS, COMPLETIONS, CHAT, "/tokenize", "/detokenize")
GET_PATHS = (
    "/healthz",
    "/readyz",
    "/health",
    "/version",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/models/builtin",
    "/tokenizer_info",
)

KEYS = {
    "all": "key-all",
    "score": "key-score",
    "generate": "key-generate",
    "metrics": "key-metrics",
    "late": "key-late",
    "small": "key-small",
}
"""API keys of the service `guarded`, by name. They are no secrets: the service lives as long as the recording."""


def _key(name: str, scopes: list[str], **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), "scopes": scopes, **more}


SERVICES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "guarded": {
        "auth": {
            "mode": "keys",
            "keys": [
                _key("all", ["inference", "metrics"]),
                _key("score", ["score"], min_priority=0),
                _key("generate", ["generate"]),
                _key("metrics", ["metrics"]),
                _key("late", ["inference"], expires="2020-01-31T00:00:00Z"),
                _key("small", ["inference"], max_body_bytes=2000),
            ],
        },
        "templates": {
            "chairs": {
                "prefix": "{% if system %}{{ system }}\n{% endif %}Query: {{ query }}\nDocument: ",
                "item": "{{ item }}",
                "suffix": "{% if instruction %}\n{{ instruction }}{% endif %}\nRelevant:",
                "labels": [" yes", " no"],
                "defaults": {"system": "", "instruction": ""},
            }
        },
        "rerank": {"template": "chairs", "return_documents": True},
        "decisions": {"layout": "plain", "min_label_mass": 0.001},
        "truncation": {"policy": "error"},
        "sampler": {"logprobs_mode": "processed_logprobs"},
        "sampling": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
        "wire": {"strict": True},
        "chat": {"expose_template": False, "template_flags": ["brief"]},
        "limits": {"max_n": 4, "max_items": 6, "max_labels": 5, "max_logprobs": 8, "max_stop": 2, "max_questions": 3},
    },
    "hasty": {"deadlines": {"scoring_s": 1e-6, "generation_s": 1e-6}},
    "speculating": {"speculation": {"method": "draft_model", "draft": "builtin", "num_speculative_tokens": 4}},
}
"""Sections of the application's configuration that each service adds to the built-in CPU configuration."""


class Request(NamedTuple):
    """Holds one HTTP request."""

    service: str
    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: str | None


class RequestList:
    """Collects requests under unique names."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._counts: dict[tuple[str, str], int] = {}
        self.service = "plain"
        self.headers: dict[str, str] = {}

    def add(
        self,
        path: str,
        body: Body | str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        note: str = "",
    ) -> None:
        """Appends a request.

        Args:
            path: Path and query of the URL.
            body: A JSON object, or text that is sent without change.
            method: HTTP method.
            headers: Headers beside those that every request of the service has. An empty value removes one.
            note: Words for the report of a difference.
        """
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        base = self.headers if text is None else {"content-type": "application/json", **self.headers}
        sent = {name: value for name, value in {**base, **(headers or {})}.items() if value}
        title = f"{method} {path}{' ' + note if note else ''}"
        number = self._counts[self.service, title] = self._counts.get((self.service, title), 0) + 1
        self.requests.append(Request(self.service, f"{title} #{number}", method, path, sent, text))

    def variants(self, path: str, base: Body, variants: Iterable[Body], note: str = "") -> None:
        """Appends the base body with each of the variants' fields in turn."""
        for variant in variants:
            self.add(path, {**base, **variant}, note=note)


QUERY = "Query: a red chair from Lisbon\nDocument: "
RED = "A pine chair for reading, sturdy and red, made in Lisbon."
BLUE = "A pine chair for reading, sturdy and blue, made in Lisbon."
LAMP = "A pine lamp for reading, sturdy and red, made in Lisbon."
DOCUMENTS = [LAMP, "chair chair", "A red chair.", "", RED, "chairs, red ones", "the chair is red or blue", RED]
ITEMS = [f"{document}\nRelevant:" for document in DOCUMENTS]
YES_NO = [" yes", " no"]
LONG = " ".join([RED] * 200)
"""More tokens than the built-in model's 2,048 positions."""

SCORING_BASE: Body = {"query": QUERY, "items": ITEMS[:3], "labels": YES_NO}
SCORING_VARIANTS: tuple[Body, ...] = (
    {},
    {},
    {"items": ITEMS},
    {"apply_softmax": False},
    {"apply_softmax": True, "detail": "probabilities"},
    {"detail": "full", "layout": "rows"},
    {"layout": "columns"},
    {"layout": "packed"},
    {"layout": "packed", "detail": "probabilities"},
    {"layout": "columns", "apply_softmax": False, "items": ITEMS},
    {"item_first": True},
    {"item_first": True, "seam": "joint"},
    {"seam": "joint"},
    {"seam": "concat", "add_special_tokens": False},
    {"max_item_tokens": 4},
    {"max_item_tokens": 4, "truncation_side": "left"},
    {"max_query_tokens": 3, "seam": "joint"},
    {"max_query_tokens": 3, "truncation_side": "right"},
    {"items": [LONG, ITEMS[0]], "truncate": "item"},
    {"items": [LONG, ITEMS[0]], "truncate": "item", "truncation_side": "left", "layout": "columns"},
    {"items": [LONG, ITEMS[0]], "truncate": "error"},
    {"items": [LONG, ITEMS[0]], "truncate": "error", "layout": "packed"},
    {"items": [LONG, ITEMS[0]], "truncate": "error", "layout": "columns"},
    {"items": [LONG, ITEMS[0]], "truncate": "error", "on_item_error": "fail"},
    {"items": [LONG], "truncate": "error", "on_item_error": "report"},
    {"labels": [" yes"]},
    {"labels": [" red", " blue", " green", " brown"]},
    {"labels": None, "label_token_ids": [328, 326]},
    {"labels": None, "label_token_ids": list(range(256)), "items": ITEMS[:2]},
    {"query": [40, 41], "items": [[42], [43, 44], [42]], "labels": None, "label_token_ids": [328, 326, 5]},
    {"query": [40, 41], "items": [[42], [43, 44]], "labels": None, "label_token_ids": [1], "item_first": True},
    {"query": [40, 41], "items": [[42], []], "labels": YES_NO},
    {"query": "", "items": ["red"]},
    {"query": "", "items": [""]},
    {"priority": -5, "cache_salt": "one", "model": "builtin", "request_id": "mine"},
    {"priority": 1000, "cache_salt": "two", "model": "default"},
    {"cache_salt": "two", "model": ""},
    {"template": "builtin", "query": "red chair", "items": DOCUMENTS, "labels": None},
    {"template": "builtin", "query": "red chair", "items": [RED, "<|end|> yes"], "labels": None, "layout": "columns"},
    {"template": "plain", "query": QUERY, "items": ITEMS[:2]},
    {"template": "builtin", "query": "red chair", "items": [RED], "labels": [" red", " no"]},
    {"template": "builtin", "query": "red chair", "items": [LONG], "labels": None},
    {"continuations": [" yes", " no"], "labels": None},
    {"query": f"Document: {RED[:-8]}", "items": [""], "labels": None, "continuations": [" Lisbon.", " Oslo.", " red"]},
)
CONTINUATION_BASE: Body = {"query": "A sturdy red", "items": [" chair", " lamp"]}
CONTINUATION_VARIANTS: tuple[Body, ...] = (
    {"continuations": [[" for reading", " for baking"], [" in Lisbon"]]},
    {"continuations": [" for reading", " for baking"], "normalization": "none"},
    {"continuations": [" for reading", " for"], "normalization": "tokens", "layout": "columns"},
    {"continuations": [" for reading", " for"], "normalization": "bytes"},
    {"continuations": [" for reading", "s"], "seam": "joint"},
    {"continuations": [[40, 41], [42]]},
    {"continuations": [[[40, 41], [42]], [[43]]], "normalization": "tokens"},
    {"continuations": [" for reading"], "items": [LONG, " lamp"]},
    {"continuations": [" for reading"], "items": [LONG, " lamp"], "truncate": "error"},
    {"continuations": [" for reading"], "template": "builtin"},
    {"continuations": [" yes", "<|end|>"], "template": "builtin", "item_first": False},
    {"continuations": [], "layout": "rows"},
    {"continuations": [[]]},
    {"continuations": [""]},
    {"continuations": [" a", [1]]},
    {"continuations": [[" a"], [[1]]]},
    {"continuations": [[" a"]]},
    {"continuations": [" a"], "labels": YES_NO},
    {"continuations": [" a"], "detail": "probabilities"},
    {"continuations": [" a"], "layout": "packed"},
    {"continuations": [" a"], "apply_softmax": True},
    {"continuations": [[5]], "normalization": "bytes"},
    {"continuations": [[5000]]},
)
SCORING_ERRORS: tuple[Body, ...] = (
    {"query": None},
    {"query": 5},
    {"query": [1, "a"]},
    {"query": [5000], "items": [[1]], "labels": None, "label_token_ids": [1]},
    {"query": [1], "items": [[-1]], "labels": None, "label_token_ids": [1]},
    {"query": [1]},
    {"items": None},
    {"items": []},
    {"items": "text"},
    {"items": ["a", 1]},
    {"items": [["a"]]},
    {"items": [[1]]},
    {"labels": None},
    {"labels": []},
    {"labels": [""]},
    {"labels": [" yes", " yes"]},
    {"labels": [" unlikelyword"]},
    {"labels": "yes"},
    {"label_token_ids": [1]},
    {"labels": None, "label_token_ids": [2048]},
    {"labels": None, "label_token_ids": [3, 3]},
    {"labels": None, "label_token_ids": [True]},
    {"apply_softmax": "yes"},
    {"apply_softmax": False, "detail": "probabilities"},
    {"item_first": 1},
    {"seam": "loose"},
    {"truncate": "yes"},
    {"truncation_side": "middle"},
    {"max_item_tokens": 0},
    {"max_query_tokens": -1},
    {"max_query_tokens": 1.5},
    {"on_item_error": "ignore"},
    {"detail": "some"},
    {"layout": "table"},
    {"priority": 1001},
    {"priority": "first"},
    {"cache_salt": ""},
    {"template": "unknown"},
    {"template": "builtin", "item_first": True},
    {"template": "builtin", "seam": "concat"},
    {"template": "builtin", "add_special_tokens": True},
    {"template": "builtin", "query": [1]},
    {"template": "builtin", "query": None},
    {"template": "builtin", "instruction": "find"},
    {"instruction": "find"},
    {"system": "You judge."},
    {"normalization": "tokens"},
    {"normalization": "words"},
    {"model": "another"},
    {"model": 5},
    {"query": LONG},
    {"items": ["a"] * 4097},
    {"unknown": 1, "another one": 2},
    {
        "query": 1,
        "items": 2,
        "labels": 3,
        "layout": 4,
        "seam": 5,
        "detail": 6,
        "truncate": 7,
        "priority": "8",
        "model": 9,
    },
)

SCORE_BASE: Body = {"query": QUERY, "items": ITEMS[:3], "label_token_ids": [328, 326]}
SCORE_VARIANTS: tuple[Body, ...] = (
    {},
    {"apply_softmax": True},
    {"item_first": True},
    {"items": ITEMS},
    {"items": []},
    {"items": RED},
    {"items": [LONG]},
    {"query": [40, 41], "items": [[42], [43, 44]], "label_token_ids": [328, 326, 5]},
    {"model": "builtin", "return_pooled_hidden_states": False},
    {"extra": True},
    {"return_pooled_hidden_states": True},
    {"embed_override_token_id": 3},
    {"query_embed_overrides": []},
    {"text_1": "a"},
    {"documents": ["a"]},
    {"queries": 1},
    {"label_token_ids": None},
    {"label_token_ids": []},
    {"label_token_ids": [9, 9]},
    {"label_token_ids": [99999]},
    {"query": None},
    {"query": [1], "items": ["a"]},
    {"items": [[2]], "query": [-1]},
    {"items": None},
    {"model": "other"},
    {"apply_softmax": 0},
    {"query": LONG},
)

RERANK_BASE: Body = {"query": "red chair", "documents": DOCUMENTS[:5]}
RERANK_VARIANTS: tuple[Body, ...] = (
    {},
    {"top_n": 2, "return_documents": True},
    {"top_n": 0},
    {"raw_scores": True, "documents": DOCUMENTS},
    {"model": "builtin", "max_tokens_per_doc": 4},
    {"max_tokens_per_query": 1, "priority": 3},
    {"truncate_prompt_tokens": 14, "truncation_side": "left"},
    {"truncate_prompt_tokens": -1, "documents": [LONG, RED]},
    {"documents": [{"title": "Lamp", "text": LAMP}, {"title": "Chair", "text": RED}], "return_documents": True},
    {"documents": [{"title": "Lamp", "text": LAMP}, {"text": RED}], "rank_fields": ["title", "text"]},
    {"documents": [LONG, RED], "return_documents": False},
    {"documents": [LONG, RED], "truncate": False},
    {"max_chunks_per_doc": 3},
    {"max_chunks_per_doc": 1, "relevant_spans": False},
    {"instruction": "find chairs"},
    {"documents": None, "texts": DOCUMENTS[:4]},
    {"documents": None, "texts": DOCUMENTS[:4], "raw_scores": True, "return_text": True},
    {"documents": None, "texts": [LONG, RED], "truncate": True, "truncation_direction": "Left"},
    {"texts": ["a"]},
    {"documents": None},
    {"documents": []},
    {"documents": [5]},
    {"documents": [{"image": "x"}]},
    {"documents": [{"name": "x"}]},
    {"relevant_spans": True},
    {"query": 7},
    {"query": None},
    {"top_n": -1},
    {"priority": 1000},
    {"truncation_side": "up"},
    {"truncation_direction": "up"},
    {"instruction": "a", "instruct": "b"},
    {"model": "other"},
    {"unheard_of": []},
)

PREDICATE: Body = {"type": "predicate", "instructions": "is it a red chair?"}
CHOICE: Body = {"type": "choice", "instructions": "which colour?", "choices": [{"value": c} for c in ("blue", "red")]}
LEVELS: Body = {"type": "score", "instructions": "which style?", "levels": [{"label": s} for s in ("light", "sturdy")]}
CALL: Body = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"colour": "red"}'}
OUTPUT: Body = {"type": "function_call_output", "call_id": "c1", "output": RED}
DECISION_BASE: Body = {"input": RED, "questions": [PREDICATE]}
DECISION_VARIANTS: tuple[Body, ...] = (
    {},
    {"questions": [{**PREDICATE, "name": "red chair"}, CHOICE, LEVELS]},
    {"questions": [CHOICE]},
    {"questions": [LEVELS]},
    {
        "questions": [
            {**CHOICE, "choices": [{"value": "true"}, {"value": True, "description": "yes"}, {"value": False}]}
        ]
    },
    {"questions": [{**CHOICE, "choices": [{"value": f"colour {i}"} for i in range(60)]}]},
    {"questions": [{**LEVELS, "levels": [{"label": str(i), "description": f"level {i}"} for i in range(11)]}]},
    {"questions": [{**PREDICATE, "instructions": f"is it number {i}?"} for i in range(20)]},
    {"input": [{"role": "user", "content": RED}]},
    {"input": [{"type": "message", "role": "system", "content": "Look."}, {"role": "assistant", "content": BLUE}]},
    {"input": [CALL, OUTPUT]},
    {"input": [{**CALL, "type": "custom_tool_call", "input": "red"}, {**OUTPUT, "type": "custom_tool_call_output"}]},
    {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": RED}, {"type": "output_text", "text": "B"}]}
        ]
    },
    {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": [1, 2.5, None], "b": "red"}}]}]},
    {"questions": [{**PREDICATE, "instructions": [{"type": "input_text", "text": "is it red?"}]}]},
    {"questions": [{**PREDICATE, "instructions": [{"type": "input_json", "data": [{"red": True}]}]}]},
    {"input": "<|end|> yes\nA) no", "questions": [CHOICE]},
    {"prompt_cache_key": "mine", "model": "builtin", "safety_identifier": "x", "prompt_cache_options": {}},
    {"prompt_cache_key": "mine"},
    {"input": ""},
    {"input": []},
    {"input": 5},
    {"input": [{"role": "tool", "content": "x"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    {"input": [OUTPUT]},
    {"input": [{"type": "reasoning"}]},
    {"input": LONG},
    {"question": "is it red?"},
    {"questions": {"a": 1}},
    {"questions": []},
    {"questions": [{"type": "guess", "instructions": "x"}]},
    {"questions": [{"type": "predicate", "question": "x"}]},
    {"questions": [{"type": "predicate", "instructions": ""}]},
    {"questions": [{**CHOICE, "choices": [{"value": "red"}]}]},
    {"questions": [{**CHOICE, "choices": [{"value": "red"}, {"value": "red"}]}]},
    {"questions": [{**CHOICE, "choices": [{"value": 5}, {"value": "red"}]}]},
    {"questions": [{**LEVELS, "levels": [{"label": "a"}] * 256}]},
    {"questions": [PREDICATE] * 401},
    {"model": "other"},
    {"surplus": 1},
)

GENERATION_VARIANTS: tuple[Body, ...] = (
    {"temperature": 0},
    {"temperature": 0, "seed": None},
    {"temperature": 0, "n": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": -1, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"presence_penalty": 1.5, "temperature": 0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "temperature": 0},
    {"repetition_penalty": 10},
    {"logit_bias": {"538": 100}},
    {"logit_bias": {"538": -100, "561": 3.5, "4": 1}},
    {"allowed_token_ids": [538, 561, 513], "top_p": 0.9},
    {"allowed_token_ids": [538]},
    {"bad_words": ["red", "sturdy", "made in"], "temperature": 0},
    {"stop": "a"},
    {"stop": [" in", "ch"], "include_stop_str_in_output": True},
    {"stop": ["e"], "min_tokens": 6},
    {"stop_token_ids": list(range(500, 600))},
    {"stop_token_ids": list(range(500, 600)), "min_tokens": 4},
    {"ignore_eos": True, "skip_special_tokens": False},
    {"ignore_eos": True, "logit_bias": {"1": 50, "5": 50}},
    {"min_tokens": 10, "logit_bias": {"1": 100}},
    {"n": 3},
    {"n": 2, "best_of": 2},
    {"seed": 0},
    {"seed": -1, "temperature": 0},
    {"seed": -2},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"seed": 2**53},
    {"return_token_ids": True},
    {"return_token_ids": True, "n": 2},
    {"add_special_tokens": True},
    {"truncate_prompt_tokens": 3, "return_token_ids": True},
    {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True},
    {"truncate_prompt_tokens": -1},
    {"resume_token_ids": [538, 561]},
    {"resume_token_ids": [538, 561], "return_token_ids": True, "stop": ["for"]},
    {"resume_token_ids": [538, 561], "stop": ["e"]},
    {"priority": -1000, "cache_salt": "a", "model": "builtin", "user": "x", "metadata": {}, "store": True},
    {"request_id": "mine", "service_tier": "auto", "spaces_between_special_tokens": True},
    {"response_format": {"type": "text"}, "suffix": "", "tools": [], "tool_choice": "none", "length_penalty": 1.0},
    {"foreign": 1, "other_field": {"a": 1}},
)
"""Fields that both generation routes take."""
GENERATION_ERRORS: tuple[Body, ...] = (
    {"temperature": 2.5},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_k": -2},
    {"top_k": 1.5},
    {"top_p": 0},
    {"top_p": 1.01},
    {"min_p": 2},
    {"presence_penalty": 3},
    {"frequency_penalty": -2.01},
    {"repetition_penalty": 0},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {"1": None}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": [1]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [2048]},
    {"bad_words": [""]},
    {"bad_words": "red"},
    {"stop": ["x"] * 17},
    {"stop": [""]},
    {"stop": 5},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [1] * 129},
    {"min_tokens": 100},
    {"min_tokens": -1},
    {"ignore_eos": "no"},
    {"n": 0},
    {"n": 129},
    {"seed": 2**63},
    {"seed": 1.5},
    {"seed": "7"},
    {"max_tokens": -1},
    {"max_tokens": 2**31},
    {"max_tokens": 3000},
    {"logprob_token_ids": [2048]},
    {"logprob_token_ids": []},
    {"truncate_prompt_tokens": 0},
    {"truncation_side": "up"},
    {"stream_options": {"include_usage": True}},
    {"stream": "yes"},
    {"stream": True, "prompt_logprobs": 1},
    {"prompt_logprobs": 21},
    {"prompt_logprobs": -1},
    {"resume_token_ids": [1]},
    {"resume_token_ids": [538], "seed": None},
    {"resume_token_ids": [99999]},
    {"best_of": 5},
    {"suffix": "x"},
    {"use_beam_search": True},
    {"length_penalty": 2.0},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {}},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "auto"},
    {"kv_transfer_params": {}},
    {"priority": -1001},
    {"cache_salt": ""},
    {"model": "other"},
    {
        "temperature": 9,
        "top_p": 9,
        "n": "x",
        "seed": "y",
        "stop": 1,
        "stream": 2,
        "logit_bias": 3,
        "model": 4,
        "top_k": "z",
    },
)

COMPLETION_BASE: Body = {"prompt": "This sturdy red", "max_tokens": 12, "seed": 7}
COMPLETION_VARIANTS: tuple[Body, ...] = (
    {"logprobs": 0},
    {"logprobs": 2, "temperature": 0},
    {"logprobs": 20, "top_k": 3},
    {"logprobs": 1, "logprob_token_ids": [538, 561, 0]},
    {"logprob_token_ids": [538]},
    {"logprobs": 2, "return_tokens_as_token_ids": True},
    {"logprobs": 1, "stop": ["e"], "include_stop_str_in_output": True},
    {"logprobs": 2, "n": 2, "temperature": 1.4},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 2, "logprob_token_ids": [1, 2]},
    {"echo": True, "max_tokens": 0, "logprobs": 0},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "logprobs": 1, "truncate_prompt_tokens": 2},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 1, "max_tokens": 0},
    {"prompt_logprobs": 3, "echo": True, "logprobs": 1, "n": 2},
    {"prompt": [40, 41, 42]},
    {"prompt": [[40, 41, 42], [43]], "logprobs": 1},
    {"prompt": ["This sturdy red", "A pine", "A"], "n": 2},
    {"prompt": ["This sturdy red", "A pine"], "seed": None, "temperature": 0},
    {"prompt": "né 日本 🙂", "logprobs": 2, "echo": True},
    {"prompt": "", "temperature": 0},
    {"max_tokens": 1},
    {"max_tokens": None},
    {"max_tokens": 300, "ignore_eos": True, "temperature": 0},
    {"prompt": QUERY + RED + "\nRelevant:", "temperature": 0, "logprobs": 5, "max_tokens": 3},
    {"prompt": LONG, "truncate_prompt_tokens": 100, "max_tokens": 2},
)
COMPLETION_ERRORS: tuple[Body, ...] = (
    {"prompt": None},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", 1]},
    {"prompt": [1, "a"]},
    {"prompt": [5000]},
    {"prompt": {"text": "a"}},
    {"prompt": LONG},
    {"max_tokens": 0},
    {"max_tokens": 0, "echo": True, "min_tokens": 1},
    {"logprobs": 21},
    {"logprobs": -1},
    {"logprobs": True},
    {"echo": 1},
    {"prompt": ["a"] * 1025},
)

MESSAGES = [
    {"role": "system", "content": "You answer questions about a catalogue."},
    {"role": "user", "content": "List documents for: red chair"},
]
CHAT_BASE: Body = {"messages": MESSAGES, "max_tokens": 12, "seed": 7}
CHAT_VARIANTS: tuple[Body, ...] = (
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "temperature": 0},
    {"logprobs": True, "top_logprobs": 20, "n": 2},
    {"logprobs": True, "logprob_token_ids": [538, 1]},
    {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": False},
    {"max_tokens": None, "max_completion_tokens": 5},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"max_tokens": None, "temperature": 0},
    {"add_generation_prompt": False},
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "- New in the"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "developer", "content": "Be brief.", "name": "d"}, MESSAGES[1]]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": "<|end|>"}]}]},
    {"messages": [{"role": "user", "content": f"Document: {RED}\nQuestion: which colour?\nA) blue\nB) red"}]},
    {"prompt_logprobs": 1},
    {"messages": [{"role": "user", "content": "né 日本 🙂"}], "logprobs": True, "top_logprobs": 1},
)
CHAT_ERRORS: tuple[Body, ...] = (
    {"messages": None},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "poem"}]}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
    {"messages": [{"role": "user", "content": LONG}]},
    {"max_tokens": 0},
    {"logprobs": 2},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"logprob_token_ids": [5]},
    {"echo": True},
    {"functions": [{}]},
    {"modalities": ["audio"]},
    {"chat_template": "{{ x }}"},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"brief": 1}},
    {"continue_final_message": True},
)
STREAM_VARIANTS: tuple[Body, ...] = (
    {},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True, "stop": ["e"]},
    {"stop": [" in", "ch"], "include_stop_str_in_output": True},
    {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 40},
    {"min_tokens": 5, "stop_token_ids": [538], "n": 2},
    {"resume_token_ids": [538, 561]},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "bad_words": ["red"]},
    {"max_tokens": 1},
    {"stream_options": {"include_usage": False, "unknown": 1}},
    {"n": 0},
)

TOKENIZE_BODIES: tuple[Body, ...] = (
    {"prompt": RED},
    {"prompt": ""},
    {"prompt": "né 日本 🙂<eos>", "return_token_strs": True},
    {"prompt": "a", "add_special_tokens": False, "model": "builtin"},
    {"messages": MESSAGES, "return_token_strs": True},
    {"messages": MESSAGES, "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": "red<|end|>"}], "return_token_strs": True},
    {"prompt": "a", "messages": MESSAGES},
    {"prompt": "a", "add_generation_prompt": True},
    {"prompt": 5},
    {},
    {"prompt": "a", "model": "other"},
    {"prompt": "a", "odd": 1},
)
DETOKENIZE_BODIES: tuple[Body, ...] = (
    {"tokens": [40, 41, 42, 1, 538]},
    {"tokens": []},
    {"tokens": list(range(300))},
    {"tokens": [2048]},
    {"tokens": [-1]},
    {"tokens": [True]},
    {"tokens": None},
    {"tokens": "x"},
    {"tokens": [2**70]},
    {},
    {"tokens": [1], "model": "other"},
)
BASES: dict[str, Body] = {
    SCORING: SCORING_BASE,
    SCORE: SCORE_BASE,
    DECISIONS: DECISION_BASE,
    COMPLETIONS: COMPLETION_BASE,
    CHAT: CHAT_BASE,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [40]},
} | dict.fromkeys(RERANK_PATHS, RERANK_BASE)
RAW_BODIES = (
    "",
    "{",
    "[]",
    "null",
    '"text"',
    '{"query": NaN}',
    '{"prompt": "\\ud800"}',
    '{"a": ' * 70 + "1" + "}" * 70,
    '{"model": "builtin", "model": 5}',
)
"""Bodies that are no request of any route."""


def build_requests() -> list[Request]:
    """Returns every request in the order in which it is sent."""
    found = RequestList()
    _add_reads(found)
    _add_scores(found)
    _add_generation(found)
    _add_random(found)
    _add_protocol(found)
    _add_guarded(found)
    _add_hasty(found)
    _add_speculating(found)
    return found.requests


def _add_reads(found: RequestList) -> None:
    for path in GET_PATHS:
        if path != "/metrics":  # recorded last, when every series has been used
            found.add(path, method="GET")
    for path in (
        "/v1/models/other",
        "/v1/models/default",
        "/v1/models/",
        "/",
        "/docs",
        "/v1",
        "/healthz/",
        "/nothing?a=1",
    ):
        found.add(path, method="GET")
    found.variants("/tokenize", {}, TOKENIZE_BODIES)
    found.variants("/detokenize", {}, DETOKENIZE_BODIES)


def _add_scores(found: RequestList) -> None:
    found.variants(SCORING, SCORING_BASE, SCORING_VARIANTS)
    found.variants(SCORING, CONTINUATION_BASE, CONTINUATION_VARIANTS, "continuations")
    found.variants(SCORING, SCORING_BASE, SCORING_ERRORS, "refused")
    found.variants(SCORE, SCORE_BASE, SCORE_VARIANTS)
    for path in RERANK_PATHS:
        found.variants(path, RERANK_BASE, RERANK_VARIANTS if path == "/rerank" else RERANK_VARIANTS[:20])
    found.variants(DECISIONS, DECISION_BASE, DECISION_VARIANTS)


def _add_generation(found: RequestList) -> None:
    found.variants(COMPLETIONS, COMPLETION_BASE, (*GENERATION_VARIANTS, *COMPLETION_VARIANTS))
    found.variants(COMPLETIONS, COMPLETION_BASE, (*GENERATION_ERRORS, *COMPLETION_ERRORS), "refused")
    found.variants(CHAT, CHAT_BASE, (*GENERATION_VARIANTS, *CHAT_VARIANTS))
    found.variants(CHAT, CHAT_BASE, (*GENERATION_ERRORS, *CHAT_ERRORS), "refused")
    streamed = {"stream": True}
    plain_logprobs: tuple[Body, ...] = ({"logprobs": 2}, {"logprobs": 1, "echo": True}, {"echo": True, "max_tokens": 0})
    chat_logprobs: tuple[Body, ...] = ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "n": 2})
    found.variants(COMPLETIONS, {**COMPLETION_BASE, **streamed}, (*STREAM_VARIANTS, *plain_logprobs), "stream")
    found.variants(CHAT, {**CHAT_BASE, **streamed}, (*STREAM_VARIANTS, *chat_logprobs), "stream")


def _add_random(found: RequestList) -> None:
    """Appends drawn combinations of fields, always the same ones."""
    rng = random.Random(635)
    for _ in range(60):
        found.add(COMPLETIONS, _random_completion(rng), note="random")
    for _ in range(30):
        query = [rng.randrange(8, 2048) for _ in range(rng.randint(0, 80))]
        items = [[rng.randrange(8, 2048) for _ in range(rng.randint(1, 40))] for _ in range(rng.randint(1, 24))]
        labels = rng.sample(range(2048), rng.randint(1, 12))
        softmax = rng.random() < 0.5
        common: Body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": softmax}
        found.add(SCORING, {**common, "layout": rng.choice(("rows", "columns", "packed"))}, note="random")
        found.add(SCORE, common, note="random")


def _random_completion(rng: random.Random) -> Body:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(8, 2048) for _ in range(rng.randint(1, 60))],
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(-(2**63), 2**63),
        "temperature": rng.choice((0, 0.3, 0.7, 1.0, 1.6)),
        "ignore_eos": rng.random() < 0.5,
        "return_token_ids": True,
    }
    options: dict[str, Any] = {
        "top_k": rng.choice((1, 3, 20, 200)),
        "top_p": rng.uniform(0.1, 1.0),
        "min_p": rng.uniform(0.0, 0.2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {str(rng.randrange(2048)): rng.uniform(-20, 20) for _ in range(5)},
        "logprobs": rng.randint(0, 5),
        "logprob_token_ids": rng.sample(range(2048), 4),
        "n": rng.randint(1, 4),
        "stream": True,
    }
    return body | {name: options[name] for name in sorted(rng.sample(sorted(options), rng.randint(0, 6)))}


def _add_protocol(found: RequestList) -> None:
    """Appends requests whose method, headers or body break a rule of the protocol, on every route."""
    for path in POST_PATHS:
        for raw in RAW_BODIES:
            found.add(path, raw, note="raw")
        found.add(path, method="GET")
        found.add(path, BASES[path], method="PUT")
        found.add(path, BASES[path], headers={"content-type": "text/plain"}, note="media type")
        found.add(path, BASES[path], headers={"content-type": ""}, note="no media type")
        found.add(path, BASES[path], headers={"content-encoding": "gzip"}, note="encoded")
        found.add(path, BASES[path], headers={"content-type": "Application/JSON; charset=utf-8"}, note="charset")
        found.add(path, {**BASES[path], "odd": 1}, headers={"x-assay-strict": "1"}, note="strict")
        found.add(path, BASES[path], headers={"x-request-timeout-seconds": "soon"}, note="no deadline")
        found.add(path, BASES[path], headers={"x-request-id": "mine", "authorization": "Bearer any"}, note="request id")
        found.add(path, '{"a": "\udcff"}', note="not UTF-8")
    for value in ("0", "-1", "nan", "inf", "1e3", "", "30"):
        found.add(COMPLETIONS, COMPLETION_BASE, headers={"x-request-timeout-seconds": value}, note="timeout")
    found.add("/healthz", method="DELETE")
    found.add("/v1/models", method="HEAD")
    found.add("/healthz", method="OPTIONS", headers={"origin": "http://a", "access-control-request-method": "GET"})
    found.add("/healthz", method="GET", headers={f"x-h{i}": "1" for i in range(140)}, note="many headers")
    found.add("/healthz", method="GET", headers={"x-long": "a" * 33_000}, note="long header")
    found.add("/metrics", method="GET")


def _add_guarded(found: RequestList) -> None:
    """Appends requests to the service with keys, strict fields, templates and processed log-probabilities."""
    found.service = "guarded"
    for path in GET_PATHS:
        if path != "/metrics":
            found.add(path, method="GET", note="no key")
    for path in ("/nothing", "/metrics"):
        found.add(path, method="GET", note="no key")
    for path, body in (
        (SCORING, SCORING_BASE),
        (COMPLETIONS, COMPLETION_BASE),
        (CHAT, CHAT_BASE),
        ("/rerank", RERANK_BASE),
    ):
        for given in ("", "Basic abc", "Bearer", "Bearer wrong", f"Bearer {KEYS['late']}"):
            found.add(path, body, headers={"authorization": given}, note="wrong key")
        for name in ("score", "generate", "metrics"):
            found.add(path, body, headers={"authorization": f"Bearer {KEYS[name]}"}, note=f"key {name}")
        found.add(path, {**body, "priority": -3}, headers={"authorization": f"Bearer {KEYS['score']}"}, note="priority")
        big = {**body, "query": LONG} if "query" in body else {**body, "prompt": LONG}
        found.add(path, big, headers={"authorization": f"Bearer {KEYS['small']}"}, note="large body")
    found.headers = {"authorization": f"Bearer {KEYS['all']}"}
    for path in GET_PATHS:
        if path != "/metrics":
            found.add(path, method="GET", note="key")
    templated: Body = {"template": "chairs", "query": "red chair", "items": DOCUMENTS[:4]}
    found.variants(
        SCORING,
        templated,
        (
            {},
            {"instruction": "Look at the colour."},
            {"system": "You judge.", "instruction": "Be strict.", "layout": "columns"},
            {"items": [LONG, RED]},
            {"items": [LONG, RED], "truncate": "item"},
            {"odd": 1},
            {"query": None},
        ),
        "template",
    )
    found.variants(SCORE, SCORE_BASE, ({}, {"items": [LONG]}, {"odd": 1}))
    found.variants("/rerank", RERANK_BASE, ({}, {"instruction": "chairs only"}, {"documents": [LONG]}, {"odd": 1}))
    questions: Body = {"questions": [PREDICATE, CHOICE, LEVELS]}
    found.variants(DECISIONS, DECISION_BASE, ({}, questions, {"input": [CALL, OUTPUT]}, {"odd": 1}))
    processed: tuple[Body, ...] = (
        {"logprobs": 3},
        {"logprobs": 3, "temperature": 0},
        {"logprobs": 5, "top_k": 2, "n": 2},
        {"logprobs": 2, "top_k": 0, "top_p": 1, "temperature": 1.5, "logit_bias": {"538": 5}},
        {"logprobs": 2, "echo": True, "stream": True},
        {"logprobs": 1, "logprob_token_ids": [538, 561], "frequency_penalty": 1},
        {"prompt_logprobs": 2},
        {"odd": 1},
    )
    found.variants(COMPLETIONS, COMPLETION_BASE, processed)
    chat: tuple[Body, ...] = (
        {"logprobs": True, "top_logprobs": 3},
        {"chat_template_kwargs": {"brief": True}},
        {"chat_template_kwargs": {"other": True}},
        {"stream": True},
    )
    found.variants(CHAT, CHAT_BASE, chat)
    found.variants(
        COMPLETIONS, COMPLETION_BASE, ({"n": 4}, {"n": 5}, {"logprobs": 9}, {"stop": ["a", "b", "c"]}), "limit"
    )
    found.variants(SCORING, SCORING_BASE, ({"items": ITEMS}, {"labels": [f" {c}" for c in "abcdef"]}), "limit")
    found.add(DECISIONS, {**DECISION_BASE, "questions": [PREDICATE] * 4}, note="limit")
    found.add("/metrics", method="GET", headers={"authorization": f"Bearer {KEYS['metrics']}"})


def _add_hasty(found: RequestList) -> None:
    """Appends requests to the service whose deadlines pass before any work is done."""
    found.service, found.headers = "hasty", {}
    for path in POST_PATHS:
        found.add(path, BASES[path])
    for path in (COMPLETIONS, CHAT):
        found.add(path, {**BASES[path], "stream": True}, note="stream")


def _add_speculating(found: RequestList) -> None:
    """Appends requests to the service with a draft model."""
    found.service, found.headers = "speculating", {}
    rng = random.Random(636)
    for _ in range(30):
        found.add(COMPLETIONS, _random_completion(rng), note="random")
    found.variants(COMPLETIONS, {**COMPLETION_BASE, "max_tokens": 40}, STREAM_VARIANTS)
    found.variants(CHAT, CHAT_BASE, STREAM_VARIANTS)
    found.variants(CHAT, {**CHAT_BASE, "stream": True}, STREAM_VARIANTS, "stream")
    found.add(SCORING, SCORING_BASE)
