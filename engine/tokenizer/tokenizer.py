"""Tokenizer: text to ids and back, by the fast tokenizer of a model folder."""

import json
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.builtin import BUILTIN_FOLDERS
from engine.model.model_folder import one_line, read_json
from engine.tokenizer.control_tokens import ControlTokens, controls_of, renamed
from engine.tokenizer.detokenizer import REPLACEMENT, IncrementalDecoder

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "merges.txt", "tekken.json", "*.tiktoken")


MANY_IDS = 4096  # more are decoded by the call that lets other threads run meanwhile


class Encoded(NamedTuple):
    """Holds the ids of one text and the characters [start, end) that each came from."""

    ids: list[int]
    spans: list[tuple[int, int]]


class PairControls(NamedTuple):
    """Holds the control tokens around two texts that a model reads as one row: `before`, first text, `between`, second
    text, `after`."""

    before: list[int]
    between: list[int]
    after: list[int]
    first_of_between: int | None  # tokens of `between` in the first segment; None: rows have no second segment

    @property
    def size(self) -> int:
        """Returns the number of control tokens."""
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """Says what a tokenizer is, for the model card."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class TooManyTokens(ValueError):
    """Says that texts have more tokens than their caller takes."""

    def __init__(self, count: int, maximum: int) -> None:
        super().__init__(count, maximum)
        self.count = count
        self.maximum = maximum


class Tokenizer:
    """Encodes and decodes text by a `tokenizers` tokenizer as transformers loads it. No code of its folder is ever run.

    Thread-safe; encoding may take milliseconds, so an event loop uses an executor.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    special_texts: frozenset[str]  # control tokens that the vocabulary calls special
    marker_texts: frozenset[str]  # the other control tokens, such as `<think>`
    pair_frame: PairControls | None  # None: the tokenizer joins no two texts
    _controls: ControlTokens
    _special: frozenset[int]  # ids that `skip_special_tokens` leaves out
    _fixed_texts: "_FixedTexts | None" = None  # None: the text of an id depends on those before it

    def __init__(self, folder: Path, revision: str | None = None) -> None:
        from transformers import AutoTokenizer

        if folder.is_dir() and not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
            raise ValueError(f"A folder of a tokenizer must hold a tokenizer.json. Given: {folder}, without one.")
        # Left out, `trust_remote_code` is a question on the terminal for a folder that brings code.
        options = {"revision": revision, "local_files_only": True, "use_fast": True, "trust_remote_code": False}
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), **options)
        except Exception as error:  # the library's messages name neither file nor place
            for file in sorted(folder.glob("*.json")):
                read_json(file)
            raise ValueError(f"No tokenizer can be read from {folder}: {one_line(error)}.") from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(loaded).__name__} has no fast implementation: a tokenizer.json is needed.")
        self._setup(loaded, backend)

    def _setup(self, loaded: Any, backend: Any) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        backend.no_truncation()
        backend.no_padding()
        self._backend: Any = backend
        data: str = backend.to_str()
        controls = controls_of(data)
        self._controls = ControlTokens({token["content"]: token["id"] for token in controls})
        self.special_texts = frozenset(token["content"] for token in controls if token["special"])
        self.marker_texts = frozenset(self._controls.names) - self.special_texts
        self._plain: Any = Backend.from_str(renamed(data, self._controls))
        if any(self._plain.token_to_id(self._controls.names[token["content"]]) != token["id"] for token in controls):
            raise ValueError("The tokenizer's control tokens cannot be told apart from text: their ids are not stable.")
        self._plain.add_special_tokens([AddedToken(self.seam, normalized=False, special=True)])
        self._seam_id: int | None = self._plain.token_to_id(self.seam)
        self._special = frozenset(int(token) for token in loaded.all_special_ids) | frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.pair_frame: PairControls | None = _pair_frame(
            backend, segments="token_type_ids" in loaded.model_input_names
        )
        decoder = json.loads(data).get("decoder")
        self._bytes = _byte_alphabet(decoder)
        self._strips = any(stage.get("type") in ("Metaspace", "Strip") for stage in _stages(decoder))
        if (decoder or {}).get("type") == "ByteLevel":
            self._fixed_texts = _FixedTexts(self.decode)
        self._pieces: dict[int, tuple[str, bytes]] = {}
        self.bos_token_id = loaded.bos_token_id
        self.eos_token_id = loaded.eos_token_id
        self._info = TokenizerInfo(
            tokenizer_class=type(loaded).__name__,
            bos_token=loaded.bos_token,
            eos_token=loaded.eos_token,
            pad_token=loaded.pad_token,
            chat_template=_default_template(loaded.chat_template),
        )

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False, max_tokens: int | None = None
    ) -> list[list[int]]:
        """Returns the ids of each text.

        Args:
            texts: The texts.
            add_special_tokens: Apply the tokenizer's own rule for the ends of a text.
            plain: Strings of control tokens are ordinary characters.
            max_tokens: Tokens of all texts together. More are counted and not made into lists, which would hold the
                interpreter; None takes any number.

        Raises:
            TooManyTokens: The texts have more than `max_tokens`.
        """
        backend = self._plain if plain else self._backend
        encoded = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        check_count(encoded, max_tokens)
        found = [one.ids for one in encoded]
        if not plain:
            return found
        seam = self.seam
        return [
            [token for token in ids if token != self._seam_id] if seam in text else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def encode_spans(self, text: str, *, plain: bool = False) -> Encoded:
        """Returns the ids of one text without special tokens, and where each came from."""
        found = (self._plain if plain else self._backend).encode(text, add_special_tokens=False)
        return Encoded(found.ids, found.offsets)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of ids. Unknown ids have no text."""
        if len(ids) > MANY_IDS:
            return str(self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each id behind any other, or `bytes:\\xNN...` where its bytes are not UTF-8."""
        return [self._piece(token)[0] for token in ids]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each id, from which a client can join characters that are cut between tokens."""
        return [self._piece(token)[1] for token in ids]

    def _piece(self, token: int) -> tuple[str, bytes]:
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._new_piece(token)
        return found

    def _new_piece(self, token: int) -> tuple[str, bytes]:
        text = self.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            if self._strips:  # the space that a text begins with, which is the token's own
                text = self.decode([token, token], skip_special_tokens=False)[len(text) :]
            return text, text.encode("utf-8")
        name = self._backend.id_to_token(token) or ""
        if len(name) == 6 and name.startswith("<0x"):  # byte fallback
            data = bytes([int(name[3:5], 16)])
        elif self._bytes and all(char in self._bytes for char in name):
            data = bytes(self._bytes[char] for char in name)
        else:
            return text, text.encode("utf-8")
        return bytes_text(data), data

    def info(self) -> TokenizerInfo:
        """Returns what the tokenizer is."""
        return self._info

    @property
    def seam(self) -> str:
        """Text that `plain` encoding gives no token: what stands on its two sides is encoded separately."""
        return self._controls.seam

    def mark(self, text: str) -> str:
        """Puts each control string under its secret name, which `plain` encoding takes for that token."""
        return self._controls.mark(text)

    def has_token(self, text: str) -> bool:
        """Tells whether `text` is the string of one control token."""
        return text in self._controls.names

    def mark_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the characters [start, end) of each secret name in a marked text."""
        return self._controls.spans(text)

    def decoder(self, *, skip_special_tokens: bool) -> IncrementalDecoder:
        """Makes a decoder for the tokens of one stream."""
        decode = partial(self.decode, skip_special_tokens=False)
        return IncrementalDecoder(decode, self._special if skip_special_tokens else frozenset(), self._fixed_texts)


class _FixedTexts(dict[int, str]):
    """Maps ids of a byte-level tokenizer to their texts, once each was looked up.

    The text of such ids is that of their bytes end to end. Bytes that are UTF-8 by themselves therefore have the same
    text behind any complete text. An id whose bytes are not, or that has none, has the text "".
    """

    def __init__(self, decode: Callable[..., str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token: int) -> str:
        text = self._decode([token], skip_special_tokens=False)
        found = self[token] = "" if REPLACEMENT in text else text
        return found


def check_count(encoded: Sequence[Sized], max_tokens: int | None) -> None:
    """Raises TooManyTokens if the texts have more than `max_tokens` together."""
    count = sum(map(len, encoded))
    if max_tokens is not None and count > max_tokens:
        raise TooManyTokens(count, max_tokens)


def load_tokenizer(path: str | Path, revision: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a model path as in ModelConfig: "toy", "builtin", a folder or a cached repository id."""
    if str(path) == "toy":
        from engine.model.checkpoint import toy_module  # imports the model library

        tokenizer: Tokenizer = toy_module().ByteTokenizer()
        return tokenizer
    return Tokenizer(BUILTIN_FOLDERS.get(str(path), Path(path)), revision)


def _pair_frame(backend: Any, *, segments: bool) -> PairControls | None:
    """Finds the control tokens that the tokenizer's post-processor writes around a pair of texts.

    Args:
        backend: The fast tokenizer.
        segments: Whether the model gets the tokenizer's segments, which are those of the library's `token_type_ids`.
    """
    found = backend.encode("a", "a", add_special_tokens=True)
    sides: list[int | None] = found.sequence_ids
    if 0 not in sides or 1 not in sides:
        return None
    first, second = sides.index(0), sides.index(1)
    end, last = second, len(sides) - 1 - sides[::-1].index(1)
    while sides[end - 1] is None:
        end -= 1
    between = found.ids[end:second]
    if not between:  # nothing tells the texts apart
        return None
    kinds = found.type_ids
    split = None
    if segments and kinds[first] != kinds[second]:
        split = sum(kind == kinds[first] for kind in kinds[end:second])
    return PairControls(found.ids[:first], between, found.ids[last + 1 :], split)


def _default_template(found: str | dict[str, str] | None) -> str | None:
    """Returns the chat template; a model with templates for several uses names one "default"."""
    return found.get("default") if isinstance(found, dict) else found


def bytes_text(data: bytes) -> str:
    """Returns the text that stands for bytes that are not UTF-8."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _stages(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoders that run one after another."""
    stages: list[dict[str, Any]] = (decoder or {}).get("decoders", [decoder or {}])
    return stages


def _byte_alphabet(decoder: dict[str, Any] | None) -> dict[str, int]:
    """Maps characters to bytes for a byte-level vocabulary; the map is empty for another kind of tokenizer.

    The printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order: the
    mapping of GPT-2's published encoder, which every byte-level tokenizer shares.
    """
    if not any(stage.get("type") == "ByteLevel" for stage in _stages(decoder)):
        return {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
