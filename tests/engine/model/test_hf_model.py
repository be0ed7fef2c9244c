"""HFModel: packed steps give what the library gives for each sequence alone."""

import json
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch.input_batch import StepKind
from engine.batch.shared_prefix import with_cascade
from engine.config import EngineConfig, ModelConfig
from engine.model.compatibility import UnsupportedModel
from engine.model.hf_model import HFModel
from engine.model.loader import load_model
from engine.model.model_folder import ModelNotFound
from gpu_sampler.sampling_params import SamplingParams
from tests.engine.model.conftest import SIX

TOLERANCE = 1e-5  # of the largest |logit|, float32
ENGINE = EngineConfig(kv_slots=331)


@pytest.mark.parametrize("name", SIX)
def test_steps_that_mix_chunks_decode_and_a_shared_prefix_give_what_each_sequence_gives_alone(
    tiny_models: Any, name: str
) -> None:
    d = tiny_models.driver(name)
    a = d.add(23)
    b = d.add(31, shares=(a, 11))
    c = d.add(19)
    # the prefix of a, its continuation and b's over the same slots in one step, beside the first chunk of c
    first = [d.run(a, 0, 11), d.run(b, 11, 24), d.run(c, 0, 5), d.run(a, 11, 22)]
    assert d.error(StepKind.PREFILL, first) < TOLERANCE
    e = d.add(13, shares=(c, 5))
    second = [d.run(a, 22, 23, from_table=True), d.run(c, 5, 17), d.run(e, 5, 13), d.run(b, 24, 25, from_table=True)]
    assert d.error(StepKind.PREFILL, second) < TOLERANCE
    third = [d.run(c, 17, 18, from_table=True), d.run(b, 25, 26, from_table=True)]
    assert d.error(StepKind.DECODE, third) < TOLERANCE
    # a verify step: several new tokens a row
    assert d.error(StepKind.VERIFY, [d.run(b, 26, 31), d.run(c, 18, 19)]) < TOLERANCE


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", SIX)
def test_any_chunk_size_gives_the_same(tiny_models: Any, name: str) -> None:
    d = tiny_models.driver(name)
    length = 17
    index = d.add(length)
    for size in range(1, length + 1):
        for first in range(0, length, size):
            run = d.run(index, first, min(first + size, length))
            assert d.error(StepKind.PREFILL, [run]) < TOLERANCE, size


@pytest.mark.parametrize("name", ("llama", "mistral", "gpt_oss"))
def test_padding_changes_nothing(tiny_models: Any, name: str) -> None:
    d = tiny_models.driver(name)
    a, b = d.add(9), d.add(9)
    assert d.error(StepKind.PREFILL, [d.run(a, 0, 8), d.run(b, 0, 8)]) < TOLERANCE
    alone = d.model.forward(StepKind.DECODE, [d.run(a, 8, 9)], d.table)  # one token: padded to two
    assert alone.shape == (1, 111)
    beside = d.model.forward(StepKind.DECODE, [d.run(b, 8, 9), d.run(a, 8, 9)], d.table)
    assert torch.allclose(alone[0], beside[1], atol=1e-5)
    assert d.error(StepKind.DECODE, [d.run(a, 8, 9)]) < TOLERANCE


def test_only_wanted_rows_come_back_in_the_order_of_the_runs(tiny_models: Any) -> None:
    d = tiny_models.driver("qwen3")
    a, b, c = d.add(6), d.add(7), d.add(5)
    sequences = [d.run(a, 0, 6, rows=[1, 5]), d.run(b, 0, 7, rows=[]), d.run(c, 0, 5, rows=[4])]
    assert d.model.forward(StepKind.SCORE, sequences, d.table).shape == (3, 111)
    assert d.error(StepKind.SCORE, sequences) < TOLERANCE
    assert d.model.forward(StepKind.PREFILL, [d.run(b, 0, 7, rows=[])], d.table).shape == (0, 111)


@pytest.mark.parametrize("name", ("llama", "gemma2", "cohere", "granite", "gpt_oss"))
def test_label_logits_are_columns_of_the_full_rows(tiny_models: Any, name: str) -> None:
    d = tiny_models.driver(name)
    a, b = d.add(9), d.add(5)
    sequences = [d.run(a, 0, 9, rows=[8]), d.run(b, 0, 5)]
    labels = np.array([110, 0, 17], np.int32)
    full = d.model.forward(StepKind.SCORE, sequences, d.table).clone()
    assert d.model.head is not None
    got = d.model.label_logits(StepKind.SCORE, sequences, d.table, labels)
    assert got.dtype == torch.float32
    assert torch.allclose(got, full[:, labels], atol=1e-4 * float(full.abs().max()))
    d.model.head = None  # a head that is no plain matrix: columns of the full rows
    assert torch.equal(d.model.label_logits(StepKind.SCORE, sequences, d.table, labels), full[:, labels])


def test_two_models_on_two_threads_do_not_see_each_others_steps(tiny_models: Any) -> None:
    drivers = [tiny_models.driver("llama"), tiny_models.driver("mistral")]
    for d in drivers:
        d.add(13)
    wanted = [d.alone(0) for d in drivers]
    errors: list[float] = []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        d = drivers[index]
        start.wait(30)
        for _ in range(20):
            got = d.model.forward(StepKind.SCORE, [d.run(0, 0, 13)], d.table)
            errors.append(float((got - wanted[index]).abs().max() / wanted[index].abs().max()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 40
    assert max(errors) < TOLERANCE


def test_a_model_called_outside_of_a_step_says_so(tiny_models: Any) -> None:
    d = tiny_models.driver("llama")
    ids = torch.zeros((1, 3), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="outside of a step"):
        d.model.module(input_ids=ids, position_ids=ids, use_cache=False)


def test_a_cpu_needs_no_attention_library(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it would raise
    d = tiny_models.driver("llama")
    reported: list[str] = []
    d.model.warm_up(lambda stage, seconds: reported.append(stage))
    assert reported == [] and d.model.contexts_built is None
    assert d.error(StepKind.SCORE, [d.run(d.add(5), 0, 5)]) < TOLERANCE


class _Contexts:
    """Counts the steps that attend in two levels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0

        def counted(*given: Any) -> Any:
            self.steps += 1
            return with_cascade(*given)

        monkeypatch.setattr("engine.model.hf_model.with_cascade", counted)


def test_contexts_are_attended_to_in_one_level_until_their_kernels_are_compiled(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, contexts = tiny_models.driver("llama"), _Contexts(monkeypatch)
    row = d.add(13)
    wanted = d.alone(row)
    seen = contexts.steps
    d.model.contexts_built = Future()
    assert d.error(StepKind.SCORE, [d.run(row, 0, 13)]) < TOLERANCE
    assert contexts.steps == seen
    d.model.contexts_built.set_result([])
    d.model.share_contexts()
    found = d.model.forward(StepKind.SCORE, [d.run(row, 0, 13)], d.table)
    assert contexts.steps > seen and d.model.contexts_built is None
    assert float((found - wanted).abs().max() / wanted.abs().max()) < TOLERANCE


def test_a_context_module_that_did_not_compile_is_not_used(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would compile it in the middle of a step."""
    d, contexts = tiny_models.driver("llama"), _Contexts(monkeypatch)
    d.model.contexts_built = Future()
    d.model.contexts_built.set_result(["contexts, bfloat16"])
    with pytest.raises(RuntimeError, match="contexts, bfloat16 did not compile"):
        d.model.share_contexts()
    seen = contexts.steps
    assert d.error(StepKind.SCORE, [d.run(d.add(9), 0, 9)]) < TOLERANCE
    assert contexts.steps == seen


def test_every_stage_of_making_a_model_is_reported(tiny_models: Any) -> None:
    reported: dict[str, float] = {}

    def note(stage: str, seconds: float) -> None:
        reported[stage] = seconds

    HFModel(tiny_models.module("llama"), ENGINE, progress=note)
    checks = ["weights digest", "probe", "head check", "packing check", "fuse projections", "second packing check"]
    assert list(reported) == [*checks, "pool"]
    assert min(reported.values()) >= 0


# Loading


@pytest.fixture
def folder(tiny_models: Any, tmp_path: Path) -> Path:
    module = tiny_models.module("qwen3")
    module.generation_config.eos_token_id = [2, 5]
    module.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_loads_from_its_folder(tiny_models: Any, folder: Path) -> None:
    reported: list[str] = []
    model = load_model(ModelConfig(path=folder), ENGINE, lambda stage, seconds: reported.append(stage))
    d = tiny_models.driver("qwen3")
    run = d.run(d.add(7), 0, 7)
    assert torch.allclose(model.forward(StepKind.SCORE, [run], d.table), d.alone(0), atol=1e-4)
    assert reported[0] == "load"
    assert (model.vocab_size, model.max_model_len, model.num_slots) == (111, 96, 331)
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2, 5))
    assert model.device.type == "cpu"


def test_an_end_that_the_vocabulary_lacks_is_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each request would have it as a stop id, and be refused for a field that it has not given."""
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [-1, 5, 111]}))
    model = load_model(ModelConfig(path=folder), ENGINE)
    assert model.eos_token_ids == (5,)
    SamplingParams(stop_token_ids=model.eos_token_ids).validate(model.vocab_size)
    assert "[-1, 5, 111]" in caplog.text


def test_random_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = load_model(ModelConfig(path=folder, random_weights=True, max_model_len=33), ENGINE)
    assert (model.vocab_size, model.max_model_len) == (111, 33)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"qwen3.*pickled"):
        load_model(ModelConfig(path=folder), ENGINE)


def test_a_model_that_brings_its_own_code_is_refused(folder: Path) -> None:
    config = '{"model_type": "homemade", "auto_map": {"AutoModelForCausalLM": "modeling_homemade.Model"}}'
    (folder / "config.json").write_text(config)
    (folder / "modeling_homemade.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(UnsupportedModel, match=r"homemade.*auto_map"):
        load_model(ModelConfig(path=folder), ENGINE)
    (folder / "config.json").write_text('{"model_type": "homemade"}')
    with pytest.raises(UnsupportedModel, match="no model type `homemade`"):
        load_model(ModelConfig(path=folder), ENGINE)


@pytest.mark.parametrize("revision", (None, "main", "0" * 39, "0" * 40))
def test_a_repository_needs_a_pinned_revision_in_the_local_cache(revision: str | None, tmp_path: Path) -> None:
    with pytest.raises((ModelNotFound, ValueError), match=r"model\.(path|revision)"):
        load_model(ModelConfig(path="nobody/nothing", revision=revision), ENGINE)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        (tmp_path / "empty").mkdir()
        load_model(ModelConfig(path=tmp_path / "empty"), ENGINE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="safetensors"):
        load_model(ModelConfig(path=folder), ENGINE)


def test_a_length_beyond_the_models_own_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_model_len` must be in \[1, 96\]. Given: 97"):
        load_model(ModelConfig(path=folder, max_model_len=97), ENGINE)


def test_cuda_is_not_silently_replaced(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=r"model\.device"):
        load_model(ModelConfig(path=folder, device="cuda"), ENGINE)


def test_the_toy_needs_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_TEST_FAULTS", raising=False)
    with pytest.raises(ValueError, match="ASSAY_TEST_FAULTS"):
        load_model(ModelConfig(path="toy"), ENGINE)
