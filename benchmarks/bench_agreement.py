"""How far the engine's logits are from the library's own, teacher-forced, with the same weights and dtype.

    python -m benchmarks.bench_agreement --model benchmarks/models/qwen3-0.6b --random-weights --out benchmarks/results

Each sequence runs through the engine's model as chunked prefill packed with the others, as prefill of its first half
and one decode step a token after it, and alone. Each is compared with the library's forward (its own attention, no
cache) position by position. Agreement counts positions whose two best logits differ by more than a gap in the library:
0.1, and 0.5 because a bfloat16 logit between 32 and 64 has a spacing of 0.25. The first row is the library against
itself, with another attention: what the dtype alone costs.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import workloads
from benchmarks.report import Row, publish
from engine.batch import Run, StepKind
from engine.builtin import grammar
from engine.config import EngineConfig, ModelConfig
from engine.jobs import Int32s
from engine.loading import choose_device, find_folder, read_config, read_model
from engine.model import HFModel
from engine.tokenizer import load_tokenizer

GAPS = (0.1, 0.5)
NO_SLOTS = np.zeros(0, np.int32)


class Comparison:
    """Sums up rows as they come; the library's logits of every sequence are made once."""

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
            row[f"agree_percent_{gap}"] = 100.0 * self.agree[gap] / max(1, self.clear[gap])
        row["largest_difference"] = self.largest
        row["mean_difference"] = self.total / max(1, self.numbers)
        return row


def _slots(index: int, length: int) -> Int32s:
    return np.arange(1 + index * length, 1 + (index + 1) * length, dtype=np.int32)


def packed(model: HFModel, ids: list[Int32s], theirs: list[torch.Tensor], chunk: int) -> Comparison:
    """All sequences side by side, `chunk` tokens of each a step."""
    found, table = Comparison(), torch.zeros((1, 1), dtype=torch.int32, device=model.device)
    length = len(ids[0])
    for first in range(0, length, chunk):
        last = min(length, first + chunk)
        rows = np.arange(last - first, dtype=np.int32)
        runs = [
            Run(0, _slots(i, length)[:first], _slots(i, length)[first:last], one[first:last], rows)
            for i, one in enumerate(ids)
        ]
        logits = torch.split(model.forward(StepKind.PREFILL, runs, table), last - first)
        for ours, wanted in zip(logits, theirs, strict=True):
            found.add(ours, wanted[first:last])
    return found


def decoded(model: HFModel, ids: list[Int32s], theirs: list[torch.Tensor]) -> Comparison:
    """First halves as prefill, the rest one forced token a decode step, all sequences together."""
    found, length = Comparison(), len(ids[0])
    half = length // 2
    table = torch.zeros((len(ids) + 1, length + 1), dtype=torch.int32, device=model.device)
    for i, one in enumerate(ids):
        table[i + 1, :length] = torch.from_numpy(one).to(model.device)
    none, first = np.zeros(0, np.int32), np.zeros(1, np.int32)
    runs = [Run(i + 1, NO_SLOTS, _slots(i, length)[:half], one[:half], none) for i, one in enumerate(ids)]
    runs[-1] = runs[-1]._replace(rows=np.array([half - 1], np.int32))
    model.forward(StepKind.PREFILL, runs, table)
    for at in range(half, length):
        runs = [
            Run(i + 1, _slots(i, length)[:at], _slots(i, length)[at : at + 1], None, first) for i in range(len(ids))
        ]
        logits = model.forward(StepKind.DECODE, runs, table)
        found.add(logits, torch.stack([wanted[at] for wanted in theirs]))
    return found


@torch.no_grad()
def library_logits(module: Any, ids: list[Int32s]) -> list[torch.Tensor]:
    """[T, V] of each sequence alone, on the host."""
    device = module.device
    return [module(input_ids=torch.from_numpy(x).long()[None].to(device), use_cache=False).logits[0] for x in ids]


def catalogue(sequences: int, length: int) -> list[Int32s]:
    """Texts of the built-in model's language, one after another, cut into sequences."""
    tokenizer = load_tokenizer("builtin")
    texts = grammar.examples(seed=5)
    flat: list[int] = []
    while len(flat) < sequences * length:
        flat.extend(tokenizer.encode_batch([next(texts)], add_special_tokens=False)[0])
    return [np.array(flat[i * length : (i + 1) * length], np.int32) for i in range(sequences)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    chosen = ModelConfig(path=args.model, random_weights=args.random_weights, max_model_len=1024)
    folder = find_folder(chosen)
    config = read_config(folder, chosen.max_model_len)
    torch.manual_seed(0)
    module: Any = read_model(folder, config, chosen, choose_device(chosen.device))
    vocab = int(config.get_text_config(decoder=True).vocab_size)
    ids = [x % vocab for x in workloads.token_lists(args.sequences, args.length, seed=11)]
    if args.model == "builtin":  # its own language: what it makes of random ids says nothing
        ids = catalogue(args.sequences, args.length)
    module.set_attn_implementation("eager")
    eager = library_logits(module, ids)
    module.set_attn_implementation("sdpa")
    theirs = library_logits(module, ids)
    itself = Comparison()
    for one, other in zip(eager, theirs, strict=True):
        itself.add(one, other)
    del eager
    engine = EngineConfig(kv_slots=args.sequences * args.length + 2)
    model = HFModel(module, engine, max_model_len=chosen.max_model_len, folder=folder)
    model.warm_up(lambda stage, seconds: None)
    rows = [
        itself.row("library: eager against sdpa"),
        packed(model, ids, theirs, chunk=64).row("packed, chunks of 64"),
        packed(model, ids, theirs, chunk=args.length).row("packed, whole"),
        decoded(model, ids, theirs).row("decode after half"),
        packed(model, ids[:1], theirs[:1], chunk=args.length).row("alone"),
    ]
    publish("agreement-" + Path(args.model).name, rows, args.out, notes=str(module.dtype))


if __name__ == "__main__":
    main()
