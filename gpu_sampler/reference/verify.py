"""The whole reference verifier: target rows, drafts and a state in, accepted tokens and one more out.

Row i of a request is the target's next-token distribution behind its first i drafts; draft i is judged by row i, and
the row behind the last accepted draft gives one token more (both counted from 0).

Shape legend: B requests, K draft steps, R = B (K + 1) rows, V vocabulary, k the drafts of one run.
"""

from typing import NamedTuple

import numpy as np

from gpu_sampler.output import RowFlag, VerifyOutput
from gpu_sampler.params import INVALID_TOKEN
from gpu_sampler.proposal import Proposal, ProposalKind, Rule, VerifyRules
from gpu_sampler.reference import accept
from gpu_sampler.reference.accept import Run, run_of
from gpu_sampler.reference.count_tokens import count_tokens
from gpu_sampler.reference.order import Float32s, Int64s
from gpu_sampler.reference.patch_rows import Place
from gpu_sampler.reference.residual import draw_residual, residual
from gpu_sampler.reference.row_stats import Float64s
from gpu_sampler.reference.sample import Targets, draw, report, scan, targets
from gpu_sampler.reference.select import Row
from gpu_sampler.state import Ids, SamplingState, SlotFlag


class _Stop(NamedTuple):
    """Where a run ends."""

    accepted: int
    weight: float | None  # P of the residual that the next token comes from; None: the row's own draw
    bad: int | None = None  # the draft of which q was 0


class _Request(NamedTuple):
    slot: int
    first: int  # its first row among the targets
    run: Run
    rule: Rule
    greedy: bool


def rule_of(state: SamplingState, slot: int, rules: VerifyRules) -> Rule:
    """`strict` for rows with an explicit seed, unless the rules say otherwise."""
    return rules.seeded if state.flags[slot] & SlotFlag.EXPLICIT_SEED else rules.rule


def verify(
    logits_RV: Float32s, state: SamplingState, slots_B: Ids, proposal: Proposal, rules: VerifyRules, processed: bool
) -> VerifyOutput:
    """Reads the state and leaves it alone; no content of the logits or of the proposal raises."""
    steps, vocab_size = proposal.draft_ids.shape[1], logits_RV.shape[1]
    places, requests = list[Place](), list[_Request]()
    for index, slot in enumerate(slots_B.tolist()):
        run, greedy = run_of(proposal, index), state.temperature[slot] == 0
        requests.append(_Request(slot, index * (steps + 1), run, rule_of(state, slot, rules), bool(greedy)))
        for step in range(steps + 1):
            ahead = tuple(token for token in run.drafts[:step] if token < vocab_size)
            used = step <= len(run.drafts)  # what stands behind the last draft's row is padding
            places.append(Place(slot, step, ahead) if used else Place(0))
    rows = targets(logits_RV, state, places)
    own = draw(rows, [row for one in requests if _draws_all(one) for row in _rows(one)])
    stops = [_stop(rows, one, own, rules) for one in requests]
    ends = [one.first + stop.accepted for one, stop in zip(requests, stops, strict=True)]
    last = draw(rows, [end for one, end, stop in zip(requests, ends, stops, strict=True) if stop.weight is None])
    tokens = np.full(len(places), INVALID_TOKEN, np.int32)
    for one, stop, end in zip(requests, stops, ends, strict=True):
        tokens[one.first : end] = one.run.drafts[: stop.accepted]
        tokens[end] = last[end] if stop.weight is None else _behind(rows, one, stop)
        if stop.bad is not None:
            rows.flags[one.first + stop.bad] |= np.uint32(RowFlag.BAD_PROPOSAL)
    counts = np.array([stop.accepted + 1 for stop in stops], np.int32)
    output = report(rows, tokens, processed)
    output.flags.reshape(len(counts), -1)[np.arange(steps + 1) >= counts[:, None]] = 0
    return VerifyOutput.of(output, counts, steps)


def advance(state: SamplingState, slots_B: Ids, output: VerifyOutput) -> None:
    """What the emitted tokens change in the state, one after another."""
    for step in range(output.tokens.shape[1]):
        emits = output.counts > step
        count_tokens(state, slots_B[emits], output.tokens[emits, step])


def _draws_all(one: _Request) -> bool:
    """Whether its drafts are compared with what the rows draw themselves."""
    return one.greedy or one.rule == "strict"


def _rows(one: _Request) -> range:
    return range(one.first, one.first + len(one.run.drafts) + 1)


def _stop(rows: Targets, one: _Request, own: Ids, rules: VerifyRules) -> _Stop:
    drafts, count = one.run.drafts, len(one.run.drafts)
    if _draws_all(one):
        return _Stop(accept.matches(drafts, own[one.first : one.first + count].tolist()), None)
    position, seed = int(rows.state.position[one.slot]), rows.state.seed[one.slot]
    u_k = accept.uniforms(seed, position, int(rows.state.branch[one.slot]), count)
    if one.rule == "synthetic":
        inside = np.array([token < rows.raw_RV.shape[1] for token in drafts], np.bool_)
        return _Stop(accept.standard(np.array([rules.rate(step) for step in range(count)]) * inside, u_k), None)
    p_kV, q_kV = _laws(rows, one), [_q(rows, one, step) for step in range(count)]
    ratios_k = accept.ratios(_at(p_kV, drafts), _at(q_kV, drafts))
    if one.rule == "standard":
        accepted = accept.standard(ratios_k, u_k)
        weight = 1.0
    else:
        weights = accept.block_weights(ratios_k)
        masses = [residual(p_kV[i], q_kV[i], weights[i]).sum() for i in range(1, count)]
        accepted = accept.block(accept.block_chances(weights, np.array(masses)), u_k)
        weight = float(weights[accepted])
    bad = accepted < count and (_at(q_kV, drafts)[accepted] == 0)
    return _Stop(accepted, weight if accepted < count else None, accepted if bad else None)


def _laws(rows: Targets, one: _Request) -> list[Float64s]:
    """p of each row that judges a draft."""
    return [law(rows, one.first + step) for step in range(len(one.run.drafts))]


def _q(rows: Targets, one: _Request, step: int) -> Float64s:
    temperature = float(rows.state.temperature[one.slot])
    return one.run.q(step, rows.raw_RV.shape[1], temperature)


def _at(laws_kV: list[Float64s], drafts: tuple[int, ...]) -> Float64s:
    """[k] the probability of each draft; 0 for an id that the vocabulary does not have."""
    found = [law[token] if token < len(law) else 0.0 for law, token in zip(laws_kV, drafts, strict=True)]
    return np.array(found, np.float64)


def law(rows: Targets, index: int) -> Float64s:
    """[V]: the fully processed distribution of a row that is drawn at random; zero where it has no token."""
    p_V = np.zeros(rows.raw_RV.shape[1])
    if rows.routes[index] == "empty":
        return p_V
    row, kept = rows.rows[index], scan(rows, index)
    ids = np.arange(len(p_V)) if kept is None else kept
    weights = np.exp((row.z_V[ids].astype(np.float64) - row.best) / row.temperature)
    p_V[ids] = weights / weights.sum()
    return p_V


def _behind(rows: Targets, one: _Request, stop: _Stop) -> int:
    """The token behind a rejected draft."""
    index = one.first + stop.accepted
    if rows.routes[index] == "empty" or stop.weight is None:
        return INVALID_TOKEN
    p_V, q_V = law(rows, index), _q(rows, one, stop.accepted)
    weights_V = residual(p_V, q_V, stop.weight)
    if not (weights_V > 0).any():
        rows.flags[index] |= np.uint32(RowFlag.ZERO_RESIDUAL)
        weights_V = p_V
    row: Row = rows.rows[index]
    return draw_residual(weights_V, row, _singles(row, one.run, stop.accepted), listed=rows.kept[index] is not None)


def _singles(row: Row, run: Run, step: int) -> Int64s:
    """Ids that stand outside of their groups, each once: of the overlay, and of a proposal that names its ids."""
    named = np.array([run.drafts[step]] if run.kind is ProposalKind.ONE_HOT else [], np.int64)
    if run.q_ids is not None and run.kind is ProposalKind.SPARSE:
        named = run.q_ids[step]
    named = named[(named >= 0) & (named < len(row.z_V))]
    return np.union1d(row.singles, named)
