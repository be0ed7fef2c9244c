"""The measures are right on cases worked out by hand, and the shipped pair passes its bars."""

import json

import numpy as np
import pytest
import torch

from tools.builtin_model import evaluate, vocabulary
from tools.builtin_model.evaluate import FOLDER, area_under_curve
from tools.builtin_model.learner import Learner, draft_config, target_config


def test_area_under_curve_counts_ties_half() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 7, 53).astype(float)
    positive = rng.random(53) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert area_under_curve(scores, positive) == pytest.approx(np.mean(pairs))
    assert area_under_curve(np.array([3.0, 1.0]), np.array([True, False])) == 1.0
    assert area_under_curve(np.array([1.0, 3.0]), np.array([True, False])) == 0.0


def test_held_out_prompts_end_where_the_answer_begins() -> None:
    for family, ending in (("relevance", "\nRelevant:"), ("choice", "\nAnswer:")):
        asked = evaluate.questions(family, 30)
        assert all(question.prompt.endswith(ending) for question in asked)
        assert len({question.answer for question in asked}) > 1


def test_logits_after_a_prompt_do_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    model = Learner("draft", draft_config(), torch.device("cpu"), compiled=False).model.eval()
    prompts = [question.prompt for question in evaluate.questions("choice", 7)]
    tokenizer = vocabulary.load()
    together = evaluate.last_logits(model, tokenizer, prompts, batch=3)
    for prompt, logits in zip(prompts, together, strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([tokenizer.encode(prompt).ids])).logits[0, -1]
        assert torch.allclose(logits, alone, atol=1e-5)


def test_a_draft_equal_to_its_target_is_always_accepted_and_another_is_not() -> None:
    torch.manual_seed(0)
    same = Learner("draft", draft_config(), torch.device("cpu"), compiled=False).model.eval()
    other = Learner("draft", draft_config(), torch.device("cpu"), compiled=False).model.eval()
    with torch.no_grad():
        other.model.norm.weight.mul_(3)
    equal = evaluate.draft_numbers(same, same, vocabulary.load(), 12)
    assert equal.overlap["1.0"] == pytest.approx(1.0, abs=1e-4)
    assert equal.greedy_match == 1.0
    assert equal.acceptance == pytest.approx([1.0] * 4)
    unlike = evaluate.draft_numbers(same, other, vocabulary.load(), 12)
    assert unlike.overlap["1.0"] < 0.95
    assert unlike.accepted_run < 4


def test_the_target_ranks_held_out_documents_that_differ_in_one_word() -> None:
    auc, accuracy = evaluate.relevance_numbers(evaluate.load(FOLDER / "target"), vocabulary.load(), 500, seed=1)
    assert auc >= 0.99
    assert accuracy >= 0.95


def test_the_target_answers_choice_questions_by_code() -> None:
    assert evaluate.choice_accuracy(evaluate.load(FOLDER / "target"), vocabulary.load(), 300, seed=1) >= 0.95


def test_the_bars_are_not_passed_by_a_model_that_only_writes_the_language() -> None:
    draft = evaluate.load(FOLDER / "draft")
    assert evaluate.relevance_numbers(draft, vocabulary.load(), 300, seed=1)[0] < 0.7
    assert evaluate.choice_accuracy(draft, vocabulary.load(), 100, seed=1) < 0.7


@pytest.mark.full
def test_the_draft_is_accepted_often_but_not_always() -> None:
    target, draft = (evaluate.load(FOLDER / name) for name in ("target", "draft"))
    numbers = evaluate.draft_numbers(target, draft, vocabulary.load(), 48, seed=1)
    assert 0.6 <= numbers.overlap["1.0"] <= 0.97
    assert 0.3 < numbers.greedy_match < 1
    assert 0.5 < numbers.acceptance[0] < 1


def test_published_numbers_pass_the_bars_and_the_files_are_small() -> None:
    numbers = json.loads((FOLDER / "numbers.json").read_text())
    assert numbers["relevance_auc"] >= 0.99
    assert numbers["choice_accuracy"] >= 0.95
    assert 0.6 <= numbers["mean_sum_min_p_q"]["1.0"] <= 0.97
    shipped = [path for path in FOLDER.rglob("*") if path.suffix in (".safetensors", ".json")]
    assert sum(path.stat().st_size for path in shipped) <= 5_000_000


def test_the_shipped_configs_are_those_the_trainer_builds() -> None:
    for name, config in (("target", target_config()), ("draft", draft_config())):
        shipped = evaluate.load(FOLDER / name).config.to_dict()
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "head_dim",
            "vocab_size",
            "tie_word_embeddings",
            "eos_token_id",
        ):
            assert shipped[key] == config.to_dict()[key]
