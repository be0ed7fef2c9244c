"""The model of fault tests and its tokenizer: logits are a pure, bitwise function of the tokens a row attends to.

It keeps the token id of each pool slot where a real model keeps keys and values, and reads every sequence *through* its
slots: a wrong, reused or never written slot changes the answer or raises. Loadable only with ASSAY_TEST_FAULTS=1.

Vocabulary (264 unless given): 0..255 bytes, BOS, EOS, then the magic tokens below, which the model never proposes.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.input_batch import ScheduledSequence, StepKind, StepSize
from engine.config import EngineConfig, ModelConfig
from engine.metrics import Stopwatch
from engine.model.heads.info import HeadInfo
from engine.model.lm_head import HeadSpec, LogprobQuery, RowLogprobs, logprobs_of_blocks
from engine.model.loader import LoadedModels, UnsupportedDraft
from engine.requests import Int32s
from engine.tokenizer.control_tokens import ControlTokens
from engine.tokenizer.tokenizer import Encoded, PairControls, Tokenizer, TokenizerInfo, bytes_text, check_count
from engine.utils.cuda import DeviceLost
from gpu_sampler.startup_progress import StartupProgress

UInt64s = npt.NDArray[np.uint64]

BOS = 256
EOS = 257
RAISE = 258  # as a new token: the step raises
NAN = 259  # attended to: the row holds a NaN
INF = 260  # attended to: the row holds +inf
EMPTY = 261  # attended to: the row is -inf throughout
HANG = 262  # as a new token: the step waits for `ToyModel.released`
KILL = 263  # as a new token: the process exits with status 70
LOSE_DEVICE = (RAISE, RAISE)  # next to each other as new tokens: the device is lost
END_THREAD = (RAISE, HANG)  # next to each other as new tokens: the thread ends without an exception that we catch
VOCAB_SIZE = 264
UNWRITTEN = -1
KILL_STATUS = 70
OTHER = np.uint64(0xD1B54A32D192ED03)
BLUR = 0.3  # a toy draft foresees the toy most of the time


class ToyFault(RuntimeError):
    """Means the magic token RAISE, or a row that attends to a slot that holds nothing."""


class ToyModel:
    """Implements `CausalLM` without a network. Thread-safe only as far as `CausalLM` is."""

    def __init__(
        self,
        *,
        vocab_size: int = VOCAB_SIZE,
        num_slots: int = 4_096,
        max_model_len: int = 1_024,
        spread: float = 2.5,
        blur: float = 0.0,
        step_seconds: float = 0.0,
        on_forward: Callable[[StepKind, Sequence[ScheduledSequence]], None] | None = None,
    ) -> None:
        """Makes a model.

        Args:
            vocab_size: width V of the logits.
            num_slots: pool slots.
            max_model_len: tokens of the longest sequence.
            spread: standard deviation of a row's logits, nats.
            blur: share of each logit that is another toy's; a blurred toy is a draft that often foresees a plain one.
            step_seconds: time that a step takes at least.
            on_forward: called with kind and sequences before each step: the clock, delay or signal of a test.
        """
        if os.environ.get("ASSAY_TEST_FAULTS") != "1":
            raise RuntimeError("the toy model is for fault tests: it loads only with ASSAY_TEST_FAULTS=1")
        self.vocab_size = vocab_size
        self.contexts_built: Future[list[str]] | None = None
        self.max_model_len = max_model_len
        self.num_slots = num_slots
        self.max_targets: int | None = None
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.head: HeadSpec | None = None
        self.pooling_head: HeadInfo | None = None  # a test may give it one
        self.weights_digest = hashlib.sha256(f"{vocab_size} {spread} {blur}".encode()).hexdigest()
        self.bos_token_id: int | None = BOS if vocab_size > BOS else None
        self.eos_token_ids: tuple[int, ...] = (EOS,) if vocab_size > EOS else ()
        self.padded_tokens = self.graph_replays = 0
        self.prefill_graph_limit: StepSize | None = None
        self.head_watch: Stopwatch | None = None
        self.on_forward = on_forward
        self.step_seconds = step_seconds
        self.steps = 0
        self.hanging = threading.Event()  # set while a step hangs
        self.released = threading.Event()
        self._pool = np.full(num_slots, UNWRITTEN, np.int64)
        self._pool[0] = 0
        # Four 16-bit uniforms added up are close to normal: mean 2 * 65535, deviation 65536 / sqrt(3).
        self._scale = np.float32(spread * 3**0.5 / 65_536)
        self._blur = blur
        self._columns = _mix(np.arange(vocab_size, dtype=np.uint64) + np.uint64(1))

    def forward(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits, float32 [R, V]. The magic tokens raise ToyFault."""
        return torch.from_numpy(self._logits(kind, sequences, token_table, np.arange(self.vocab_size)))

    def label_logits(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, labels: Int32s
    ) -> torch.Tensor:
        """Returns the columns `labels` of the logits, float32 [R, L]."""
        return torch.from_numpy(self._logits(kind, sequences, token_table, labels.astype(np.int64)))

    def pooled(self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor) -> torch.Tensor:
        """Returns the first columns of the logits as the head's numbers, float32 [R, K]."""
        if self.pooling_head is None:
            raise RuntimeError("The toy model has no pooling head.")
        return torch.from_numpy(self._logits(kind, sequences, token_table, np.arange(self.pooling_head.width)))

    def target_logprobs(
        self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor, asked: LogprobQuery
    ) -> RowLogprobs:
        """Answers a query from float32 logits."""
        return logprobs_of_blocks([self.forward(kind, sequences, token_table)], asked)

    def fill(self, kind: StepKind, sequences: Sequence[ScheduledSequence], token_table: torch.Tensor) -> None:
        """Writes the tokens only. Magic tokens act in the target model alone."""
        self._store(sequences, token_table.numpy())

    def decode_graphs(self) -> None: ...

    def capture_next(self) -> bool:
        return False

    def warm_up(self, progress: StartupProgress) -> None:
        progress("toy", 0.0)

    def share_contexts(self) -> None: ...

    def forget(self, slots: Int32s) -> None:
        """Poisons pool slots that became free."""
        self._pool[slots] = UNWRITTEN

    def _logits(
        self,
        kind: StepKind,
        sequences: Sequence[ScheduledSequence],
        token_table: torch.Tensor,
        columns: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        self.steps += 1
        if self.on_forward is not None:
            self.on_forward(kind, sequences)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self._write(sequences, token_table.numpy())
        hashes, faults = self._read(sequences)
        logits = self._values(hashes, columns)
        if self._blur:
            others = self._values(_mix(hashes ^ OTHER), columns)
            logits = np.float32((1 - self._blur**2) ** 0.5) * logits + np.float32(self._blur) * others
        logits[:, (columns >= RAISE) & (columns <= KILL)] = -np.inf
        logits[(faults == NAN).nonzero()[0], :1] = np.nan
        logits[(faults == INF).nonzero()[0], :1] = np.inf
        logits[(faults == EMPTY).nonzero()[0]] = -np.inf
        return logits

    def _values(self, hashes: UInt64s, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        words = _mix(hashes[:, None] ^ self._columns[columns][None, :])
        sums = sum(((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
        values: npt.NDArray[np.float32] = (np.asarray(sums) - 2 * 65_535).astype(np.float32) * self._scale
        return values

    def _store(self, sequences: Sequence[ScheduledSequence], table: npt.NDArray[np.int32]) -> list[Int32s]:
        """Writes the new tokens of each sequence to its slots and returns them."""
        new = []
        for one in sequences:
            first = len(one.context)
            new.append(table[one.slot, first : first + len(one.write)] if one.ids is None else one.ids)
            self._pool[one.write] = new[-1]
        return new

    def _write(self, sequences: Sequence[ScheduledSequence], table: npt.NDArray[np.int32]) -> None:
        """Writes all new tokens of the step before any is read; then the magic ones among them act."""
        new = self._store(sequences, table)
        ids = np.concatenate(new) if new else np.empty(0, np.int32)
        if (ids < 0).any() or (ids >= self.vocab_size).any():
            raise ToyFault("a token id outside the vocabulary reached the model")
        magic = set(ids[ids >= RAISE].tolist())
        if KILL in magic:
            os._exit(KILL_STATUS)
        pairs = {pair for ids in new for pair in pairwise(ids.tolist())} if RAISE in magic else ()
        if LOSE_DEVICE in pairs:
            raise DeviceLost("the magic tokens that lose the device")
        if END_THREAD in pairs:
            raise SystemExit
        if HANG in magic:
            self.hanging.set()
            self.released.wait()
            self.hanging.clear()
        if RAISE in magic:
            raise ToyFault("the magic token that raises")

    def _read(self, sequences: Sequence[ScheduledSequence]) -> tuple[UInt64s, npt.NDArray[np.int64]]:
        """Returns a hash of the tokens of each wanted row, u64 [R], and the magic value it attends to (0: none)."""
        hashes: list[UInt64s] = []
        faults: list[npt.NDArray[np.int64]] = []
        for one in sequences:
            if not len(one.rows):
                continue
            tokens = self._pool[np.concatenate((one.context, one.write))]
            ends = len(one.context) + one.rows
            if (tokens[: ends[-1] + 1] == UNWRITTEN).any():
                raise ToyFault("a row attends to a slot that holds nothing")
            positions = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
            hashes.append(np.cumsum(_mix(positions + tokens.astype(np.uint64)))[ends])
            magic_at = np.where((tokens >= NAN) & (tokens <= EMPTY), tokens, 0)
            faults.append(np.maximum.accumulate(magic_at)[ends])
        if not hashes:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        return _mix(np.concatenate(hashes)), np.concatenate(faults)


class ByteTokenizer(Tokenizer):
    """Tokenizes for the toy model: ids 0 to 255 are bytes, 256 begins a text and 257 ends one."""

    BOS, EOS = BOS, EOS
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    _SPECIAL: ClassVar[dict[int, str]] = {BOS: "<bos>", EOS: "<eos>"}
    special_texts: frozenset[str] = frozenset(_SPECIAL.values())
    marker_texts: frozenset[str] = frozenset()
    _special = frozenset(_SPECIAL)
    pair_frame: PairControls | None = PairControls([BOS], [EOS], [EOS], 1)

    def __init__(self) -> None:
        self._controls = ControlTokens({text: token for token, text in self._SPECIAL.items()})
        self._names = {token: self._controls.names[text] for token, text in self._SPECIAL.items()}

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, plain: bool = False, max_tokens: int | None = None
    ) -> list[list[int]]:
        head = [self.BOS] if add_special_tokens else []
        names = self._names if plain else self._SPECIAL
        found = [head + self._encode(text.replace(self.seam, ""), names) for text in texts]
        check_count(found, max_tokens)
        return found

    @staticmethod
    def _encode(text: str, names: dict[int, str]) -> list[int]:
        if not any(name in text for name in names.values()):
            return list(text.encode("utf-8"))
        ids: list[int] = []
        while text:
            found = [(at, token) for token, name in names.items() if (at := text.find(name)) >= 0]
            at, control = min(found, default=(len(text), None))
            ids.extend(text[:at].encode("utf-8"))
            if control is None:
                break
            ids.append(control)
            text = text[at + len(names[control]) :]
        return ids

    def encode_spans(self, text: str, *, plain: bool = False) -> Encoded:
        names = self._names if plain else self._SPECIAL
        ids = self._encode(text, names)
        spans: list[tuple[int, int]] = []
        at = index = 0
        while index < len(ids):
            if ids[index] >= self.BOS:
                width, count = len(names[ids[index]]), 1
            else:
                width, count = 1, len(text[at].encode("utf-8"))
            spans += [(at, at + width)] * count
            at, index = at + width, index + count
        return Encoded(ids, spans)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        out = bytearray()
        for token in ids:
            if 0 <= token < self.BOS:
                out.append(token)
            elif not skip_special_tokens:
                out += self._SPECIAL.get(token, "").encode("ascii")
        return out.decode("utf-8", "replace")

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [
            self.decode([token], skip_special_tokens=False)
            if not 128 <= token < self.BOS
            else bytes_text(bytes([token]))
            for token in ids
        ]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [bytes([token]) if 0 <= token < self.BOS else self._SPECIAL.get(token, "").encode() for token in ids]

    def info(self) -> TokenizerInfo:
        return TokenizerInfo(
            tokenizer_class="ByteTokenizer", bos_token="<bos>", eos_token="<eos>", pad_token=None, chat_template=None
        )


def load(model: ModelConfig, engine: EngineConfig) -> ToyModel:
    """Loads the toy for `ModelConfig(path="toy")`. ASSAY_TEST_DELAY_STEP: seconds that each step takes."""
    delay_s = float(os.environ.get("ASSAY_TEST_DELAY_STEP", "0"))
    slots, longest = engine.kv_slots or 65_536, model.max_model_len or 1_024
    return ToyModel(num_slots=slots, max_model_len=longest, step_seconds=delay_s)


def load_models(model: ModelConfig, engine: EngineConfig) -> LoadedModels:
    """Loads the toy, and a toy that drafts for it; UnsupportedDraft for another draft."""
    target = load(model, engine)
    if engine.speculation.draft != "toy":
        raise UnsupportedDraft(f"`speculation.draft` must be toy for the toy model. Given: {engine.speculation.draft}.")
    draft = ToyModel(
        num_slots=target.num_slots, max_model_len=target.max_model_len, vocab_size=target.vocab_size, blur=BLUR
    )
    return LoadedModels(target, draft)


def _mix(words: UInt64s) -> UInt64s:
    """Mixes words by the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
