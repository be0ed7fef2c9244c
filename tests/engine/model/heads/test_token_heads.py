"""Token heads and process rewards against the library's own classes and the card's own loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForTokenClassification, BertConfig

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.heads.info import HeadKind
from engine.model.loader import load_model
from engine.requests import EngineError, Float32s, Int32s, PoolingRequest, PoolingTask
from tests.support.head_models import FAMILIES, config_of, perturbed
from tests.support.model_folders import SIZES, process_reward

TOLERANCE = 1e-5
LABELS = 3
FAST = ("llama", "qwen3", "gemma2")
LENGTHS = (13, 1, 40, 7, 90, 3)


class Tokens:
    """A folder's engine, and what the library's own computation gives for each token of a row."""

    def __init__(self, folder: Path, alone: Callable[[torch.Tensor], torch.Tensor], **engine: Any) -> None:
        options = EngineConfig(**{"kv_slots": 700, "seed": 3, **engine})
        self.alone = alone
        self.model: Any = load_model(ModelConfig(path=folder, device="cpu"), options)
        self.engine = Engine(self.model, options)
        self.engine.start()

    async def values(self, prefix: Int32s, rows: list[Int32s], marks: list[Int32s]) -> Float32s:
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        positions = np.concatenate([start + own for start, own in zip(starts[:-1], marks, strict=True)])
        request = PoolingRequest(
            request_id="r",
            prefix=prefix,
            ids=np.concatenate(rows),
            starts=starts,
            task=PoolingTask.TOKEN_CLASSIFY,
            positions=positions.astype(np.int32),
        )
        found = await self.engine.pooling(request)
        assert not found.status.any()
        return found.values

    def reference(self, prefix: Int32s, rows: list[Int32s], marks: list[Int32s]) -> Float32s:
        with torch.no_grad():
            whole = [torch.from_numpy(np.concatenate((prefix, row))).long()[None] for row in rows]
            found = [self.alone(one)[0].float().numpy() for one in whole]
        return np.concatenate([one[len(prefix) + own] for one, own in zip(found, marks, strict=True)])


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Callable[..., Tokens]]:
    """`tokens(family, **engine)`: a token classifier of the family."""
    made: list[Tokens] = []

    def make(family: str, **engine: Any) -> Tokens:
        torch.manual_seed(0)
        config = config_of(family, num_labels=LABELS)
        plain = perturbed(AutoModelForTokenClassification.from_config(config, attn_implementation="eager"))
        folder = tmp_path / f"{family}{len(made)}"
        plain.save_pretrained(folder)
        made.append(Tokens(folder, lambda ids: plain(input_ids=ids).logits, **engine))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()
        one.engine.check()


def some_rows(highest: int = 250) -> tuple[Int32s, list[Int32s], list[Int32s]]:
    """A prefix, rows, and the places in each row that are wanted: all, some, the first or the last."""
    rng = np.random.default_rng(0)
    prefix, *rows = (rng.integers(3, highest, size).astype(np.int32) for size in LENGTHS)
    marks = [np.arange(len(row), dtype=np.int32) for row in rows]
    marks[1] = np.array([0, 5, 39], np.int32)
    marks[3] = np.array([7, 8, 60], np.int32)
    return prefix, rows, marks


async def difference(one: Tokens, highest: int = 250) -> float:
    """The largest difference from the reference: rows packed, behind a cached prefix, alone."""
    prefix, rows, marks = some_rows(highest)
    wanted = one.reference(prefix, rows, marks)
    packed = await one.values(prefix, rows, marks)
    cached = await one.values(prefix, rows, marks)
    each = zip(rows, marks, strict=True)
    alone = [await one.values(prefix[:0], [np.concatenate((prefix, row))], [len(prefix) + own]) for row, own in each]
    return float(max(np.abs(found - wanted).max() for found in (packed, cached, np.concatenate(alone))))


@pytest.mark.full(keep=len(FAST))
@pytest.mark.parametrize("family", (*FAST, *sorted(FAMILIES.keys() - set(FAST))))
async def test_logits_are_the_librarys_token_by_token(tokens: Callable[..., Tokens], family: str) -> None:
    assert await difference(tokens(family)) < TOLERANCE
    assert await difference(tokens(family, token_budget=9, prefix_cache=False)) < TOLERANCE  # in chunks


@pytest.mark.parametrize("fault", ["the token before", "last token of the row", "head in bf16", "labels reversed"])
async def test_the_comparison_finds_planted_faults(
    tokens: Callable[..., Tokens], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = tokens("llama")
    model, head = one.model, one.model._pooler
    hidden_of = model._hidden

    def hidden(kind: Any, sequences: Any, table: Any) -> torch.Tensor:
        if fault == "the token before":
            sequences = [run._replace(rows=np.maximum(run.rows - 1, 0)) for run in sequences]
        if fault == "last token of the row":
            sequences = [run._replace(rows=np.full_like(run.rows, len(run.write) - 1)) for run in sequences]
        rows: torch.Tensor = hidden_of(kind, sequences, table)
        return rows

    if fault == "head in bf16":
        head.layers.weight.data = head.layers.weight.data.bfloat16().float()
    if fault == "labels reversed":
        head.layers.weight.data = head.layers.weight.data.flip(0)
    monkeypatch.setattr(model, "_hidden", hidden)
    assert await difference(one) > TOLERANCE


@pytest.mark.parametrize("engine", [{}, {"token_budget": 9, "prefix_cache": False}], ids=["whole", "chunks"])
async def test_process_rewards_are_those_of_the_cards_loop(tmp_path: Path, engine: dict[str, Any]) -> None:
    """The card: softmax over the labels of every token, then the second label's share at each step tag."""
    folder = process_reward(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    body = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    first, second = (torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
    for at, layer in ((0, first), (2, second)):
        layer.load_state_dict({name: tensors[f"score.{at}.{name}"] for name in ("weight", "bias")})
    score = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    one = Tokens(folder, lambda ids: score(body(input_ids=ids).last_hidden_state), **engine)
    head = one.model.pooling_head
    assert (head.kind, head.width, head.mark) == (HeadKind.TOKEN, 2, "<extra_0>")
    tag, rng = 5, np.random.default_rng(1)
    prefix, *rows = (rng.integers(6, 64, size).astype(np.int32) for size in (9, 20, 33, 5))
    for row, places in zip(rows, ([3, 19], [0, 10, 11, 30], [4]), strict=True):
        row[places] = tag
    marks = [np.flatnonzero(row == tag).astype(np.int32) for row in rows]
    for _ in range(2):
        found = torch.from_numpy(await one.values(prefix, rows, marks)).softmax(-1)[:, 1]
        loop = []
        with torch.no_grad():
            for row in rows:
                ids = torch.from_numpy(np.concatenate((prefix, row))).long()[None]
                shares = score(body(input_ids=ids).last_hidden_state).softmax(-1) * (ids == tag)[..., None]
                loop.append(shares[shares != 0].view(-1, 2)[:, 1])
        assert (found - torch.cat(loop)).abs().max() < TOLERANCE
    one.engine.stop()
    one.engine.check()


async def test_tokens_of_an_encoder_are_the_librarys(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(**{**SIZES, "max_position_embeddings": 128}, num_labels=LABELS)
    plain = perturbed(AutoModelForTokenClassification.from_config(config, attn_implementation="eager"))
    plain.save_pretrained(tmp_path / "model")
    one = Tokens(tmp_path / "model", lambda ids: plain(input_ids=ids).logits, token_budget=64)
    prefix, rows, marks = some_rows(60)
    for whole in ([*rows], [np.concatenate((prefix, row)) for row in rows]):
        wanted = one.reference(prefix[:0], whole, marks)
        assert np.abs(await one.values(prefix[:0], whole, marks) - wanted).max() < TOLERANCE
    with pytest.raises(EngineError, match="`prefix` must be empty"):
        await one.values(prefix, rows, marks)
    one.engine.stop()
    one.engine.check()


@pytest.mark.parametrize(
    ("positions", "words"),
    [([], "ascending places"), ([3, 2], "ascending places"), ([0, 9], "ascending places"), ([0, 1], "at least one")],
)
async def test_bad_positions_are_refused_by_name(
    tokens: Callable[..., Tokens], positions: list[int], words: str
) -> None:
    one = tokens("llama")
    ids, starts = np.arange(9, dtype=np.int32), np.array([0, 4, 9], np.int32)
    request = PoolingRequest(
        request_id="r",
        prefix=ids[:0],
        ids=ids,
        starts=starts,
        task=PoolingTask.TOKEN_CLASSIFY,
        positions=np.array(positions, np.int32),
    )
    with pytest.raises(EngineError, match=f"`positions` must be {words}"):
        await one.engine.pooling(request)
