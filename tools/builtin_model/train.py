"""Trains the built-in target and draft together. One command, one GPU, about eight minutes:

    python -m tools.builtin_model.train               # writes engine/builtin/{target,draft}/ and numbers.json

The target first learns single examples, half of them drills (membership and copying, a label every few tokens), then
examples alone and packed in turn; the draft learns from the packed ones. The learning rate follows the clock (or the
steps, with `--steps`), so a run ends where it should on any machine. Yes/no stays a coin toss for the first 1,500 steps
or so and then climbs: a run that has not left it after three minutes gives up and says so.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from tools.builtin_model import evaluate, vocabulary
from tools.builtin_model.corpus import Corpus, Examples, pack
from tools.builtin_model.learner import Learner, autocast, draft_config, hidden_states, target_config

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
BATCHES_A_DRAW: Final = 8  # drawn together, in a few launches
CLOSING_SECONDS: Final = 60.0  # of the time limit, for the final evaluation
HOPELESS_SECONDS: Final = 180.0
HOPELESS_AUC: Final = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Configures one run. `steps`, where given, replaces the clock."""

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


class Validation(NamedTuple):
    """Holds held-out numbers of id-level rows, measured during training."""

    auc: float
    choice: float


class HeldOut:
    """Measures rows whose documents training never shows: relevance (one word off) and choice, one label each."""

    def __init__(self, corpus: Corpus, rows: int, seed: int) -> None:
        generator = torch.Generator(corpus.device).manual_seed(seed)
        drawn = [corpus.pick(40 * rows, {family: 1.0}, generator) for family in ("relevance", "choice")]
        filled = [corpus.fill_held_out(forms, generator) for forms in drawn]
        self.relevance, self.choice = (Examples(*(value[:rows] for value in examples)) for examples in filled)
        (no, yes), _ = corpus.answers[" "]
        self.no, self.yes = int(no), int(yes)

    def measure(self, model: PreTrainedModel) -> Validation:
        """Returns the AUC of yes against no, and the share of choices whose best next token is the right code."""
        logits, answers = self._at_label(model, self.relevance)
        scores = (logits[:, self.yes] - logits[:, self.no]).cpu().numpy()
        auc = evaluate.area_under_curve(scores, (answers == self.yes).cpu().numpy())
        logits, answers = self._at_label(model, self.choice)
        return Validation(auc, float((logits.argmax(-1) == answers).float().mean()))

    def _at_label(self, model: PreTrainedModel, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(len(examples.ids_BL), device=examples.ids_BL.device)
        label = examples.weights_BL.argmax(1)
        with torch.no_grad(), autocast(rows.device):
            hidden = hidden_states(model, examples.ids_BL)[rows, label - 1]
            return model.lm_head(hidden).float(), examples.ids_BL[rows, label]


class Trainer:
    """Runs the training: batches, both learners, reports and files."""

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
        self.target = Learner("target", target_config(settings.hidden), device, compiled=settings.compile)
        self.draft = Learner("draft", draft_config(), device, compiled=settings.compile)
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.best: tuple[float, dict[str, torch.Tensor]] = (-1.0, {})
        self.measured = Validation(0.5, 0.0)

    def run(self) -> bool:
        """Trains to the end; returns False if it gives up."""
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
            ids, weights = (torch.split(value, self.settings.batch) for value in drawn[:2])
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
        """Writes the best target so far and the draft as bfloat16 safetensors with their configs."""
        for learner in (self.target, self.draft):
            state = self.best[1] if learner is self.target and self.best[1] else learner.model.state_dict()
            shipped = Qwen3ForCausalLM._from_config(learner.model.config, dtype=torch.bfloat16)
            shipped.load_state_dict(state)
            shipped.save_pretrained(self.settings.out / learner.name)

    def finish(self) -> None:
        """Saves the models, and evaluates the saved files."""
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
    """Parses the arguments, trains and evaluates; exits with status 3 if the run gives up."""
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
