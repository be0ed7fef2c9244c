"""Philox4x32-10 and Gumbel noise in torch integer operations: the same words as `reference/philox.py`, on any device.

Words are held in int64, each in [0, 2^32). A 32 x 32 bit product is taken modulo 2^64, whose bits are the unsigned
product's, and its high word is masked after the shift, which copies the sign.
Shape legend: R rows, N numbers of a row, D rounds.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
LARGEST_UNIFORM = 1.0 - 2.0**-24


def philox_words(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter; the five arguments broadcast. `seed` holds the 64 bits of the key in an int64.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((right >> 32) & _MASK) ^ c1 ^ k0, ((left >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = right & _MASK, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(words: Tensor) -> Tensor:
    """fp32 in (0, 1): (w + 0.5) / 2^32 from two 16-bit halves, so that small numbers keep all their bits."""
    high, low = (words >> 16).to(torch.float32), (words & 0xFFFF).to(torch.float32)
    return torch.clamp(high * 2.0**-16 + (low + 0.5) * 2.0**-32, max=LARGEST_UNIFORM)


def gumbels(words: Tensor) -> Tensor:
    """fp32 Gumbel noise in [-2.82, 22.87]."""
    return -torch.log(-torch.log1p(-uniforms(words)))


class RowNoise:
    """The noise of R rows: each has its own seed, output position and branch, and nothing else of a row enters."""

    def __init__(self, seeds_R: Tensor, positions_R: Tensor, branches_R: Tensor) -> None:
        self._seeds_R1 = seeds_R.to(torch.int64)[:, None]
        self._positions_R1 = positions_R.to(torch.int64)[:, None] & _MASK
        self._branches_R1 = branches_R.to(torch.int64)[:, None] & _MASK

    def rows(self, rows: Tensor) -> "RowNoise":
        """The same noise for a selection of the rows."""
        return RowNoise(self._seeds_R1[rows, 0], self._positions_R1[rows, 0], self._branches_R1[rows, 0])

    def of_blocks(self, purpose: int, first_R: Tensor, count: int, draw: int | Tensor = 0) -> Tensor:
        """[R, count] noise of the ids from `first` on, a multiple of 4 in each row: one Philox call for four ids."""
        blocks = torch.arange(-(-count // 4), dtype=torch.int64, device=first_R.device)
        words = philox_words(self._counter(purpose, (first_R[:, None] >> 2) + blocks, draw), self._seeds_R1)
        return gumbels(torch.stack(words, dim=-1).flatten(1)[:, :count])

    def of_ids(self, purpose: int, ids_RN: Tensor, draw: int | Tensor = 0) -> Tensor:
        """[R, N] noise of any ids."""
        words = philox_words(self._counter(purpose, ids_RN >> 2, draw), self._seeds_R1)
        return gumbels(torch.stack(words, dim=-1).gather(-1, (ids_RN & 3)[..., None])[..., 0])

    def _counter(self, purpose: int, blocks: Tensor, draw: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c0 id >> 2, c1 position, c2 purpose << 16 | round, c3 branch."""
        purposes = torch.zeros_like(blocks) + ((purpose << 16) | draw)
        return blocks, self._positions_R1, purposes, self._branches_R1
