"""Tests encoders over packed rows against the library, row by row: hidden states, logits, limits and refusals."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.model.compatibility import UnsupportedModel
from engine.model.encoder.attention import attend_rows
from engine.model.encoder.encoder_model import EncoderModel
from engine.model.encoder.packed_rows import EncoderRow
from engine.model.heads.row_pooling import Pooling
from engine.model.optimize import onednn_linear
from tests.engine.model.encoder.conftest import ENCODERS, LABELS, LENGTHS, LONGEST, PADDING, VOCAB

TOLERANCE = 1e-5


def row(*ids: int) -> EncoderRow:
    return EncoderRow(np.array(ids, np.int32))


@pytest.mark.parametrize("name", ENCODERS)
def test_packed_rows_are_the_librarys_own_row_by_row(tiny_encoders: Any, name: str) -> None:
    module = tiny_encoders.module(name)
    rows = tiny_encoders.rows(module)
    hidden, logits = tiny_encoders.reference(module, rows)
    model = EncoderModel(module)
    encoded = model.encode(rows)
    torch.testing.assert_close(encoded.hidden, hidden, rtol=0, atol=TOLERANCE)
    assert encoded.indptr.tolist() == np.cumsum([0, *LENGTHS]).tolist()
    found = model.classify(rows)
    assert (found.shape, found.dtype) == ((len(rows), LABELS), torch.float32)
    torch.testing.assert_close(found, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v3"])
def test_a_row_does_not_depend_on_its_neighbours(tiny_encoders: Any, name: str) -> None:
    module = tiny_encoders.module(name)
    rows, others = (tiny_encoders.rows(module, seed=seed) for seed in (1, 2))
    model = EncoderModel(module)
    together = model.classify([*others[:3], *rows, *others[3:]])[3 : 3 + len(rows)]
    alone = torch.cat([model.classify([one]) for one in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


def test_rows_of_one_length_share_a_call_of_disentangled_attention(tiny_encoders: Any) -> None:
    module = tiny_encoders.module("deberta-v3")
    rows = tiny_encoders.rows(module, lengths=(9, 4, 9, 9, 4))
    wanted = tiny_encoders.reference(module, rows)[0]
    torch.testing.assert_close(EncoderModel(module).encode(rows).hidden, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("step", [8, 64])
def test_rows_padded_inside_disentangled_attention_stay_the_same(
    tiny_encoders: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """CUDA pads rows to multiples there, so that several share a call."""
    monkeypatch.setattr("engine.model.encoder.disentangled_attention.LENGTH_STEP", {"cpu": step})
    monkeypatch.setattr("engine.model.encoder.disentangled_attention.GROUP_PAIRS", 2 * 64**2)
    for name in ("deberta-v3", "deberta-v2 absolute"):
        module = tiny_encoders.module(name)
        rows = tiny_encoders.rows(module)
        wanted = tiny_encoders.reference(module, rows)[0]
        torch.testing.assert_close(EncoderModel(module).encode(rows).hidden, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "modernbert mean"])
def test_embeddings_pool_the_rows_of_a_model_without_a_head(tiny_encoders: Any, name: str) -> None:
    module = tiny_encoders.module(name)
    rows = tiny_encoders.rows(module)
    hidden = tiny_encoders.reference(module, rows)[0].split(list(LENGTHS))
    model = EncoderModel(module.base_model)
    assert not model.has_head
    for pooling, wanted in (
        (Pooling.CLS, [one[0] for one in hidden]),
        (Pooling.MEAN, [one.mean(0) for one in hidden]),
        (Pooling.LAST, [one[-1] for one in hidden]),
    ):
        torch.testing.assert_close(model.embed(rows, pooling), torch.stack(wanted), rtol=0, atol=TOLERANCE)
    with pytest.raises(RuntimeError, match="no sequence head"):
        model.classify(rows)


def test_rows_have_as_many_tokens_as_the_model_has_positions_for(tiny_encoders: Any) -> None:
    models = {name: EncoderModel(tiny_encoders.module(name)) for name in ("bert", "roberta")}
    assert models["bert"].max_model_len == LONGEST
    assert models["roberta"].max_model_len == LONGEST - PADDING - 1
    for model in models.values():
        longest = EncoderRow(np.full(model.max_model_len, 7, np.int32))
        assert model.encode([longest]).hidden.isfinite().all()
        with pytest.raises(ValueError, match=rf"`rows\[1\].ids` must hold 1 to {model.max_model_len} tokens. Given: "):
            model.encode([longest, EncoderRow(np.full(model.max_model_len + 1, 7, np.int32))])
    with pytest.raises(ValueError, match=r"`model.max_model_len` must be in \[1, 298\] for this encoder. Given: 299"):
        EncoderModel(tiny_encoders.module("roberta"), max_model_len=299)
    assert EncoderModel(tiny_encoders.module("roberta"), max_model_len=12).max_model_len == 12


BAD_ROWS: dict[str, tuple[list[EncoderRow], str]] = {
    "no row": ([], "`rows` must hold at least 1 row. Given: 0"),
    "an empty row": ([row(3), row()], r"`rows\[1\].ids` must hold 1 to 300 tokens. Given: 0"),
    "an id too high": ([row(3, VOCAB)], r"`rows\[0\].ids` must be in \[0, 110\]. Given: 111"),
    "an id too low": ([row(3, -1)], r"`rows\[0\].ids` must be in \[0, 110\]. Given: -1"),
    "a third segment": (
        [row(3, 4)._replace(token_types=np.array([0, 2], np.int32))],
        r"`rows\[0\].token_types` must be in \[0, 1\]. Given: 2",
    ),
    "too few segments": (
        [row(3, 4)._replace(token_types=np.zeros(1, np.int32))],
        "`.*token_types` must have one entry for each of 2 ids. Given: 1",
    ),
}


@pytest.fixture(scope="module")
def bert(tiny_encoders: Any) -> EncoderModel:
    return EncoderModel(tiny_encoders.module("bert"))


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_bad_rows_are_refused_by_name(bert: EncoderModel, fault: str) -> None:
    rows, message = BAD_ROWS[fault]
    with pytest.raises(ValueError, match=message):
        bert.encode(rows)


def test_segments_are_refused_where_the_model_has_none(tiny_encoders: Any) -> None:
    model = EncoderModel(tiny_encoders.module("modernbert"))
    with pytest.raises(ValueError, match=r"token_types` must be in \[0, 0\]. Given: 1"):
        model.encode([row(3, 4)._replace(token_types=np.array([0, 1], np.int32))])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "decoder": ("bert", {"is_decoder": True}, "`is_decoder` of its config.json is true"),
    "relative keys": ("bert", {"position_embedding_type": "relative_key"}, "absolute.*Given: relative_key"),
    "quantised": ("bert", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_variants_that_would_be_computed_wrong_are_refused_by_name(tiny_encoders: Any, fault: str) -> None:
    name, changes, reason = REFUSED[fault]
    module = tiny_encoders.module(name)
    for field, value in changes.items():
        setattr(module.config, field, value)
    with pytest.raises(UnsupportedModel, match=reason):
        EncoderModel(module)


def test_other_encoders_are_refused_by_name() -> None:
    config = transformers.MPNetConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    module = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModel, match=r"`mpnet` is not supported: of the encoders only bert, .* are"):
        EncoderModel(module)


def test_attention_without_rows_is_an_error() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="must get `rows`"):
        attend_rows(torch.nn.Identity(), states, states, states)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_on_a_gpu_packed_rows_are_as_close_as_the_librarys_own(
    tiny_encoders: Any, name: str, dtype: torch.dtype
) -> None:
    """The truth is the library's float32; packed rows may be off by twice what the library's own dtype is off."""
    module = tiny_encoders.module(name).cuda()
    rows = tiny_encoders.rows(module)
    truth = tiny_encoders.reference(module, rows)[0]
    module = module.to(dtype)
    own = (tiny_encoders.reference(module, rows)[0].float() - truth).abs().max()
    packed = (EncoderModel(module).encode(rows).hidden.float() - truth).abs().max()
    assert packed <= 2 * own + TOLERANCE


def test_linear_layers_are_computed_by_onednn_unless_they_must_not(
    tiny_encoders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_linear, "MIN_WEIGHTS", 1)
    calls, product = list[int](), onednn_linear._product

    def noting(x: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(len(x))
        return product(x, *others)

    monkeypatch.setattr(onednn_linear, "_product", noting)
    EncoderModel(tiny_encoders.module("bert"), onednn_linear=False)
    assert not calls
    EncoderModel(tiny_encoders.module("bert"))  # its check compares
    assert calls
