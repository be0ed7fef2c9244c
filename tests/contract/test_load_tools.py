"""AIPerf 0.13 and GuideLLM 0.8 over streamed completions: every request ends, and each has its streaming metrics."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.model.model_folder import BUILTIN

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]

REQUESTS, TOKENS = 8, 8


@pytest.fixture(scope="module")
def given(url: str) -> dict[str, Any]:
    return {"url": url, "tokenizer": str(BUILTIN), "requests": REQUESTS, "tokens": TOKENS}


def test_aiperf_measures_streams(given: dict[str, Any], run_client: Callable[..., Any]) -> None:
    found = run_client("aiperf_load", given)
    assert found["request_count"]["avg"] == REQUESTS and not found.get("error_summary")
    assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"]
    assert found["inter_token_latency"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] == pytest.approx(TOKENS, abs=2)  # counted anew from the text


def test_guidellm_measures_streams(given: dict[str, Any], run_client: Callable[..., Any]) -> None:
    found = run_client("guidellm_load", given)
    assert found["request_totals"]["successful"] == found["request_totals"]["total"] == REQUESTS
    mean = {name: found[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")}
    assert all(value > 0 for value in mean.values())
    assert found["output_token_count"]["successful"]["mean"] == TOKENS
