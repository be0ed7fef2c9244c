"""The configurations for GPUs, served as they are and asked over HTTP: the built-in model, and its pair."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.served import served

pytestmark = pytest.mark.gpu

READY_S = 600.0  # FlashInfer's modules may have to be compiled
ROOM = {"kv_slots": 65_536}  # else nearly all of a GPU that other tests use, too
GAP = 0.5  # logits; between closer ones bfloat16 may choose otherwise
TOKENS = 48
PROMPTS = (
    "This sturdy red",
    "Query: a red chair\nDocuments:\n-",
    "Query: a blue lamp\nDocuments:\n-",
    "A pine chair for reading, sturdy and red, made in",
)
PIECES = {
    "query": "Query: red chair\nDocument:",
    "items": [
        " A pine chair for reading, sturdy and red, made in Lisbon.\nRelevant:",
        " A pine chair for reading, sturdy and blue, made in Lisbon.\nRelevant:",
    ],
    "labels": [" yes", " no"],
}


class Service(NamedTuple):
    url: str
    drafts: bool

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self.post(path, body)[1])

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def complete(self, prompt: str, **fields: Any) -> Any:
        return self.ask("/v1/completions", {"prompt": prompt, "max_tokens": TOKENS, "return_token_ids": True} | fields)


def the_right_item_is_found(service: Service) -> None:
    found = service.ask("/generative_scoring", PIECES)
    right, wrong = (row["score"] for row in found["data"])
    assert right > 0.99 and wrong < 0.01
    assert all(row["label_mass"] > 0.99 for row in found["data"])
    ranked = service.ask("/v1/rerank", {"query": "red chair", "documents": [" A red chair.", " A blue lamp."]})
    assert ranked["results"][0]["index"] == 0


def greedy_tokens_are_the_librarys(service: Service, library: Any, prompt: str) -> None:
    """Compares the tokens where the library's first choice leads by more than `GAP`."""
    [choice] = service.complete(prompt, temperature=0)["choices"]
    ids, start = choice["prompt_token_ids"] + choice["token_ids"], len(choice["prompt_token_ids"])
    with torch.no_grad():
        best = library(torch.tensor([ids])).logits[0, start - 1 : -1].topk(2)
    sure = (best.values[:, 0] - best.values[:, 1] > GAP).tolist()
    expected, told = best.indices[:, 0].tolist(), choice["token_ids"]
    assert len(told) > 4 and sum(sure) > len(told) / 4
    assert [a for a, known in zip(told, sure, strict=True) if known] == [
        a for a, known in zip(expected, sure, strict=True) if known
    ]


def a_seed_gives_the_same_whole_and_streamed(service: Service) -> None:
    fields = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    alone = service.complete(PROMPTS[0], **fields)["choices"][0]
    assert service.complete(PROMPTS[0], **fields)["choices"][0]["text"] == alone["text"]
    status, body = service.post(
        "/v1/completions", {"prompt": PROMPTS[0], "max_tokens": TOKENS, "stream": True} | fields
    )
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    assert status == 200 and lines[-1] == "[DONE]"
    told = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(told) == alone["text"]


def chosen_tokens_are_reported_beside_the_best(service: Service) -> None:
    choice = service.complete(PROMPTS[1], temperature=0.9, logprobs=5, logprob_token_ids=[1, 300, 511])["choices"][0]
    count = len(choice["token_ids"])
    assert len(choice["logprobs"]["token_logprobs"]) == count > 0
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert all(len(best) >= 5 for best in choice["logprobs"]["top_logprobs"])
    assert len(choice["logprobs"]["requested_logprobs"]) == count


def drafts_are_accepted_where_there_is_a_draft(service: Service) -> None:
    answers = [service.complete(prompt, temperature=temperature) for prompt in PROMPTS for temperature in (0.0, 1.0)]
    told = [answer["usage"].get("speculation") for answer in answers]
    if service.drafts:
        assert all(0 <= one["accepted"] <= one["drafted"] for one in told)
        assert sum(one["accepted"] for one in told) > 0.25 * sum(one["drafted"] for one in told) > 0
    else:
        assert told == [None] * len(told)


def bad_input_is_named_and_harms_nobody(service: Service) -> None:
    before = service.complete(PROMPTS[0], temperature=0)["choices"][0]["text"]
    for field, value in {"temperature": -1, "top_p": 2, "logit_bias": {"999999": 1}, "max_tokens": -3}.items():
        status, body = service.post("/v1/completions", {"prompt": "a", field: value})
        assert status in (400, 422)
        assert field in json.loads(body)["error"]["message"]
    assert service.complete(PROMPTS[0], temperature=0)["choices"][0]["text"] == before


# One test a configuration: pytest's workers would each start a service for their share of several.


@pytest.mark.timeout(READY_S + 120)
@pytest.mark.parametrize("name", ["gpu.yaml", "gpu-spec.yaml"])
def test_a_configuration_answers(name: str, library: Any, tmp_path: Path) -> None:
    with served(name, tmp_path, READY_S, engine=ROOM) as url:
        service = Service(url, "spec" in name)
        the_right_item_is_found(service)
        for prompt in PROMPTS:
            greedy_tokens_are_the_librarys(service, library, prompt)
        a_seed_gives_the_same_whole_and_streamed(service)
        chosen_tokens_are_reported_beside_the_best(service)
        drafts_are_accepted_where_there_is_a_draft(service)
        bad_input_is_named_and_harms_nobody(service)
