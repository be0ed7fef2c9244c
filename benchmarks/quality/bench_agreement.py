"""Compares the engine's logits with those of transformers, teacher-forced, with the same weights and dtype.

    python -m benchmarks.quality.bench_agreement --out benchmarks/results
    python -m benchmarks.quality.bench_agreement --model benchmarks/models/qwen3-0.6b --random-weights --out OUT

Each sequence runs through the engine's model as chunked prefill packed with the others, as prefill of its first half
and one decode step a token after it, and alone. Each is compared with the library's forward (its own attention, no
cache) position by position. Agreement counts positions whose two best logits differ by more than a gap in the library:
0.1, and 0.5 because a bfloat16 logit between 32 and 64 has a spacing of 0.25. The first row is the library against
itself, with another attention: what the dtype alone costs.

Sequences are texts of the catalogue, as long as they are, for a model that speaks its language (the built-in target and
draft, or `--texts catalogue`), and random ids of one length for any other.
"""

import argparse
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support import workloads
from benchmarks.support.report import Row, publish
from engine.batch.input_batch import ScheduledSequence, StepKind
from engine.config import EngineConfig, ModelConfig
from engine.model.checkpoint import choose_device, read_config, read_model
from engine.model.hf_model import HFModel
from engine.model.model_folder import find_folder
from engine.requests import Int32s
from engine.tokenizer.tokenizer import load_tokenizer
from tools.builtin_model import grammar

GAPS = (0.1, 0.5)
NONE = np.zeros(0, np.int32)
FIRST = np.zeros(1, np.int32)
CATALOGUE_TEXTS, RANDOM_SEQUENCES, RANDOM_LENGTH = 256, 32, 192


class Comparison:
    """Accumulates differences from the library's logits, which are computed once for every sequence."""

    def __init__(self) -> None:
        self.positions = self.numbers = 0
        self.clear, self.agree = dict.fromkeys(GAPS, 0), dict.fromkeys(GAPS, 0)
        self.largest = self.total = 0.0

    def add(self, ours_RV: torch.Tensor, theirs_RV: torch.Tensor) -> None:
        ours, theirs = ours_RV.float(), theirs_RV.float()
        difference = (ours - theirs).abs()
        best = theirs.topk(2, dim=1)
        same = ours.argmax(1) == best.indices[:, 0]
        self.positions += len(ours)
        for gap in GAPS:
            clear = best.values[:, 0] - best.values[:, 1] > gap
            self.clear[gap] += int(clear.sum())
            self.agree[gap] += int((same & clear).sum())
        self.largest = max(self.largest, float(difference.max()))
        self.total += float(difference.sum(dtype=torch.float64))
        self.numbers += difference.numel()

    def row(self, case: str) -> Row:
        row: Row = {"case": case, "positions": self.positions}
        for gap in GAPS:
            row[f"over_{gap}"] = self.clear[gap]
            row[f"agree_percent_{gap}"] = 100.0 * self.agree[gap] / self.clear[gap] if self.clear[gap] else None
        row["largest_difference"] = self.largest
        row["mean_difference"] = self.total / max(1, self.numbers)
        return row


def pool_slots(ids: list[Int32s]) -> list[Int32s]:
    """Assigns each sequence its slots of the KV cache, one after another; slot 0 is padding."""
    ends = accumulate((len(one) for one in ids), initial=1)
    return [np.arange(start, start + len(one), dtype=np.int32) for start, one in zip(ends, ids, strict=False)]


def packed(model: HFModel, ids: list[Int32s], theirs: list[torch.Tensor], chunk: int) -> Comparison:
    """Runs all sequences packed, `chunk` tokens of each a step, until the longest ends."""
    found, slots = Comparison(), pool_slots(ids)
    table = torch.zeros((1, 1), dtype=torch.int32, device=model.device)
    for first in range(0, max(map(len, ids)), chunk):
        going = [i for i, one in enumerate(ids) if len(one) > first]
        runs = []
        for i in going:
            part = ids[i][first : first + chunk]
            rows = np.arange(len(part), dtype=np.int32)
            runs.append(ScheduledSequence(0, slots[i][:first], slots[i][first : first + chunk], part, rows))
        logits = model.forward(StepKind.PREFILL, runs, table)
        found.add(logits, torch.cat([theirs[i][first : first + chunk] for i in going]))
    return found


def decoded(model: HFModel, ids: list[Int32s], theirs: list[torch.Tensor]) -> Comparison:
    """Runs the first halves as prefill and the rest as decode steps of one forced token, all sequences packed."""
    found, slots = Comparison(), pool_slots(ids)
    table = torch.zeros((len(ids) + 1, max(map(len, ids)) + 1), dtype=torch.int32, device=model.device)
    for i, one in enumerate(ids):
        table[i + 1, : len(one)] = torch.from_numpy(one).to(model.device)
    halves = [len(one) // 2 for one in ids]
    runs = [ScheduledSequence(i + 1, NONE, slots[i][:half], ids[i][:half], NONE) for i, half in enumerate(halves)]
    runs[-1] = runs[-1]._replace(rows=FIRST)  # a step gives at least one row
    model.forward(StepKind.PREFILL, runs, table)
    for step in range(max(len(one) - half for one, half in zip(ids, halves, strict=True))):
        going = [(i, half + step) for i, half in enumerate(halves) if half + step < len(ids[i])]
        runs = [ScheduledSequence(i + 1, slots[i][:at], slots[i][at : at + 1], None, FIRST) for i, at in going]
        logits = model.forward(StepKind.DECODE, runs, table)
        found.add(logits, torch.stack([theirs[i][at] for i, at in going]))
    return found


def alone(model: HFModel, ids: list[Int32s], theirs: list[torch.Tensor]) -> Comparison:
    """Runs each sequence as a prefill step of its own."""
    found = Comparison()
    table = torch.zeros((1, 1), dtype=torch.int32, device=model.device)
    for one, slots, wanted in zip(ids, pool_slots(ids), theirs, strict=True):
        run = ScheduledSequence(0, NONE, slots, one, np.arange(len(one), dtype=np.int32))
        found.add(model.forward(StepKind.PREFILL, [run], table), wanted)
    return found


@torch.no_grad()
def library_logits(module: Any, ids: list[Int32s], attention: str) -> list[torch.Tensor]:
    """Returns the library's logits [T, V] of each sequence alone, with its own `attention`."""
    module.set_attn_implementation(attention)
    rows = [torch.from_numpy(one).long()[None].to(module.device) for one in ids]
    return [module(input_ids=one, use_cache=False).logits[0] for one in rows]


def catalogue(texts: int) -> list[Int32s]:
    """Returns texts of the built-in model's language from all families, without documents of its training data."""
    drawn = list(islice(grammar.examples(seed=5, kept=True), texts))
    rows = load_tokenizer("builtin").encode_batch(drawn, add_special_tokens=False)
    return [np.array(row, np.int32) for row in rows]


def sequences(kind: str, count: int | None, vocab_size: int) -> list[Int32s]:
    """Returns the token ids to compare on: texts for a model that knows the language, random ids for others."""
    if kind == "catalogue":
        return catalogue(count or CATALOGUE_TEXTS)
    drawn = workloads.token_lists(count or RANDOM_SEQUENCES, RANDOM_LENGTH, seed=11)
    return [one % vocab_size for one in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--texts", choices=("catalogue", "random"), help="default: catalogue for the built-in target")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--name", help="of the result, in place of the model's last part")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    chosen = ModelConfig(path=args.model, random_weights=args.random_weights, max_model_len=1024)
    folder = find_folder(chosen)
    config = read_config(folder, chosen.max_model_len)
    torch.manual_seed(0)
    module: Any = read_model(folder, config, chosen, choose_device(chosen.device))
    vocab = int(config.get_text_config(decoder=True).vocab_size)
    texts = args.texts or ("catalogue" if args.model == "builtin" else "random")
    ids = sequences(texts, args.sequences, vocab)
    eager, theirs = (library_logits(module, ids, attention) for attention in ("eager", "sdpa"))
    itself = Comparison()
    for one, other in zip(eager, theirs, strict=True):
        itself.add(one, other)
    del eager
    engine = EngineConfig(kv_slots=sum(map(len, ids)) + 2)
    model = HFModel(module, engine, max_model_len=chosen.max_model_len, folder=folder)
    model.warm_up(lambda stage, seconds: None)
    rows = [
        itself.row("library: eager against sdpa"),
        packed(model, ids, theirs, chunk=64).row("packed, chunks of 64"),
        packed(model, ids, theirs, chunk=chosen.max_model_len or RANDOM_LENGTH).row("packed, whole"),
        decoded(model, ids, theirs).row("decode after half"),
        alone(model, ids, theirs).row("alone"),
    ]
    name = args.name or Path(args.model).name
    publish(f"agreement-{name}", rows, args.out, notes=f"{module.dtype}, {texts} texts")


if __name__ == "__main__":
    main()
