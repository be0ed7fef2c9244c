"""Defines the cases of bench_verify: drafts, verification rule and target times.

About 70 % of the verified drafts are accepted: the drafter's logits are the target's with noise of `apart`, greedy
drafts are the best token that often, and certain drafts have that probability.
Shape legend: B requests, K drafts of each, R = B (K + 1) rows, V vocabulary, N ids of a sparse proposal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.sampler.sampler_cases import TEMPERATURE, TOP_K, TOP_P
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Proposal, ProposalKind, VerifyRules

DRAFTS = 4
REQUESTS = (1, 8, 64, 256)
ACCEPTED = 0.7  # of the drafts looked at, about
Kind = Literal["sparse", "dense", "certain", "best"]
Slots = np.ndarray[Any, np.dtype[np.int32]]
BLOCK, STRICT, STANDARD = VerifyRules(rule="block"), VerifyRules(rule="strict"), VerifyRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCase:
    """Defines one row of the table. Times are in microseconds, for 151,936 bf16 logits and 4 drafts, by requests."""

    name: str
    kind: Kind
    rules: VerifyRules = STANDARD
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: float = 0.0  # noise on the drafter's logits
    history: bool = False  # the rows have seen tokens, and write to their logits
    targets_us: Mapping[int, float] = field(default_factory=dict)
    vllm_us: Mapping[int, float] = field(default_factory=dict)  # 0.26 on the same card

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{"temperature": TEMPERATURE, **self.options})


CASES: tuple[VerifyCase, ...] = (
    VerifyCase(name="standard", kind="sparse", apart=0.6, targets_us={64: 60, 256: 200}, vllm_us={64: 145, 256: 492}),
    VerifyCase(
        name="block", kind="sparse", rules=BLOCK, apart=0.6, targets_us={64: 80, 256: 260}, vllm_us={64: 184, 256: 612}
    ),
    VerifyCase(
        name="greedy",
        kind="best",
        options={"temperature": 0.0},
        targets_us={64: 45, 256: 120},
        vllm_us={64: 66, 256: 146},
    ),
    VerifyCase(name="one-hot", kind="certain", targets_us={64: 45, 256: 150}, vllm_us={64: 105, 256: 347}),
    VerifyCase(name="strict", kind="sparse", rules=STRICT, apart=0.6),
    VerifyCase(name="standard topk50_topp.9", kind="sparse", options={"top_k": TOP_K, "top_p": TOP_P}, apart=0.6),
    VerifyCase(
        name="standard penalties",
        kind="sparse",
        options={"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "max_tokens": 2048},
        apart=0.6,
        history=True,
    ),
    VerifyCase(name="standard dense", kind="dense", apart=0.6),
)


def make_certain(logits_RV: torch.Tensor) -> None:
    """Raises the best token of each row, in place, to a probability of about ACCEPTED."""
    odds = float(np.log(ACCEPTED / (1 - ACCEPTED)))
    for part_RV in torch.split(logits_RV, 64):
        best_R = part_RV.argmax(1, keepdim=True)
        others_RV = (part_RV.float() / TEMPERATURE).scatter_(1, best_R, -torch.inf)
        part_RV.scatter_(1, best_R, (TEMPERATURE * (others_RV.logsumexp(1, keepdim=True) + odds)).to(part_RV.dtype))


def propose(case: VerifyCase, sampler: Sampler, logits_RV: torch.Tensor, slots_B: Slots, seed: int) -> Proposal:
    """Returns the drafts of every request, on the device of the logits."""
    rows_BKV = logits_RV.view(len(slots_B), DRAFTS + 1, -1)[:, :DRAFTS]
    generator = torch.Generator(logits_RV.device).manual_seed(seed)
    if case.kind == "sparse":
        return _drawn(case, sampler, rows_BKV, slots_B, generator)
    if case.kind == "dense":
        return _dense(case, rows_BKV, generator)
    ids_BK = rows_BKV.argmax(2).to(torch.int32)
    if case.kind == "best":
        wrong_BK = torch.rand(ids_BK.shape, generator=generator, device=ids_BK.device) >= ACCEPTED
        ids_BK = torch.where(wrong_BK, (ids_BK + 1) % rows_BKV.shape[2], ids_BK)
    return Proposal(ids_BK, _kinds(ids_BK, ProposalKind.ONE_HOT))


def _drawn(
    case: VerifyCase, sampler: Sampler, rows_BKV: torch.Tensor, slots_B: Slots, generator: torch.Generator
) -> Proposal:
    """Draws drafts with `Sampler.draft`, as a draft model's are drawn."""
    columns = []
    for offset in range(DRAFTS):
        noisy_BV = _noisy(rows_BKV[:, offset], case.apart, generator)
        columns.append(sampler.draft(noisy_BV, slots_B, offset, "probabilistic", case.rules))
    ids, q_ids, q_probs = (
        torch.stack([torch.as_tensor(part) for part in parts], 1) for parts in zip(*columns, strict=True)
    )
    return Proposal(ids, _kinds(ids, ProposalKind.SPARSE), q_ids, q_probs)


def _dense(case: VerifyCase, rows_BKV: torch.Tensor, generator: torch.Generator) -> Proposal:
    """Draws drafts from all of the drafter's logits, which stay dense."""
    q_logits = torch.empty_like(rows_BKV)
    ids_BK = torch.empty(rows_BKV.shape[:2], dtype=torch.int32, device=rows_BKV.device)
    for offset in range(DRAFTS):
        q_logits[:, offset] = _noisy(rows_BKV[:, offset], case.apart, generator)
        heated_BV = q_logits[:, offset].float() / TEMPERATURE
        gumbel_BV = -torch.empty_like(heated_BV).exponential_(generator=generator).log_()
        ids_BK[:, offset] = (heated_BV + gumbel_BV).argmax(1)
    return Proposal(ids_BK, _kinds(ids_BK, ProposalKind.DENSE), q_logits=q_logits)


def _noisy(rows_BV: torch.Tensor, apart: float, generator: torch.Generator) -> torch.Tensor:
    noise_BV = torch.randn(rows_BV.shape, generator=generator, device=rows_BV.device)
    return (rows_BV + apart * noise_BV).to(rows_BV.dtype)


def _kinds(ids_BK: torch.Tensor, kind: ProposalKind) -> torch.Tensor:
    return torch.full((len(ids_BK),), int(kind), dtype=torch.uint8, device=ids_BK.device)
