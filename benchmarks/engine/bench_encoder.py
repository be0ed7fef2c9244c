"""Measures an encoder over packed rows against padded batches of the library, on pairs of mixed or equal lengths.

    python -m benchmarks.engine.bench_encoder --threads 2 --out benchmarks/results
    python -m benchmarks.engine.bench_encoder --device cuda --dtype bfloat16
    python -m benchmarks --only encoder-large --out benchmarks/results

Every side scores the same pairs with the same random weights, in turn within a round; times are medians of the rounds.
`padded` are batches of `--batch` pairs in the order given, each padded to its longest, by the library's scaled dot
product attention; `sorted` are the same of pairs sorted by length. `packed` are passes of at most `--tokens` tokens in
the order given. Mixed lengths are log-normal, from 16 tokens to 512. With pairs of one length a padded batch holds as
many tokens as a packed pass, where that is more than `--batch` pairs. `difference` is the largest between the logits of
packed and padded pairs.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from benchmarks.support.report import Row, publish
from engine.model.checkpoint import DTYPES
from engine.model.encoder.encoder_model import EncoderModel
from engine.model.encoder.packed_rows import EncoderRow
from engine.requests import Int64s

SHORTEST, LONGEST = 16, 512  # tokens of a pair
MEDIAN, SPREAD = 100.0, 0.8  # of the log-normal distribution
FIRST_ID = 1000  # control tokens lie before
LARGE = "bge-reranker-v2-m3"  # takes too long on a CPU to be among those that are measured by default
SHAPES: dict[str, Callable[[], Any]] = {  # of published rerankers
    "minilm-l6": lambda: transformers.BertConfig(
        hidden_size=384, num_attention_heads=12, num_hidden_layers=6, intermediate_size=1536, num_labels=1
    ),
    "xlm-roberta-base": lambda: transformers.XLMRobertaConfig(
        vocab_size=32_000, max_position_embeddings=514, type_vocab_size=1, num_labels=1
    ),
    LARGE: lambda: transformers.XLMRobertaConfig(
        vocab_size=250_002,
        hidden_size=1024,
        num_attention_heads=16,
        num_hidden_layers=24,
        intermediate_size=4096,
        max_position_embeddings=8194,
        type_vocab_size=1,
        num_labels=1,
    ),
    "modernbert-base": lambda: transformers.ModernBertConfig(num_labels=1),
    "deberta-v3-small": lambda: transformers.DebertaV2Config(
        vocab_size=32_000,
        num_hidden_layers=6,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        max_relative_positions=-1,
        num_labels=1,
    ),
}


def random_rows(count: int, vocab_size: int, length: int | None = None, seed: int = 0) -> list[EncoderRow]:
    """Returns random rows of a length, or of mixed ones in random order."""
    rng = np.random.default_rng(seed)
    if length is None:
        lengths = np.clip(rng.lognormal(np.log(MEDIAN), SPREAD, count), SHORTEST, LONGEST).astype(int)
    else:
        lengths = np.full(count, length)
    return [EncoderRow(rng.integers(FIRST_ID, vocab_size, length).astype(np.int32)) for length in lengths]


def padded_scores(module: Any, rows: Sequence[EncoderRow], order: Int64s, batch: int) -> torch.Tensor:
    """Returns the library's logits f32 [R, K] of padded batches, in the order of `rows`."""
    found = torch.empty(len(rows), module.config.num_labels)
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        longest = max(len(rows[index].ids) for index in members)
        ids = np.full((len(members), longest), module.config.pad_token_id or 0, np.int64)
        mask = np.zeros_like(ids)
        for line, index in enumerate(members):
            ids[line, : len(rows[index].ids)] = rows[index].ids
            mask[line, : len(rows[index].ids)] = 1
        given = {"input_ids": ids, "attention_mask": mask}
        tensors = {name: torch.from_numpy(array).to(module.device) for name, array in given.items()}
        found[torch.from_numpy(members)] = module(**tensors).logits.float().cpu()
    return found


def packed_scores(model: EncoderModel, rows: Sequence[EncoderRow], tokens: int) -> torch.Tensor:
    """Returns logits f32 [R, K] of passes of at most `tokens` tokens."""
    found, step, size = [], list[EncoderRow](), 0
    for row in rows:
        if step and size + len(row.ids) > tokens:
            found.append(model.classify(step).cpu())
            step, size = [], 0
        step.append(row)
        size += len(row.ids)
    return torch.cat([*found, model.classify(step).cpu()])


@torch.inference_mode()
def measure(name: str, args: argparse.Namespace) -> list[Row]:
    """Runs all sides of one shape, with each of the lengths."""
    torch.manual_seed(0)
    config, options = SHAPES[name](), {"dtype": DTYPES[args.dtype]}
    reference = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", **options)
    reference = reference.eval().to(args.device)
    model = EncoderModel(_copy(reference, SHAPES[name](), options))
    if name != "deberta-v3-small":  # the library has no other attention for it
        reference.set_attn_implementation("sdpa")
    return [_compared(name, reference, model, length, args) for length in args.lengths]


def _compared(name: str, reference: Any, model: EncoderModel, length: int | None, args: argparse.Namespace) -> Row:
    rows = random_rows(args.pairs, reference.config.vocab_size, length)
    lengths = np.array([len(row.ids) for row in rows])
    batch = args.batch if length is None else max(args.batch, args.tokens // length)
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "padded": lambda: padded_scores(reference, rows, np.arange(len(rows)), batch),
        "sorted": lambda: padded_scores(reference, rows, np.argsort(-lengths), batch),
        "packed": lambda: packed_scores(model, rows, args.tokens),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    scores: dict[str, torch.Tensor] = {}
    for turn in range(args.rounds + 1):
        for side, run in sides.items():
            since = time.perf_counter()
            scores[side] = run()
            if turn:  # the first warms up
                seconds[side].append(time.perf_counter() - since)
    rates = {side: len(rows) / statistics.median(times) for side, times in seconds.items()}
    return {
        "case": f"{name} {args.dtype}" + ("" if length is None else f", {length} tokens"),
        "pairs": len(rows),
        "tokens": int(lengths.sum()),
        **{f"{side}_pairs_s": rate for side, rate in rates.items()},
        "over_padded": rates["packed"] / rates["padded"],
        "over_sorted": rates["packed"] / rates["sorted"],
        "difference": float((scores["packed"] - scores["padded"]).abs().max()),
    }


def _lengths(words: str) -> list[int | None]:
    return [None if word == "mixed" else int(word) for word in words.split(",")]


def _copy(module: Any, config: Any, options: dict[str, Any]) -> Any:
    """Returns a model with the same weights and a configuration of its own, which holds its choice of attention."""
    copy = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", **options)
    copy.load_state_dict(module.state_dict())
    return copy.eval().to(module.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default=",".join(name for name in SHAPES if name != LARGE), help="names with commas"
    )
    parser.add_argument("--lengths", type=_lengths, default="mixed", help="tokens of a pair, or mixed; with commas")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32, help="pairs of a padded batch")
    parser.add_argument("--tokens", type=int, help="of a packed pass, at most; 1024 on a CPU, else 16384")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--name", default="encoder", help="begins the name of the results")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.tokens = args.tokens or (1024 if args.device == "cpu" else 16384)
    if args.threads:
        torch.set_num_threads(args.threads)
    results = [row for name in args.shapes.split(",") for row in measure(name, args)]
    publish(f"{args.name}-{args.device}-{args.dtype}", results, args.out, f"{torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
