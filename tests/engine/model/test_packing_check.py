"""Tests what is refused, with its reason; and faults of attention that the packing check must see."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.attention.interface import NO_SOFTCAP, NO_WINDOW, AttentionCall, AttentionStep
from engine.attention.torch_backend import TorchAttention
from engine.batch.input_batch import InputBatch, ScheduledSequence, StepKind
from engine.config import EngineConfig
from engine.model.checkpoint import read_config
from engine.model.compatibility import UnsupportedModel, check_config
from engine.model.hf_model import HFModel
from tests.support.model_folders import write_json

ENGINE = EngineConfig(kv_slots=64)
SMALL = {
    "vocab_size": 111,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FEW = {"vocab_size": 111, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
T = transformers
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: T.BloomConfig(vocab_size=111, hidden_size=64, n_layer=2, n_head=4), "attention interface"),
    "falcon": (lambda: T.FalconConfig(**FEW), "attention interface"),
    "falcon with alibi": (lambda: T.FalconConfig(**FEW, alibi=True), "attention interface"),
    "mamba": (
        lambda: T.MambaConfig(vocab_size=111, hidden_size=64, num_hidden_layers=2, state_size=8),
        "linear_attention|attention interface",
    ),
    "recurrent_gemma": (
        lambda: T.RecurrentGemmaConfig(**{**SMALL, "num_key_value_heads": 1}, lru_width=64),
        "not one call of each of its 4 layers",
    ),
    "qwen3_next": (lambda: T.Qwen3NextConfig(**SMALL, **MOE, **LINEAR, head_dim=16), "linear_attention"),
    "falcon_h1": (
        lambda: T.FalconH1Config(**SMALL, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16),
        "hybrid",
    ),
    "llama4_text": (
        lambda: T.Llama4TextConfig(**SMALL, head_dim=16, num_local_experts=2, attention_chunk_size=8),
        "chunked",
    ),
    "diffllama": (lambda: T.DiffLlamaConfig(**SMALL), "8 calls"),
    "doge": (lambda: T.DogeConfig(**SMALL), "attention mask of its own"),
    "dynamic rope": (
        lambda: T.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rotary embedding is dynamic",
    ),
    "longrope": (
        lambda: T.Phi3Config(**SMALL, pad_token_id=0, original_max_position_embeddings=64, rope_parameters=dict(LONG)),
        "longrope.*at most 64. Given: 128",
    ),
    "t5": (
        lambda: T.T5Config(vocab_size=111, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16),
        "encoder-decoder",
    ),
    "gptq": (lambda: T.LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
    "awq": (lambda: T.LlamaConfig(**SMALL, quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_packing_would_get_wrong_is_refused_by_name_and_reason(name: str) -> None:
    make, reason = REFUSED[name]
    config = make()
    kind = T.AutoModelForSeq2SeqLM if config.is_encoder_decoder else T.AutoModelForCausalLM
    module = kind.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModel, match=reason) as error:
        HFModel(module, ENGINE, max_model_len=128)
    assert error.value.architecture == config.model_type
    assert f"`{config.model_type}` is not supported: " in str(error.value)


OFFSET = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OFFSET)
def test_a_decoder_whose_positions_do_not_begin_at_0_is_refused(
    tiny_models: Any, name: str, dtype: torch.dtype
) -> None:
    config = T.CONFIG_MAPPING[name](**FEW, intermediate_size=96, max_position_embeddings=130, is_decoder=True)
    with pytest.raises(UnsupportedModel, match=r"positions that begin at 0.* change its rows.*pad_token_id \+ 1"):
        HFModel(tiny_models.of(config).to(dtype), ENGINE, max_model_len=64)


MASKED: dict[str, tuple[Callable[..., Any], str]] = {  # the library's mask has the window; no attention call passes it
    "phimoe": (lambda **more: T.PhimoeConfig(**SMALL, num_local_experts=4, **more), "None"),
    "qwen2_moe": (
        lambda **more: T.Qwen2MoeConfig(**SMALL, **MOE, use_sliding_window=True, max_window_layers=2, **more),
        "sliding_attention",
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_window_that_only_the_librarys_mask_knows_bounds_the_length(tiny_models: Any, name: str) -> None:
    make, kind = MASKED[name]
    for window in (8, 100):  # the packing check's sequences are longer than one, and shorter than the other
        module = tiny_models.of(make(sliding_window=window))
        reason = rf"`sliding_window`: {window}, `layer_types`: {kind}.*passes: none.*at most {window}. Given: 128"
        with pytest.raises(UnsupportedModel, match=reason):
            HFModel(module, ENGINE, max_model_len=128)
        assert HFModel(module, ENGINE, max_model_len=window).max_model_len == window


def test_a_sliding_layer_whose_call_has_no_window_is_refused(tiny_models: Any) -> None:
    types = ["full_attention"] * 3 + ["sliding_attention"]
    module = tiny_models.of(T.LlamaConfig(**SMALL, layer_types=types, sliding_window=100))
    with pytest.raises(UnsupportedModel, match=r"layer 3 must pass.*100 \(.*It passes: none.*at most 100. Given: 128"):
        HFModel(module, ENGINE, max_model_len=128)


@pytest.mark.parametrize("window", [8, 100, 4096])
def test_a_window_that_the_library_ignores_refuses_no_model(tiny_models: Any, window: int) -> None:
    model = HFModel(tiny_models.of(T.LlamaConfig(**SMALL, sliding_window=window)), ENGINE, max_model_len=128)
    assert {(call.window, call.mask_window) for call in model.probed.calls} == {(NO_WINDOW, NO_WINDOW)}


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["su", "foo"])
def test_an_unknown_rotary_embedding_is_refused_by_its_field(tmp_path: Path, field: str, kind: str) -> None:
    config = T.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).to_dict()
    del config["rope_parameters"]
    write_json(tmp_path, "config.json", config | {field: {"type": kind, "rope_theta": 1e4, "factor": 2.0}})
    allowed = "`rope_parameters.rope_type` must be one of default, linear, llama3, longrope, proportional, yarn"
    with pytest.raises(UnsupportedModel, match=rf"{allowed}. Given: {kind}\."):
        read_config(tmp_path, None)


def test_a_rotary_embedding_of_a_layer_type_is_refused_by_its_field() -> None:
    ropes = {"full_attention": {"rope_type": "foo"}, "sliding_attention": {"rope_type": "default"}}
    config = T.Gemma3TextConfig(**SMALL, head_dim=16)
    config.rope_parameters = ropes
    with pytest.raises(UnsupportedModel, match=r"`rope_parameters.full_attention.rope_type` must be.*Given: foo\."):
        check_config(config)


def test_longrope_within_its_original_length_is_served(tiny_models: Any) -> None:
    module = tiny_models.module("phi3", original_max_position_embeddings=64, rope_parameters=dict(LONG))
    assert HFModel(module, ENGINE, max_model_len=64).max_model_len == 64


def test_refusals_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(UnsupportedModel("bloom", "no interface")))  # noqa: S301
    assert (error.architecture, str(error)) == ("bloom", "`bloom` is not supported: no interface.")


class _Faulty(TorchAttention):
    """Right attention, but for one fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def plan(self, batch: InputBatch) -> AttentionStep:
        if self._fault == "neighbours":
            batch = _with_a_neighbours_token(batch)
        if self._fault == "unwritten slots":
            batch = batch._replace(kv_indices=torch.zeros_like(batch.kv_indices))
        if self._fault == "order":
            batch = batch._replace(single=False, write_slots=batch.write_slots.flip(0))
        return _FaultyStep(super().plan(batch), self._fault)


class _FaultyStep:
    def __init__(self, right: AttentionStep, fault: str) -> None:
        self._right, self._fault = right, fault

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._fault == "window":
            call = call._replace(window=NO_WINDOW)
        if self._fault == "wide window" and call.window != NO_WINDOW:
            call = call._replace(window=call.window + 1)
        if self._fault == "soft cap":
            call = call._replace(softcap=NO_SOFTCAP)
        if self._fault == "sinks":
            call = call._replace(sinks=None)
        return self._right.attend(call)


def _with_a_neighbours_token(batch: InputBatch) -> InputBatch:
    """Every sequence but the first also sees the last token of the one before it, as its first."""
    edges = batch.kv_indptr.tolist()
    indices = [batch.kv_indices[first:last] for first, last in pairwise(edges)]
    wrong = [indices[0]] + [torch.cat([before[-1:], own]) for before, own in pairwise(indices)]
    counts = torch.tensor([0, *map(len, wrong)], dtype=torch.int32)
    return batch._replace(kv_indices=torch.cat(wrong), kv_indptr=counts.cumsum(0, dtype=torch.int32))


FAULTS = {
    "neighbours": ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "qwen3_moe"),
    "order": ("llama",),
    "unwritten slots": ("llama",),
    "window": ("mistral", "gemma2", "gpt_oss"),
    "wide window": ("mistral", "gemma2", "gpt_oss"),
    "soft cap": ("gemma2",),
    "sinks": ("gpt_oss",),
}


@pytest.mark.full(keep=5)
@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, names in FAULTS.items() for name in names])
def test_the_packing_check_sees_a_planted_fault(tiny_models: Any, fault: str, name: str) -> None:
    changes = {"attn_logit_softcapping": 2.0} if fault == "soft cap" else {}
    with pytest.raises(UnsupportedModel, match="packed steps change its rows"):
        HFModel(tiny_models.module(name, **changes), ENGINE, backend=_Faulty(fault))
    HFModel(tiny_models.module(name, **changes), ENGINE, backend=_Faulty("none"))


def test_a_packed_state_outside_of_attention_is_seen(tiny_models: Any) -> None:
    """A layer that mixes neighbouring tokens of the packed order, as a convolution would."""
    module = tiny_models.module("llama")
    layer = module.model.layers[1].mlp
    right = layer.forward
    layer.forward = lambda hidden: right(hidden) + 0.1 * right(hidden).roll(1, dims=1)
    with pytest.raises(UnsupportedModel, match="packed steps change its rows"):
        HFModel(module, ENGINE)


def test_projections_that_must_not_be_merged_are_found_after_merging(tiny_models: Any) -> None:
    """Keys read another input than queries: apart this is right, merged it is not."""
    module = tiny_models.module("llama")
    module.model.layers[2].self_attn.k_proj.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    HFModel(copy.deepcopy(module), replace(ENGINE, fuse_projections=False, restrict_last_layer=False))
    with pytest.raises(UnsupportedModel, match="packed steps change its rows"):
        HFModel(module, replace(ENGINE, fuse_projections=True))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ("llama", "gpt_oss", "gemma2"))
def test_half_precision_passes_its_own_bound_and_faults_do_not(tiny_models: Any, name: str) -> None:
    HFModel(tiny_models.module(name).to(torch.bfloat16), ENGINE)
    with pytest.raises(UnsupportedModel, match="packed steps change its rows"):
        HFModel(tiny_models.module(name).to(torch.bfloat16), ENGINE, backend=_Faulty("neighbours"))


def test_a_head_that_is_no_plain_matrix_is_found_out(tiny_models: Any) -> None:
    module = tiny_models.module("llama")
    right = module.lm_head.forward
    module.lm_head.forward = lambda hidden: right(hidden) ** 2
    assert HFModel(module, ENGINE).head is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [("llama", 1.0, 0.0), ("cohere", 0.0625, 0.0), ("granite", 0.25, 0.0), ("gemma2", 1, 30)],
)
def test_scale_and_soft_cap_of_the_head_are_measured(
    tiny_models: Any, name: str, scale: float, softcap: float, dtype: torch.dtype
) -> None:
    head = HFModel(tiny_models.module(name).to(dtype), ENGINE).head
    assert head is not None
    assert (head.scale, head.softcap) == (scale, softcap)


@pytest.mark.parametrize("name", ["cohere", "gemma2", "granite"])
def test_the_head_gives_the_bits_of_the_models_own_rows(tiny_models: Any, name: str) -> None:
    changes = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 10.0}}.get(name, {})
    model = HFModel(tiny_models.module(name, **changes), replace(ENGINE, trace_base=False))
    ids, table = np.arange(41, dtype=np.int32), torch.zeros((1, 1), dtype=torch.int32)
    step = [ScheduledSequence(0, ids[:0], ids + 1, ids, ids)]
    own = model.forward(StepKind.SCORE, step, table)
    assert model.head is not None
    assert torch.equal(model.head.rows(model._hidden(StepKind.SCORE, step, table)), own)
