"""A timed verify step begins with the state of the first one: a history that grew would be timed in its place."""

import numpy as np
import torch

from benchmarks.sampler.bench_verify import Saved
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import DEFAULT_RULES, Proposal, ProposalKind

VOCAB, DRAFTS = 129, 2


def test_restore_takes_back_what_a_verify_step_counted(device: str) -> None:
    sampler = Sampler(num_slots=2, vocab_size=VOCAB, device=device, backend="triton")
    params = SamplingParams(temperature=0.0, frequency_penalty=0.1, max_tokens=64)
    sampler.admit(1, params, np.array([3, 5], np.int32), seed=1, output_ids=[])
    logits = torch.zeros((DRAFTS + 1, VOCAB), device=device)
    logits[torch.arange(DRAFTS + 1), torch.tensor([20, 21, 22])] = 9.0  # the drafts, and one more
    ids = torch.tensor([[20, 21]], dtype=torch.int32, device=device)
    proposal = Proposal(ids, torch.full((1,), int(ProposalKind.ONE_HOT), dtype=torch.uint8, device=device))
    saved = Saved(sampler)
    on_device = sampler._triton
    assert on_device is not None
    before = on_device.device_state.words.clone()
    sampler.verify(logits.clone(), np.array([1]), proposal, DEFAULT_RULES)
    assert not torch.equal(on_device.device_state.words, before)  # what is planted in every timed pass
    saved.restore()
    assert torch.equal(on_device.device_state.words, before)
