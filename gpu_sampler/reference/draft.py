"""Twin of `draft`: one draft token a row, from the drafter's logits, and what it was drawn from.

The row's filters, penalties and bans hold for the drafter too: what the target will not take is not worth drafting.
They are no part of the law, which asks only that q is what the draft was drawn from.

Shape legend: B rows, V vocabulary, N = PROPOSAL_IDS.
"""

import numpy as np
import numpy.typing as npt

from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.proposal import PROPOSAL_IDS, Draft, DraftMethod, VerifyRules
from gpu_sampler.reference.order import Float32s, Int64s, first
from gpu_sampler.reference.patch_rows import Place
from gpu_sampler.reference.philox import Purpose, gumbel, words
from gpu_sampler.reference.row_stats import Float64s
from gpu_sampler.reference.sample import Targets, draw, targets
from gpu_sampler.reference.select import Row, greedy, scaled
from gpu_sampler.reference.verify import rule_of
from gpu_sampler.state import Ids, SamplingState


def draft(
    logits_BV: Float32s, state: SamplingState, slots_B: Ids, offset: int, method: DraftMethod, rules: VerifyRules
) -> Draft:
    """Draft `offset` of each row's run. A row sees the drafts before it, which the state keeps; it keeps these too."""
    places = [Place(slot, offset, _before(state, slot, offset)) for slot in slots_B.tolist()]
    rows = targets(logits_BV, state, places)
    strict = [i for i in rows.rows if method != "greedy" and rule_of(state, places[i].slot, rules) == "strict"]
    ids = draw(rows, strict)
    q_ids = np.full((len(places), PROPOSAL_IDS), INVALID_TOKEN, np.int32)
    q_probs = np.zeros((len(places), PROPOSAL_IDS), np.float32)
    for index, route in enumerate(rows.routes):
        if route == "empty":
            continue
        if index in rows.rows and method == "probabilistic" and index not in strict:
            ids[index], q_ids[index], q_probs[index] = _draw(rows, index, offset)
            continue
        ids[index] = ids[index] if index in strict else greedy(rows.patched[index])
        q_ids[index, 0], q_probs[index, 0] = ids[index], 1.0
    state.draft_ids[slots_B, offset] = ids
    return Draft(ids, q_ids, q_probs)


def _before(state: SamplingState, slot: int, offset: int) -> tuple[int, ...]:
    return tuple(token for token in state.draft_ids[slot, :offset].tolist() if token >= 0)


def _draw(rows: Targets, index: int, offset: int) -> tuple[int, Ids, npt.NDArray[np.float32]]:
    """(token, q_ids [N], q_probs [N]): of the first N tokens that the filters keep, one number each."""
    row, kept = rows.rows[index], rows.kept[index]
    found = (first(row.z_V, PROPOSAL_IDS) if kept is None else kept)[:PROPOSAL_IDS]
    found = found[row.z_V[found] > -np.inf]
    x = scaled(row, found)
    q_ids = np.full(PROPOSAL_IDS, INVALID_TOKEN, np.int32)
    q_probs = np.zeros(PROPOSAL_IDS, np.float32)
    q_ids[: len(found)] = found
    q_probs[: len(found)] = np.exp(x) / np.exp(x).sum()
    return int(found[(x + _noise(row, found, offset)).argmax()]), q_ids, q_probs


def _noise(row: Row, ids: Int64s, offset: int) -> Float64s:
    """The round is the offset in the run: a position behind a rejection is drafted again, with other numbers."""
    found = words(row.seed, ids, row.position, Purpose.DRAFT_TOKEN, offset, row.branch)
    return gumbel(found).astype(np.float64)
