"""Tests that the check at start-up sees the faults that packed encoders have had elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from engine.model.compatibility import UnsupportedModel
from engine.model.encoder import attention, disentangled_attention, encoder_model
from engine.model.encoder.encoder_check import EncoderCheck
from engine.model.encoder.encoder_model import EncoderModel
from engine.model.encoder.packed_rows import EncoderRow, PackedRows

MODULES: dict[str, Any] = {
    "attention": attention,
    "disentangled_attention": disentangled_attention,
    "encoder_model": encoder_model,
}


def _packed(change: Callable[[PackedRows], PackedRows]) -> Callable[[Any], Any]:
    return lambda pack_rows: lambda *arguments: change(pack_rows(*arguments))


def _one_row(rows: PackedRows) -> PackedRows:
    return rows._replace(bounds=(0, rows.bounds[-1]), longest=rows.bounds[-1])


def _half_rows(rows: PackedRows) -> PackedRows:
    return rows._replace(bounds=tuple(sorted({*rows.bounds, sum(rows.bounds[-2:]) // 2})))


def _counting_on(rows: PackedRows) -> PackedRows:
    return rows._replace(positions=torch.arange(len(rows.ids)).clamp(max=290))


PACK = ("encoder_model", "pack_rows")
FAULTS: dict[str, tuple[str, tuple[str, str], Callable[[Any], Any]]] = {
    "rows see each other": ("bert", PACK, _packed(_one_row)),
    "rows see each other, relative positions": ("deberta-v3", PACK, _packed(_one_row)),
    "a row is cut in two": ("xlm-roberta", PACK, _packed(_half_rows)),
    "positions go on through the batch": ("bert", PACK, _packed(_counting_on)),
    "rotary positions go on": ("modernbert", PACK, lambda pack: lambda rows, *more: _shuffled(pack(rows, *more))),
    "positions begin at zero": ("roberta", PACK, lambda pack: lambda rows, device, padding: pack(rows, device)),
    "positions count padding tokens": (
        "roberta",
        PACK,
        _packed(lambda rows: rows._replace(positions=_uninterrupted(rows) + 2)),
    ),
    "one segment": ("bert", PACK, _packed(lambda rows: rows._replace(token_types=torch.zeros_like(rows.ids)))),
    "no window": (
        "modernbert",
        ("attention", "_attend_window"),
        lambda right: lambda q, k, v, scale, reach, out: right(q, k, v, scale, 10**6, out),
    ),
    "a window one token wider": (
        "modernbert",
        ("attention", "_attend_window"),
        lambda right: lambda q, k, v, scale, reach, out: right(q, k, v, scale, reach + 1, out),
    ),
    "no relative positions": ("deberta-v3", ("disentangled_attention", "_bias"), lambda right: lambda *_: None),
    "relative positions turned round": (
        "deberta-v3",
        ("disentangled_attention", "_buckets"),
        lambda right: lambda *arguments: right(*arguments).flip(0),
    ),
    "a convolution into the neighbour": (
        "deberta-v2 convolution",
        ("disentangled_attention", "_convolve"),
        lambda right: lambda conv, embedded, hidden, rows: right(conv, embedded, hidden, _one_row(rows)),
    ),
}


def _uninterrupted(rows: PackedRows) -> torch.Tensor:
    starts = torch.tensor(rows.bounds[:-1]).repeat_interleave(rows.indptr.long().diff())
    return torch.arange(len(rows.ids)) - starts


def _shuffled(rows: PackedRows) -> PackedRows:
    return rows._replace(positions=rows.positions.roll(1))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_refused(tiny_encoders: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, (module, function), plant = FAULTS[fault]
    right = getattr(MODULES[module], function)
    monkeypatch.setattr(MODULES[module], function, plant(right))
    encoder = tiny_encoders.module(name)
    with pytest.raises(UnsupportedModel, match="packed rows change its hidden states by"):
        EncoderModel(encoder)


@pytest.mark.parametrize("longest", [3, 41])
def test_short_rows_are_judged_by_themselves_in_half_precision(longest: int) -> None:
    """Most of the checked tokens are of long rows."""
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=500
    )
    check = EncoderCheck(BertModel(config).bfloat16().eval(), 512, 2)
    sound = torch.cat(check._reference)

    def spoilt(rows: Sequence[EncoderRow]) -> torch.Tensor:
        lengths = [len(row.ids) for row in rows]
        parts = zip(torch.split(sound, lengths), lengths, strict=True)
        return torch.cat([-part if length <= longest else part for part, length in parts])

    assert check.run(lambda rows: sound) == 0
    with pytest.raises(UnsupportedModel, match="packed rows change"):
        check.run(spoilt)
