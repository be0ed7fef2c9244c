"""Pace: the longest span of branches that run side by side, and the time between tokens of streams only."""

import numpy as np
import pytest

from deployments.api.generation.response import TokenTiming
from deployments.observability.ingress_metrics import IngressMetrics, Stage
from deployments.protocol import PromptChunk
from engine.requests import GenerateChunk


class Heard(IngressMetrics):
    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.gaps: list[float] = []

    def stage(self, stage: Stage, seconds: float) -> None:
        self.stages[stage] = seconds

    def token_gap(self, route: str, seconds: float) -> None:
        self.gaps.append(seconds)


def chunk(branch: int, tokens: int, queue_s: float, prefill_s: float, compute_s: float) -> PromptChunk:
    ids = np.zeros(tokens, np.int32)
    own = GenerateChunk(branch, ids, None, None, None, None, None, None, None, 0, queue_s, compute_s, 0, 0, prefill_s)
    return PromptChunk(0, own)


def reported(streamed: bool) -> Heard:
    """Two branches: one of 4 + 2 tokens within 3 s, one of 1 + 5 within 4 s."""
    times = iter((10.0, 11.0, 13.0, 15.0))
    pace, heard = TokenTiming(lambda: next(times)), Heard()
    pace.record([chunk(0, 4, 0.1, 0.5, 1.0)])
    pace.record([chunk(1, 1, 0.2, 0.5, 2.0)])
    pace.record([chunk(0, 2, 0.1, 0.5, 4.0)])
    pace.record([chunk(1, 5, 0.2, 0.5, 6.0)])
    pace.report(heard, "/v1/completions", streamed=streamed)
    return heard


def test_stages_are_those_of_the_longest_branch() -> None:
    assert reported(streamed=False).stages == {"queue": 0.2, "prefill": 0.5, "decode": 5.5}


def test_time_between_tokens_is_that_of_the_branch_with_most_of_them_after_its_first_message() -> None:
    assert reported(streamed=True).gaps == [pytest.approx((15.0 - 11.0) / 5)]
    assert reported(streamed=False).gaps == []


def test_nothing_that_came_is_nothing_sent() -> None:
    heard = Heard()
    TokenTiming().report(heard, "/v1/completions", streamed=True)
    assert not heard.stages and not heard.gaps
