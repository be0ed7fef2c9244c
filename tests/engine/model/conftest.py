"""Tiny random models, and a driver that runs sequences through a model in any steps and compares with the library."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.attention.interface import AttentionBackend
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import EngineConfig
from engine.model.hf_model import HFModel
from engine.requests import Int32s
from tests.engine.model import stand_in as flashinfer

SIX = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe")
VOCAB = 111
WINDOW = 7
LENGTH = 96
SLOTS = 331
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: LlamaConfig(**{**BASE, "head_dim": 16, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**BASE, "head_dim": 16, **more}),
    "mistral": lambda **more: MistralConfig(**{**BASE, "head_dim": 16, "sliding_window": WINDOW, **more}),
    "gemma2": lambda **more: Gemma2Config(
        **{**BASE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, **more}
    ),
    "gpt_oss": lambda **more: GptOssConfig(
        **{**BASE, **EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, **more}
    ),
    "qwen3_moe": lambda **more: Qwen3MoeConfig(
        **{**BASE, **EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **more}
    ),
    "cohere": lambda **more: CohereConfig(**{**BASE, **more}),
    "granite": lambda **more: GraniteConfig(**{**BASE, "logits_scaling": 4.0, **more}),
    "phi3": lambda **more: Phi3Config(**{**BASE, "pad_token_id": 0, **more}),
}


class TinyModels:
    """Random models with weights large enough that attention and routing matter."""

    def module(self, name: str, **changes: Any) -> Any:
        return self.of(CONFIGS[name](**changes))

    def of(self, config: Any, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return module.eval()

    def driver(
        self, name: str, *, backend: AttentionBackend | None = None, merge: bool = True, **changes: Any
    ) -> "Driver":
        return Driver(self.module(name, **changes), backend=backend, merge=merge)


class Driver:
    """Sequences over scattered slots of a pool full of NaN. `step` runs parts of them and compares every row."""

    def __init__(
        self,
        module: Any,
        *,
        backend: AttentionBackend | None = None,
        merge: bool = True,
        engine: EngineConfig | None = None,
    ) -> None:
        self.plain = copy.deepcopy(module)
        as_on_a_gpu = EngineConfig(
            kv_slots=SLOTS, fuse_projections=True, fused_norms=False, onednn_linear=False, trace_base=False
        )
        engine = engine or as_on_a_gpu
        if not merge:
            engine = replace(engine, fuse_projections=False, restrict_last_layer=False, skinny_gemm=False)
        self.model = HFModel(module, engine, backend=backend)
        for pool in (self.model.kv_storage.keys, self.model.kv_storage.values):
            for tensor in pool:
                tensor.fill_(float("nan"))
        self.table = torch.zeros((9, LENGTH), dtype=torch.int32, device=self.model.device)
        self._free = np.random.default_rng(1).permutation(np.arange(1, SLOTS)).astype(np.int32)
        self.ids: list[Int32s] = []
        self.slots: list[Int32s] = []

    def add(self, length: int, *, shares: tuple[int, int] | None = None) -> int:
        """A new sequence; `shares` (other, n) gives it the first n tokens, and their slots, of another."""
        rng = np.random.default_rng(len(self.ids) + 10)
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        slots, self._free = self._free[:length].copy(), self._free[length:]
        if shares is not None:
            other, common = shares
            ids[:common], slots[:common] = self.ids[other][:common], self.slots[other][:common]
        self.ids.append(ids)
        self.slots.append(slots)
        return len(self.ids) - 1

    def run(
        self, index: int, first: int, last: int, *, from_table: bool = False, rows: Any = None
    ) -> ScheduledSequence:
        """Tokens [first, last) of a sequence, all rows wanted unless told otherwise."""
        wanted = np.arange(last - first, dtype=np.int32) if rows is None else np.array(rows, np.int32)
        if from_table:
            self.table[index, first] = int(self.ids[index][first])
        ids = None if from_table else self.ids[index][first:last]
        return ScheduledSequence(index, self.slots[index][:first], self.slots[index][first:last], ids, wanted)

    def alone(self, index: int) -> torch.Tensor:
        """The library's logits [n, V] of a whole sequence, with its own attention and nothing else in the call."""
        ids = torch.from_numpy(self.ids[index]).long()[None].to(self.model.device)
        with torch.no_grad():
            logits: torch.Tensor = self.plain(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def error(self, kind: StepKind, sequences: list[ScheduledSequence]) -> float:
        """Runs a step; the largest difference of any row from `alone`, over the largest |logit|."""
        got = self.model.forward(kind, sequences, self.table).float()
        places = [len(run.context) + row for run in sequences for row in run.rows]
        whole = [run.slot for run in sequences for _ in run.rows]
        wanted = torch.stack([self.alone(index)[place] for index, place in zip(whole, places, strict=True)])
        assert got.shape == wanted.shape
        return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(scope="session")
def tiny_driver() -> type[Driver]:
    """Makes a driver of a module that is already on its device."""
    return Driver


@pytest.fixture(scope="session")
def tiny_models() -> Iterator[TinyModels]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TinyModels()
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[flashinfer.Wrapper]:
    flashinfer.put_in(monkeypatch)
    return flashinfer.Wrapper
