"""Text to ids and back: the toy's bytes, the built-in's byte-level pieces, and a sentence-piece kind of vocabulary."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.tokenizer.detokenizer import MAX_HELD, IncrementalDecoder
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.support import toy_model
from tests.support.toy_model import ByteTokenizer

BUILTIN = Path(__file__).parents[3] / "engine" / "builtin" / "target"
UGLY = ["", " ", "a", " née 😀 x", "\x00", "אבג", "e\u0301", "\U0001f469\u200d\U0001f52c!", "a" * 5000, "line\n\n  two"]


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return load_tokenizer("builtin")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Words begin with U+2581, unknown characters fall back to bytes, and decoding strips the first space."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁cat",
        "s",
        "t",
        "▁t",
        "e",
    ]
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=[("▁", "t")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("pieces")
    backend.save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    (folder / "tokenizer_config.json").write_text(config)
    return Tokenizer(folder)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True, size: int = 1) -> str:
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    parts = [decoder.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return "".join(parts) + decoder.finish()


def test_the_byte_tokenizer_matches_the_toy_model() -> None:
    assert (toy_model.BOS, toy_model.EOS) == (ByteTokenizer.BOS, ByteTokenizer.EOS)
    [ids] = ByteTokenizer().encode_batch(["é<eos>"], add_special_tokens=True)
    assert ids == [toy_model.BOS, 0xC3, 0xA9, toy_model.EOS]


def test_plain_encoding_takes_special_strings_as_text(builtin: Tokenizer) -> None:
    for tokenizer, text in ((ByteTokenizer(), "x<eos>"), (builtin, "x<eos>")):
        [mapped] = tokenizer.encode_batch([text], add_special_tokens=False)
        [plain] = tokenizer.encode_batch([text], add_special_tokens=False, plain=True)
        assert mapped[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in plain
        assert tokenizer.decode(plain, skip_special_tokens=True) == text


def test_bytes_of_tokens_joined_are_the_text(builtin: Tokenizer, pieces: Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), builtin):
        for text in UGLY:
            [ids] = tokenizer.encode_batch([text], add_special_tokens=False)
            assert b"".join(tokenizer.token_bytes(ids)) == text.encode("utf-8")
    for tokenizer, token, data in ((builtin, "<|end|>", b"<|end|>"), (pieces, "é", b"\xc3\xa9")):
        [ids] = tokenizer.encode_batch([token], add_special_tokens=False)
        assert data in b"".join(tokenizer.token_bytes(ids))


def test_a_token_keeps_the_space_that_is_its_own(pieces: Tokenizer, tmp_path: Path) -> None:
    """A piece may stand within a word and begin one: a name without its space would be that of both."""
    backend = Backend.from_str(pieces._backend.to_str())
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for tokenizer in (pieces, Tokenizer(tmp_path)):
        [ids] = tokenizer.encode_batch(["t test"], add_special_tokens=False)
        assert "".join(tokenizer.token_texts(ids)) == " t test"
        assert b"".join(tokenizer.token_bytes(ids)) == b" t test"
        assert tokenizer.token_texts([1, 4000]) == ["<s>", ""]


def test_special_tokens_and_markers_are_told_apart(builtin: Tokenizer, tmp_path: Path) -> None:
    assert "<|end|>" in builtin.special_texts and not builtin.marker_texts
    backend = Backend.from_file(str(BUILTIN / "tokenizer.json"))
    backend.add_tokens(["<think>", "  "])
    backend.save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer(tmp_path)
    assert loaded.marker_texts == {"<think>"} and loaded.special_texts == builtin.special_texts
    assert loaded.info().chat_template == "d"


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_pieces_joined_are_the_whole_text(builtin: Tokenizer, pieces: Tokenizer, size: int) -> None:
    for tokenizer in (ByteTokenizer(), builtin, pieces):
        for text in UGLY:
            [ids] = tokenizer.encode_batch([text], add_special_tokens=False)
            assert streamed(tokenizer, ids, size=size) == tokenizer.decode(ids, skip_special_tokens=True)
            if tokenizer is not pieces:
                assert streamed(tokenizer, ids, size=size) == text


def test_no_piece_ends_inside_a_character(builtin: Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), builtin):
        decoder = tokenizer.decoder(skip_special_tokens=True)
        [ids] = tokenizer.encode_batch(["😀é"], add_special_tokens=False)
        parts = [decoder.push([token]) for token in ids]
        assert [part for part in parts if part] == ["😀", "é"]


def test_a_skipped_special_token_does_not_eat_the_next_space(pieces: Tokenizer) -> None:
    [ids] = pieces.encode_batch(["the the"], add_special_tokens=False)
    marked = [*ids[: len(ids) // 2], 2, *ids[len(ids) // 2 :]]
    assert streamed(pieces, marked) == pieces.decode(ids, skip_special_tokens=True)


def test_an_answer_goes_on_where_its_prompt_ends(builtin: Tokenizer, pieces: Tokenizer) -> None:
    """Decoding strips the space that a text begins with, and an answer behind a prompt begins none."""
    for tokenizer, skip in itertools.product((ByteTokenizer(), builtin, pieces), (True, False)):
        for text in ("the", "the 😀", "é", "the "):
            [prompt] = tokenizer.encode_batch([text], add_special_tokens=False)
            [whole] = tokenizer.encode_batch([text + " the cat"], add_special_tokens=False)
            decoder = tokenizer.decoder(skip_special_tokens=skip)
            decoder.follow(prompt)
            for one in (decoder.copy(), decoder.copy(), decoder):
                answer = "".join(one.push([token]) for token in whole[len(prompt) :]) + one.finish()
                assert text + answer == tokenizer.decode(whole, skip_special_tokens=skip)


def test_an_answer_behind_control_tokens_alone_begins_a_text(pieces: Tokenizer) -> None:
    [ids] = pieces.encode_batch(["the the"], add_special_tokens=False)
    decoder = pieces.decoder(skip_special_tokens=True)
    decoder.follow([1, 1])
    assert decoder.push(ids) == "the the"


def test_bytes_behind_a_character_do_not_repeat_it(pieces: Tokenizer) -> None:
    """Byte fallback makes all of a run of bytes unreadable where one character of it is unfinished."""
    smile = [3 + byte for byte in "😀".encode()]
    for rest in ([], smile[:1], [3 + ord("a")]):
        assert streamed(pieces, [*smile, *smile[:2], *rest]) == "😀" + "\ufffd" * len(smile[:2] + rest[:1])


def test_a_decoder_that_forgets_its_context_is_noticed(pieces: Tokenizer) -> None:
    [ids] = pieces.encode_batch(["the the"], add_special_tokens=False)
    naive = "".join(pieces.decode([token], skip_special_tokens=True) for token in ids)
    assert naive != pieces.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=40), st.integers(1, 7))
def test_any_bytes_stream_to_what_they_decode_to(ids: list[int], size: int) -> None:
    tokenizer = ByteTokenizer()
    text = streamed(tokenizer, ids, size=size)
    if "\ufffd" * MAX_HELD not in text:  # garbage is let go rather than held for ever
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


garbage = st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 97]), min_size=2 * MAX_HELD, max_size=70)


@settings(max_examples=200, deadline=None)
@given(garbage, st.integers(2, 70))
def test_garbage_reads_the_same_however_it_is_grouped(ids: list[int], size: int) -> None:
    """A plain answer, a stream and a client's resume tell the same text of the same tokens."""
    assert streamed(ByteTokenizer(), ids, size=size) == streamed(ByteTokenizer(), ids, size=1)


def test_a_decoder_that_lets_go_by_groups_is_noticed() -> None:
    def grouped(sizes: tuple[int, ...]) -> str:
        ids, decoder = iter([0xE2] * 16 + [0xE2, 0x82, 0xAC, 0xE2]), ByteTokenizer().decoder(skip_special_tokens=True)
        text = ""
        for size in sizes:
            decoder._window += [next(ids) for _ in range(size)]
            waits = len(decoder._window) - decoder._known <= MAX_HELD
            whole = decoder._decode(decoder._window)
            text += "" if waits and whole.endswith("\ufffd") else decoder._emit(whole)
        return text + decoder.finish()

    assert grouped((20,)) != grouped((1,) * 20)


def test_the_window_stays_small() -> None:
    lengths: list[int] = []

    def decode(ids: object) -> str:
        lengths.append(len(list(ids)))  # type: ignore[call-overload]
        return bytes(x for x in ids if x < 256).decode("utf-8", "replace")  # type: ignore[attr-defined]

    for script in ([97] * 5000, [0xFF] * 5000, [300] * 5000):
        decoder = IncrementalDecoder(decode)
        for token in script:
            decoder.push([token])
        assert max(lengths) <= 2 * MAX_HELD + 2


def with_and_without_fixed_texts(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[list[str], list[str]]:
    """What each push returns, from a decoder that knows the texts of ids and from one that decodes every window."""
    quick = tokenizer.decoder(skip_special_tokens=skip)
    plain = IncrementalDecoder(quick._decode, quick._skip)
    return (
        [*map(quick.push, ([x] for x in ids)), quick.finish()],
        [*map(plain.push, ([x] for x in ids)), plain.finish()],
    )


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 2100), max_size=60), skip=st.booleans())
def test_texts_of_single_ids_are_those_of_their_windows(builtin: Tokenizer, ids: list[int], skip: bool) -> None:
    quick, plain = with_and_without_fixed_texts(builtin, ids, skip)
    assert quick == plain


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 5))
def test_texts_of_single_ids_are_those_of_their_windows_in_text(builtin: Tokenizer, text: str, cut: int) -> None:
    [ids] = builtin.encode_batch([text], add_special_tokens=False)
    quick, plain = with_and_without_fixed_texts(builtin, ids[cut:] + ids, skip=True)
    assert quick == plain


def test_a_tokenizer_whose_texts_depend_on_their_place_keeps_its_windows(builtin: Tokenizer, pieces: Tokenizer) -> None:
    assert builtin._fixed_texts is not None and pieces._fixed_texts is None
    assert builtin.decoder(skip_special_tokens=True)._fixed_texts is builtin._fixed_texts


def test_fixed_texts_of_another_kind_of_tokenizer_would_be_noticed(pieces: Tokenizer) -> None:
    [ids] = pieces.encode_batch(["the the"], add_special_tokens=False)
    planted = {token: pieces.decode([token], skip_special_tokens=False) for token in ids}
    decoder = IncrementalDecoder(pieces.decoder(skip_special_tokens=True)._decode, (), planted)
    assert "".join([*map(decoder.push, ([x] for x in ids)), decoder.finish()]) != streamed(pieces, ids)


def test_special_tokens_have_text_only_if_wanted(builtin: Tokenizer) -> None:
    eos = builtin.eos_token_id
    assert eos is not None
    assert streamed(builtin, [eos, eos], skip=False) == "<eos><eos>"
    assert streamed(builtin, [eos, eos], skip=True) == ""


def test_tokens_that_are_not_utf8_show_their_bytes(builtin: Tokenizer, pieces: Tokenizer) -> None:
    [ids] = builtin.encode_batch(["né"], add_special_tokens=False)
    assert builtin.token_texts(ids) == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert pieces.token_texts([3 + 0xE2, 3 + 0x41]) == ["bytes:\\xe2", "A"]
    assert ByteTokenizer().token_texts([97, 0xC3, 257, 260]) == ["a", "bytes:\\xc3", "<eos>", ""]


@pytest.mark.parametrize("text", UGLY)
def test_spans_say_where_each_token_came_from(builtin: Tokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), builtin):
        found = tokenizer.encode_spans(text)
        assert [found.ids] == tokenizer.encode_batch([text], add_special_tokens=False)
        assert len(found.spans) == len(found.ids)
        if found.spans:
            assert found.spans[0][0] == 0 and found.spans[-1][1] == len(text)
            assert all(a <= b and b <= len(text) for a, b in found.spans)


def test_ids_beyond_the_vocabulary_have_no_text(builtin: Tokenizer) -> None:
    assert builtin.decode([5000, 2**31 - 1], skip_special_tokens=False) == ""
    assert builtin.token_texts([5000]) == [""]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)


def test_info_names_the_end_of_text(builtin: Tokenizer) -> None:
    assert builtin.info().eos_token == "<eos>"
    assert ByteTokenizer().info().eos_token == "<eos>"


@pytest.mark.parametrize(
    ("pair", "inputs", "split"),
    [
        ("<s>:0 $A:0 </s>:0 $B:1 </s>:1", ["input_ids", "token_type_ids"], 1),  # BERT's
        ("<s>:0 $A:0 </s>:0 </s>:1 $B:1 </s>:1", ["input_ids", "token_type_ids"], 1),
        ("<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0", ["input_ids", "token_type_ids"], None),  # RoBERTa's
        ("<s>:0 $A:0 </s>:0 $B:1 </s>:1", ["input_ids", "attention_mask"], None),
    ],
)
def test_a_pair_has_the_segments_that_the_library_gives_the_model(
    tmp_path: Path, pair: str, inputs: list[str], split: int | None
) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs).save_pretrained(tmp_path)
    frame = Tokenizer(tmp_path).pair_frame
    assert frame is not None
    assert (frame.before, set(frame.between), frame.after) == ([0], {1}, [1])
    assert frame.first_of_between == split
    given = AutoTokenizer.from_pretrained(tmp_path)("a", "a")
    second = 1 in given.get("token_type_ids", [])
    assert second is (split is not None)
