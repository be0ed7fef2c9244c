"""The id-level generator says what the strings say, keeps the split, and puts the label weight on the labels."""

import re

import pytest
import torch

from tools.builtin_model import grammar, vocabulary
from tools.builtin_model.catalogue import CLASSES, CODES, WORDS, held_out
from tools.builtin_model.corpus import LABEL_WEIGHT, ROW_TOKENS, SLOT_NAMES, Corpus, Examples, compile_form, pack

TOKENIZER = vocabulary.load()
CLASS_OF = {word: name for name, words in WORDS.items() for word in words}
ROWS = 160


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(TOKENIZER, forms_a_family=40, seed=3, device=torch.device("cpu"))


def drawn(corpus: Corpus, seed: int = 0) -> tuple[torch.Tensor, Examples]:
    generator = torch.Generator().manual_seed(seed)
    forms = corpus.pick(ROWS, dict.fromkeys(grammar.FAMILIES, 1.0), generator)
    return forms, corpus.fill(forms, generator)


def row_ids(ids: torch.Tensor) -> list[int]:
    kept: list[int] = ids[ids != vocabulary.PAD_ID].tolist()
    return kept


def slot_words(slots: torch.Tensor) -> dict[str, str]:
    return {name: TOKENIZER.decode([int(token)]).strip() for name, token in zip(SLOT_NAMES, slots, strict=True)}


def disagreements(corpus: Corpus, forms: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> int:
    """How many rows are not the tokens of their form's text, rendered and encoded as one string."""
    count = 0
    for index, form_index in enumerate(forms.tolist()):
        text = grammar.render(corpus.forms[form_index], slot_words(slots[index]))
        count += row_ids(ids[index]) != TOKENIZER.encode(text, add_special_tokens=False).ids
    return count


def test_rows_are_the_tokens_of_the_rendered_string(corpus: Corpus) -> None:
    forms, examples = drawn(corpus)
    assert disagreements(corpus, forms, examples.ids_BL, examples.slots_BS) == 0


def test_one_wrong_token_or_the_words_of_a_neighbour_are_seen(corpus: Corpus) -> None:
    forms, examples = drawn(corpus)
    wrong = examples.ids_BL.clone()
    wrong[17, 5] += 1
    assert disagreements(corpus, forms, wrong, examples.slots_BS) == 1
    assert disagreements(corpus, forms, examples.ids_BL, examples.slots_BS.roll(1, 0)) == ROWS


def test_a_slot_that_would_not_be_a_word_is_refused() -> None:
    form = grammar.Form(family="running_text", text="The{d0.colour} chair<eos>")
    with pytest.raises(ValueError, match=r"a space before slot `d0\.colour`"):
        compile_form(TOKENIZER, form)


@pytest.mark.parametrize("seed", [1, 2])
def test_labels_are_true_of_the_documents(corpus: Corpus, seed: int) -> None:
    forms, examples = drawn(corpus, seed)
    checked = {"yes": 0, "no": 0, "code": 0, "probe": 0}
    for index, form_index in enumerate(forms.tolist()):
        form, words = corpus.forms[form_index], slot_words(examples.slots_BS[index])
        for j, ask in enumerate(form.asks):
            if ask.asked:
                assert words[f"o{j}.{CODES.index(words[f'a{j}'])}"] == words[f"d0.{ask.asked}"]
                assert len({words[f"o{j}.{k}"] for k in range(ask.options)}) == ask.options
                checked["code"] += 1
            else:
                true = all(words[f"q{j}.{name}"] == words[f"d0.{name}"] for name in ask.used)
                assert words[f"y{j}"] == words[f"y{j}-"] == ("yes" if true else "no")
                checked[words[f"y{j}"]] += 1
        if form.family == "drill":
            listed = [words[f"w{k}"] for k in range(grammar.DRILL_WORDS)]
            assert all((words[f"p{k}"] in listed) == (words[f"m{k}"] == "yes") for k in range(grammar.DRILL_PROBES))
            checked["probe"] += 1
        for name in form.shared:
            assert len({words[f"d{number}.{name}"] for number in range(grammar.MAX_DOCUMENTS)}) == 1
    assert min(checked.values()) > 5


def test_label_weights_stand_on_the_labels_and_nowhere_else(corpus: Corpus) -> None:
    forms, examples = drawn(corpus)
    for index, form_index in enumerate(forms.tolist()):
        heavy = examples.weights_BL[index] == LABEL_WEIGHT
        said = [TOKENIZER.decode([token]).strip() for token in examples.ids_BL[index][heavy].tolist()]
        labels = re.findall(r"\{([yam]\d)\}", corpus.forms[form_index].text)
        words = slot_words(examples.slots_BS[index])
        assert said == [words[name] for name in labels]
        padding = examples.ids_BL[index] == vocabulary.PAD_ID
        assert not examples.weights_BL[index][padding].any()
        assert examples.weights_BL[index][0] == 0


def documents_of(form: grammar.Form, words: dict[str, str]) -> list[dict[str, str]]:
    numbers = sorted(set(re.findall(r"\{d(\d)\.", form.text)))
    return [{name: words[f"d{number}.{name}"] for name in CLASSES} for number in numbers]


def test_no_row_with_weight_holds_a_held_out_document(corpus: Corpus) -> None:
    forms, examples = drawn(corpus, 5)
    for index, form_index in enumerate(forms.tolist()):
        if examples.weights_BL[index].any():
            words = slot_words(examples.slots_BS[index])
            assert not any(map(held_out, documents_of(corpus.forms[form_index], words)))


def test_held_out_rows_have_a_held_out_document_and_hard_negatives(corpus: Corpus) -> None:
    generator = torch.Generator().manual_seed(1)
    forms = corpus.pick(3000, {"relevance": 1.0}, generator)
    examples = corpus.fill_held_out(forms, generator)
    assert 40 < len(examples.ids_BL) < 180
    for slots, ids in zip(examples.slots_BS, examples.ids_BL, strict=True):
        words = slot_words(slots)
        assert held_out({name: words[f"d0.{name}"] for name in CLASSES})
        text = TOKENIZER.decode(row_ids(ids))
        query, document = text.split("\nDocument:")
        missing = {word for word in re.findall(r"\w+", query) if word in CLASS_OF and word not in document}
        assert len(missing) == (words["y0"] == "no")


def test_packing_joins_rows_without_padding_and_keeps_every_weight(corpus: Corpus) -> None:
    _, examples = drawn(corpus)
    ids, weights = pack(examples, 8)
    assert ids.shape == weights.shape == (ROWS // 8, 8 * ROW_TOKENS)
    for index in range(len(ids)):
        rows = slice(8 * index, 8 * index + 8)
        assert row_ids(ids[index]) == [token for row in examples.ids_BL[rows] for token in row_ids(row)]
        assert weights[index].sum() == examples.weights_BL[rows].sum()
