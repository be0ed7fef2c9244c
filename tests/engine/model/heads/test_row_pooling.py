"""Tests pooling of packed rows: what is read, in which precision, and that neighbours do not matter."""

import pytest
import torch

from engine.model.heads.row_pooling import Pooling, pool_rows

LENGTHS = (3, 1, 700, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_pooled_by_itself_in_float32(dtype: torch.dtype) -> None:
    hidden = torch.randn(sum(LENGTHS), 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    indptr = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = torch.split(hidden.float(), list(LENGTHS))
    assert torch.equal(pool_rows(hidden, indptr, Pooling.CLS), torch.stack([row[0] for row in rows]))
    assert torch.equal(pool_rows(hidden, indptr, Pooling.LAST), torch.stack([row[-1] for row in rows]))
    means = pool_rows(hidden, indptr, Pooling.MEAN)
    torch.testing.assert_close(means, torch.stack([row.mean(0) for row in rows]), rtol=0, atol=1e-6)
    alone = [pool_rows(row.to(dtype), torch.tensor([0, len(row)]), Pooling.MEAN) for row in rows]
    assert torch.equal(means, torch.cat(alone))
