"""Proposes the tokens that followed an earlier occurrence of a row's last tokens (prompt lookup decoding)."""

import numpy as np
import torch

from engine.batch.input_batch import StepSequences
from engine.config import SpeculationConfig
from engine.requests import Int32s, Int64s
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_state import DraftState
from engine.spec_decode.proposer import DraftRows
from gpu_sampler.spec_decode import Proposal
from gpu_sampler.startup_progress import StartupProgress


def followers(tokens: Int32s, n: int, count: int) -> Int32s:
    """Returns `count` tokens that followed the latest earlier occurrence of the last `n` of `tokens`.

    Where the row ends before as many, it repeats what followed. There are none without an earlier occurrence.
    """
    size = len(tokens)
    if size <= n or count < 1:
        return tokens[:0]
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    found = np.flatnonzero((windows == tokens[size - n :]).all(axis=1))
    if not len(found):
        return tokens[:0]
    start = int(found[-1]) + n
    return np.resize(tokens[start:], count)


class NGram:
    """Implements `Proposer` by a search on the host. Its proposals are one-hot."""

    def __init__(self, table: RequestTable, config: SpeculationConfig) -> None:
        self._table = table
        self._n = config.ngram_tokens
        self._state = DraftState(len(table.sequences), config.num_speculative_tokens, table.token_table.device)

    def propose(self, rows: DraftRows) -> Proposal:
        self._state.clear(rows.slots)
        for slot, length, count in zip(*(part.tolist() for part in rows), strict=True):
            drafts = followers(self._table.tokens[slot, :length], self._n, count)
            if len(drafts):
                ids = torch.from_numpy(drafts).to(self._table.token_table.device)
                self._state.put_row(slot, ids)
                self._table.token_table[slot, length : length + len(drafts)] = ids
        return self._state.of(rows.slots)

    def lengths(self, slots: Int64s) -> Int64s:
        return self._state.lengths[slots]

    def missing(self, slots: Int64s) -> int:
        return 0  # its drafts are certain: their distribution is known

    def prefill(self, sequences: StepSequences) -> None: ...

    def warm_up(self, progress: StartupProgress) -> None: ...

    def capture_next(self) -> bool:
        return False
