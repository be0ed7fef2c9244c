"""Train the built-in target and draft together. One command, one GPU, about eight minutes:

    python -m engine.builtin.train               # writes engine/builtin/{target,draft}/ and numbers.json

The target first learns single examples, half of them drills (membership and copying, a label every few tokens), then
examples alone and packed in turn; the draft learns from the packed ones. The learning rate follows the clock (or the
steps, with `--steps`), so a run ends where it should on any machine. Yes/no stays a coin toss for the first thousand
steps or so and then climbs: a run that has not left it after three minutes gives up and says so.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from engine.builtin import evaluate, vocabulary
from engine.builtin.corpus import LABEL_WEIGHT, Corpus, Examples, pack

FIRST_SHARES: Final[Mapping[str, float]] = {
    "relevance": 0.15,
    "document_first": 0.10,
    "choice": 0.07,
    "questions": 0.07,
    "running_text": 0.03,
    "listing": 0.04,
    "chat": 0.04,
    "drill": 0.50,
}
SHARES: Final[Mapping[str, float]] = {
    "relevance": 0.22,
    "document_first": 0.12,
    "choice": 0.15,
    "questions": 0.13,
    "running_text": 0.08,
    "listing": 0.10,
    "chat": 0.17,
    "drill": 0.03,
}
FIRST_PART: Final = 1 / 3  # of the run, with FIRST_SHARES and nothing packed
PACKED_ROWS: Final = 8
PACKED_TOKENS: Final = 448  # eight rows without padding are about 376 tokens long
LEARNING_RATE: Final = 2.5e-3
WARM_UP_STEPS: Final = 300
BATCHES_A_DRAW: Final = 8  # drawn at once, so that drawing is a few launches a step
CLOSING_SECONDS: Final = 60.0  # of the time limit, for the final evaluation
HOPELESS_SECONDS: Final = 180.0
HOPELESS_AUC: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. `steps`, where given, replaces the clock."""

    out: Path
    minutes: float = 8.0
    steps: int | None = None
    batch: int = 1024
    seed: int = 0
    device: torch.device
    compile: bool = True
    report_steps: int = 500
    forms_a_family: int = 4096
    hidden: int = 128
    final: bool = True  # evaluate on strings at the end


class Measured(NamedTuple):
    """Held-out numbers by id-level rows: quick, during training."""

    auc: float
    choice: float


def target_config(hidden: int = 128) -> Qwen3Config:
    """The target: 1.25 M parameters at hidden 128."""
    return _config(hidden=hidden, layers=4, heads=4, kv_heads=2, inter=384)


def draft_config() -> Qwen3Config:
    """The draft: 0.19 M parameters."""
    return _config(hidden=64, layers=1, heads=2, kv_heads=1, inter=192)


def _config(*, hidden: int, layers: int, heads: int, kv_heads: int, inter: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary.SIZE,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        intermediate_size=inter,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[vocabulary.EOS_ID, vocabulary.END_ID],
        pad_token_id=vocabulary.PAD_ID,
    )


def hidden_states(model: torch.nn.Module, ids_BL: torch.Tensor) -> torch.Tensor:
    """Final hidden states [B, L, hidden]; the mapping in place of a mask leaves attention plainly causal."""
    states: torch.Tensor = model.model(
        input_ids=ids_BL, attention_mask={"full_attention": None}, use_cache=False
    ).last_hidden_state
    return states


def weighted_loss(model: torch.nn.Module, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
    """float32 [2]: weighted mean cross entropy in nats over all tokens, and the plain mean over the labels."""
    logits = model.lm_head(hidden_states(model, ids_BL)[:, :-1]).float()
    each = F.cross_entropy(logits.flatten(0, 1), ids_BL[:, 1:].flatten(), reduction="none")
    weights = weights_BL[:, 1:].flatten()
    labels = (weights >= LABEL_WEIGHT).float()
    return torch.stack([(each * weights).sum() / weights.sum(), (each * labels).sum() / labels.sum().clamp_min(1)])


class Learner:
    """A model, its optimizer and its compiled loss."""

    def __init__(self, name: str, config: Qwen3Config, settings: Settings) -> None:
        self.name, self.settings, self.steps = name, settings, 0
        self.model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").to(settings.device).train()
        decayed = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        plain = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
            lr=LEARNING_RATE,
            betas=(0.9, 0.98),
            fused=settings.device.type == "cuda",
        )
        self.loss: Callable[..., torch.Tensor] = weighted_loss
        if settings.compile:
            self.loss = torch.compile(weighted_loss, dynamic=False)

    def step(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor, progress: float) -> torch.Tensor:
        """One update; the losses [2], still on the device."""
        rate = LEARNING_RATE * min(1.0, (self.steps + 1) / WARM_UP_STEPS) * (0.01 + 0.99 * _cosine(progress))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = self._losses(ids_BL, weights_BL)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return losses.detach()

    def _losses(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
        """The losses, their gradients accumulated."""
        try:
            return self._backward(ids_BL, weights_BL)
        except torch._dynamo.exc.TorchDynamoException as error:  # no compiler here: slower, but the run is not lost
            if self.loss is weighted_loss:
                raise
            print(f"{self.name}: compiling failed, going on without: {str(error)[:500]}", flush=True)
            self.loss = weighted_loss
            self.optimizer.zero_grad(set_to_none=True)
            return self._backward(ids_BL, weights_BL)

    def _backward(self, ids_BL: torch.Tensor, weights_BL: torch.Tensor) -> torch.Tensor:
        with autocast(self.settings.device):
            losses = self.loss(self.model, ids_BL, weights_BL)
        losses[0].backward()
        return losses


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA, nothing elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))


class HeldOut:
    """Rows whose documents training never shows: relevance (one word off) and choice, one label each."""

    def __init__(self, corpus: Corpus, rows: int, seed: int) -> None:
        generator = torch.Generator(corpus.device).manual_seed(seed)
        drawn = [corpus.pick(40 * rows, {family: 1.0}, generator) for family in ("relevance", "choice")]
        filled = [corpus.fill_held_out(forms, generator) for forms in drawn]
        self.relevance, self.choice = (Examples(*(value[:rows] for value in examples)) for examples in filled)
        (no, yes), _ = corpus.answers[" "]
        self.no, self.yes = int(no), int(yes)

    def measure(self, model: torch.nn.Module) -> Measured:
        """AUC of yes against no, and the share of choices whose best next token is the right code."""
        logits, answers = self._at_label(model, self.relevance)
        scores = (logits[:, self.yes] - logits[:, self.no]).cpu().numpy()
        auc = evaluate.area_under_curve(scores, (answers == self.yes).cpu().numpy())
        logits, answers = self._at_label(model, self.choice)
        return Measured(auc, float((logits.argmax(-1) == answers).float().mean()))

    def _at_label(self, model: torch.nn.Module, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(examples.ids_BL), device=examples.ids_BL.device)
        label = examples.weights_BL.argmax(1)
        with torch.no_grad(), autocast(rows.device):
            hidden = hidden_states(model, examples.ids_BL)[rows, label - 1]
            return model.lm_head(hidden).float(), examples.ids_BL[rows, label]


class Trainer:
    """The run: batches, both learners, reports and the files."""

    def __init__(self, settings: Settings, began: float) -> None:
        self.settings, self.began = settings, began
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        device = settings.device
        self.corpus = Corpus(
            vocabulary.load(), forms_a_family=settings.forms_a_family, seed=settings.seed, device=device
        )
        self.generator = torch.Generator(device).manual_seed(settings.seed + 1)
        self.held_out = HeldOut(self.corpus, 2 * settings.batch, settings.seed + 2)
        self.target = Learner("target", target_config(settings.hidden), settings)
        self.draft = Learner("draft", draft_config(), settings)
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.best: tuple[float, dict[str, torch.Tensor]] = (-1.0, {})
        self.measured = Measured(0.5, 0.0)

    def run(self) -> bool:
        """Train to the end; False if it was given up."""
        self._say("compiling and warming up")
        start = time.monotonic()
        end = self.began + self.settings.minutes * 60 - (CLOSING_SECONDS if self.settings.final else 0)
        saved = start
        losses, draft_losses = torch.zeros(2), torch.zeros(2)
        while (progress := self._progress(start, end)) < 1:
            later = progress >= FIRST_PART
            packed = later and self.target.steps % 2 == 1
            ids, weights = self._batch(packed, SHARES if later else FIRST_SHARES)
            losses = self.target.step(ids, weights, progress)
            if packed:
                draft_losses = self.draft.step(ids, weights, (progress - FIRST_PART) / (1 - FIRST_PART))
            if self.target.steps in (1, 2, 10, 100) or self.target.steps % self.settings.report_steps == 0:
                self._report(losses, draft_losses, progress)
                if time.monotonic() - start > HOPELESS_SECONDS and self.measured.auc < HOPELESS_AUC:
                    self._say(f"ABORT: held-out AUC {self.measured.auc:.3f} < {HOPELESS_AUC}: this run does not learn")
                    return False
                if time.monotonic() - saved > 60:
                    self.save()
                    saved = time.monotonic()
        self._report(losses, draft_losses, 1.0)
        return True

    def _progress(self, start: float, end: float) -> float:
        if self.settings.steps is not None:
            return self.target.steps / self.settings.steps
        return (time.monotonic() - start) / max(1e-9, end - start)

    def _batch(self, packed: bool, shares: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.queue:
            rows = BATCHES_A_DRAW * self.settings.batch
            drawn = self.corpus.fill(self.corpus.pick(rows, shares, self.generator), self.generator)
            ids, weights = (value.split(self.settings.batch) for value in drawn[:2])
            self.queue = list(zip(ids, weights, strict=True))
        ids_BL, weights_BL = self.queue.pop()
        if not packed:
            return ids_BL, weights_BL
        ids_BL, weights_BL = pack(Examples(ids_BL, weights_BL, ids_BL), PACKED_ROWS)
        return ids_BL[:, :PACKED_TOKENS].contiguous(), weights_BL[:, :PACKED_TOKENS].contiguous()

    def _report(self, losses: torch.Tensor, draft_losses: torch.Tensor, progress: float) -> None:
        self.measured = self.held_out.measure(self.target.model)
        score = min(1.0, self.measured.auc) + self.measured.choice
        if score >= self.best[0] or progress > 0.9:  # late differences are noise, and the last steps polish the rest
            self.best = (score, {name: value.clone() for name, value in self.target.model.state_dict().items()})
        (loss, label), (draft_loss, _) = losses.tolist(), draft_losses.tolist()
        self._say(
            f"step {self.target.steps} progress {progress:.3f} loss {loss:.3f} label {label:.3f} "
            f"auc {self.measured.auc:.4f} choice {self.measured.choice:.4f} draft {draft_loss:.3f}"
        )

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        """Write the best target so far and the draft as bfloat16 safetensors with their configs."""
        for learner in (self.target, self.draft):
            state = self.best[1] if learner is self.target and self.best[1] else learner.model.state_dict()
            shipped = Qwen3ForCausalLM._from_config(learner.model.config, dtype=torch.bfloat16)
            shipped.load_state_dict(state)
            shipped.save_pretrained(self.settings.out / learner.name)

    def finish(self) -> None:
        """Save, and evaluate what was saved."""
        self.save()
        numbers = {
            "steps": {"target": self.target.steps, "draft": self.draft.steps},
            "batch": self.settings.batch,
            "seed": self.settings.seed,
            "training_seconds": round(time.monotonic() - self.began),
            "device": torch.cuda.get_device_name() if self.settings.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        if self.settings.final:
            numbers |= evaluate.evaluate(self.settings.out)
        text = json.dumps(numbers, indent=2) + "\n"
        (self.settings.out / "numbers.json").write_text(text)
        self._say(f"done\n{text}")


def main() -> int:
    """Parse, train, evaluate; exit status 3 if the run was given up."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--out", type=Path, default=evaluate.FOLDER)
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time in all, the evaluation included")
    parser.add_argument("--steps", type=int, help="train so many steps instead")
    parser.add_argument("--batch", type=int, default=1024, help="rows a step, a multiple of 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--no-evaluation", action="store_true")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    settings = Settings(
        out=given.out,
        minutes=given.minutes,
        steps=given.steps,
        batch=given.batch,
        seed=given.seed,
        hidden=given.hidden,
        device=torch.device(given.device),
        compile=not given.eager,
        final=not given.no_evaluation,
    )
    trainer = Trainer(settings, began)
    learned = trainer.run()
    trainer.finish()
    return 0 if learned else 3


if __name__ == "__main__":
    raise SystemExit(main())
