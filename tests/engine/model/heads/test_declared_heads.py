"""Heads that a file declares, against torch's own arithmetic over the library's hidden states."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.model.checkpoint import audit_files, read_config
from engine.model.heads.head_declaration import BadDeclaration, read_declaration
from engine.model.heads.info import HeadKind
from engine.model.loader import load_model
from engine.model.model_folder import BadCheckpoint
from engine.requests import Float32s, Int32s, PoolingRequest
from tests.support.head_models import config_of, perturbed, save, save_tokenizer

TOLERANCE = 1e-5
HIDDEN, LABELS, WIDTH = 64, 3, 16
LENGTHS = (13, 1, 40, 7, 90, 3)
FAMILIES = ("llama", "gemma2", "qwen3_moe", "gpt2")
MARK = 257  # </s> of the tests' tokenizer
FORMS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {  # declaration, shapes by role
    "linear": ({"head": "linear", "reads": "last"}, {"weight": (LABELS, HIDDEN), "bias": (LABELS,)}),
    "linear of one number": ({"head": "linear", "reads": "last", "temperature": 0.7}, {"weight": (1, HIDDEN)}),
    "mean": ({"head": "linear", "reads": "mean"}, {"weight": (LABELS, HIDDEN)}),
    "layernorm": (
        {"head": "layernorm_linear", "reads": "last", "temperature": 2.5, "norm_eps": 0.01},
        {
            "norm_weight": (HIDDEN,),
            "norm_bias": (HIDDEN,),
            "weight": (LABELS, HIDDEN),
            "bias": (LABELS,),
        },
    ),
    "marked": (
        {"head": "layernorm_linear", "reads": "marked", "mark": "</s>"},
        {"norm_weight": (HIDDEN,), "weight": (LABELS, HIDDEN)},
    ),
    "pointer": (
        {"head": "pointer", "mark": "</s>", "temperature": 4.0},
        {
            "query_weight": (WIDTH, HIDDEN),
            "query_bias": (WIDTH,),
            "key_weight": (WIDTH, HIDDEN),
            "key_bias": (WIDTH,),
        },
    ),
}


def declare(folder: Path, form: str, *, own: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a declaration and its tensors beside the model, or among its own tensors; returns the declaration."""
    fields, shapes = FORMS[form]
    torch.manual_seed(1)
    tensors = {f"decision.{role}": (torch.randn(shape) * 0.5).to(dtype) for role, shape in shapes.items()}
    content = {**fields, "tensors": {role: f"decision.{role}" for role in shapes}}
    if own:
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, {"format": "pt"})
    else:
        save_file(tensors, folder / "decision.safetensors")
        content["weights"] = "decision.safetensors"
    declared = folder / "decision.yaml"
    declared.write_text(yaml.safe_dump(content))
    return declared


def torch_head(folder: Path, form: str, *, own: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head's arithmetic by torch's functions: hidden rows to numbers."""
    fields, shapes = FORMS[form]
    tensors = load_file(folder / ("model.safetensors" if own else "decision.safetensors"))
    value = {role: tensors[f"decision.{role}"].float() for role in shapes}
    temperature = fields.get("temperature", 1.0)

    def numbers(hidden: torch.Tensor) -> torch.Tensor:
        if form == "pointer":
            query = F.linear(hidden, value["query_weight"], value["query_bias"])
            return torch.cat((query / temperature, F.linear(hidden, value["key_weight"], value["key_bias"])), -1)
        if "norm_weight" in value:
            eps = fields.get("norm_eps", 1e-5)
            hidden = F.layer_norm(hidden, (HIDDEN,), value["norm_weight"], value.get("norm_bias"), eps)
        found: torch.Tensor = F.linear(hidden, value["weight"], value.get("bias")) / temperature
        return found

    return numbers


class Declared:
    """The engine of a folder with a declared head, and what the library and torch give for the same rows."""

    def __init__(self, folder: Path, form: str, *, own: bool = False, **engine: Any) -> None:
        options = EngineConfig(**{"kv_slots": 700, "seed": 3, **engine})
        self.model: Any = load_model(ModelConfig(path=folder, device="cpu", head=Path("decision.yaml")), options)
        self.form, self.numbers = form, torch_head(folder, form, own=own)
        self.body = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        self.engine = Engine(self.model, options)
        self.engine.start()

    @property
    def by_token(self) -> bool:
        return self.form in ("marked", "pointer")

    def answered(self, row: Int32s) -> list[int]:
        """The places of a row that are read: the marked tokens, and the last one of a pointer."""
        places = set(np.flatnonzero(row == MARK).tolist())
        return sorted(places | ({len(row) - 1} if self.form == "pointer" else set()))

    async def values(self, prefix: Int32s, rows: list[Int32s]) -> Float32s:
        starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        places = [start + np.array(self.answered(row), np.int32) for start, row in zip(starts[:-1], rows, strict=True)]
        request = PoolingRequest(
            request_id="r",
            prefix=prefix,
            ids=np.concatenate(rows),
            starts=starts,
            task=self.model.pooling_head.task,
            positions=np.concatenate(places).astype(np.int32) if self.by_token else np.zeros(0, np.int32),
        )
        found = await self.engine.pooling(request)
        assert not found.status.any()
        return found.values

    def reference(self, prefix: Int32s, rows: list[Int32s]) -> Float32s:
        found = []
        for row in rows:
            ids = torch.from_numpy(np.concatenate((prefix, row))).long()[None]
            with torch.no_grad():
                hidden = self.body(input_ids=ids).last_hidden_state[0].float()
                if self.by_token:
                    read = hidden[[len(prefix) + place for place in self.answered(row)]]
                else:
                    read = hidden.mean(0, keepdim=True) if self.form == "mean" else hidden[-1:]
                found.append(self.numbers(read))
        return torch.cat(found).numpy()

    async def difference(self) -> float:
        """The largest difference from torch: rows packed behind a prefix, the prefix cached, and alone."""
        rng = np.random.default_rng(0)
        prefix, *rows = (rng.integers(3, 250, size).astype(np.int32) for size in LENGTHS)
        for row in rows:
            row[:: max(1, len(row) // 4)] = MARK
        wanted = self.reference(prefix, rows)
        whole = [np.concatenate((prefix, row)) for row in rows]
        packed = [await self.values(prefix, rows) for _ in range(2)] if self.form != "mean" else []
        packed.append(await self.values(prefix[:0], whole))
        alone = np.concatenate([await self.values(prefix[:0], [row]) for row in whole])
        return float(max(np.abs(found - wanted).max() for found in (*packed, alone)))


@pytest.fixture
def declared(tmp_path: Path) -> Iterator[Callable[..., Declared]]:
    """`declared(form, family, own=, **engine)`."""
    made: list[Declared] = []

    def make(form: str, family: str = "llama", *, own: bool = False, **engine: Any) -> Declared:
        folder = tmp_path / f"{family}{len(made)}"
        save(body_of(family), folder)
        declare(folder, form, own=own)
        made.append(Declared(folder, form, own=own, **engine))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()
        one.engine.check()


def body_of(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return perturbed(AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager"))


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
async def test_numbers_are_torchs(declared: Callable[..., Declared], form: str, family: str) -> None:
    one = declared(form, family)
    assert await one.difference() < TOLERANCE
    kinds = {"marked": HeadKind.TOKEN, "pointer": HeadKind.POINTER}
    assert one.model.pooling_head.kind is kinds.get(form, HeadKind.SEQUENCE)
    assert await declared(form, family, own=True).difference() < TOLERANCE
    assert await declared(form, family, token_budget=9, prefix_cache=False).difference() < TOLERANCE  # in chunks


FAULTS = ("token before", "head in bf16", "labels reversed", "no temperature", "another eps", "keys for queries")


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_comparison_finds_planted_faults(
    declared: Callable[..., Declared], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one = declared("pointer" if fault == "keys for queries" else "layernorm")
    head, hidden_of = one.model._pooler, one.model._hidden
    if fault == "token before":

        def hidden(kind: Any, sequences: Any, table: Any) -> torch.Tensor:
            rows: torch.Tensor = hidden_of(
                kind, [run._replace(rows=np.maximum(run.rows - 1, 0)) for run in sequences], table
            )
            return rows

        monkeypatch.setattr(one.model, "_hidden", hidden)
    elif fault == "head in bf16":
        head.layers[1].weight.data = head.layers[1].weight.data.bfloat16().float()
    elif fault == "labels reversed":
        head.layers[1].weight.data = head.layers[1].weight.data.flip(0)
    elif fault == "no temperature":
        head.layers[2].value.fill_(1.0)
    elif fault == "another eps":
        head.layers[0].eps = 1e-5
    else:
        head.layers.query, head.layers.key = head.layers.key, head.layers.query
    assert await one.difference() > TOLERANCE


async def test_an_encoder_takes_a_declared_head(tmp_path: Path) -> None:
    from transformers import BertConfig

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=260, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    save(perturbed(AutoModel.from_config(config, attn_implementation="eager")), tmp_path / "model")
    declare(tmp_path / "model", "mean")
    one = Declared(tmp_path / "model", "mean")
    assert one.model.pooling_head.encoder and await one.difference() < TOLERANCE
    one.engine.stop()
    one.engine.check()


def loaded_digest(folder: Path) -> str:
    config = ModelConfig(path=folder, device="cpu", head=Path("decision.yaml"))
    return str(load_model(config, EngineConfig(kv_slots=64)).weights_digest)


def test_the_digest_covers_tensors_and_declaration(tmp_path: Path) -> None:
    folder = save(body_of(), tmp_path / "model")
    file = declare(folder, "linear")
    first = loaded_digest(folder)
    assert loaded_digest(folder) == first
    content = yaml.safe_load(file.read_text())
    digests = {first}
    for change in ({"temperature": 2.0}, {"labels": ["a", "b", "c"]}, {"labels": ["c", "b", "a"]}, {"reads": "mean"}):
        file.write_text(json.dumps(content | change))
        digests.add(loaded_digest(folder))
    file.write_text(json.dumps(content))
    tensors = load_file(folder / "decision.safetensors")
    tensors["decision.bias"][0] += 1e-3
    save_file(tensors, folder / "decision.safetensors")
    assert len(digests | {loaded_digest(folder)}) == 6


def test_half_precision_tensors_are_computed_in_float32(tmp_path: Path) -> None:
    folder = save(body_of(), tmp_path / "model")
    declare(folder, "layernorm", dtype=torch.bfloat16)
    model: Any = load_model(ModelConfig(path=folder, device="cpu", head=Path("decision.yaml")), EngineConfig())
    hidden = torch.randn(5, HIDDEN)
    assert (model._pooler(hidden) - torch_head(folder, "layernorm")(hidden)).abs().max() < TOLERANCE


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", ["deleted", "renamed", "another shape", "integers", "one beside"])
def test_every_tensor_of_a_head_is_needed_as_it_is(tmp_path: Path, form: str, damage: str) -> None:
    folder = save(body_of(), tmp_path / "model")
    declare(folder, form)
    config = ModelConfig(path=folder, device="cpu", head=Path("decision.yaml"))
    whole = load_file(folder / "decision.safetensors")
    for name in whole:
        tensors = dict(whole)
        value = tensors[name]
        if damage in ("deleted", "renamed"):
            del tensors[name]
        if damage == "renamed":
            tensors[f"{name}_"] = value
        if damage == "another shape":
            tensors[name] = value[..., :-1].clone()
        if damage == "integers":
            tensors[name] = value.to(torch.int8)
        if damage == "one beside":
            tensors[f"{name}_2"] = value.clone()
        save_file(tensors, folder / "decision.safetensors")
        with pytest.raises(BadDeclaration, match="decision"):
            audit_files(folder, read_config(folder, None, Path("decision.yaml")), config)
        if name == next(iter(whole)):
            with pytest.raises(BadDeclaration, match="decision"):
                load_model(config, EngineConfig(kv_slots=64))


GOOD = {"head": "linear", "reads": "last", "tensors": {"weight": "decision.weight", "bias": "decision.bias"}}
GOOD |= {"weights": "decision.safetensors"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": "mlp"}, "`head` in .* must be one of linear, layernorm_linear, pointer. Given: mlp"),
        ({"head": None}, "`head` in .* Given: nothing"),
        ({"reads": "first"}, "`reads` in .* must be one of last, mean, cls, marked. Given: first"),
        ({"reads": "marked"}, "`mark` in .* must be a text. Given: nothing"),
        ({"mark": "</s>"}, "`mark` in .* must be absent: the head reads last"),
        ({"reads": "marked", "mark": "<|choice|>"}, r"`mark` in .* must be a token of .* Given: <\|choice\|>"),
        ({"pooling": "last"}, "`pooling` in .* must be absent: the fields are head, reads"),
        ({"norm_eps": 1e-6}, "`norm_eps` in .* must be absent"),
        ({"temperature": 0}, "`temperature` in .* must be a number over 0. Given: 0"),
        ({"temperature": True}, "`temperature`"),
        ({"temperature": "1"}, "`temperature`"),
        ({"labels": ["a", "b"]}, "`labels` in .* must be the 3 labels .* Given: 2"),
        ({"labels": ["a", "a", "b"]}, "`labels` in .* different texts"),
        ({"labels": "abc"}, "`labels`"),
        ({"problem_type": "ranking"}, "`problem_type` in .* must be one of regression"),
        ({"tensors": {"weight": "decision.weight"}}, "leaves out decision.bias"),
        ({"tensors": {"bias": "decision.bias"}}, "`tensors` in .* must be a mapping from weight"),
        ({"tensors": {**GOOD["tensors"], "scale": "x"}}, "`tensors`"),  # type: ignore[dict-item]
        ({"tensors": {"weight": "decision.weight", "bias": "decision.weight"}}, "different tensors"),
        ({"tensors": ["decision.weight"]}, "`tensors` in .* Given: list"),
        ({"weights": "decision.bin"}, r"`weights` in .* must be a \*.safetensors file"),
        ({"weights": "other.safetensors"}, "`weights` in .* must be a file"),
        ({"weights": None}, "names the tensor decision.*, and the model's files lack it"),
        ({"head": "pointer"}, "`reads` in .* must be absent: a pointer"),
    ],
)
def test_a_wrong_declaration_is_refused_by_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = save(body_of(), tmp_path / "model")
    declare(folder, "linear")
    content = {name: value for name, value in (GOOD | change).items() if value is not None}
    (folder / "decision.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(BadDeclaration, match=words):
        audit_files(
            folder,
            read_config(folder, None, Path("decision.yaml")),
            ModelConfig(path=folder, head=Path("decision.yaml")),
        )


@pytest.mark.parametrize("text", ["- a", "head: [", "\x00", "", "\xff"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "decision.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadDeclaration, match=r"`model.head`: .*decision.yaml must be"):
        read_declaration(file)


def test_a_name_that_is_no_file_lists_what_there_is(tmp_path: Path) -> None:
    folder = save(body_of(), tmp_path / "model")
    with pytest.raises(BadDeclaration, match=r"auto, lm, sequence, token, pooled, or a file"):
        read_config(folder, None, Path("sequnce"))


def test_random_weights_and_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = save(body_of(), tmp_path / "model")
    declare(folder, "linear")
    random = ModelConfig(path=folder, device="cpu", head=Path("decision.yaml"), random_weights=True)
    with pytest.raises(BadDeclaration, match=r"`model.random_weights` must be false"):
        load_model(random, EngineConfig(kv_slots=64))
    tensors = load_file(folder / "decision.safetensors")
    tensors["decision.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "decision.safetensors")
    with pytest.raises(BadCheckpoint, match="not finite"):
        load_model(ModelConfig(path=folder, device="cpu", head=Path("decision.yaml")), EngineConfig(kv_slots=64))


def test_the_body_is_audited_as_without_a_declaration(tmp_path: Path) -> None:
    folder = save(body_of(), tmp_path / "model")
    declare(folder, "linear", own=True)
    file = folder / "model.safetensors"
    whole = load_file(file)
    config = ModelConfig(path=folder, head=Path("decision.yaml"))
    for changed in (
        {name: value for name, value in whole.items() if name != "model.layers.1.mlp.up_proj.weight"},
        whole | {"score.weight": torch.zeros(1, HIDDEN)},
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(BadCheckpoint):
            audit_files(folder, read_config(folder, None, Path("decision.yaml")), config)
    save_tokenizer(folder)
