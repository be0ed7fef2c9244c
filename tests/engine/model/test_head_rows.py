"""Logits written to where they are read are those that a head returns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.model.lm_head import HeadSpec

ROWS, HIDDEN, VOCAB = 5, 16, 33


def head(dtype: torch.dtype, **more: Any) -> HeadSpec:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn((VOCAB, HIDDEN), generator=generator), torch.randn(VOCAB, generator=generator)
    fields = {"bias": None, "scale": 1.0, "softcap": 0.0} | more
    if fields["bias"] is not None:
        fields["bias"] = bias.to(dtype)
    return HeadSpec(weight=weight.to(dtype), **fields)


def twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return 2 * F.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("more", "direct"),
    [
        ({}, True),
        ({"bias": True}, True),
        ({"scale": 0.5}, False),
        ({"divisor": 3.0}, False),
        ({"softcap": 2.0}, False),
        ({"linear": twice}, False),
    ],
)
def test_rows_are_written(
    more: dict[str, Any], direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = head(dtype, **more)
    hidden = torch.randn((ROWS, HIDDEN), generator=torch.Generator().manual_seed(2)).to(dtype)
    out = torch.zeros((ROWS + 1, VOCAB), dtype=dtype)
    wanted, copied = given.rows(hidden), list[str]()
    own: Callable[..., Any] = HeadSpec.rows

    def noting(*args: Any) -> torch.Tensor:
        copied.append("rows")
        rows: torch.Tensor = own(*args)
        return rows

    monkeypatch.setattr(HeadSpec, "rows", noting)
    given.write_rows(hidden, out[:ROWS])
    torch.testing.assert_close(out[:ROWS], wanted)
    assert not out[ROWS].any() and copied == ([] if direct else ["rows"])


def test_logits_of_a_wider_type_are_copied() -> None:
    given, hidden = head(torch.bfloat16), torch.ones((ROWS, HIDDEN), dtype=torch.bfloat16)
    out = torch.zeros((ROWS, VOCAB))
    given.write_rows(hidden, out)
    assert torch.equal(out, given.rows(hidden).float())
