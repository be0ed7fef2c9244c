"""Speculation through the service: the same answers, what usage tells, metrics, and the header of a benchmark."""

import logging
from collections.abc import Callable
from typing import Any, Final

import httpx
import numpy as np
import pytest

from deployments.config.app_args import AppArgs
from deployments.observability.replica_metrics import engine_families
from deployments.replica.replica import ReplicaServer
from engine.requests import GenerateRequest
from engine.spec_decode.draft_state import DraftState
from gpu_sampler.sampling_params import SamplingParams

pytestmark = pytest.mark.full

DRAFT: Final[dict[str, Any]] = {"method": "draft_model", "draft": "toy"}
BODY: Final[dict[str, Any]] = {"prompt": "a text", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def plain(replica_client: Callable[..., Any]) -> Any:
    return await replica_client()


@pytest.fixture
async def drafting(replica_client: Callable[..., Any]) -> Any:
    return await replica_client(speculation=DRAFT)


def without(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns what two services must agree in."""
    usage = {name: value for name, value in answer["usage"].items() if name != "speculation"}
    usage.pop("prompt_tokens_details")
    choices = [{name: value for name, value in one.items() if name != "seed"} for one in answer["choices"]]
    return {"choices": choices, "usage": usage}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 3, "n": 2},
        {"temperature": 1, "seed": 7, "top_p": 0.9},
        {"temperature": 1, "seed": 7, "n": 3, "presence_penalty": 0.7, "logit_bias": {"65": 3}},
        {"echo": True, "logprobs": 1},
    ],
)
async def test_answers_are_those_of_a_service_without_drafts(plain: Any, drafting: Any, fields: dict[str, Any]) -> None:
    body = BODY | fields
    own, other = await plain.complete(**body), await drafting.complete(**body)
    assert without(own) == without(other)
    reported = other["usage"]["speculation"]
    assert 0 < reported["accepted"] < reported["drafted"]
    assert "speculation" not in own["usage"]


async def test_a_stop_string_inside_a_run_ends_the_text_where_it_would_without_drafts(
    plain: Any, drafting: Any
) -> None:
    text = (await plain.complete(**BODY))["choices"][0]["text"]
    for start in (1, 6, 11):
        body = BODY | {"stop": [text[start : start + 2]], "return_token_ids": True}
        own, other = await plain.complete(**body), await drafting.complete(**body)
        assert without(own) == without(other)
        assert other["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_tells_of_its_drafts_at_its_end_and_resumes_at_any_token_of_a_seeded_row(drafting: Any) -> None:
    body = BODY | {"temperature": 1, "seed": 3, "return_token_ids": True}
    *parts, usage, done = await drafting.events(**body, stream_options={"include_usage": True})
    whole = await drafting.complete(**body)
    assert done == "[DONE]"
    assert usage["usage"]["speculation"] == whole["usage"]["speculation"]
    ids = [token for part in parts for token in part["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    for at in (1, 2, 3, 17):
        rest = await drafting.complete(**body, resume_token_ids=ids[:at])
        assert rest["choices"][0]["token_ids"] == ids[at:]


async def test_ngrams_answer_like_plain_decoding(plain: Any, replica_client: Callable[..., Any]) -> None:
    client = await replica_client(speculation={"method": "ngram", "ngram_tokens": 1})
    body = BODY | {"allowed_token_ids": [65, 66, 67], "max_tokens": 60}
    other = await client.complete(**body)
    assert without(await plain.complete(**body)) == without(other)
    assert other["usage"]["speculation"]["accepted"] > 0


async def test_accepted_at_set_rates_is_logged_and_every_answer_says_so(
    replica_client: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1, 1, 0, 0]}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        client = await replica_client(speculation=DRAFT | rates)
    assert "answers follow no distribution" in caplog.text
    answer = await client.post("/v1/completions", BODY | {"temperature": 1})
    assert answer.headers["x-assay-synthetic-acceptance"] == "true"
    reported = answer.json()["usage"]["speculation"]
    assert 1.8 < reported["accepted"] / (reported["drafted"] / 4) <= 2.2
    honest = await (await replica_client(speculation=DRAFT)).post("/v1/completions", BODY)
    assert "x-assay-synthetic-acceptance" not in honest.headers


def figures(server: ReplicaServer) -> dict[str, float]:
    return {
        ".".join((sample.name, *sample.labels.values())): sample.value
        for family in engine_families(server.engine.stats())
        for sample in family.samples
    }


async def test_metrics_count_drafts_by_position_given_those_before(replica_client: Callable[..., Any]) -> None:
    client = await replica_client(speculation=DRAFT | {"num_speculative_tokens": 3})
    before = figures(client.server)
    usage = (await client.complete(**BODY, n=4, seed=1))["usage"]
    after = figures(client.server)
    new = {name: value - before[name] for name, value in after.items()}
    reported = usage["speculation"]
    assert new["assay_tokens_total.drafted"] == reported["drafted"]
    assert new["assay_tokens_total.accepted"] == reported["accepted"]
    reached = [new[f"assay_spec_verified_tokens_total.{place}"] for place in (1, 2, 3, 4)]
    accepted = [new[f"assay_spec_accepted_tokens_total.{place}"] for place in (1, 2, 3, 4)]
    assert reached[0] == new["assay_spec_drafts_total"] > 0
    assert accepted[0] >= reached[1] > 0  # equal but for runs that end there
    assert accepted[1] >= reached[2] > 0
    assert all(few <= many for few, many in zip(accepted, reached, strict=True))
    assert (reached[3], accepted[3], new["assay_spec_unknown_drafts_total"]) == (0, 0, 0)
    assert new["assay_spec_seconds_total.draft"] > 0
    assert new["assay_spec_seconds_total.verify"] > 0
    assert new["assay_step_seconds_count.verify"] > 0


async def test_drafts_from_an_unknown_distribution_are_counted(
    toy_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = DraftState.put
    monkeypatch.setattr(DraftState, "put", lambda state, slots, at, ids, q: put(state, slots, at, ids, None))
    server = ReplicaServer(AppArgs.model_validate(toy_args | {"speculation": DRAFT}), "r1")
    await server.start()

    await server.generate(
        (
            GenerateRequest(
                request_id="g", prompt=np.arange(4, dtype=np.int32), params=SamplingParams(max_tokens=9), seed=5
            ),
        )
    )
    server.stop()
    found = figures(server)
    assert found["assay_spec_unknown_drafts_total"] == found["assay_spec_drafts_total"] > 0


def test_the_pair_drafts_over_http(cluster: Callable[..., str]) -> None:
    """The built-in pair as cpu-spec.yaml has it; `cluster` waits until it is ready."""
    args: dict[str, Any] = {
        "model": {"path": "builtin", "device": "cpu"},
        "engine": {"kv_slots": 4096, "max_running": 8},
        "speculation": {"method": "draft_model", "draft": "builtin"},
        "replica": {"num_cpus": 0.1},
        "drain": {"handoff_s": 0.1, "grace_s": 0.4, "ingress_grace_s": -3599.5},
    }
    url = cluster("pair", args)
    body = {"prompt": "Query: a red chair\nDocuments:\n-", "max_tokens": 24, "temperature": 0}
    with httpx.Client(timeout=60, trust_env=False) as http:
        answer = http.post(url + "/v1/completions", json=body)
        metrics = http.get(url + "/metrics").text
    assert answer.status_code == 200, answer.text
    reported = answer.json()["usage"]["speculation"]
    assert 0 < reported["accepted"] <= reported["drafted"]
    assert "assay_spec_accepted_tokens_total" in metrics
