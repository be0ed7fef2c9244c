"""Makes the sequences of a verify step, and writes the tokens that it emits."""

from typing import Any

import numpy as np
import torch

from engine.batch.input_batch import ScheduledSequence
from engine.config import SpeculationConfig
from engine.model.interface import CausalLM
from engine.requests import Int64s
from engine.scheduler.request_state import RequestTable
from engine.spec_decode.draft_model import DraftModel
from engine.spec_decode.ngram import NGram
from engine.spec_decode.proposer import Proposer
from gpu_sampler.sampler import Sampler


def make_proposer(
    config: SpeculationConfig, draft: CausalLM | None, table: RequestTable, sampler: Sampler, token_budget: int
) -> Proposer | None:
    """Makes the proposer that `config` names; None without speculation. `token_budget`: that of the engine's steps.

    Raises:
        ValueError: The method is draft_model and there is no `draft`.
    """
    if config.method == "draft_model":
        if draft is None:
            raise ValueError("`speculation.method` draft_model needs a draft model. Given: none.")
        return DraftModel(draft, table, sampler, config, token_budget)
    return NGram(table, config) if config.method == "ngram" else None


def verify_sequences(table: RequestTable, slots: Int64s, lengths: Int64s, drafts: Int64s) -> list[ScheduledSequence]:
    """Returns each row's last token and its drafts, which follow it in the token table, with K + 1 wanted rows, K being
    the largest number of drafts; a row with fewer repeats its last."""
    wanted = np.arange(int(drafts.max(initial=0)) + 1, dtype=np.int32)
    triples = zip(slots.tolist(), lengths.tolist(), drafts.tolist(), strict=True)
    return [table.run(slot, n - 1, n + more, None, np.minimum(wanted, np.int32(more))) for slot, n, more in triples]


def write_tokens(table: RequestTable, slots: Int64s, lengths: Int64s, drafts: Int64s, tokens: Any) -> None:
    """Writes what a verify step emitted, tokens [B, K + 1], to the token table on the device. Everything after a row's
    count is overwritten by the row's next step."""
    device = table.token_table.device
    width = int(drafts.max(initial=0)) + 1
    row, column = np.nonzero(np.arange(width) <= drafts[:, None])
    at = torch.from_numpy(np.stack((slots[row], lengths[row] + column, row, column)))
    if device.type == "cuda":
        at = at.pin_memory().to(device, non_blocking=True)
    new = torch.as_tensor(tokens).to(device=device, dtype=torch.int32).clamp(min=0)
    table.token_table.index_put_((at[0], at[1]), new[at[2], at[3]])
