"""Compares the engine on a CPU with the library that it stands on, side by side on the same model, cores and threads.

    python -m benchmarks.engine.bench_cpu --out benchmarks/results

Decoding: 16 greedy streams, against transformers' `generate` with a batch of the same 16 prompts. Scoring: 256 items
behind one prefix, against a loop that computes the prefix once with the library's cache, and the items in batches of
`--batch` in the order in which they come. Items of mixed lengths are padded there to the longest of their batch; those
of one length are the best case of such a loop. Both run in turn, in rounds after a first one that does not count; each
round has prompts of its own, and each side threads of its own, which end before the other begins. A row gives the
medians, and the median ratio of a round.
"""

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from benchmarks.support.report import Row, publish
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.hf_model import HFModel
from engine.model.model_folder import BUILTIN
from engine.requests import GenerateRequest, Int32s, ScoreRequest
from engine.utils.cpu import run_apart
from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.startup_progress import silent

STREAMS, PROMPT, NEW = 16, 64, 96  # sequences, and tokens of each
PREFIX, ITEMS = 256, 256  # tokens of the prefix, items
LENGTHS = {"items of 32 tokens": (32, 32), "items of 8 to 56 tokens": (8, 56)}
LABELS = (11, 12)
SMALL = Qwen3Config(  # 0.13B parameters
    vocab_size=32_000,
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=None,
)


class Work(NamedTuple):
    """Holds the prompts of one round."""

    prompts: Int32s  # [STREAMS, PROMPT]
    prefix: Int32s  # [PREFIX]
    items: list[Int32s]  # [ITEMS] of any length


class Library:
    """Runs transformers alone."""

    def timed(self, kind: str, work: Work) -> tuple[float, Any]:
        """Returns the seconds of one run, and its answer."""
        return run_apart(lambda: _timed(getattr(self, kind), work))

    def __init__(self, module: Any, batch: int) -> None:
        self._module = module
        self._batch = batch

    @torch.no_grad()
    def decode(self, work: Work) -> Int32s:
        """Returns the new tokens, [STREAMS, NEW]."""
        ids = torch.from_numpy(work.prompts).long()
        options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
        out = self._module.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
        found: Int32s = out[:, PROMPT:].numpy().astype(np.int32)
        return found

    @torch.no_grad()
    def score(self, work: Work) -> torch.Tensor:
        """Returns the log-probabilities of the labels, [ITEMS, L]."""
        prefix = self._module(torch.from_numpy(work.prefix).long()[None], logits_to_keep=1, use_cache=True)
        found = []
        for first in range(0, ITEMS, self._batch):
            items = work.items[first : first + self._batch]
            cache: DynamicCache = copy.deepcopy(prefix.past_key_values)
            cache.batch_repeat_interleave(len(items))
            logits = self._module(past_key_values=cache, logits_to_keep=1, **_padded(items)).logits[:, -1]
            found.append(logits[:, list(LABELS)].float().log_softmax(-1))
        return torch.cat(found)


def _padded(items: list[Int32s]) -> dict[str, torch.Tensor]:
    """Returns the arguments of a batch of items behind the prefix, padded on the left, so that the last row is wanted.

    Items of one length need no mask, with which the library is slower.
    """
    longest = max(map(len, items))
    ids = torch.from_numpy(np.stack([np.pad(item, (longest - len(item), 0)) for item in items])).long()
    pads = torch.tensor([longest - len(item) for item in items])[:, None]
    if not pads.any():
        return {"input_ids": ids}
    at = torch.arange(longest)[None]
    mask = torch.cat((torch.ones(len(items), PREFIX), (at >= pads).float()), dim=1).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": PREFIX + (at - pads).clamp(min=0)}


class Ours:
    """Runs the engine."""

    def timed(self, kind: str, work: Work) -> tuple[float, Any]:
        """Returns the seconds of one run of the started engine, and its answer."""
        self._engine.start()
        try:
            return _timed(getattr(self, kind), work)
        finally:
            self._engine.stop()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0

    def decode(self, work: Work) -> Int32s:
        """Returns the new tokens, [STREAMS, NEW]."""
        params = SamplingParams(temperature=0.0, max_tokens=NEW)
        requests = [
            GenerateRequest(request_id=self._name(), prompt=prompt, params=params, seed=0) for prompt in work.prompts
        ]

        async def run() -> Int32s:
            return np.stack(
                [chunks[0].tokens for chunks in await asyncio.gather(*map(self._engine.complete, requests))]
            )

        return asyncio.run(run())

    def score(self, work: Work) -> torch.Tensor:
        """Returns the log-probabilities of the labels, [ITEMS, L]."""
        request = ScoreRequest(
            request_id=self._name(),
            prefix=work.prefix,
            ids=np.concatenate(work.items),
            starts=np.cumsum([0, *map(len, work.items)], dtype=np.int32),
            labels=np.array(LABELS, np.int32),
            full=False,
        )
        return torch.from_numpy(asyncio.run(self._engine.score(request)).label_logprobs)

    def _name(self) -> str:
        self._number += 1
        return str(self._number)


def _timed(run: Callable[[Work], Any], work: Work) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = run(work)
    return time.perf_counter() - start, answer


def builtin() -> Any:
    """Returns the built-in model in float32."""
    return AutoModelForCausalLM.from_pretrained(BUILTIN, dtype=torch.float32)


def small() -> Any:
    """Returns the 0.1B shape with random weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(SMALL).float()


MODELS: dict[str, Callable[[], Any]] = {"builtin": builtin, "0.1B": small}
SHARE = {"builtin": 1, "0.1B": 3}  # of the rounds: one of the larger model takes a minute


def sides(module: Any, batch: int) -> tuple[Ours, Library]:
    """Returns both sides; the engine, as a service starts it, has a copy of the model."""
    config = EngineConfig(kv_slots=1 << 15)
    engine = Engine(HFModel(copy.deepcopy(module).eval(), config), config)
    engine.warm_up(silent)
    return Ours(engine), Library(module.eval(), batch)


def work_of(round_: int, vocab: int, shortest: int, longest: int) -> Work:
    """Returns the prompts of a round, which no other round begins like."""
    draw = np.random.default_rng((round_, shortest))

    def ids(*shape: int) -> Int32s:
        return draw.integers(10, vocab, shape, dtype=np.int32)

    lengths = draw.integers(shortest, longest + 1, ITEMS)
    return Work(ids(STREAMS, PROMPT), ids(PREFIX), [ids(int(length)) for length in lengths])


def measured(name: str, module: Any, rounds: int, batch: int) -> list[Row]:
    """Measures all cases on one model."""
    cases = [(f"{STREAMS} streams", "decode", (1, 1))]
    cases += [(f"{ITEMS} {name}", "score", lengths) for name, lengths in LENGTHS.items()]
    times: dict[str, list[tuple[float, float]]] = {case: [] for case, _, _ in cases}
    ours, library = run_apart(lambda: sides(module, batch))
    for round_ in range(rounds + 1):
        for case, kind, lengths in cases:
            work = work_of(round_, module.config.vocab_size, *lengths)
            (own_s, own), (library_s, other) = ours.timed(kind, work), library.timed(kind, work)
            _check(kind, own, other)
            if round_:
                times[case].append((own_s, library_s))
    return [_row(f"{name}, {case}", kind, times[case]) for case, kind, _ in cases]


def _check(kind: str, ours: Any, library: Any) -> None:
    """Raises ValueError unless both sides computed the same, but for roundings that turn a stream."""
    if kind == "score":
        same = torch.allclose(ours, library, atol=2e-3)
    else:
        same = float((ours == library).all(axis=1).mean()) > 0.5
    if not same:
        raise ValueError(f"The answers of both sides must agree. Given: a difference of {kind}.")


def _row(case: str, kind: str, found: list[tuple[float, float]]) -> Row:
    count, unit = (STREAMS * NEW, "tokens") if kind == "decode" else (ITEMS, "items")
    ratios = sorted(library / ours for ours, library in found)
    ours, library = (count / statistics.median(column) for column in zip(*found, strict=True))
    return {
        "case": case,
        f"engine_{unit}_s": ours,
        f"library_{unit}_s": library,
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="beside a first; a third for the 0.1B shape")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides")
    parser.add_argument("--batch", type=int, default=32, help="items of a batch of the library's loop")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = [
        row
        for name in given.models.split(",")
        for row in measured(name, run_apart(MODELS[name]), max(1, given.rounds // SHARE[name]), given.batch)
    ]
    rounds = f"median of {given.rounds} rounds, a third of them for 0.1B"
    notes = f"float32, {given.threads} threads, {rounds}; the library's batches of {given.batch}"
    publish("cpu", rows, given.out, notes=notes)


if __name__ == "__main__":
    main()
