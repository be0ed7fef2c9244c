"""The catalogue language as strings: its labels are true, its split is clean, its wording is plain."""

import random
import re
from collections.abc import Mapping
from itertools import islice

import pytest

from tools.builtin_model import grammar
from tools.builtin_model.catalogue import CLASSES, CODES, DOCUMENTS, NAMES, WORDS, draw_document, held_out

CLASS_OF: Mapping[str, str] = {word: name for name, words in WORDS.items() for word in words}
RELEVANCE = re.compile(r"Query: (.*)\nDocument: (.*)\nRelevant: (yes|no)<eos>")


def catalogue_words(text: str) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]+", text) if word in CLASS_OF]


def by_class(text: str) -> dict[str, str]:
    return {CLASS_OF[word]: word for word in catalogue_words(text)}


def label_is_true(text: str) -> bool:
    """An oracle of its own: a query is relevant iff the document holds every catalogue word of it."""
    match = RELEVANCE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a relevance example: {text!r}")
    return (set(catalogue_words(match[1])) <= set(catalogue_words(match[2]))) == (match[3] == "yes")


def right_codes(document: str, question: str) -> list[str]:
    """The codes of the options that the document holds."""
    options = re.findall(r"^([A-F])[).:] (\w+)$", question, re.M)
    return [code for code, word in options if word in catalogue_words(document)]


def test_every_word_is_in_one_class_and_not_in_the_wording() -> None:
    words = [word for group in WORDS.values() for word in group]
    assert len(words) == len(set(words)) == 164
    assert {name: len(group) for name, group in WORDS.items()}.keys() == set(CLASSES)
    wording = re.sub(r"\{\w+\}", " ", " ".join((*DOCUMENTS, *grammar.OPENERS, *grammar.SYSTEMS, *NAMES.values())))
    assert not catalogue_words(wording)


def test_words_that_may_follow_the_article_begin_with_a_consonant() -> None:
    for name in ("adjective", "colour", "material", "object"):
        assert not [word for word in WORDS[name] if word[0] in "aeiou"]


def test_at_least_a_dozen_templates_name_every_class_once_in_many_orders() -> None:
    orders = {tuple(re.findall(r"\{(\w+)\}", template)) for template in DOCUMENTS}
    assert len(set(DOCUMENTS)) >= 12
    assert len(orders) >= 12
    assert all(sorted(order) == sorted(CLASSES) for order in orders)


def test_examples_are_the_same_for_the_same_seed() -> None:
    assert list(islice(grammar.examples(7), 40)) == list(islice(grammar.examples(7), 40))
    assert list(islice(grammar.examples(7), 40)) != list(islice(grammar.examples(8), 40))


@pytest.mark.parametrize("kept", [False, True])
def test_a_document_is_relevant_exactly_when_it_holds_every_word_of_the_query(kept: bool) -> None:
    texts = list(islice(grammar.examples(11, "relevance", kept=kept), 400))
    assert all(map(label_is_true, texts))
    assert 120 < sum("Relevant: yes" in text for text in texts) < 280


def test_the_relevance_oracle_sees_a_flipped_label() -> None:
    text = next(grammar.examples(11, "relevance"))
    flipped = text.replace(" yes<", " ?<").replace(" no<", " yes<").replace(" ?<", " no<")
    assert label_is_true(text)
    assert not label_is_true(flipped)


def test_a_hard_negative_differs_from_the_document_in_exactly_one_word() -> None:
    for text in islice(grammar.examples(3, "relevance", kept=True, hard=1.0), 300):
        query, document, label = RELEVANCE.fullmatch(text).groups()  # type: ignore[union-attr]
        missing = set(catalogue_words(query)) - set(catalogue_words(document))
        assert len(missing) == (label == "no")


def test_a_choice_has_one_right_option_and_names_its_code() -> None:
    seen: set[str] = set()
    for text in islice(grammar.examples(5, "choice"), 300):
        match = re.fullmatch(r"Document: (.*)\n(Question: .*)\nAnswer: ([A-F])<eos>", text, re.S)
        assert match is not None
        assert right_codes(match[1], match[2]) == [match[3]]
        seen.add(match[3])
    assert seen == set(CODES)


def test_every_turn_of_a_chat_is_answered_truly() -> None:
    turns = re.compile(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<\|end\|>", re.S)
    kinds = {"choice": 0, "yes or no": 0, "listing": 0}
    for text in islice(grammar.examples(9, "chat"), 400):
        assert text.endswith("<|end|><eos>")
        document = ""
        for user, answer in turns.findall(text):
            if found := re.search(r"^Document: (.*)$", user, re.M):
                document = found[1]
            if answer in CODES:
                kinds["choice"] += 1
                assert right_codes(document, user) == [answer]
            elif answer in ("yes", "no"):
                kinds["yes or no"] += 1
                asked = catalogue_words(user.replace(f"Document: {document}", ""))
                assert (set(asked) <= set(catalogue_words(document))) == (answer == "yes")
            else:
                kinds["listing"] += 1
                assert all(set(catalogue_words(user)) <= set(catalogue_words(line)) for line in answer.split("\n"))
    assert min(kinds.values()) > 20


def test_listed_documents_match_their_query() -> None:
    for text in islice(grammar.examples(13, "listing"), 200):
        query, lines = text.removesuffix("<eos>").split("\nDocuments:\n")
        assert all(set(catalogue_words(query)) <= set(catalogue_words(line)) for line in lines.split("\n"))


@pytest.mark.parametrize("family", [name for name in grammar.FAMILIES if name != "drill"])
def test_training_strings_hold_no_held_out_document_in_any_form(family: str) -> None:
    for text in islice(grammar.examples(17, family), 150):
        for line in text.replace("<|end|>", "\n").split("\n"):
            words = by_class(line)
            if len(catalogue_words(line)) == len(words) == len(CLASSES):
                assert not held_out(words)


def test_held_out_strings_hold_only_held_out_documents() -> None:
    for text in islice(grammar.examples(17, "relevance", kept=True), 150):
        assert held_out(by_class(RELEVANCE.fullmatch(text)[2]))  # type: ignore[index]


def test_the_split_keeps_about_one_document_in_thirty_one() -> None:
    rng = random.Random(0)
    share = sum(held_out(draw_document(rng)) for _ in range(5000)) / 5000
    assert 0.022 < share < 0.043  # four standard deviations around 1 / 31
