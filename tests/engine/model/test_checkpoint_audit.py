"""A folder is loaded with its own head and all its weights, or refused by name, by start-up and by `assay check`."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig, ModelConfig
from engine.model import checkpoint
from engine.model.checkpoint import read_config, read_model
from engine.model.checkpoint_audit import TensorHeader, audit_weights, check_loading_info, compare, read_headers
from engine.model.compatibility import UnsupportedModel
from engine.model.encoder.families import FAMILIES as ENCODER_FAMILIES
from engine.model.loader import load_model
from engine.model.model_folder import BadCheckpoint, ModelNotFound
from tests.engine.model.conftest import CONFIGS
from tests.support import head_models
from tests.support import model_folders as folders

CPU = torch.device("cpu")
REFUSALS = (ModelNotFound, BadCheckpoint, UnsupportedModel)


def load(folder: Path) -> Any:
    """Returns what a start-up loads, before its later checks."""
    return read_model(folder, read_config(folder, None), ModelConfig(path=folder), CPU)


def checked(folder: Path) -> list[str]:
    """Returns the errors of `assay check` on the model's files."""
    from deployments.cli.check import model as check_model  # needs packages that a machine for GPU tests may lack
    from deployments.config.app_args import AppArgs

    args = AppArgs.model_validate({"model": {"path": str(folder)}})
    _, findings = check_model.check(args, "args")
    return [one.message for one in findings if one.level == "error" and one.where.startswith("args.model.path")]


@pytest.mark.parametrize("name", folders.OTHER_HEADS)
def test_a_model_with_another_head_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, words, architecture = folders.OTHER_HEADS[name]
    folder = make(tmp_path / name)
    with pytest.raises(UnsupportedModel) as refused:
        load(folder)
    assert words in str(refused.value) and architecture in refused.value.architecture
    assert checked(folder) == [str(refused.value)]


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", folders.OTHER_SERVED)
def test_a_model_with_another_head_is_served_with_it(name: str, tmp_path: Path) -> None:
    folder = folders.OTHER_SERVED[name](tmp_path / name)
    assert checked(folder) == []
    model = load_model(ModelConfig(path=folder, device="cpu"), EngineConfig(kv_slots=100, token_budget=64))
    assert model.pooling_head is not None
    config = read_config(folder, None)
    for what, headers in mutants(read_headers(folder)):
        if not any(part in what for part in ("pooler", "cls.", "deleted lm_head")):
            with pytest.raises(BadCheckpoint):
                pytest.fail(f"{what}: taken as {compare(headers, config)}")


@pytest.mark.parametrize("name", folders.DAMAGED)
def test_files_that_are_not_the_models_are_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    make, words = folders.DAMAGED[name]
    folder = make(tmp_path / name)
    with pytest.raises(REFUSALS) as refused:
        load(folder)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert str(folder) in message and "\n" not in message
    assert checked(folder) == [message]


@pytest.mark.parametrize("name", folders.GOOD)
def test_a_language_model_is_loaded_however_it_was_saved(name: str, tmp_path: Path) -> None:
    folder = folders.GOOD[name](tmp_path / name)
    module = load(folder)
    assert checked(folder) == []
    elements = sum(one.numel() for one in module.parameters())
    assert audit_weights(folder, read_config(folder, None)).elements == elements


def test_a_folder_without_an_architecture_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folders.GOOD["no_architectures"](tmp_path / "model")
    with caplog.at_level(logging.WARNING, checkpoint.__name__):
        load(folder)
    assert [record.getMessage() for record in caplog.records if record.name == checkpoint.__name__] == [
        f"{folder}/config.json names no `architectures`: it is served as a language model."
    ]


def mutants(headers: dict[str, TensorHeader]) -> list[tuple[str, dict[str, TensorHeader]]]:
    """Each tensor deleted, renamed, or one longer, in turn."""
    found = []
    for name, one in headers.items():
        others = {key: value for key, value in headers.items() if key != name}
        found.append((f"{name} deleted", others))
        found.append((f"{name} renamed", {**others, f"{name}_": one}))
        found.append((f"{name} in another model's place", {**others, f"other.{name}": one}))
        longer = one._replace(shape=(one.shape[0] + 1, *one.shape[1:]))
        found.append((f"{name} longer", {**others, name: longer}))
    return found


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_change_of_every_tensor_is_refused(tiny_models: Any, name: str, tmp_path: Path) -> None:
    tiny_models.module(name, num_hidden_layers=1).save_pretrained(tmp_path)
    config = read_config(tmp_path, None)
    headers = read_headers(tmp_path)
    compare(headers, config)
    changes = mutants(headers)
    assert len(changes) == 4 * len(headers) and len(headers) >= 7
    for what, changed in changes:
        with pytest.raises(BadCheckpoint) as refused:
            pytest.fail(f"{what}: taken as {compare(changed, config)}")
        module = what.split()[0].removesuffix(".weight").rpartition(".")[2]
        named = (module, "experts.gate_up_proj")  # the library joins the experts' projections into one tensor
        assert any(name in str(refused.value) for name in named), what


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_every_change_of_every_tensor_of_a_classifier_is_refused(family: str, tmp_path: Path) -> None:
    """The head's too: renamed, it would be drawn at random."""
    made = head_models.sequence_classifier(head_models.config_of(family, num_hidden_layers=1, num_labels=2))
    made.save_pretrained(tmp_path)
    config, headers = read_config(tmp_path, None), read_headers(tmp_path)
    compare(headers, config)
    assert "score.weight" in headers
    for what, changed in mutants(headers):
        with pytest.raises(BadCheckpoint):
            pytest.fail(f"{what}: taken as {compare(changed, config)}")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", ["process_reward", "bert_cross_encoder", "qwen2_token", "bert_tokens"])
def test_every_change_of_every_tensor_of_other_heads_is_refused(name: str, tmp_path: Path) -> None:
    folder = folders.OTHER_SERVED[name](tmp_path / "model")
    config, headers = read_config(folder, None), read_headers(folder)
    compare(headers, config)
    assert any(key.startswith(("score", "classifier")) for key in headers)
    for what, changed in mutants(headers):
        with pytest.raises(BadCheckpoint):
            pytest.fail(f"{what}: taken as {compare(changed, config)}")


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("change", ["deleted", "renamed"])
def test_start_up_and_check_refuse_a_changed_file_alike(name: str, change: str, tmp_path: Path) -> None:
    folder = folders.save(tmp_path / "model", folders.llama())
    if change == "deleted":
        folders.without(folder, name)
    else:
        folders.renamed(folder, lambda key: f"{key}_" if key == name else key)
    with pytest.raises(BadCheckpoint) as refused:
        load(folder)
    assert checked(folder) == [str(refused.value)]


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mismatched"])
def test_what_the_library_reports_of_a_load_counts_too(fault: str, tmp_path: Path) -> None:
    module = load(folders.save(tmp_path / "model", folders.llama()))
    info: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    check_loading_info(info, module)
    key = "model.norm.weight"
    info[f"{fault}_keys"] = {(key, (1,), (2,))} if fault == "mismatched" else {key}
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight"):
        check_loading_info(info, module)


def test_a_head_that_is_not_tied_after_the_load_is_found(tmp_path: Path) -> None:
    module = load(folders.save(tmp_path / "model", folders.qwen3()))
    info: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    check_loading_info(info, module)
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight is not tied"):
        check_loading_info(info, module)


@pytest.mark.parametrize("name", ["layer_missing", "head_of_a_classifier", "other_prefix"])
def test_without_the_audit_the_library_loads_it(name: str, tmp_path: Path) -> None:
    """The planted fault: transformers draws what is missing at random, and drops what it has no place for."""
    folder = folders.DAMAGED[name][0](tmp_path / name)
    module = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    with torch.no_grad():
        logits = module(input_ids=torch.arange(5)[None]).logits
    assert torch.isfinite(logits).all()


NOT_BUILT = [  # by the library itself, from a configuration without values
    *("cohere_compass_text", "dbrx", "dots1", "gemma3n", "gemma4_assistant", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("lfm2_moe", "ministral", "musicgen", "musicgen_melody", "nemotron", "qwen4_exp", "reformer"),
]
FEW = {  # of the names that configurations have for them
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "n_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
}


def small_models(kind: str) -> Iterator[Any]:
    """Yields configurations of the kind from a small one to its default: not every model can be small."""
    default = AutoConfig.for_model(kind)
    few = {name: value for name, value in FEW.items() if hasattr(default, name)}
    if default.sub_configs.get("text_config"):
        text = default.get_text_config()
        yield {"text_config": {name: value for name, value in FEW.items() if hasattr(text, name)}}
    yield few
    yield {name: value for name, value in few.items() if "layer" in name}
    yield {}


def on_meta(kind: str) -> tuple[Any, Any]:
    """Returns a configuration and its model, without memory."""
    for fields in small_models(kind):
        with contextlib.suppress(Exception), torch.device("meta"):
            config = AutoConfig.for_model(kind, **fields)
            if kind in ENCODER_FAMILIES:
                config.is_decoder = True
            return config, AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    pytest.fail(f"{kind} cannot be built")


@pytest.mark.full(keep=2)
@pytest.mark.filterwarnings("default")  # those of the library's modules are not ours
@pytest.mark.parametrize("kind", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(NOT_BUILT)))
def test_every_causal_model_of_the_library_passes_with_its_own_tensors(kind: str) -> None:
    """Names and shapes are what the library itself would save."""
    config, module = on_meta(kind)
    config.architectures = [type(module).__name__]
    tensors = revert_weight_conversion(module, module.state_dict())
    file = Path("model.safetensors")
    headers = {name: TensorHeader(file, "BF16", tuple(one.shape)) for name, one in tensors.items()}
    assert compare(headers, config).elements == sum(one.numel() for one in module.parameters())
