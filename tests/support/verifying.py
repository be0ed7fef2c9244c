"""Runs mixed verify steps, and checks that two samplers answer them alike.

Shape legend: B requests, K draft steps, R = B (K + 1) rows, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gpu_sampler.output import VerifyOutput
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import INVALID_TOKEN, SamplingParams
from gpu_sampler.spec_decode import PROPOSAL_IDS, Proposal, VerifyRules
from tests.support.agreement import allowed_error
from tests.support.edges import pair_of_samplers

FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 9, "temperature": 1.3},
    {"top_p": 0.7},
    {"top_p": 0.99, "temperature": 2.0},  # more tokens than a list holds, where the vocabulary has them
    {"min_p": 0.02, "temperature": 1.9},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"bad_words_ids": ((3, 5), (7,)), "stop_token_ids": (2, 9), "min_tokens": 5, "logit_bias": ((4, 2.0),)},
    {"allowed": True, "top_k": 20},
    {"top_p": 0.9, "frequency_penalty": 1.0, "logit_bias": ((1, 1.0), (6, -1.0))},
    {"seed": 5, "min_p": 0.1},
    {"allowed": True, "presence_penalty": 0.5},
)


class VerifyStep(NamedTuple):
    logits_RV: npt.NDArray[np.float32]
    proposal: Proposal


def params_of(number: int, vocab_size: int) -> SamplingParams:
    features = dict(FEATURES[number % len(FEATURES)])
    if features.pop("allowed", False):
        features["allowed_token_ids"] = tuple(range(0, vocab_size, 3))
    if number % 5:
        features |= {"logprobs": number % 4, "logprob_token_ids": (5, 1, vocab_size - 1)}
    return SamplingParams(max_tokens=60, **features)


def admit_all(sampler: Sampler, requests: int) -> None:
    """A request a slot, from 1 on, one feature after another."""
    for slot in range(1, requests + 1):
        params = params_of(slot - 1, sampler.vocab_size)
        sampler.admit(slot, params, (3, 5, 7, 5), seed=1000 + slot, branch=slot % 3)


def verify_step(requests: int, steps: int, size: int, seed: int) -> VerifyStep:
    """Drafts that are often right, by proposals of every kind; runs of every length; here and there a draft that its
    proposal does not have, one of no vocabulary, a bad value, and rows behind a run that are all bad values."""
    rng = np.random.default_rng([seed, requests, steps, size])
    target = (np.round(rng.normal(0, 2, (requests, steps + 1, size)) * 8) / 8).astype(np.float32)
    q_logits = (target[:, :steps] + rng.normal(0, 0.5, (requests, steps, size))).astype(np.float32)
    drafts = (q_logits + rng.gumbel(size=q_logits.shape)).argmax(axis=2).astype(np.int32)
    q_ids = np.full((requests, steps, PROPOSAL_IDS), INVALID_TOKEN, np.int32)
    q_probs = np.zeros((requests, steps, PROPOSAL_IDS), np.float32)
    for at in np.ndindex(requests, steps):
        ids = np.union1d(rng.choice(size, min(PROPOSAL_IDS, size) - 1, replace=False), drafts[at])[:PROPOSAL_IDS]
        weights = np.exp(q_logits[at][ids])
        order = rng.permutation(len(ids))
        q_ids[at][: len(ids)], q_probs[at][: len(ids)] = ids[order], (weights / weights.sum())[order]
    kind = (np.arange(requests) + seed) % 4
    drafts[rng.random(drafts.shape) < 0.05] = size + 3
    drafts[rng.random(drafts.shape) < 0.1] = INVALID_TOKEN
    target[rng.random(target.shape) < 0.0005] = np.nan
    runs = [next((i for i, d in enumerate(row) if d < 0), steps) for row in drafts]
    for row, length in enumerate(runs):
        target[row, length + 1 :] = np.nan
    proposal = Proposal(drafts, kind.astype(np.uint8), q_ids, q_probs, q_logits)
    return VerifyStep(target.reshape(-1, size), proposal)


def verify_agrees(
    device: str, mode: LogprobsMode, rules: VerifyRules, *, requests: int, steps: int, size: int, turns: int, seed: int
) -> list[str]:
    """Returns the differences between the kernels and the reference over `pdl` steps; both keep their own tokens, and a
    difference ends the comparison."""
    ours, reference = pair_of_samplers(requests + 1, size, device, mode)
    for sampler in (ours, reference):
        admit_all(sampler, requests)
    slots = np.arange(1, requests + 1)
    for turn in range(turns):
        step = verify_step(requests, steps, size, seed + turn)
        there = Proposal(*(torch.tensor(part).to(device) for part in step.proposal))
        given = torch.tensor(step.logits_RV).to(device)
        found = ours.fetch(ours.verify(given, slots, there, rules)).result()
        expected = reference.verify(step.logits_RV, slots, step.proposal, rules)
        if wrong := [f"turn {turn}: {fault}" for fault in faults(found, expected)]:
            return wrong
    return []


def faults(found: VerifyOutput, expected: VerifyOutput) -> Iterator[str]:
    """Integers that are not equal, floats that are not near."""
    got: Any = found
    for name, wanted in expected._asdict().items():
        own = getattr(got, name)
        if wanted is None or own is None:
            if (wanted is None) != (own is None):
                yield f"{name}: one of the two is None"
            continue
        for at in np.ndindex(*wanted.shape[:1]):
            if not _near(np.asarray(own[at]), np.asarray(wanted[at])):
                yield f"{name} of request {at[0]}: {own[at]}, expected {wanted[at]}"


def _near(own: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    if wanted.dtype != np.float32:
        return np.array_equal(own.astype(np.int64), wanted.astype(np.int64))
    shown = np.isfinite(wanted)
    if own.shape != wanted.shape or not np.array_equal(np.isfinite(own), shown):
        return False
    return bool((np.abs(own[shown] - wanted[shown]) <= allowed_error(wanted[shown])).all())
