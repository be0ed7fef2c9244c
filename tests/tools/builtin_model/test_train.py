"""The trainer learns what it is shown, from the right positions, and writes what can be loaded."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.builtin_model import vocabulary
from tools.builtin_model.corpus import LABEL_WEIGHT, Corpus, Examples
from tools.builtin_model.learner import NOISE, Z_LOSS, Learner, draft_config, target_config, weighted_loss
from tools.builtin_model.train import SHARES, Settings, Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def examples() -> Examples:
    corpus = Corpus(vocabulary.load(), forms_a_family=8, seed=1, device=CPU)
    generator = torch.Generator().manual_seed(0)
    return corpus.fill(corpus.pick(6, SHARES, generator), generator)


def test_the_pair_has_the_published_shape() -> None:
    sizes = [
        Learner("", config, CPU, compiled=False).model.num_parameters() for config in (target_config(), draft_config())
    ]
    assert sizes == [1_246_848, 192_832]


def test_the_loss_is_the_weighted_mean_of_each_next_token_and_its_z_loss(examples: Examples) -> None:
    torch.manual_seed(0)
    model = Learner("draft", draft_config(), CPU, compiled=False).model
    with torch.no_grad():
        loss, label_loss = weighted_loss(model, examples.ids_BL, examples.weights_BL).tolist()
        logits = model(examples.ids_BL).logits.double()
    log_p, log_sums = torch.log_softmax(logits, -1), torch.logsumexp(logits, -1)
    total = weight_total = label_total = labels = 0.0
    for row in range(len(examples.ids_BL)):
        for at in range(1, examples.ids_BL.shape[1]):
            nll = -float(log_p[row, at - 1, examples.ids_BL[row, at]])
            weight = float(examples.weights_BL[row, at])
            total += weight * (nll + Z_LOSS * float(log_sums[row, at - 1]) ** 2)
            weight_total += weight
            if weight == LABEL_WEIGHT:
                label_total, labels = label_total + nll, labels + 1
    assert loss == pytest.approx(total / weight_total, rel=1e-5)
    assert label_loss == pytest.approx(label_total / labels, rel=1e-5)


def test_training_blurs_what_layers_give_and_nothing_else_does(examples: Examples) -> None:
    torch.manual_seed(0)
    model = Learner("draft", draft_config(), CPU, compiled=False).model
    given: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda norm, states: given.append(states[0].detach()))
    with torch.no_grad():
        model(examples.ids_BL)
        model(examples.ids_BL)
    model(examples.ids_BL)
    plain, again, blurred = given
    assert torch.equal(plain, again)
    relative = (blurred / plain - 1)[plain != 0]
    assert float(relative.std()) == pytest.approx(NOISE, rel=0.02)
    assert abs(float(relative.mean())) < 0.1 * NOISE


@pytest.mark.full
def test_a_handful_of_rows_is_learned_by_heart(examples: Examples) -> None:
    torch.manual_seed(0)
    learner = Learner("target", target_config(), CPU, compiled=False)
    learner.steps = 300  # past the warm-up
    for _ in range(60):
        losses = learner.step(examples.ids_BL, examples.weights_BL, progress=0.3)
    assert losses[1] < 0.1
    with torch.no_grad():
        best = learner.model(examples.ids_BL).logits[:, :-1].argmax(-1)
    labels = examples.weights_BL[:, 1:] == LABEL_WEIGHT
    assert bool((best == examples.ids_BL[:, 1:])[labels].all())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_short_run_writes_a_pair_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        out=tmp_path, steps=6, batch=16, device=CPU, compile=False, forms_a_family=64, final=False, report_steps=2
    )
    trainer = Trainer(settings, began=0.0)
    assert trainer.run()
    trainer.finish()
    assert "step 6 progress 1.000" in capsys.readouterr().out
    assert json.loads((tmp_path / "numbers.json").read_text())["steps"] == {"target": 6, "draft": 2}
    for name, learner in (("target", trainer.target), ("draft", trainer.draft)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == torch.bfloat16
        assert loaded.generation_config.eos_token_id == [vocabulary.EOS_ID, vocabulary.END_ID]
        expected = learner.model.model.norm.weight.to(torch.bfloat16)
        assert torch.equal(loaded.model.norm.weight, expected)
