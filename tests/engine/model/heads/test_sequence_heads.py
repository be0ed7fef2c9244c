"""Sequence heads against the library's own classes: every family that packs, every way in which a row is computed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.engine import Engine
from engine.model.architectures import find_kind
from engine.model.checkpoint import read_config
from engine.model.compatibility import UnsupportedModel
from engine.model.heads.info import HeadKind
from engine.model.loader import UnsupportedDraft, check_pair, load_model, load_models
from engine.model.model_folder import BadCheckpoint
from engine.requests import Float32s, Int32s, PoolingRequest, PoolingTask
from tests.support.head_models import FAMILIES, config_of, save, sequence_classifier
from tests.support.model_folders import OTHER_SERVED, edit_config

TOLERANCE = 1e-5
LABELS = 3
FAST = ("llama", "qwen3", "gemma2")
Check = Callable[..., Any]


class Served:
    """A folder's engine, and the library's model with the same weights."""

    def __init__(self, folder: Path, plain: Any, dtype: Any = "auto", **engine: Any) -> None:
        options = EngineConfig(**{"kv_slots": 700, "seed": 3, **engine})
        self.plain = plain
        self.model: Any = load_model(ModelConfig(path=folder, device="cpu", dtype=dtype), options)
        self.engine = Engine(self.model, options)

    async def values(self, prefix: Int32s, rows: list[Int32s]) -> Float32s:
        request = PoolingRequest(
            request_id="r",
            prefix=prefix,
            ids=np.concatenate(rows),
            starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
            task=PoolingTask.CLASSIFY,
        )
        found = await self.engine.pooling(request)
        assert not found.status.any()
        return found.values

    def reference(self, prefix: Int32s, rows: list[Int32s]) -> Float32s:
        """The library's logits of each row by itself."""
        with torch.no_grad():
            ids = [torch.from_numpy(np.concatenate((prefix, row))).long()[None] for row in rows]
            return np.concatenate([self.plain(input_ids=one).logits.float().numpy() for one in ids])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`served(family, change=..., engine={...}, body=..., **configuration)`: `change` edits the saved folder, and
    `body` is the dtype in which it is loaded."""
    made: list[Served] = []

    def make(
        family: str = "llama",
        change: Callable[[Path], None] | None = None,
        engine: dict[str, Any] | None = None,
        body: str = "auto",
        **config: Any,
    ) -> Served:
        plain = sequence_classifier(config_of(family, **{"num_labels": LABELS, **config}))
        folder = save(plain, tmp_path / str(len(made)))
        if change is not None:
            change(folder)
        made.append(Served(folder, plain, body, **(engine or {})))
        made[-1].engine.start()
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()
        one.engine.check()


def some_rows(seed: int = 0) -> tuple[Int32s, list[Int32s]]:
    rng = np.random.default_rng(seed)
    prefix, *rows = (rng.integers(0, 250, size).astype(np.int32) for size in (13, 1, 40, 7, 150, 3))
    return prefix, rows


async def difference(one: Served, seed: int = 0) -> float:
    """The largest difference from the library's logits: rows packed, behind a cached prefix, alone."""
    prefix, rows = some_rows(seed)
    wanted = one.reference(prefix, rows)
    packed = await one.values(prefix, rows)
    cached = await one.values(prefix, rows)
    alone = np.concatenate([await one.values(prefix[:0], [np.concatenate((prefix, row))]) for row in rows])
    return float(max(np.abs(found - wanted).max() for found in (packed, cached, alone)))


@pytest.mark.full(keep=len(FAST))
@pytest.mark.parametrize("family", (*FAST, *sorted(FAMILIES.keys() - set(FAST))))
async def test_logits_are_the_librarys_row_by_row(served: Callable[..., Served], family: str) -> None:
    assert await difference(served(family)) < TOLERANCE
    assert await difference(served(family, engine={"token_budget": 9, "prefix_cache": False})) < TOLERANCE  # in chunks


@pytest.mark.parametrize("fault", ["last position of the step", "first token", "head in bf16", "labels reversed"])
async def test_the_comparison_finds_planted_faults(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = served()
    model, head = one.model, one.model._pooler
    hidden_of = model._hidden

    def hidden(kind: Any, sequences: Any, table: Any) -> torch.Tensor:
        if fault == "first token":
            sequences = [run._replace(rows=np.zeros_like(run.rows)) for run in sequences]
        rows: torch.Tensor = hidden_of(kind, sequences, table)
        return rows[-1:].expand_as(rows) if fault == "last position of the step" and len(rows) else rows

    if fault == "head in bf16":
        head.layers.weight.data = head.layers.weight.data.bfloat16().float()
    if fault == "labels reversed":
        head.layers.weight.data = head.layers.weight.data.flip(0)
    monkeypatch.setattr(model, "_hidden", hidden)
    assert await difference(one) > TOLERANCE


@pytest.mark.parametrize("labels", [1, 2, 7])
async def test_any_number_of_labels(served: Callable[..., Served], labels: int) -> None:
    one = served(num_labels=labels)
    assert one.model.pooling_head.width == labels
    assert await difference(one) < TOLERANCE


def edit_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


async def test_a_bias_in_the_checkpoint_is_added(served: Callable[..., Served]) -> None:
    bias = torch.tensor([1.0, -2.0, 3.0])
    one = served(change=edit_weights(lambda tensors: tensors.update({"score.bias": bias})))
    prefix, rows = some_rows()
    wanted = one.reference(prefix, rows) + bias.numpy()
    assert np.abs(await one.values(prefix, rows) - wanted).max() < TOLERANCE


async def test_a_float32_head_beside_a_half_body_keeps_its_bits(served: Callable[..., Served]) -> None:
    """The library would round the head to the body's dtype."""
    weight = torch.randn(LABELS, 64)
    one = served(change=edit_weights(lambda tensors: tensors.update({"score.weight": weight})), body="bfloat16")
    head = one.model._pooler.layers.weight
    assert one.model.dtype == torch.bfloat16
    assert head.dtype == torch.float32
    assert torch.equal(head, weight)
    assert not torch.equal(head, head.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
async def test_a_half_head_is_computed_in_float32(served: Callable[..., Served], dtype: torch.dtype) -> None:
    one = served(
        change=edit_weights(lambda tensors: tensors.update({"score.weight": tensors["score.weight"].to(dtype)}))
    )
    one.plain.score.weight.data = one.plain.score.weight.data.to(dtype).float()
    assert await difference(one) < TOLERANCE


def test_no_padding_token_is_needed(served: Callable[..., Served]) -> None:
    assert served().model.module.config.pad_token_id is None


def test_names_and_problem_type_come_from_the_configuration(served: Callable[..., Served]) -> None:
    labels = {0: "bad", 1: "so-so", 2: "good"}
    head = served(id2label=labels, problem_type="multi_label_classification").model.pooling_head
    assert head[:4] == (HeadKind.SEQUENCE, 3, ("bad", "so-so", "good"), "multi_label_classification")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("score.weight"), "lack score.weight"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(2, 64)}), r"score.weight has shape \[2, 64\]"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(3, 64, dtype=torch.int8)}), "quantised"),
        (lambda tensors: tensors.update({"score.bias": torch.ones(2)}), r"`score.bias` of shape \[3\]"),
        (lambda tensors: tensors.update({"classifier.weight": torch.ones(3, 64)}), "hold classifier.weight"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_checkpoint_that_is_not_the_head_is_refused_by_name(
    served: Callable[..., Served], change: Callable[[Any], None], words: str
) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        served(change=edit_weights(change))


def test_the_head_is_chosen_by_architecture_or_by_name(tmp_path: Path) -> None:
    folder = save(sequence_classifier(config_of("llama")), tmp_path / "model")
    assert find_kind(read_config(folder, None)).head is HeadKind.SEQUENCE
    with pytest.raises(BadCheckpoint, match=r"LlamaForCausalLM.*lack lm_head.weight.*score.weight"):
        load_model(ModelConfig(path=folder, device="cpu", head="lm"), EngineConfig(kv_slots=100))
    names = ["LlamaForCausalLM", "LlamaForSequenceClassification"]
    edit_config(folder, architectures=names)
    with pytest.raises(UnsupportedModel, match=r"`model\.head`"):
        read_config(folder, None)
    assert find_kind(read_config(folder, None, "sequence")).head is HeadKind.SEQUENCE
    assert find_kind(read_config(folder, None, "lm")).head is HeadKind.LM


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2_token", "score.weight"),
        ("process_reward", "score.0.bias"),
        ("bert_cross_encoder", "bert.pooler.dense.weight"),
        ("bert_tokens", "classifier.weight"),
    ],
)
def test_a_head_with_values_that_are_not_finite_is_refused(tmp_path: Path, name: str, tensor: str) -> None:
    folder = OTHER_SERVED[name](tmp_path)
    edit_weights(lambda tensors: tensors.update({tensor: tensors[tensor] * float("nan")}))(folder)
    with pytest.raises(BadCheckpoint, match=r"head's `.*` in .* has values that are not finite\. Download"):
        load_model(ModelConfig(path=folder, device="cpu"), EngineConfig(kv_slots=200))


def test_a_head_needs_no_draft(tmp_path: Path) -> None:
    folder = save(sequence_classifier(config_of("llama")), tmp_path / "model")
    speculation = SpeculationConfig(method="draft_model", draft=str(folder))
    with pytest.raises(UnsupportedDraft, match="sequence head"):
        load_models(ModelConfig(path=folder, device="cpu"), EngineConfig(kv_slots=100, speculation=speculation))


def test_a_model_with_a_head_is_no_draft(tmp_path: Path) -> None:
    draft = save(sequence_classifier(config_of("llama")), tmp_path / "draft")
    target = save(AutoModelForCausalLM.from_config(config_of("llama")), tmp_path / "model")
    engine = EngineConfig(kv_slots=100, speculation=SpeculationConfig(method="draft_model", draft=str(draft)))
    for check in (check_pair, load_models):
        with pytest.raises(UnsupportedDraft, match=r"a language model\. Given: .*draft, with a sequence head"):
            check(ModelConfig(path=target, device="cpu"), engine)
