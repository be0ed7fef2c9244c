"""NGram: drafts what followed the row's last tokens when they last stood in the row."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch.input_batch import ScheduledSequence
from engine.config import SpeculationConfig
from engine.model.interface import StartupProgress
from engine.requests import Int32s, Int64s
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_state import DraftState
from engine.spec_decode.proposer import DraftRows
from gpu_sampler.spec_decode import Proposal


def followers(tokens: Int32s, n: int, most: int) -> Int32s:
    """Up to `most` tokens that followed the latest earlier place of the last `n` of `tokens`; none where there is none.

    Where the place is so near that the row ends before `most` tokens, the row goes on in the same rhythm.
    """
    size = len(tokens)
    if size <= n or most < 1:
        return tokens[:0]
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    found = np.flatnonzero((windows == tokens[size - n :]).all(axis=1))
    if not len(found):
        return tokens[:0]
    start = int(found[-1]) + n
    return np.resize(tokens[start:], most)


class NGram:
    """Implements `Proposer`. One-hot proposals; the search is on the host, over tokens that it has read."""

    def __init__(self, table: RequestTable, config: SpeculationConfig) -> None:
        self._table = table
        self._n = config.ngram_tokens
        self._state = DraftState(len(table.sequences), config.num_speculative_tokens, table.token_table.device)

    def propose(self, rows: DraftRows) -> Proposal:
        self._state.clear(rows.slots)
        for slot, length, most in zip(rows.slots.tolist(), rows.lengths.tolist(), rows.most.tolist(), strict=True):
            drafts = followers(self._table.tokens[slot, :length], self._n, most)
            if len(drafts):
                ids = torch.from_numpy(drafts).to(self._table.token_table.device)
                self._state.put_row(slot, ids)
                self._table.token_table[slot, length : length + len(drafts)] = ids
        return self._state.of(rows.slots)

    def lengths(self, slots: Int64s) -> Int64s:
        return self._state.lengths[slots]

    def missing(self, slots: Int64s) -> int:
        return 0  # a draft that nobody drew is certain: its distribution is known

    def prefill(self, sequences: Sequence[ScheduledSequence]) -> None: ...

    def warm_up(self, progress: StartupProgress) -> None: ...
