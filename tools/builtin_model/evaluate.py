"""Measures the built-in model on held-out strings with its own tokenizer, in float32 on the CPU.

    python -m tools.builtin_model.evaluate            # rewrites engine/builtin/numbers.json

Axes: N prompts, L token positions, V vocabulary, K draft steps.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tools.builtin_model import grammar, vocabulary

FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin"
COMPLETION_TOKENS: Final = 32
DRAFT_STEPS: Final = 4


class HeldOutQuestion(NamedTuple):
    """Holds a prompt and the word that answers it, which follows with a space."""

    prompt: str
    answer: str


class Padded(NamedTuple):
    """Holds token rows of unequal length, padded on the right, which causal attention does not see."""

    ids_NL: torch.Tensor
    lengths_N: torch.Tensor


class DraftNumbers(NamedTuple):
    """Holds how well the draft foresees the target, over sampled completions."""

    overlap: dict[str, float]  # mean sum of min(p, q), by temperature
    greedy_match: float
    acceptance: list[float]  # of drafted tokens reached at position 1..K, the share accepted, at temperature 1
    accepted_run: float  # mean tokens accepted of K


def load(folder: Path) -> PreTrainedModel:
    """Loads the model in `folder`, in float32, for evaluation."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def questions(family: str, count: int, seed: int = 0) -> list[HeldOutQuestion]:
    """Returns held-out prompts of `relevance` (irrelevant ones wrong in exactly one word) or `choice`."""
    rng = random.Random(seed)
    asked = []
    for _ in range(count):
        form = grammar.FAMILIES[family](rng)
        text = grammar.render(form, grammar.draw_slots(form, rng, kept=True, hard=1.0))
        asked.append(HeldOutQuestion(*text.removesuffix(vocabulary.EOS).rsplit(" ", 1)))
    return asked


def pad(rows: Sequence[Sequence[int]], room: int = 0) -> Padded:
    """Pads rows to one length, with `room` more columns than the longest needs."""
    ids = torch.full((len(rows), max(map(len, rows)) + room), vocabulary.PAD_ID)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return Padded(ids, torch.tensor([len(row) for row in rows]))


def row_logits(model: PreTrainedModel, padded: Padded, back: int = 1) -> torch.Tensor:
    """Returns the logits of the last `back` tokens of each row, float32 [N, back, V]."""
    with torch.inference_mode():
        ids = padded.ids_NL[:, : int(padded.lengths_N.max())]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        at = padded.lengths_N[:, None] - back + torch.arange(back)
        chosen = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        logits: torch.Tensor = model.lm_head(chosen).float()
        return logits


def last_logits(model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[str], batch: int = 64) -> torch.Tensor:
    """Returns the next-token logits after each prompt, float32 [N, V]."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(prompts), add_special_tokens=False)]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    logits = [
        row_logits(model, pad([rows[i] for i in order[at : at + batch]]))[:, 0] for at in range(0, len(rows), batch)
    ]
    return torch.cat(logits)[torch.tensor(order).argsort()]


def area_under_curve(scores: np.ndarray[Any, Any], positive: np.ndarray[Any, Any]) -> float:
    """Returns the chance that a positive scores above a negative, ties counting half (Mann and Whitney 1947)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(positive.sum())
    negatives = len(scores) - positives
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def relevance_numbers(model: PreTrainedModel, tokenizer: Tokenizer, count: int, seed: int = 0) -> tuple[float, float]:
    """Returns the AUC of log p(yes) - log p(no), and the share of pairs on the right side of zero."""
    asked = questions("relevance", count, seed)
    logits = last_logits(model, tokenizer, [question.prompt for question in asked])
    yes, no = tokenizer.token_to_id("Ġyes"), tokenizer.token_to_id("Ġno")
    scores = (logits[:, yes] - logits[:, no]).numpy()
    relevant = np.array([question.answer == "yes" for question in asked])
    return area_under_curve(scores, relevant), float(((scores > 0) == relevant).mean())


def choice_accuracy(model: PreTrainedModel, tokenizer: Tokenizer, count: int, seed: int = 0) -> float:
    """Returns the share of choice questions whose most likely next token is the code of the right option."""
    asked = questions("choice", count, seed)
    best = last_logits(model, tokenizer, [question.prompt for question in asked]).argmax(-1)
    right = torch.tensor([tokenizer.token_to_id(f"Ġ{question.answer}") for question in asked])
    return float((best == right).float().mean())


def completion_prompts(count: int, seed: int = 0) -> list[str]:
    """Returns prompts to continue: the start of a document, a query whose documents are to be listed, a turn."""
    rng = random.Random(seed)
    prompts = []
    for number in range(count):
        family = ("running_text", "listing", "chat")[number % 3]
        form = grammar.FAMILIES[family](rng)
        text = grammar.render(form, grammar.draw_slots(form, rng))
        if family == "running_text":
            words = text.split(" ")
            prompts.append(" ".join(words[: rng.randint(2, 6)]))
        else:
            mark = "Documents:\n-" if family == "listing" else vocabulary.ASSISTANT
            prompts.append(text[: text.index(mark) + len(mark)])
    return prompts


def extend(
    model: PreTrainedModel, padded: Padded, steps: int, temperature: float, generator: torch.Generator
) -> tuple[Padded, torch.Tensor]:
    """Samples `steps` tokens after each row, into its padding; returns the probabilities [N, K, V] too."""
    ids, lengths, drawn = padded.ids_NL.clone(), padded.lengths_N.clone(), []
    for _ in range(steps):
        probabilities = torch.softmax(row_logits(model, Padded(ids, lengths))[:, 0] / temperature, -1)
        tokens = torch.multinomial(probabilities, 1, generator=generator)
        ids.scatter_(1, lengths[:, None], tokens)
        lengths += 1
        drawn.append(probabilities)
    return Padded(ids, lengths), torch.stack(drawn, 1)


def _ended(ids_NK: torch.Tensor) -> torch.Tensor:
    """Marks the completion tokens after the end of their text."""
    ends = (ids_NK == vocabulary.EOS_ID) | (ids_NK == vocabulary.END_ID)
    return (ends.cumsum(1) - ends.long()) > 0


def draft_numbers(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Tokenizer, count: int, seed: int = 0
) -> DraftNumbers:
    """Compares the two along completions sampled from the target, and lets the draft run ahead of it."""
    generator = torch.Generator().manual_seed(seed)
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(completion_prompts(count, seed))]
    padded, _ = extend(target, pad(rows, COMPLETION_TOKENS), COMPLETION_TOKENS, 1.0, generator)
    sampled = padded.ids_NL.gather(1, padded.lengths_N[:, None] - COMPLETION_TOKENS + torch.arange(COMPLETION_TOKENS))
    live = ~_ended(sampled)
    before = Padded(padded.ids_NL, padded.lengths_N - 1)
    logits = [row_logits(model, before, COMPLETION_TOKENS)[live] for model in (target, draft)]
    overlap = {}
    for temperature in (1.0, 0.7):
        p, q = (torch.softmax(value / temperature, -1) for value in logits)
        overlap[str(temperature)] = float(torch.minimum(p, q).sum(-1).mean())
    greedy = float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean())
    acceptance, run = _run_ahead(target, draft, padded, live, generator)
    return DraftNumbers(overlap, greedy, acceptance, run)


def _run_ahead(
    target: PreTrainedModel, draft: PreTrainedModel, padded: Padded, live: torch.Tensor, generator: torch.Generator
) -> tuple[list[float], float]:
    """Accepts drafted token x with chance min(1, p(x) / q(x)) until one fails (Leviathan et al. 2023), from a random
    point of each completion; acceptance at positions 1..K among those reached, and the mean number accepted."""
    kept = (torch.rand(len(live), generator=generator) * live.sum(1)).long()
    start = Padded(padded.ids_NL, padded.lengths_N - COMPLETION_TOKENS + kept)
    room = torch.nn.functional.pad(start.ids_NL, (0, DRAFT_STEPS), value=vocabulary.PAD_ID)
    ahead, q = extend(draft, Padded(room, start.lengths_N), DRAFT_STEPS, 1.0, generator)
    tokens = ahead.ids_NL.gather(1, start.lengths_N[:, None] + torch.arange(DRAFT_STEPS))[..., None]
    p = torch.softmax(row_logits(target, Padded(ahead.ids_NL, ahead.lengths_N - 1), DRAFT_STEPS), -1)
    ratio = (p.gather(2, tokens) / q.gather(2, tokens))[..., 0]
    passed = (torch.rand(ratio.shape, generator=generator) < ratio).long().cumprod(1)
    counts = passed.sum(0).tolist()
    reached = [len(live), *counts[:-1]]
    return [done / max(1, tried) for done, tried in zip(counts, reached, strict=True)], sum(counts) / len(live)


def evaluate(folder: Path, *, pairs: int = 2000, choices: int = 1000, completions: int = 192) -> dict[str, object]:
    """Returns all published numbers of the models in `folder`/target and `folder`/draft."""
    tokenizer = vocabulary.load()
    target, draft = load(folder / "target"), load(folder / "draft")
    auc, accuracy = relevance_numbers(target, tokenizer, pairs)
    numbers = draft_numbers(target, draft, tokenizer, completions)
    return {
        "relevance_pairs": pairs,
        "relevance_auc": round(auc, 5),
        "relevance_accuracy": round(accuracy, 5),
        "choice_questions": choices,
        "choice_accuracy": round(choice_accuracy(target, tokenizer, choices), 5),
        "completions": completions,
        "draft_relevance_auc": round(relevance_numbers(draft, tokenizer, pairs)[0], 5),
        "mean_sum_min_p_q": {key: round(value, 4) for key, value in numbers.overlap.items()},
        "greedy_match": round(numbers.greedy_match, 4),
        "acceptance_by_position": [round(value, 4) for value in numbers.acceptance],
        "mean_accepted_of_4": round(numbers.accepted_run, 3),
        "parameters": {name: count_parameters(model) for name, model in (("target", target), ("draft", draft))},
    }


def count_parameters(model: PreTrainedModel) -> int:
    """Returns the number of stored parameters; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Measures the shipped pair, and keeps what training wrote about itself."""
    parser = argparse.ArgumentParser(description="Measure the built-in model.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    path = folder / "numbers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | evaluate(folder), indent=2) + "\n")
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()
