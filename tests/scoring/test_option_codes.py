"""Codes against plain definitions: prefix-free, single tokens first, probabilities that multiply."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from scoring.option_codes import NAMES, Code, Ids, alphabet, code_reader, prefix_free


def begins(first: Ids, second: Ids) -> bool:
    return second[: len(first)] == first


def some_codes(seed: int, count: int) -> list[Code]:
    """Codes of one to three tokens; none begins another."""
    rng = random.Random(seed)
    codes: list[Code] = []
    while len(codes) < count:
        ids = tuple(rng.randrange(9) for _ in range(rng.choice((1, 2, 2, 3))))
        if not any(begins(ids, other.ids) or begins(other.ids, ids) for other in codes):
            codes.append(Code(str(ids), ids))
    return codes


def encoder(singles: Sequence[str]) -> object:
    """A tokenizer with a token for each of `singles` and for each letter behind one or alone."""
    ids = {name: index for index, name in enumerate(singles)}

    def encode(texts: Sequence[str]) -> list[Ids | None]:
        return [(ids[text],) if text in ids else (ids.get(text[0], 1000), 2000 + ord(text[-1])) for text in texts]

    return encode


def test_a_code_that_begins_another_is_found() -> None:
    assert prefix_free([Code("a", (1,)), Code("b", (2, 3)), Code("c", (2, 4))])
    assert not prefix_free([Code("a", (2,)), Code("b", (2, 3))])
    assert not prefix_free([Code("a", (2, 3, 4)), Code("b", (7,)), Code("c", (2, 3))])
    assert not prefix_free([Code("a", (2,)), Code("b", (2,))])
    assert not prefix_free([Code("a", ()), Code("b", (2,))])
    for seed in range(30):
        codes = some_codes(seed, 7)
        assert prefix_free(codes)
        ids = codes[seed % 7].ids
        assert not prefix_free([*codes, Code("more", (*ids, 1))]) and not prefix_free([*codes, Code("less", ids[:1])])


@pytest.mark.parametrize("singles", [NAMES, NAMES[:200], NAMES[:52], NAMES[:26], NAMES[10:40]])
@pytest.mark.parametrize("most", [2, 53, 255])
def test_an_alphabet_is_prefix_free_with_single_tokens_first(singles: Sequence[str], most: int) -> None:
    codes = alphabet(encoder(singles), most)  # type: ignore[arg-type]
    assert prefix_free(codes) and len(codes) == most
    lengths = [len(code.ids) for code in codes]
    assert lengths == sorted(lengths)
    assert len({code.text for code in codes}) == most
    if len(singles) >= most:
        assert [code.text for code in codes] == list(singles[:most])


def test_a_poor_tokenizer_yields_fewer_codes() -> None:
    def letters(texts: Sequence[str]) -> list[Ids | None]:
        return [(ord(text),) if len(text) == 1 else None for text in texts]

    def none(texts: Sequence[str]) -> list[Ids | None]:
        return [None for _ in texts]

    def same(texts: Sequence[str]) -> list[Ids | None]:
        return [(1,) if len(text) == 1 else (1, 2) for text in texts]

    assert [code.text for code in alphabet(letters, 255)] == list(NAMES[:52])
    assert alphabet(same, 255) == (Code("A", (1,)),)
    assert alphabet(none, 255) == ()


def test_the_probability_of_a_code_is_the_product_of_its_tokens() -> None:
    for seed in range(20):
        codes = some_codes(seed, 11)
        found = code_reader(codes)
        rng = np.random.default_rng(seed)
        values = {stem: dict(zip(range(9), np.log(rng.dirichlet(np.ones(9))), strict=True)) for stem in found.stems}
        edges = [
            values[stem][token] for stem, tokens in zip(found.stems, found.tokens, strict=True) for token in tokens
        ]
        wanted = [sum(values[code.ids[:at]][token] for at, token in enumerate(code.ids)) for code in codes]
        np.testing.assert_allclose(found.logprobs(np.array(edges)), wanted, rtol=1e-12)
        assert math.fsum(map(math.exp, wanted)) <= 1 + 1e-12


def test_codes_with_the_same_beginning_share_a_row() -> None:
    found = code_reader([Code("a", (1,)), Code("b", (2, 3)), Code("c", (2, 4)), Code("d", (5, 3))])
    assert found.stems == ((), (2,), (5,)) and found.tokens == ((1, 2, 5), (3, 4), (3,))
    assert code_reader([Code(str(i), (i,)) for i in range(5)]).stems == ((),)


def test_a_token_without_weight_makes_its_codes_impossible() -> None:
    found = code_reader([Code("a", (1,)), Code("b", (2, 3)), Code("c", (2, 4))])
    logprobs = found.logprobs(np.array([-0.5, -np.inf, -0.1, -0.2]))
    assert logprobs.tolist() == [-0.5, -np.inf, -np.inf]


def test_names_are_letters_and_their_pairs() -> None:
    assert len(NAMES) == len(set(NAMES)) == 52 + 52 * 52
    assert list(itertools.islice(NAMES, 2)) == ["A", "B"] and NAMES[26] == "a" and NAMES[52] == "AA"
