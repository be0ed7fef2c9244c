"""Trains the built-in cross-encoder: a BERT of a few hundred kilobytes with one logit for (query, document).

    python -m tools.builtin_model.train_cross_encoder     # writes engine/builtin/cross_encoder/: minutes on a GPU

It reads the catalogue language of the built-in pair. The logit is above zero exactly if the document contains every
word that the query names. During training a second head says for each word of the query whether the document contains
it: with one bit a pair alone, the loss stays at chance for long. That head is not saved. Half of the rows have no token
types, so that a pair may also come as one text: `query<|sep|> document`.

Axes: B rows, L token positions, H hidden.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from tools.builtin_model import evaluate, grammar, vocabulary
from tools.builtin_model.catalogue import Chance
from tools.builtin_model.corpus import SLOT_NAMES, Corpus, Examples
from tools.builtin_model.grammar import Ask, Form
from tools.builtin_model.learner import autocast

CLS, SEP = "<|cls|>", "<|sep|>"
CLS_ID, SEP_ID = vocabulary.SIZE, vocabulary.SIZE + 1
POSITIONS: Final = 256
LEARNING_RATE: Final = 2e-3
WARM_UP_STEPS: Final = 300
WEIGHT_DECAY: Final = 0.05
UNTYPED: Final = 0.5  # share of training rows without token types
FOLDER: Final = evaluate.FOLDER / "cross_encoder"


def pair(rng: Chance) -> Form:
    """Returns a query and a document between the marks of a pair."""
    query, used = grammar.query_text(rng, "q0")
    return Form(family="pair", text=f"{CLS} {query}{SEP} {grammar.document_text(rng)}{SEP}", asks=(Ask(used=used),))


def make_tokenizer(*, joins: bool) -> Tokenizer:
    """Returns the tokenizer of the built-in pair with two more control tokens.

    Args:
        joins: a text begins as if a space stood before it, and a pair becomes `<|cls|> query <|sep|> document <|sep|>`
            with token types 0 and 1. Otherwise texts are encoded as they stand.
    """
    tokenizer = vocabulary.load()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (CLS, SEP)])
    if joins:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}",
            pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
            special_tokens=[(CLS, CLS_ID), (SEP, SEP_ID)],
        )
    return tokenizer


def make_config(hidden: int = 64) -> BertConfig:
    """Returns the configuration of the cross-encoder: 0.3 M parameters at hidden 64."""
    return BertConfig(
        vocab_size=vocabulary.SIZE + 2,
        hidden_size=hidden,
        num_hidden_layers=3,
        num_attention_heads=hidden // 32,
        intermediate_size=3 * hidden,
        max_position_embeddings=POSITIONS,
        type_vocab_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=vocabulary.PAD_ID,
        num_labels=1,
        id2label={0: "relevant"},
        label2id={"relevant": 0},
    )


class PairModel(nn.Module):
    """Holds the model and the head that says which words of the query the document contains."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.model = BertForSequenceClassification(config)
        self.contained = nn.Linear(config.hidden_size, 1)

    def forward(self, ids_BL: torch.Tensor, untyped: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logit of each row, f32 [B], and of each position, f32 [B, L].

        Args:
            ids_BL: Token ids.
            untyped: The share of rows without token types, drawn at random.
        """
        seen = (ids_BL != vocabulary.PAD_ID).long()
        ends = (ids_BL == SEP_ID).long()
        types = ((ends.cumsum(1) - ends) > 0).long() * seen
        types = types * (torch.rand(len(ids_BL), 1, device=ids_BL.device) >= untyped)
        states = self.model.bert(input_ids=ids_BL, attention_mask=seen, token_type_ids=types)
        logits = self.model.classifier(states.pooler_output)[:, 0]
        return logits.float(), self.contained(states.last_hidden_state)[..., 0].float()


class PairCorpus:
    """Makes batches of pairs on the device: ids [B, L], whether each is relevant [B], and its weight [B]."""

    def __init__(self, device: torch.device, seed: int) -> None:
        tokenizer = make_tokenizer(joins=False)
        self.corpus = Corpus(tokenizer, forms_a_family=16_384, seed=seed, device=device, families={"pair": pair})
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self._label = SLOT_NAMES.index("y0")
        self._yes = int(self.corpus.answers[" "][0][1])

    def draw(self, rows: int, hard: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws pairs of the training part."""
        forms = self.corpus.pick(rows, {"pair": 1.0}, self.generator)
        found = self.corpus.fill(forms, self.generator, hard=hard)
        return found.ids_BL, self._relevant(found), (found.weights_BL.amax(1) > 0).float()

    def draw_held_out(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws pairs of held-out documents; irrelevant ones are wrong in exactly one word."""
        forms = self.corpus.pick(40 * rows, {"pair": 1.0}, self.generator)
        found = self.corpus.fill_held_out(forms, self.generator)
        return found.ids_BL[:rows], self._relevant(found)[:rows]

    def _relevant(self, examples: Examples) -> torch.Tensor:
        return (examples.slots_BS[:, self._label] == self._yes).float()

    def contained(self, ids_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns whether each position's word stands in the document, and which positions are words of the query."""
        ends = (ids_BL == SEP_ID).long()
        in_document = (ends.cumsum(1) - ends) > 0
        words = torch.isin(ids_BL, self.corpus.all_words_W) & ~in_document
        same = (ids_BL[:, :, None] == ids_BL[:, None, :]) & in_document[:, None, :]
        return same.any(2).float(), words.float()


def losses(model: PairModel, pairs: PairCorpus, rows: int, hard: float) -> torch.Tensor:
    """Returns the mean binary cross entropies of pairs and of the query's words, in nats, f32 [2]."""
    ids_BL, relevant_B, weights_B = pairs.draw(rows, hard)
    contained_BL, words_BL = pairs.contained(ids_BL)
    words_BL = words_BL * weights_B[:, None]
    with autocast(ids_BL.device):
        logits_B, each_BL = model(ids_BL, untyped=UNTYPED)
    cross_entropy = nn.functional.binary_cross_entropy_with_logits
    whole = (cross_entropy(logits_B, relevant_B, reduction="none") * weights_B).sum() / weights_B.sum()
    words = (cross_entropy(each_BL, contained_BL, reduction="none") * words_BL).sum() / words_BL.sum()
    return torch.stack([whole, words])


def train(
    device: torch.device, *, seconds: float, batch: int, hidden: int, seed: int, start: Path | None = None
) -> tuple[PairModel, int]:
    """Trains until the clock ends, from the weights in `start` if it is given. Returns the model and the steps."""
    torch.manual_seed(seed)
    model = PairModel(make_config(hidden))
    if start is not None:
        model.model = BertForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    model = model.to(device).train()
    pairs = PairCorpus(device, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=device.type == "cuda"
    )
    held_ids, held_relevant = pairs.draw_held_out(1024)
    began, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / seconds) < 1:
        rate = LEARNING_RATE * min(1.0, (steps + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = losses(model, pairs, batch, hard=min(0.9, 0.3 + progress))
        torch.autograd.backward(loss.sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 250 == 1:
            with torch.no_grad():
                held = model(held_ids)[0].cpu().numpy()
            auc = evaluate.area_under_curve(held, held_relevant.cpu().numpy() > 0)
            whole, words = loss.tolist()
            print(
                f"{time.monotonic() - began:6.1f} s  step {steps}  pair {whole:.4f}  words {words:.4f}  AUC {auc:.4f}",
                flush=True,
            )
    return model.eval(), steps


def save(model: PairModel, folder: Path) -> None:
    """Writes the folder as a published cross-encoder: config, bfloat16 weights, tokenizer."""
    model.model.to("cpu", torch.bfloat16).save_pretrained(folder)
    make_tokenizer(joins=True).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": CLS,
        "sep_token": SEP,
        "pad_token": vocabulary.PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def held_out_pairs(count: int, seed: int = 0) -> list[tuple[str, str, bool]]:
    """Returns held-out (query, document, relevant) as strings; irrelevant ones are wrong in exactly one word."""
    rng, drawn = random.Random(seed), []
    for _ in range(count):
        form = pair(rng)
        slots = grammar.draw_slots(form, rng, kept=True, hard=1.0)
        query, document, _ = grammar.render(form, slots).removeprefix(CLS).split(SEP)
        drawn.append((query.strip(), document.strip(), slots["y0"] == "yes"))
    return drawn


def measure(folder: Path, count: int = 2000) -> dict[str, object]:
    """Returns the published numbers of the folder, in float32 on the CPU: of pairs, and of pairs as one text."""
    pairs = held_out_pairs(count)
    relevant = np.array([right for *_, right in pairs])
    found = scores(folder, [(query, document) for query, document, _ in pairs])
    joined = scores(folder, [f"{query}{SEP} {document}" for query, document, _ in pairs])
    return {
        "cross_encoder_relevance_auc": round(evaluate.area_under_curve(found, relevant), 5),
        "cross_encoder_relevance_accuracy": round(float(((found > 0) == relevant).mean()), 5),
        "cross_encoder_joined_accuracy": round(float(((joined > 0) == relevant).mean()), 5),
        "cross_encoder_parameters": evaluate.count_parameters(BertForSequenceClassification.from_pretrained(folder)),
    }


def scores(folder: Path, inputs: Sequence[str | tuple[str, str]]) -> np.ndarray[Any, Any]:
    """Returns the logit of each text or pair, f32 [N], as the folder's tokenizer writes it."""
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=vocabulary.PAD_ID, pad_token=vocabulary.PAD)
    found: list[np.ndarray[Any, Any]] = []
    for at in range(0, len(inputs), 100):
        batch = tokenizer.encode_batch(list(inputs[at : at + 100]))
        ids, types, seen = (
            torch.tensor([getattr(row, name) for row in batch]) for name in ("ids", "type_ids", "attention_mask")
        )
        with torch.inference_mode():
            found.append(model(input_ids=ids, token_type_ids=types, attention_mask=seen).logits[:, 0].numpy())
    return np.concatenate(found)


def main() -> None:
    """Trains, writes the folder, and adds its numbers to numbers.json."""
    parser = argparse.ArgumentParser(description="Train the built-in cross-encoder.")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a folder whose weights to begin with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    model, steps = train(
        torch.device(given.device),
        seconds=given.seconds,
        batch=given.batch,
        hidden=given.hidden,
        seed=given.seed,
        start=given.start,
    )
    save(model, given.out)
    numbers = measure(given.out) | {"cross_encoder_steps": steps}
    path = given.out.parent / "numbers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | numbers, indent=2) + "\n")
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
