"""Every limit of every route: what is at it is answered; one more is refused by name, and no replica hears of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from deployments.api.app import build_api
from deployments.config.app_args import AppArgs
from deployments.config.sections import RerankArgs
from deployments.config.settings import ApiSettings, ChatSettings
from deployments.limits import Limits
from deployments.protocol import GenerateCall, GenerateReply, LikelihoodReply
from deployments.replica.replica import ReplicaServer
from engine.requests import LikelihoodRequest, ScoreRequest, ScoreResult
from engine.tokenizer.tokenizer import load_tokenizer
from scoring.prompts.templates import TemplateSpec

ASK = TemplateSpec(
    prefix="{{ instruction }}|{{ query }}|",
    item="{{ item }}",
    suffix="?",
    labels=("y", "n"),
    defaults={"instruction": ""},
)
SETTINGS = ApiSettings(
    chat=ChatSettings(template="{% for message in messages %}{{ message.content }}{% endfor %}"),
    templates={"ask": ASK},
    rerank=RerankArgs(template="ask"),
)
COMPLETION = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SCORING = {"query": "q", "items": ["a"], "label_token_ids": [1, 2]}
TEMPLATE = {"query": "q", "items": ["a"], "template": "ask"}
CONTINUATIONS = {"query": "q", "items": ["a"], "continuations": ["b"]}
SCORE = {"query": "q", "items": ["a"], "label_token_ids": [1, 2]}
RERANK = {"query": "q", "documents": ["a"]}
TEXTS = {"query": "q", "texts": ["a"]}
PREDICATE = {"type": "predicate", "instructions": "b"}
DECISION = {"input": "a", "questions": [PREDICATE]}
INVALID = (422, "invalid_value")
TOO_LARGE = (413, "request_too_large")


@dataclass(frozen=True)
class Case:
    """A route's body of size k, where k is the limit or one more."""

    limit: str
    bound: int
    refusal: tuple[int, str]
    path: str
    param: str | None
    body: Callable[[int], Any]

    def __str__(self) -> str:
        return f"{self.limit} of {self.param} at {self.path}"


def cases(
    limit: str, bound: int, refusal: tuple[int, str], bodies: list[tuple[str, str | None, Callable[[int], Any]]]
) -> list[Case]:
    return [Case(limit, bound, refusal, *one) for one in bodies]


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels > 1 else []


def marks(body: dict[str, Any], chars: str) -> int:
    """How many of these characters are in the JSON of a body whose texts have none."""
    return sum(map(json.dumps(body).count, chars))


def ids(k: int) -> list[int]:
    return list(range(k))


def padded(k: int) -> bytes:
    body = json.dumps({"prompt": "", "add_special_tokens": False}).encode()
    return body.replace(b'""', b'"' + b"x" * (k - len(body)) + b'"')


def spaced(k: int) -> bytes:
    return json.dumps({"tokens": [1]}).encode().ljust(k)


def named(k: int) -> dict[str, Any]:
    return RERANK | {"rank_fields": ["text", "t" * k], "documents": [{"text": "a", "t" * k: 1}]}


def question(**more: Any) -> dict[str, Any]:
    return {"input": "a", "questions": [PREDICATE | more]}


def choices(k: int) -> dict[str, Any]:
    return question(type="choice", choices=[{"value": str(i)} for i in range(k)])


def levels(k: int) -> dict[str, Any]:
    return question(type="score", levels=[{"label": str(i)} for i in range(k)])


def messages(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


COMPLETIONS, CHATS, GENERATIVE = "/v1/completions", "/v1/chat/completions", "/generative_scoring"
CASES = [
    *cases("max_body_bytes", 100, (413, "body_too_large"), [
        ("/tokenize", None, padded),
    ]),
    *cases("max_tokenize_bytes", 100, (413, "body_too_large"), [
        ("/tokenize", None, padded),
        ("/detokenize", None, spaced),
    ]),
    *cases("max_tokenize_tokens", 5, TOO_LARGE, [
        ("/tokenize", "prompt", lambda k: {"prompt": "a" * k, "add_special_tokens": False}),
        ("/tokenize", "messages", lambda k: messages("a" * k)),
        ("/detokenize", "tokens", lambda k: {"tokens": ids(k)}),
    ]),
    *cases("max_answer_bytes", 2000, TOO_LARGE, [
        ("/detokenize", None, lambda k: {"tokens": [97] * (k - len('{"prompt":""}'))}),
        # A prompt token that the answer repeats counts eight bytes.
        (COMPLETIONS, "return_token_ids", lambda k: COMPLETION | {"prompt": ids(-(-k // 8)), "return_token_ids": True}),
        (COMPLETIONS, "echo", lambda k: COMPLETION | {"prompt": ids(-(-k // 8)), "echo": True, "stream": True}),
        (CHATS, "return_token_ids", lambda k: CHAT | messages("a" * -(-k // 8)) | {"return_token_ids": True}),
    ]),
    *cases("max_json_depth", 4, (400, "invalid_json"), [
        (COMPLETIONS, None, lambda k: COMPLETION | {"user": nested(k - 1)}),
        ("/v1/rerank", None, lambda k: RERANK | {"a": nested(k - 1)}),
    ]),
    *cases("max_json_values", 30, (413, "body_too_large"), [
        (COMPLETIONS, None, lambda k: COMPLETION | {"user": [0] * (k - marks(COMPLETION, ","))}),
        ("/v1/rerank", None, lambda k: RERANK | {"a": [0] * (k - marks(RERANK, ","))}),
    ]),
    *cases("max_json_containers", 30, (413, "body_too_large"), [
        (COMPLETIONS, None, lambda k: COMPLETION | {"user": [[]] * (k - 2 - marks(COMPLETION, "[{:"))}),
        ("/v1/rerank", None, lambda k: RERANK | {"a": [{}] * (k - 2 - marks(RERANK, "[{:"))}),
    ]),
    *cases("max_prompts", 3, INVALID, [
        (COMPLETIONS, "prompt", lambda k: COMPLETION | {"prompt": ["a"] * k}),
        (COMPLETIONS, "prompt", lambda k: COMPLETION | {"prompt": [[1]] * k}),
    ]),
    *cases("max_messages", 3, INVALID, [
        (CHATS, "messages", lambda k: CHAT | messages(*"a" * k)),
        ("/tokenize", "messages", lambda k: messages(*"a" * k)),
        (CHATS, "messages[0].content", lambda k: CHAT | messages([{"type": "text", "text": "a"}] * k)),
    ]),
    *cases("max_rows", 3, TOO_LARGE, [
        (COMPLETIONS, "n", lambda k: COMPLETION | {"n": k}),
        (COMPLETIONS, "n", lambda k: COMPLETION | {"prompt": ["a"] * k}),
        (CHATS, "n", lambda k: CHAT | {"n": k}),
        (GENERATIVE, "items", lambda k: SCORING | {"items": ["a"] * k}),
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"items": ["a"] * k}),
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"continuations": ["b"] * k}),
        ("/v1/score", "items", lambda k: SCORE | {"items": ["a"] * k}),
        ("/rerank", "texts", lambda k: TEXTS | {"texts": ["a"] * k}),
        ("/v2/rerank", "documents", lambda k: RERANK | {"documents": ["a"] * k}),
    ]),
    *cases("max_rows", 12, TOO_LARGE, [
        # A question of this tokenizer, which has no token for yes, is four rows.
        ("/v1/decisions", "questions", lambda k: DECISION | {"questions": [PREDICATE] * -(-k // 4)}),
    ]),
    *cases("max_request_tokens", 9, TOO_LARGE, [
        (COMPLETIONS, "max_tokens", lambda k: {"prompt": ids(3), "max_tokens": k - 3}),
        (CHATS, "max_tokens", lambda k: messages("abc") | {"max_tokens": k - 3}),
        (GENERATIVE, "items", lambda k: SCORING | {"query": ids(3), "items": [ids(k - 3)]}),
        ("/v1/score", "items", lambda k: SCORE | {"query": ids(3), "items": [ids(k - 3)]}),
        ("/rerank", "texts", lambda k: TEXTS | {"texts": ["a" * (k - 4)]}),
        ("/v1/rerank", "documents", lambda k: RERANK | {"documents": ["a" * (k - 4)]}),
    ]),
    *cases("max_request_tokens", 9, INVALID, [
        ("/detokenize", "tokens", lambda k: {"tokens": ids(k)}),
    ]),
    *cases("max_answer_cells", 8, TOO_LARGE, [
        (COMPLETIONS, "logprobs", lambda k: {"prompt": "a", "max_tokens": k, "logprobs": 0}),
        (COMPLETIONS, "prompt_logprobs", lambda k: COMPLETION | {"prompt": ids(k), "prompt_logprobs": 0}),
        (CHATS, "logprobs", lambda k: CHAT | {"max_tokens": k, "logprobs": True}),
        (GENERATIVE, "items", lambda k: SCORING | {"items": ["a"] * k, "label_token_ids": [1]}),
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"continuations": ["b" * k]}),
        ("/v1/score", "items", lambda k: SCORE | {"items": ["a"] * k, "label_token_ids": [1]}),
    ]),
    *cases("max_stop", 2, INVALID, [
        (COMPLETIONS, "stop", lambda k: COMPLETION | {"stop": ["a"] * k}),
        (CHATS, "stop", lambda k: CHAT | {"stop": ["a"] * k}),
    ]),
    *cases("max_stop_chars", 5, INVALID, [
        (COMPLETIONS, "stop", lambda k: COMPLETION | {"stop": "a" * k}),
        (CHATS, "stop", lambda k: CHAT | {"stop": ["a" * k]}),
        (COMPLETIONS, "bad_words", lambda k: COMPLETION | {"bad_words": ["a" * k]}),
    ]),
    *cases("max_string_chars", 7, INVALID, [
        (COMPLETIONS, "prompt", lambda k: COMPLETION | {"prompt": "a" * k}),
        (COMPLETIONS, "prompt", lambda k: COMPLETION | {"prompt": ["a", "a" * k]}),
        (CHATS, "messages[0].content", lambda k: CHAT | messages("a" * k)),
        ("/tokenize", "prompt", lambda k: {"prompt": "a" * k}),
        (GENERATIVE, "query", lambda k: SCORING | {"query": "q" * k}),
        (GENERATIVE, "items", lambda k: SCORING | {"items": ["a" * k]}),
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"continuations": ["a" * k]}),
        ("/v1/score", "items", lambda k: SCORE | {"items": "a" * k}),
        ("/rerank", "texts", lambda k: TEXTS | {"texts": ["a" * k]}),
        ("/v1/rerank", "documents", lambda k: RERANK | {"documents": [{"text": "a" * k}]}),
        ("/v2/rerank", "query", lambda k: RERANK | {"query": "q" * k}),
    ]),
    *cases("max_string_chars", 20, INVALID, [
        ("/v1/decisions", "input", lambda k: DECISION | {"input": "a" * k}),
        ("/v1/decisions", "questions[0].instructions", lambda k: question(instructions="a" * k)),
    ]),
    *cases("max_name_chars", 6, INVALID, [
        (COMPLETIONS, "cache_salt", lambda k: COMPLETION | {"cache_salt": "s" * k}),
        (GENERATIVE, "cache_salt", lambda k: SCORING | {"cache_salt": "s" * k}),
        ("/v1/rerank", "rank_fields", named),
        ("/v1/decisions", "questions[0].name", lambda k: question(name="n" * k)),
        ("/v1/decisions", "prompt_cache_key", lambda k: DECISION | {"prompt_cache_key": "n" * k}),
    ]),
    *cases("max_n", 3, INVALID, [
        (COMPLETIONS, "n", lambda k: COMPLETION | {"n": k}),
        (CHATS, "n", lambda k: CHAT | {"n": k}),
    ]),
    *cases("max_logit_bias", 3, INVALID, [
        (COMPLETIONS, "logit_bias", lambda k: COMPLETION | {"logit_bias": {str(i): 1 for i in range(k)}}),
    ]),
    *cases("max_allowed_token_ids", 3, INVALID, [
        (COMPLETIONS, "allowed_token_ids", lambda k: COMPLETION | {"allowed_token_ids": ids(k)}),
    ]),
    *cases("max_bad_words", 3, INVALID, [
        (COMPLETIONS, "bad_words", lambda k: COMPLETION | {"bad_words": [chr(97 + i) for i in range(k)]}),
    ]),
    *cases("max_bad_word_tokens_total", 9, INVALID, [
        (COMPLETIONS, "bad_words", lambda k: COMPLETION | {"bad_words": ["a" * ((k - 1) // 2) + "b" * (k == 10)]}),
    ]),
    *cases("max_stop_token_ids", 3, INVALID, [
        (COMPLETIONS, "stop_token_ids", lambda k: COMPLETION | {"stop_token_ids": ids(k)}),
    ]),
    *cases("max_logprobs", 3, INVALID, [
        (COMPLETIONS, "logprobs", lambda k: COMPLETION | {"logprobs": k}),
        (COMPLETIONS, "prompt_logprobs", lambda k: COMPLETION | {"prompt_logprobs": k}),
        (CHATS, "top_logprobs", lambda k: CHAT | {"logprobs": True, "top_logprobs": k}),
    ]),
    *cases("max_logprob_token_ids", 3, INVALID, [
        (COMPLETIONS, "logprob_token_ids", lambda k: COMPLETION | {"logprob_token_ids": ids(k)}),
    ]),
    *cases("max_items", 3, INVALID, [
        (GENERATIVE, "items", lambda k: SCORING | {"items": ["a"] * k}),
        (GENERATIVE, "items", lambda k: CONTINUATIONS | {"items": ["a"] * k}),
        ("/v1/score", "items", lambda k: SCORE | {"items": ["a"] * k}),
        ("/rerank", "texts", lambda k: TEXTS | {"texts": ["a"] * k}),
        ("/v1/rerank", "documents", lambda k: RERANK | {"documents": ["a"] * k}),
        ("/v1/decisions", "input", lambda k: DECISION | {"input": [{"role": "user", "content": "a"}] * k}),
    ]),
    *cases("max_labels", 3, INVALID, [
        (GENERATIVE, "label_token_ids", lambda k: SCORING | {"label_token_ids": ids(k)}),
        ("/v1/score", "label_token_ids", lambda k: SCORE | {"label_token_ids": ids(k)}),
    ]),
    *cases("max_questions", 3, INVALID, [
        ("/v1/decisions", "questions", lambda k: DECISION | {"questions": [PREDICATE] * k}),
    ]),
    *cases("max_choices", 3, INVALID, [
        ("/v1/decisions", "questions[0].choices", choices),
    ]),
    *cases("max_levels", 3, INVALID, [
        ("/v1/decisions", "questions[0].levels", levels),
    ]),
    *cases("max_continuations", 3, INVALID, [
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"continuations": ["b"] * k}),
    ]),
    *cases("max_continuation_tokens", 3, INVALID, [
        (GENERATIVE, "continuations", lambda k: CONTINUATIONS | {"continuations": [ids(k)]}),
        (GENERATIVE, "continuations[0]", lambda k: CONTINUATIONS | {"continuations": ["b" * k]}),
    ]),
    *cases("max_joined_chars", 9, TOO_LARGE, [
        (GENERATIVE, "items", lambda k: SCORING | {"query": "q" * 4, "items": ["a" * (k - 4)], "seam": "joint"}),
        ("/v1/score", "items", lambda k: SCORE | {"query": "q" * 4, "items": ["a" * (k - 4)]}),
    ]),
    *cases("max_instruction_chars", 5, INVALID, [
        (GENERATIVE, "instruction", lambda k: TEMPLATE | {"instruction": "i" * k}),
        ("/v1/rerank", "instruction", lambda k: RERANK | {"instruction": "i" * k}),
        ("/rerank", "instruct", lambda k: TEXTS | {"instruct": "i" * k}),
    ]),
]  # fmt: skip
OF_HEADERS = {"max_headers", "max_header_bytes"}  # in test_middleware.py


def with_limit(name: str, bound: int) -> ApiSettings:
    """Only this one differs from the defaults."""
    limits = Limits()
    for part in fields(limits):
        held = getattr(limits, part.name)
        if hasattr(held, name):
            limits = replace(limits, **{part.name: replace(held, **{name: bound})})
    return replace(SETTINGS, limits=limits)


class Counted:
    """A backend that counts what comes through to a replica."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def score(self, task: ScoreRequest, all_or_nothing: bool = False) -> ScoreResult:
        self.calls += 1
        found: ScoreResult = await self._inner.score(task, all_or_nothing)
        return found

    async def likelihood(self, task: LikelihoodRequest, all_or_nothing: bool = False) -> LikelihoodReply:
        self.calls += 1
        found: LikelihoodReply = await self._inner.likelihood(task, all_or_nothing)
        return found

    async def generate(self, task: GenerateCall) -> GenerateReply:
        self.calls += 1
        found: GenerateReply = await self._inner.generate(task)
        return found


class World:
    def __init__(self, server: ReplicaServer, backend_of: Any, make_client: Any) -> None:
        self.backend: Any = Counted(backend_of(server))
        self._make_client = make_client
        self.clients: dict[tuple[str, int], Any] = {}

    def client(self, settings: ApiSettings = SETTINGS) -> Any:
        return self._make_client(build_api(self.backend, load_tokenizer("toy"), settings))

    def under(self, case: Case) -> Any:
        """A client of a server with the case's limit."""
        kind = case.limit, case.bound
        if kind not in self.clients:
            self.clients[kind] = self.client(with_limit(*kind))
        return self.clients[kind]


@pytest.fixture
async def world(
    toy_args: dict[str, Any], replica_servers: dict[str, ReplicaServer], backend_of: Any, make_client: Any
) -> AsyncIterator[World]:
    if "limits" not in replica_servers:
        server = ReplicaServer(AppArgs.model_validate(toy_args), "r1")
        await server.start()
        replica_servers["limits"] = server
    made = World(replica_servers["limits"], backend_of, make_client)
    yield made
    for client in made.clients.values():
        await client.http.aclose()


@pytest.mark.risk("S1")
def test_every_limit_is_here() -> None:
    assert {case.limit for case in CASES} | OF_HEADERS == set(Limits().flat())


@pytest.mark.full(keep=7)
@pytest.mark.risk("S1")
@pytest.mark.parametrize("limit", sorted({case.limit for case in CASES}))
async def test_at_the_limit_it_is_answered_and_one_more_is_refused_by_name(world: World, limit: str) -> None:
    for case in (case for case in CASES if case.limit == limit):
        client = world.under(case)
        found = await client.post(case.path, case.body(case.bound))
        assert found.status_code == 200, (str(case), found.text)
        before = world.backend.calls
        found = await client.post(case.path, case.body(case.bound + 1))
        error = found.json()["error"]
        refusal = (found.status_code, error["code"], error["param"])
        assert refusal == (*case.refusal, case.param), (str(case), found.text)
        assert str(case.bound) in error["message"], (str(case), found.text)
        assert world.backend.calls == before, str(case)


@pytest.mark.risk("S1", planted=True)
@pytest.mark.risk("S15", planted=True)
async def test_without_the_limit_one_more_is_answered(world: World) -> None:
    """So it is the limit that refused it."""
    client = world.client()
    for case in CASES:
        found = await client.post(case.path, case.body(case.bound + 1))
        assert found.status_code == 200, (str(case), found.text)


NEIGHBOURS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a neighbour", "max_tokens": 60, "seed": 3, "logprobs": 2, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 60, "seed": 4, "ignore_eos": True, "logprobs": True}),
    ("/generative_scoring", SCORING | {"items": [f"neighbour {i}" for i in range(40)]}),
]


async def answers(client: Any, **other: Any) -> list[Any]:
    """The neighbours' answers without what differs between any two. `other` replaces fields that a body has."""
    bodies = [(path, body | {name: other[name] for name in body.keys() & other}) for path, body in NEIGHBOURS]
    found = await asyncio.gather(*(client.post(path, body) for path, body in bodies))
    assert all(answer.status_code == 200 for answer in found)
    return [(answer.json().get("choices"), _scores(answer.json())) for answer in found]


def _scores(answer: Any) -> list[Any]:
    return [(row["probabilities"], row["logprobs"], row["label_mass"]) for row in answer.get("data", ())]


@pytest.mark.risk("Q8")
async def test_neighbours_of_refused_requests_do_not_change(world: World) -> None:
    client = world.client()
    alone = await answers(client)
    beside = asyncio.create_task(answers(client))
    rounds = 0
    while not beside.done():
        for case in CASES:
            found = await world.under(case).post(case.path, case.body(case.bound + 1))
            assert found.status_code == case.refusal[0]
        rounds += 1
    assert await beside == alone and rounds


@pytest.mark.risk("Q8", planted=True)
async def test_a_neighbour_that_changed_would_be_seen(world: World) -> None:
    client = world.client()
    alone = await answers(client)
    assert await answers(client) == alone
    for change in ({"seed": 5}, {"query": "r"}):
        assert await answers(client, **change) != alone
