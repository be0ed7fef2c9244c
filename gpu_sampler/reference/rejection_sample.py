"""Reference of `rejection_sample` and `draft_sample`: accepts and draws drafts, from probabilities in float64.

Row i of a request is the target's next-token distribution after its first i drafts. Draft i is judged by row i, and the
row after the last accepted draft gives one token more (both counted from 0).

The token after a rejected draft comes from the residual max(P p - q, 0). A row that keeps all tokens is drawn in
two levels, as in `filters`: one number a group of 128 ids and then one a token of it. Tokens of the overlay and of a
proposal that names its ids stand outside of their groups. A filtered row is drawn with one number a kept token.

In a draft, the row's filters, penalties and bans hold for the drafter too: what the target will not accept is not worth
drafting. Verification needs only that q is what the draft was drawn from.

Shape legend: B requests, K draft steps, R = B (K + 1) rows, V vocabulary, k drafts of one run, N = PROPOSAL_IDS. p_k
are the target's probabilities of the drafts, q_k the drafter's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import RowFlag, VerifyOutput
from gpu_sampler.reference.filters import Int64s, Row, clean, first, greedy, scaled
from gpu_sampler.reference.logits_processors import RowPosition
from gpu_sampler.reference.philox import Purpose, gumbel, uniform, words
from gpu_sampler.reference.sample import Targets, draw, report, scan, targets
from gpu_sampler.reference.softmax_stats import GROUP, Float32s, Float64s
from gpu_sampler.reference.token_counts import update_token_counts
from gpu_sampler.sampling_params import INVALID_TOKEN
from gpu_sampler.spec_decode import PROPOSAL_IDS, Draft, DraftMethod, Proposal, ProposalKind, Rule, VerifyRules
from gpu_sampler.state.host_state import Ids, SamplingState, SlotFlag


def residual(p_V: Float64s, q_V: Float64s, weight: float = 1.0) -> Float64s:
    """Returns max(P p - q, 0) [V], not normalised. `weight` is P, which is 1 except in block verification."""
    return np.maximum(weight * p_V - q_V, 0.0)


def draw_residual(weights_V: Float64s, row: Row, singles: Int64s, *, listed: bool) -> int:
    """Draws a token by the seed, position and branch of `row`; some weight is positive.

    `listed`: a filter keeps a part of the row.
    """
    with np.errstate(divide="ignore"):
        logs_V = np.log(weights_V)
    if listed:
        ids = np.flatnonzero(weights_V > 0)
        return int(ids[(logs_V[ids] + _residual_noise(row, ids, Purpose.RESID_TOKEN)).argmax()])
    grouped = _grouped(weights_V, singles)
    with np.errstate(divide="ignore"):
        scores = np.log(grouped.sum(axis=1)) + _residual_noise(row, np.arange(len(grouped)), Purpose.RESID_GROUP)
        group = int(scores.argmax())
        inside = np.log(grouped[group])
    ids = group * GROUP + np.arange(GROUP)
    token = int(ids[(inside + _residual_noise(row, ids, Purpose.RESID_TOKEN)).argmax()])
    if len(singles):
        alone = logs_V[singles] + _residual_noise(row, singles, Purpose.RESID_TOKEN)
        if alone.max() > scores.max():
            token = int(singles[alone == alone.max()].min())
    return token


def _grouped(weights_V: Float64s, singles: Int64s) -> Float64s:
    """Returns [G, 128] without the singles, the last group filled up with 0."""
    others = np.zeros(-(-len(weights_V) // GROUP) * GROUP)
    others[: len(weights_V)] = weights_V
    others[singles] = 0.0
    return others.reshape(-1, GROUP)


def _residual_noise(row: Row, ids: Int64s, purpose: Purpose) -> Float64s:
    return gumbel(words(row.seed, ids, row.position, purpose, 0, row.branch)).astype(np.float64)


class DraftRun(NamedTuple):
    """Holds one request's drafts, up to the first negative id."""

    drafts: tuple[int, ...]  # k
    kind: ProposalKind
    q_ids: npt.NDArray[np.int64] | None  # [k, N]
    q_probs: Float64s | None  # [k, N]
    q_logits: npt.NDArray[np.float32] | None  # [k, V]

    def q(self, step: int, vocab_size: int, temperature: float) -> Float64s:
        """Returns the distribution [V] that draft `step` was drawn from, without ids outside of the vocabulary."""
        q_V = np.zeros(vocab_size)
        if self.kind is ProposalKind.DENSE and self.q_logits is not None:
            z_V = clean(self.q_logits[step : step + 1])[0][0].astype(np.float64)
            if z_V.max() > -np.inf:
                q_V = np.exp((z_V - z_V.max()) / temperature)
                q_V /= q_V.sum()
        elif self.kind is ProposalKind.SPARSE and self.q_ids is not None and self.q_probs is not None:
            inside = (self.q_ids[step] >= 0) & (self.q_ids[step] < vocab_size)
            np.add.at(q_V, self.q_ids[step][inside], self.q_probs[step][inside])
        elif self.kind is ProposalKind.ONE_HOT and self.drafts[step] < vocab_size:
            q_V[self.drafts[step]] = 1.0
        return q_V


def run_of(proposal: Proposal, request: int) -> DraftRun:
    """Returns the run of one request; `proposal` holds numpy arrays."""
    kind = ProposalKind(int(proposal.kind[request]))
    ids = proposal.draft_ids[request].tolist()
    length = next((step for step, token in enumerate(ids) if token < 0), len(ids))
    length = 0 if kind is ProposalKind.NONE else length
    q_ids, q_probs, q_logits = proposal.q_ids, proposal.q_probs, proposal.q_logits
    return DraftRun(
        tuple(ids[:length]),
        kind,
        None if q_ids is None else q_ids[request, :length].astype(np.int64),
        None if q_probs is None else q_probs[request, :length].astype(np.float64),
        None if q_logits is None else q_logits[request, :length].astype(np.float32),
    )


def uniforms(seed: np.uint64, position: int, branch: int, count: int) -> Float64s:
    """Returns the ACCEPT numbers [k] of a run that begins at `position`; the round is the offset in the run."""
    offsets = np.arange(count)
    return uniform(words(seed, np.zeros(count), position + offsets, Purpose.ACCEPT, offsets, branch)).astype(np.float64)


def ratios(p_k: Float64s, q_k: Float64s) -> Float64s:
    """Returns p / q; 0 where q is 0, which no draft may have: a caller's error."""
    return np.divide(p_k, q_k, out=np.zeros(len(p_k)), where=q_k > 0)


def standard(ratios_k: Float64s, u_k: Float64s) -> int:
    """Returns how many drafts come before the first with u >= p / q."""
    refused = np.flatnonzero(u_k >= ratios_k)
    return int(refused[0]) if len(refused) else len(u_k)


def block_weights(ratios_k: Float64s) -> Float64s:
    """Returns P_i [k + 1]: 1, then min(1, P_{i-1} p / q)."""
    weights = [1.0]
    for ratio in ratios_k:
        weights.append(min(1.0, weights[-1] * float(ratio)))
    return np.array(weights)


def block_chances(weights: Float64s, masses: Float64s) -> Float64s:
    """Returns h_1 to h_k: h_i = r_i / (r_i + 1 - P_i) from the residual masses r_1 to r_{k-1}, and h_k = P_k.

    0 / 0 is 1: then the next index is accepted too.
    """
    if len(weights) == 1:
        return np.empty(0)
    over = masses + 1 - weights[1:-1]
    inner = np.divide(masses, over, out=np.ones(len(masses)), where=over > 0)
    return np.append(inner, weights[-1])


def block(chances_k: Float64s, u_k: Float64s) -> int:
    """Returns the largest i with u_i <= h_i, 0 if there is none."""
    taken = np.flatnonzero(u_k <= chances_k)
    return int(taken[-1]) + 1 if len(taken) else 0


def matches(drafts_k: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many drafts are the tokens that the rows draw themselves."""
    for step, (draft, token) in enumerate(zip(drafts_k, tokens, strict=False)):
        if draft != token or token == INVALID_TOKEN:
            return step
    return len(drafts_k)


class _Stop(NamedTuple):
    """Says where a run ends."""

    accepted: int
    weight: float | None  # P of the residual that the next token comes from; None: the row's own draw
    bad: int | None = None  # the draft whose q was 0


class _Request(NamedTuple):
    """Holds one request of the step."""

    slot: int
    first: int  # its first row among the targets
    run: DraftRun
    rule: Rule
    greedy: bool


def rule_of(state: SamplingState, slot: int, rules: VerifyRules) -> Rule:
    """Returns the rule of a slot: that of seeded rows where it has an explicit seed."""
    return rules.seeded if state.flags[slot] & SlotFlag.EXPLICIT_SEED else rules.rule


def verify(
    logits_RV: Float32s, state: SamplingState, slots_B: Ids, proposal: Proposal, rules: VerifyRules, processed: bool
) -> VerifyOutput:
    """Verifies a step; see `Sampler.verify`. It leaves the state alone, and bad values never raise."""
    steps, vocab_size = proposal.draft_ids.shape[1], logits_RV.shape[1]
    places, requests = list[RowPosition](), list[_Request]()
    for index, slot in enumerate(slots_B.tolist()):
        run, greedy = run_of(proposal, index), state.temperature[slot] == 0
        requests.append(_Request(slot, index * (steps + 1), run, rule_of(state, slot, rules), bool(greedy)))
        for step in range(steps + 1):
            ahead = tuple(token for token in run.drafts[:step] if token < vocab_size)
            used = step <= len(run.drafts)  # rows after the last draft's are padding
            places.append(RowPosition(slot, step, ahead) if used else RowPosition(0))
    rows = targets(logits_RV, state, places)
    own = draw(rows, [row for one in requests if _draws_all(one) for row in _rows(one)])
    stops = [_stop(rows, one, own, rules) for one in requests]
    ends = [one.first + stop.accepted for one, stop in zip(requests, stops, strict=True)]
    undrawn = [
        end for one, end, stop in zip(requests, ends, stops, strict=True) if stop.weight is None and not _draws_all(one)
    ]
    own[undrawn] = draw(rows, undrawn)[undrawn]  # each row once: a draw may leave its kept tokens
    tokens = np.full(len(places), INVALID_TOKEN, np.int32)
    for one, stop, end in zip(requests, stops, ends, strict=True):
        tokens[one.first : end] = one.run.drafts[: stop.accepted]
        tokens[end] = own[end] if stop.weight is None else _residual_token(rows, one, stop)
        if stop.bad is not None:
            rows.flags[one.first + stop.bad] |= np.uint32(RowFlag.BAD_PROPOSAL)
    counts = np.array([stop.accepted + 1 for stop in stops], np.int32)
    output = report(rows, tokens, processed)
    output.flags.reshape(len(counts), -1)[np.arange(steps + 1) >= counts[:, None]] = 0
    return VerifyOutput.of(output, counts, steps)


def advance(state: SamplingState, slots_B: Ids, output: VerifyOutput) -> None:
    """Counts the emitted tokens in the state, one after another."""
    for step in range(output.tokens.shape[1]):
        emits = output.counts > step
        update_token_counts(state, slots_B[emits], output.tokens[emits, step])


def _draws_all(one: _Request) -> bool:
    """Returns whether drafts are compared with what the rows draw themselves."""
    return one.greedy or one.rule == "strict"


def _rows(one: _Request) -> range:
    return range(one.first, one.first + len(one.run.drafts) + 1)


def _stop(rows: Targets, one: _Request, own: Ids, rules: VerifyRules) -> _Stop:
    drafts, count = one.run.drafts, len(one.run.drafts)
    if _draws_all(one):
        return _Stop(matches(drafts, own[one.first : one.first + count].tolist()), None)
    position, seed = int(rows.state.position[one.slot]), rows.state.seed[one.slot]
    u_k = uniforms(seed, position, int(rows.state.branch[one.slot]), count)
    if one.rule == "synthetic":
        inside = np.array([token < rows.raw_RV.shape[1] for token in drafts], np.bool_)
        return _Stop(standard(np.array([rules.rate(step) for step in range(count)]) * inside, u_k), None)
    p_kV, q_kV = _distributions(rows, one), [_q(rows, one, step) for step in range(count)]
    ratios_k = ratios(_at(p_kV, drafts), _at(q_kV, drafts))
    if one.rule == "standard":
        accepted = standard(ratios_k, u_k)
        weight = 1.0
    else:
        weights = block_weights(ratios_k)
        masses = [residual(p_kV[i], q_kV[i], weights[i]).sum() for i in range(1, count)]
        accepted = block(block_chances(weights, np.array(masses)), u_k)
        weight = float(weights[accepted])
    bad = accepted < count and (_at(q_kV, drafts)[accepted] == 0)
    return _Stop(accepted, weight if accepted < count else None, accepted if bad else None)


def _distributions(rows: Targets, one: _Request) -> list[Float64s]:
    """Returns p of each row that judges a draft."""
    return [distribution(rows, one.first + step) for step in range(len(one.run.drafts))]


def _q(rows: Targets, one: _Request, step: int) -> Float64s:
    temperature = float(rows.state.temperature[one.slot])
    return one.run.q(step, rows.raw_RV.shape[1], temperature)


def _at(probs_kV: list[Float64s], drafts: tuple[int, ...]) -> Float64s:
    """Returns the probability [k] of each draft; 0 for an id outside of the vocabulary."""
    found = [
        distribution[token] if token < len(distribution) else 0.0
        for distribution, token in zip(probs_kV, drafts, strict=True)
    ]
    return np.array(found, np.float64)


def distribution(rows: Targets, index: int) -> Float64s:
    """Returns the processed distribution [V] of a row that is drawn at random; zero where it has no token."""
    p_V = np.zeros(rows.raw_RV.shape[1])
    if rows.routes[index] == "empty":
        return p_V
    row, kept = rows.rows[index], scan(rows, index)
    ids = np.arange(len(p_V)) if kept is None else kept
    weights = np.exp((row.z_V[ids].astype(np.float64) - row.best) / row.temperature)
    p_V[ids] = weights / weights.sum()
    return p_V


def _residual_token(rows: Targets, one: _Request, stop: _Stop) -> int:
    """Draws the token after a rejected draft."""
    index = one.first + stop.accepted
    if rows.routes[index] == "empty" or stop.weight is None:
        return INVALID_TOKEN
    p_V, q_V = distribution(rows, index), _q(rows, one, stop.accepted)
    weights_V = residual(p_V, q_V, stop.weight)
    if not (weights_V > 0).any():
        rows.flags[index] |= np.uint32(RowFlag.ZERO_RESIDUAL)
        weights_V = p_V
    row: Row = rows.rows[index]
    return draw_residual(weights_V, row, _singles(row, one.run, stop.accepted), listed=rows.kept[index] is not None)


def _singles(row: Row, run: DraftRun, step: int) -> Int64s:
    """Returns ids outside of their groups, each once: of the overlay, and of a proposal that names its ids."""
    named = np.array([run.drafts[step]] if run.kind is ProposalKind.ONE_HOT else [], np.int64)
    if run.q_ids is not None and run.kind is ProposalKind.SPARSE:
        named = run.q_ids[step]
    named = named[(named >= 0) & (named < len(row.z_V))]
    return np.union1d(row.singles, named)


def draft(
    logits_BV: Float32s, state: SamplingState, slots_B: Ids, offset: int, method: DraftMethod, rules: VerifyRules
) -> Draft:
    """Draws draft `offset` of each row's run; see `Sampler.draft`. The state keeps a run's drafts, which rows see."""
    places = [RowPosition(slot, offset, _before(state, slot, offset)) for slot in slots_B.tolist()]
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
        ids[index] = ids[index] if index in strict else greedy(rows.processed_RV[index])
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
    """Returns the DRAFT_TOKEN noise of ids."""
    found = words(row.seed, ids, row.position, Purpose.DRAFT_TOKEN, offset, row.branch)
    return gumbel(found).astype(np.float64)
