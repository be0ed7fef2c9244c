"""Log-probabilities of given tokens from real architectures: those of the library's own log-softmax."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import lm_head
from engine.model.hf_model import HFModel
from engine.requests import LikelihoodRequest, LikelihoodResult
from engine.scheduler import request_state

TOLERANCE = 1e-4  # nats
PROMPT = np.random.default_rng(3).integers(0, 111, 61).astype(np.int32)
CONTEXT, LABELS = PROMPT[:40], (PROMPT[40:43], PROMPT[43:44], PROMPT[44:53])
NAMES = ["llama", "qwen3", "gemma2", "cohere", "granite"]  # soft cap, logit scale, logit division


@asynccontextmanager
async def running(module: Any, *, known_head: bool = True, **config: Any) -> AsyncIterator[Engine]:
    options = EngineConfig(**{"kv_slots": 300, "max_running": 4, **config})
    model = HFModel(module, options)
    if not known_head:
        model.head, model.max_targets = None, 5
    engine = Engine(model, options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


async def whole_prompt(engine: Engine, top: int = 3) -> LikelihoodResult:
    return await engine.likelihood(
        LikelihoodRequest(
            request_id="l", prefix=PROMPT[:0], ids=PROMPT, starts=np.array([0, len(PROMPT)], np.int32),
            shared=np.zeros(1, np.int32), wanted=np.array([len(PROMPT) - 1], np.int32), top=top,
        )
    )  # fmt: skip


def by_the_library(module: Any, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """float64 [tokens, V]: log-softmax after each token."""
    with torch.no_grad():
        logits = module(torch.from_numpy(ids).long()[None]).logits[0].double()
    found: npt.NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", NAMES)
async def test_prompts_have_the_librarys_log_probabilities(
    tiny_models: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_the_library(tiny_models.module(name), PROMPT)[:-1]
    own = expected[np.arange(len(expected)), PROMPT[1:]]
    monkeypatch.setattr(lm_head, "MAX_LOGITS_CPU", 17 * 111)  # several blocks a step
    for config in ({}, {"token_budget": 7}, {"token_budget": 64}, {"known_head": False}):
        async with running(tiny_models.module(name), **config) as engine:
            found = await whole_prompt(engine)
        assert np.abs(found.logprobs - own).max() < TOLERANCE
        assert np.abs(found.top_logprobs - np.sort(expected, 1)[:, :-4:-1]).max() < TOLERANCE
        clear = np.abs(np.sort(expected, 1)[:, -1] - own) > 2 * TOLERANCE
        assert not found.greedy[clear].any()
        assert (found.logprobs[found.greedy] == found.top_logprobs[found.greedy, 0]).all()
        assert (found.ranks[found.greedy] == 1).all() and (found.ranks[clear] > 1).all()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", NAMES)
async def test_continuations_have_the_librarys_log_probabilities(tiny_models: Any, name: str) -> None:
    module = tiny_models.module(name)
    expected = []
    for label in LABELS:
        ids = np.concatenate((CONTEXT, label))
        logprobs = by_the_library(module, ids)[len(CONTEXT) - 1 : -1]
        expected.append(logprobs[np.arange(len(label)), label])
    own = [np.concatenate((CONTEXT[30:], label)) for label in LABELS]
    shared = np.array([0, 9, 9], np.int32)
    rows = [tokens[share:] for tokens, share in zip(own, shared, strict=True)]
    request = LikelihoodRequest(
        request_id="l", prefix=CONTEXT[:30], ids=np.concatenate(rows),
        starts=np.cumsum([0, *map(len, rows)]).astype(np.int32), shared=shared,
        wanted=np.array([len(label) for label in LABELS], np.int32),
    )  # fmt: skip
    for config in ({}, {"token_budget": 2}, {"token_budget": 7}, {"known_head": False}):
        async with running(tiny_models.module(name), **config) as engine:
            for _ in range(2):  # the second time over a cached prefix
                found = await engine.likelihood(request)
                assert np.abs(found.logprobs - np.concatenate(expected)).max() < TOLERANCE


async def test_positions_off_by_one_would_be_seen(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_the_library(tiny_models.module("llama"), PROMPT)[:-1]
    own = expected[np.arange(len(expected)), PROMPT[1:]]
    true_targets = request_state._targets
    monkeypatch.setattr(request_state, "_targets", lambda request: np.roll(true_targets(request), 1))
    async with running(tiny_models.module("llama")) as engine:
        found = await whole_prompt(engine)
    assert np.abs(found.logprobs - own).max() > 100 * TOLERANCE


async def test_memory_is_that_of_a_block_and_not_of_the_prompt(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more rows of logits than a block's are ever asked of the head."""
    seen: list[int] = []
    true_rows = lm_head._of_logits

    def watched(logits: torch.Tensor, asked: lm_head.LogprobQuery) -> lm_head.RowLogprobs:
        seen.append(len(logits))
        return true_rows(logits, asked)

    monkeypatch.setattr(lm_head, "_of_logits", watched)
    monkeypatch.setattr(lm_head, "MAX_LOGITS_CPU", 8 * 111)
    async with running(tiny_models.module("llama")) as engine:
        await whole_prompt(engine)
    assert max(seen) == 8 and sum(seen) == len(PROMPT) - 1
