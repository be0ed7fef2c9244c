"""Runs engines with and without speculation on one pair of models, with samplers that measure verify steps."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig, SpeculationConfig
from engine.core import LoopOptions
from engine.engine import Engine
from engine.metrics import Stopwatch
from engine.model.interface import CausalLM
from engine.requests import GenerateChunk, GenerateRequest, Int32s
from engine.tokenizer.tokenizer import load_tokenizer
from gpu_sampler.output import VerifyOutput
from gpu_sampler.sampler import Sampler
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.spec_decode import Proposal
from tools.builtin_model import evaluate


class TimedSampler(Sampler):
    """Times the rejection step of every verify step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watches: list[Stopwatch] = []

    def verify(self, logits: Any, slots: Any, proposal: Proposal, *rest: Any) -> VerifyOutput:
        watch = Stopwatch(self.device)
        out = super().verify(logits, slots, proposal, *rest)
        watch.stop()
        self.watches.append(watch)
        return out

    def seconds(self) -> float:
        """Returns the seconds since the last call; no step may be running."""
        taken = sum(watch.seconds() for watch in self.watches)
        self.watches.clear()
        return taken


class OverlapSampler(TimedSampler):
    """Records the sum of min(p, q) of every verified draft; p is the target's distribution at temperature 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: list[float] = []

    def verify(self, logits: Any, slots: Any, proposal: Proposal, *rest: Any) -> VerifyOutput:
        p_BKV = logits.double().softmax(-1).view(len(slots), -1, logits.shape[-1])  # before the sampler owns it
        out = super().verify(logits, slots, proposal, *rest)
        if proposal.q_ids is None or proposal.q_probs is None:
            return out
        ids, q_ids, q_probs, counts = (
            torch.as_tensor(part).to(p_BKV.device)
            for part in (proposal.draft_ids, proposal.q_ids, proposal.q_probs, out.counts)
        )
        own = p_BKV[:, : ids.shape[1]].gather(2, q_ids.clamp(min=0).long())
        sums_BK = torch.where(q_ids >= 0, torch.minimum(own, q_probs.double()), 0).sum(2)
        places = torch.arange(ids.shape[1], device=ids.device)
        reached_BK = (places < counts[:, None]) & ((ids < 0).cumsum(1) == 0)
        self.sums += sums_BK[reached_BK].tolist()
        return out


@contextmanager
def running(
    target: CausalLM,
    draft: CausalLM | None,
    config: EngineConfig,
    sampler: type[TimedSampler] = TimedSampler,
    overlap: bool | None = None,
) -> Iterator[Engine]:
    """Starts a warmed-up engine whose sampler is a `sampler`. The draft model is used if the configuration names it;
    `overlap` is that of `Engine`."""

    def progress(stage: str, seconds: float) -> None:
        if seconds:
            sys.stderr.write(f"{stage}: {seconds:.1f} s\n")

    own = sampler(
        num_slots=config.max_running + 1,
        vocab_size=target.vocab_size,
        device=target.device,
        overlay_entries=config.sampler.overlay_entries,
    )
    drafter = draft if config.speculation.method == "draft_model" else None
    engine = Engine(target, config, own, draft=drafter, options=LoopOptions(overlap=overlap))
    engine.warm_up(progress, complete=True)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def with_speculation(config: EngineConfig, **options: Any) -> EngineConfig:
    return replace(config, speculation=SpeculationConfig(**options))


async def complete(
    engine: Engine,
    prompts: Sequence[Int32s],
    params: SamplingParams,
    first_seed: int = 0,
    at_once: int | None = None,
) -> list[GenerateChunk]:
    """Completes each prompt with one chunk, in order, with at most `at_once` in flight."""
    turns = asyncio.Semaphore(at_once or len(prompts))

    async def one(number: int, prompt: Int32s) -> GenerateChunk:
        name = f"{first_seed}-{number}"
        job = GenerateRequest(request_id=name, prompt=prompt, params=params, seed=first_seed + number)
        async with turns:
            return (await engine.complete(job))[0]

    return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))


def builtin_prompts(count: int) -> list[Int32s]:
    """Returns prompts of the built-in model's language."""
    rows = load_tokenizer("builtin").encode_batch(evaluate.completion_prompts(count), add_special_tokens=False)
    return [np.array(row, np.int32) for row in rows]
