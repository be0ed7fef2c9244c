"""The built-in model through the engine, held against the model library: greedy tokens, label scores, and the bars."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.loader import load_model
from engine.requests import Float32s, GenerateRequest, ScoreRequest, ScoreResult
from engine.tokenizer.tokenizer import Tokenizer
from gpu_sampler.sampling_params import SamplingParams
from tools.builtin_model import evaluate, grammar
from tools.builtin_model.catalogue import CODES

PROMPTS: Final = 50
AT_ONCE: Final = 16
NEW: Final = 24
TINY: Final[dict[str, Any]] = {"kv_slots": 300, "admission_tokens": 1}  # sixteen rows need about three times as many
CLOSE: Final = 1e-4
PAIRS: Final = 200
FAMILIES: Final = ("relevance", "running_text", "listing", "choice", "chat", "questions")
ODD_TEXTS: Final = (" ", "\n", "a", "-", "\u00e9\u4e2d\U0001f600", "red red red red red red", "Query:", "<|user|>")


@contextmanager
def running(**config: Any) -> Iterator[Engine]:
    options = EngineConfig(**{"kv_slots": 16_384, "max_running": 32, **config})
    engine = Engine(load_model(ModelConfig(device="cpu", max_model_len=256), options), options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Beginnings of catalogue texts of 1 to 40 tokens, and some that no catalogue holds."""
    each = -(-(PROMPTS - len(ODD_TEXTS)) // len(FAMILIES))
    texts = [text for family in FAMILIES for text in itertools.islice(grammar.examples(5, family), each)]
    rows = tokenizer.encode_batch([*ODD_TEXTS, *texts], add_special_tokens=False)[:PROMPTS]
    lengths = np.random.default_rng(1).integers(1, 41, PROMPTS)
    assert len(rows) == PROMPTS and all(rows)
    return [row[: int(length)] for row, length in zip(rows, lengths, strict=True)]


@pytest.fixture(scope="module")
def greedy(library: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The library's own answers, their end-of-text tokens included."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = library.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answers.append([int(token) for token in out[0, len(prompt) :]])
    return answers


async def completions(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float = 0.0) -> list[list[int]]:
    """The engine's answers, sixteen prompts at a time."""
    gate = asyncio.Semaphore(AT_ONCE)
    params = SamplingParams(temperature=temperature, max_tokens=NEW, stop_token_ids=engine.model.eos_token_ids)

    async def ask(index: int, prompt: Sequence[int]) -> list[int]:
        request = GenerateRequest(request_id=f"g{index}", prompt=np.array(prompt, np.int32), params=params, seed=index)
        async with gate:
            return [int(token) for chunk in await engine.complete(request) for token in chunk.tokens]

    return await asyncio.gather(*(ask(index, prompt) for index, prompt in enumerate(prompts)))


async def test_greedy_answers_are_those_of_the_library(
    engine: Engine, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    assert await completions(engine, prompts) == greedy
    assert len({len(answer) for answer in greedy}) > 1  # some end by themselves, some by their length


async def test_greedy_answers_are_those_of_the_library_though_rows_are_thrown_out_and_resumed(
    prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    with running(**TINY) as engine:
        assert await completions(engine, prompts) == greedy
        assert engine.stats().preemptions > 0


async def test_answers_drawn_at_temperature_one_are_seen_to_differ(
    engine: Engine, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    drawn = await completions(engine, prompts, temperature=1.0)
    assert sum(a != b for a, b in zip(drawn, greedy, strict=True)) > PROMPTS // 2


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """The one token of each word as it follows a space."""
    ids = tokenizer.encode_batch([f" {word}" for word in words], add_special_tokens=False)
    return [token for (token,) in ids]


def score_job(prefix: Sequence[int], items: Sequence[Sequence[int]], labels: Sequence[int], full: bool) -> ScoreRequest:
    return ScoreRequest(
        request_id="s",
        prefix=np.array(prefix, np.int32),
        ids=np.array([token for item in items for token in item], np.int32),
        starts=np.cumsum([0, *map(len, items)]).astype(np.int32),
        labels=np.array(labels, np.int32),
        full=full,
    )


def plain(library: Any, rows: Sequence[Sequence[int]], labels: Sequence[int], full: bool) -> npt.NDArray[np.float64]:
    """float64 [N, L]: one forward pass a row, no cache, then a log-softmax over the vocabulary or over the labels."""
    found = []
    for row in rows:
        with torch.no_grad():
            logits = library(torch.tensor([row]), use_cache=False).logits[0, -1].double()
        found.append((logits.log_softmax(-1)[labels] if full else logits[labels].log_softmax(-1)).numpy())
    return np.stack(found)


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> tuple[list[int], list[list[int]], list[int]]:
    """A query, nine documents of unequal length (one of them nothing), and five labels."""
    prefix, *items = tokenizer.encode_batch(
        [
            "Query: red chair\nDocument:",
            *(text.split("Document:")[1] for text in itertools.islice(grammar.examples(8, "relevance"), 8)),
        ],
        add_special_tokens=False,
    )
    cut = [item[: length or None] for item, length in zip(items, (0, 0, 1, 3, 7, 0, 2, 11), strict=True)]
    return prefix, [*cut, []], [*word_ids(tokenizer, ("yes", "no")), 7, 100, 1500]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("budget", [16_384, 13])
async def test_scores_are_those_of_a_plain_computation_however_they_are_asked(
    budget: int,
    full: bool,
    library: Any,
    asked: tuple[list[int], list[list[int]], list[int]],
    prompts: list[list[int]],
    greedy: list[list[int]],
) -> None:
    prefix, items, labels = asked
    rows = [[*prefix, *item] for item in items]
    wanted = plain(library, rows, labels, full)
    with running(token_budget=budget) as engine:

        async def scores(prefix: Sequence[int], items: Sequence[Sequence[int]]) -> Float32s:
            result: ScoreResult = await engine.score(score_job(prefix, items, labels, full))
            assert not result.status.any()
            return result.label_logprobs

        one_by_one = [await scores([], [row]) for row in rows]
        np.testing.assert_allclose(np.concatenate(one_by_one), wanted, rtol=0, atol=CLOSE)
        shared = [await scores(prefix, [item]) for item in items]
        np.testing.assert_allclose(np.concatenate(shared), wanted, rtol=0, atol=CLOSE)
        answers, *together = await asyncio.gather(
            completions(engine, prompts[:AT_ONCE]), scores(prefix, items), scores([], rows), scores(prefix, items[::-1])
        )
        assert answers == greedy[:AT_ONCE]
        np.testing.assert_allclose(together[0], wanted, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(together[1], wanted, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(together[2][::-1], wanted, rtol=0, atol=CLOSE)


async def test_scores_of_rows_that_lack_a_token_are_seen_to_differ(
    engine: Engine, library: Any, asked: tuple[list[int], list[list[int]], list[int]]
) -> None:
    prefix, items, labels = asked
    wanted = plain(library, [[*prefix, *item] for item in items], labels, True)
    found = await engine.score(score_job(prefix[1:], items, labels, True))
    assert (np.abs(found.label_logprobs - wanted).max(axis=1) > CLOSE).all()


async def label_scores(engine: Engine, tokenizer: Tokenizer, family: str, words: Sequence[str]) -> tuple[Float32s, Any]:
    """Log-probabilities [N, L] of the words after held-out questions, all in one request, and the right words."""
    asked = evaluate.questions(family, PAIRS, seed=3)
    rows = tokenizer.encode_batch([question.prompt for question in asked], add_special_tokens=False)
    labels = word_ids(tokenizer, words)
    result = await engine.score(score_job([], rows, labels, True))
    return result.label_logprobs, np.array([question.answer for question in asked])


async def test_relevant_documents_stand_above_those_with_one_word_wrong(engine: Engine, tokenizer: Tokenizer) -> None:
    found, answers = await label_scores(engine, tokenizer, "relevance", ("yes", "no"))
    scores, relevant = found[:, 0] - found[:, 1], answers == "yes"
    assert 0 < relevant.sum() < PAIRS
    assert evaluate.area_under_curve(scores, relevant) >= 0.99
    assert evaluate.area_under_curve(np.roll(scores, 1), relevant) < 0.7  # scores of other pairs do not pass


async def test_the_right_option_is_the_likeliest(engine: Engine, tokenizer: Tokenizer) -> None:
    found, answers = await label_scores(engine, tokenizer, "choice", CODES)
    chosen = np.array(CODES)[found.argmax(axis=1)]
    assert (chosen == answers).mean() >= 0.95
    assert (np.roll(chosen, 1) == answers).mean() < 0.7
