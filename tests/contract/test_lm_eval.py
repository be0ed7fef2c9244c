"""lm-evaluation-harness 0.4.13, `local-completions` with its remote tokenizer, against the library in this process.

Multiple choice, rolling log-likelihood and generation on tasks of a local file: the same accuracy, and log-likelihoods
as a log-softmax over the ids that the harness says it meant gives them, but for the rounding of float32.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml

from engine.tokenizer.tokenizer import load_tokenizer
from tools.builtin_model import grammar

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]

# Nats a token, which add up as random steps do. In float32 a token of this model differs from float64 by 3.2e-6 in the
# library and by 3.4e-6 in the engine (root mean square of 12,980 tokens of text; at most 1.2e-4 in both), and the two,
# which sum in different orders where a step has many rows, from each other by 2.6e-6 and at most 7.3e-5.
ROUNDING = 1e-4
QUESTIONS, TEXTS, NEW = 40, 6, 12
OPTIONS = {"tokenizer_backend": "remote", "max_length": 256, "num_concurrent": 1, "max_retries": 1}
CHOICES: dict[str, dict[str, Any]] = {"plain": {}, "batches": {"batch_size": 4}, "at_once": {"num_concurrent": 3}}
RUNS = {
    **{name: {"task": "relevant", "options": OPTIONS | options} for name, options in CHOICES.items()},
    "texts": {"task": "relevant", "options": OPTIONS | {"tokenized_requests": False}},
    "rolling": {"task": "rolling", "options": OPTIONS},
    "continued": {"task": "continued", "options": OPTIONS},
}
TASKS: dict[str, dict[str, Any]] = {
    "relevant": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": NEW},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def documents() -> dict[str, list[dict[str, Any]]]:
    """Questions with labels of one token and of several, texts longer than the model's window, and beginnings."""
    questions = []
    for number, text in enumerate(itertools.islice(grammar.examples(5, "relevance", kept=True), QUESTIONS)):
        body, answer = text.removesuffix("<eos>").rsplit(" ", 1)
        choices = [" yes", " no"] if number % 2 else [" yes\nDocument: People", " no\nDocument: People"]
        questions.append({"text": body, "choices": choices, "answer": 0 if answer.startswith("yes") else 1})
    sentences = itertools.islice(grammar.examples(6, "running_text", kept=True), 12 * TEXTS)
    texts = ["\n".join(itertools.islice(sentences, 12)).replace("<eos>", "") for _ in range(TEXTS)]
    beginnings = [{"text": text[:60], "answer": "x"} for text in texts]
    return {"relevant": questions, "rolling": [{"text": text} for text in texts], "continued": beginnings}


@pytest.fixture(scope="module")
def folder(documents: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks as files: what a user of the harness would write."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in documents.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            **TASKS[name],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), "utf-8")
    return folder


@pytest.fixture(scope="module")
def told(url: str, run_client: Callable[..., Any], folder: Path) -> Any:
    return run_client("harness", {"url": url, "folder": str(folder), "runs": RUNS})


def library_rows(library: Any, ids: list[int]) -> npt.NDArray[np.float64]:
    """Log-softmax after each token but the last, which is no input: as the harness asks a model of its own process.
    With it float32 sums in another order, and the library differs from itself by 3e-5."""
    with torch.no_grad():
        logits = library(torch.tensor([ids[:-1]])).logits[0].double()
    found: npt.NDArray[np.float64] = torch.log_softmax(logits, -1).numpy()
    return found


def check(library: Any, asked: list[dict[str, Any]]) -> None:
    """Every log-likelihood, and `greedy` wherever the best two are not the same float but for rounding."""
    assert asked
    for one in asked:
        context, continuation = one["context"], one["continuation"]
        rows = library_rows(library, [*context, *continuation])[len(context) - 1 :]
        own = rows[np.arange(len(continuation)), continuation]
        assert abs(own.sum() - one["logprob"]) <= ROUNDING * len(own) ** 0.5, one
        behind = (rows.max(1) - own).max()
        assert one["greedy"] == (behind == 0) or behind < ROUNDING


@pytest.mark.parametrize("run", CHOICES)
def test_multiple_choice(told: Any, library: Any, documents: dict[str, Any], run: str) -> None:
    found = told[run]
    assert len(found["asked"]) == sum(len(one["choices"]) for one in documents["relevant"])
    check(library, found["asked"])
    accuracy, normalised = expected_accuracy(library, documents["relevant"])
    assert (found["results"]["acc,none"], found["results"]["acc_norm,none"]) == (accuracy, normalised)
    assert accuracy > 0.8  # the model knows the language: a chance result would hide a slip


def expected_accuracy(library: Any, questions: list[dict[str, Any]]) -> tuple[float, float]:
    """Without the harness: the best summed log-likelihood, and the best a character."""
    tokenizer = load_tokenizer("builtin")
    right, right_a_character = 0, 0
    for one in questions:
        texts = [one["text"], *(one["text"] + choice for choice in one["choices"])]
        context, *wholes = tokenizer.encode_batch(texts, add_special_tokens=False)
        sums = []
        for whole in wholes:
            rows = library_rows(library, whole)
            sums.append(sum(rows[at - 1, whole[at]] for at in range(len(context), len(whole))))
        lengths = [len(choice) for choice in one["choices"]]
        right += int(np.argmax(sums)) == one["answer"]
        right_a_character += int(np.argmax(np.array(sums) / lengths)) == one["answer"]
    return right / len(questions), right_a_character / len(questions)


def test_texts_in_place_of_ids(told: Any, library: Any, documents: dict[str, Any]) -> None:
    """`tokenized_requests=False`: the harness sends the text and trusts that it is cut into the same tokens."""
    accuracy, _ = expected_accuracy(library, documents["relevant"])
    assert told["texts"]["results"]["acc,none"] == accuracy


def test_rolling(told: Any, library: Any, documents: dict[str, Any]) -> None:
    """Texts longer than the window: a prompt of 255 tokens and one generated token, as much as the harness reserves."""
    found = told["rolling"]
    check(library, found["asked"])
    assert len(found["asked"]) > TEXTS
    total = sum(one["logprob"] for one in found["asked"])
    size = sum(len(one["text"].encode()) for one in documents["rolling"])
    assert found["results"]["byte_perplexity,none"] == pytest.approx(float(np.exp(-total / size)), rel=1e-9)


def test_generation(told: Any, library: Any, documents: dict[str, Any]) -> None:
    found = told["continued"]
    tokenizer = load_tokenizer("builtin")
    texts = {one["doc"]["text"]: one["resps"][0][0] for one in found["samples"]}
    assert len(texts) == TEXTS
    for one in documents["continued"]:
        [ids] = tokenizer.encode_batch([one["text"]], add_special_tokens=False)
        with torch.no_grad():
            drawn = library.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        text = tokenizer.decode(
            [token for token in drawn if token != tokenizer.eos_token_id], skip_special_tokens=False
        )
        assert texts[one["text"]] == text.split("\n\n")[0]


def test_a_slip_would_be_seen(library: Any) -> None:
    """The planted counterpart: the same comparison, with the likelihoods of the tokens one place further."""
    ids = list(range(40, 60))
    rows = library_rows(library, ids)
    moved = sum(float(rows[at, ids[at]]) for at in range(10, 19))
    one = {"context": ids[:10], "continuation": ids[10:19], "logprob": moved, "greedy": False}
    with pytest.raises(AssertionError):
        check(library, [one])
