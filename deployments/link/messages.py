"""Encodes and decodes the messages of a link: MessagePack by msgspec, and arrays as they lie in memory.

A message names the type and shape of each array where the array stands: a list of both, or a number alone, the length
of an int32 array of one dimension, as nearly all are. The bytes of all arrays follow the message in the same order.
Decoding checks every field against its annotation, and every array against its type, its dimensions and the bytes that
are left, so that a hostile frame raises `FrameError` and allocates no more than its own size.

Requests travel as the classes of `engine.requests`, and the tokens of a step as the columns that the engine made: one
step brings a token for each stream. Other chunks travel as columns too.

Shape legend: K chunks, M tokens of all chunks, R tokens with log-probabilities.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.link import handshake
from deployments.link.frames import MAX_FRAME_BYTES, FrameError, FrameKind, LinkFrame, encode_frame
from deployments.protocol import Failure, LikelihoodReply, PromptChunk, PromptScores
from engine.requests import (
    FinishReason,
    Float32s,
    GenerateChunk,
    GenerateRequest,
    Int32s,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    ScoreRequest,
    ScoreResult,
    StepTokens,
    UInt8s,
)

Float64s = npt.NDArray[np.float64]
MAX_DIMENSIONS = 2
DTYPES = tuple(np.dtype(name) for name in ("<i4", "<f4", "<f8", "u1", "?"))
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
INT32 = CODES[np.dtype(np.int32)]
FINISHES = (None, FinishReason.STOP, FinishReason.LENGTH)
ABSENT = -1
WIDE = ("top_ids", "top_logprobs", "chosen_logprobs")  # columns of a step with a width of their own
MAX_NUMBER = 2**31 - 1  # of a call
NO_LOAD = Load(0, 0.0)
NO_BYTES = bytearray()
M = TypeVar("M")


# Messages of an ingress.


class ScoreCall(msgspec.Struct, array_like=True):
    """Requests label scores."""

    number: int  # of the call, unique on its link
    request: ScoreRequest


class LikelihoodCall(msgspec.Struct, array_like=True):
    """Requests log-likelihoods."""

    number: int
    request: LikelihoodRequest


class PoolingCall(msgspec.Struct, array_like=True):
    """Requests what a pooling head answers."""

    number: int
    request: PoolingRequest


class GenerationCall(msgspec.Struct, array_like=True):
    """Requests a generation, whose results come as they are made (`streamed`) or all at its end."""

    number: int
    requests: tuple[GenerateRequest, ...]
    epoch: int
    streamed: bool


class CancelCall(msgspec.Struct, array_like=True):
    """Says that the ingress no longer waits for a call."""

    number: int


# Messages of a replica.


class ChunkColumns(msgspec.Struct, array_like=True, tag=1):
    """Holds chunks of any number of streams. Entry i of an array [K] is of chunk i."""

    numbers: Int32s  # [K] calls
    prompts: Int32s  # [K]
    branches: Int32s  # [K]
    counts: Int32s  # [K] tokens of the chunk
    tokens: Int32s  # [M]
    finishes: UInt8s  # [K] index into FINISHES
    stop_tokens: Int32s  # [K] or ABSENT
    cached: Int32s  # [K]
    drafted: Int32s  # [K]
    accepted: Int32s  # [K]
    seconds: Float64s  # [K, 3] queue, compute, prefill
    widths: Int32s  # [K, 2] most probable tokens and chosen ids of each token; ABSENT without them
    scored: UInt8s  # [K] whether the chunk has log-probabilities
    logprobs: Float32s  # [R]
    ranks: Int32s  # [R]
    top_ids: Int32s  # flat, row after row
    top_logprobs: Float32s  # flat
    chosen_logprobs: Float32s  # flat


class StepPart(msgspec.Struct, array_like=True, tag=2):
    """Holds what a step brought for streams that go on. The first number of a stream's name is its call."""

    tokens: StepTokens


class LabelScoreAnswer(msgspec.Struct, array_like=True, tag=1):
    """Answers a ScoreCall."""

    number: int
    result: ScoreResult


class LikelihoodAnswer(msgspec.Struct, array_like=True, tag=2):
    """Answers a LikelihoodCall."""

    number: int
    reply: LikelihoodReply


class CallFailure(msgspec.Struct, array_like=True, tag=3):
    """Says why a call, or one prompt of a stream, failed. The call goes on in the second case."""

    number: int
    failure: Failure
    prompt: int  # ABSENT: the whole call


class CallEnd(msgspec.Struct, array_like=True, tag=4):
    """Ends a generation: nothing follows for this call."""

    number: int


class PoolingAnswer(msgspec.Struct, array_like=True, tag=5):
    """Answers a PoolingCall."""

    number: int
    result: PoolingResult


class ScoredPrompt(msgspec.Struct, array_like=True):
    """Holds the scores of one prompt of a generation."""

    number: int
    prompt: int
    scores: PromptScores


Answer = LabelScoreAnswer | LikelihoodAnswer | PoolingAnswer | CallFailure | CallEnd


class Results(msgspec.Struct, array_like=True):
    """Holds what a replica has for the calls of one link. Parts apply in the order of the fields.

    Answers have the frame's load: their own fields of this name hold `NO_LOAD`.
    """

    load: Load
    prompts: list[ScoredPrompt]
    chunks: list[ChunkColumns | StepPart]
    answers: list[Answer]


class NumberedChunk(NamedTuple):
    """Holds a chunk with its call and prompt."""

    number: int
    prompt: int
    chunk: GenerateChunk


class MessageType(Generic[M]):
    """Encodes and decodes the messages of one class."""

    def __init__(self, kind: FrameKind, message: type[M], *, copies: bool = False) -> None:
        """`copies`: arrays are copies when they are decoded, for messages of many calls: none keeps the whole frame."""
        self._kind = kind
        self._copies = copies
        self._sent: list[bytes] = []
        # The arrays of the frame that is decoded, and how many bytes were read.
        self._received, self._taken = NO_BYTES, 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put)
        self._decoder = msgspec.msgpack.Decoder(message, dec_hook=self._take)

    def encode(self, message: M) -> bytes:
        """Returns the frame of a message.

        Raises:
            FrameError: the frame would be too large, or a text of the message is not Unicode.
        """
        self._sent = []
        try:
            data = self._encoder.encode(message)
        except UnicodeError:
            raise FrameError("A text of a message must be Unicode without lone surrogates.") from None
        sent, self._sent = self._sent, []
        return encode_frame(self._kind, data, b"".join(sent))

    def decode(self, frame: LinkFrame) -> M:
        """Returns the message of a frame.

        Raises:
            FrameError: the frame holds no such message.
        """
        self._received, self._taken = frame.arrays, 0
        try:
            found: M = self._decoder.decode(frame.message)
            if left := len(self._received) - self._taken:
                raise FrameError(f"The arrays of a frame must be used up. Left: {left} bytes.")
            return found
        except FrameError:
            raise
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise FrameError(f"A {self._kind.name} frame must hold its message: {error}") from None
        finally:
            self._received = NO_BYTES

    def _put(self, value: object) -> int | tuple[int, ...]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"A message holds no {type(value).__name__}.")
        self._sent.append(value.tobytes())
        code, shape = CODES[value.dtype], value.shape
        return shape[0] if code == INT32 and len(shape) == 1 else (code, *shape)

    def _take(self, kind: Any, value: object) -> npt.NDArray[Any]:
        dtype, code = _dtype_of(kind)
        if type(value) is int and code == INT32:
            shape = (value,)
        elif type(value) is list and 2 <= len(value) <= 1 + MAX_DIMENSIONS and value[0] == code:
            shape = tuple(value[1:])
        else:
            raise FrameError(f"An array must name its type, {dtype.name}, and one or two lengths.")
        start, size = self._taken, dtype.itemsize
        for length in shape:
            if type(length) is not int or not 0 <= length <= MAX_FRAME_BYTES:
                raise FrameError(f"A length of an array must be in [0, {MAX_FRAME_BYTES}].")
            size *= length
        if size > len(self._received) - start:
            raise FrameError(f"An array must fit its frame. Given: {size} bytes of {len(self._received) - start}.")
        self._taken = start + size
        found: npt.NDArray[Any] = np.ndarray(shape, dtype, self._received, start)
        return found.copy() if self._copies else found


_DTYPES_OF: dict[int, tuple[Any, tuple[np.dtype[Any], int]]] = {}  # by the id of an annotation, which is kept


def _dtype_of(annotation: Any) -> tuple[np.dtype[Any], int]:
    """Returns the type that an array annotated so must have, and its number."""
    found = _DTYPES_OF.get(id(annotation))
    if found is None:
        dtype = np.dtype(get_args(get_args(annotation)[1])[0])
        found = _DTYPES_OF[id(annotation)] = annotation, (dtype, CODES[dtype])
    return found[1]


HELLO = MessageType(FrameKind.HELLO, handshake.Hello)
PROOF = MessageType(FrameKind.PROOF, handshake.Proof)
WELCOME = MessageType(FrameKind.WELCOME, handshake.Welcome)
SCORE = MessageType(FrameKind.SCORE, ScoreCall)
LIKELIHOOD = MessageType(FrameKind.LIKELIHOOD, LikelihoodCall)
POOLING = MessageType(FrameKind.POOLING, PoolingCall)
GENERATE = MessageType(FrameKind.GENERATE, GenerationCall)
CANCEL = MessageType(FrameKind.CANCEL, CancelCall)
RESULTS = MessageType(FrameKind.RESULTS, Results, copies=True)


def parts_of(chunks: Sequence[NumberedChunk | StepTokens]) -> list[ChunkColumns | StepPart]:
    """Returns chunks, and the tokens of steps, as parts of a message in the same order."""
    found: list[ChunkColumns | StepPart] = []
    for _, group in groupby(chunks, type):
        run = list(group)
        steps = [StepPart(chunk) for chunk in run if isinstance(chunk, StepTokens)]
        found += steps or [_columns_of([chunk for chunk in run if isinstance(chunk, NumberedChunk)])]
    return found


def chunks_of(parts: Sequence[ChunkColumns | StepPart]) -> Iterator[tuple[int, PromptChunk]]:
    """Yields the chunks of a message's parts, each with the number of its call. Their arrays are views.

    Raises:
        FrameError: the columns of a part do not fit each other.
    """
    for part in parts:
        yield from _step_chunks(part.tokens) if isinstance(part, StepPart) else _column_chunks(part)


def _columns_of(chunks: Sequence[NumberedChunk]) -> ChunkColumns:
    rows = [chunk for _, _, chunk in chunks]
    scored = [chunk for chunk in rows if chunk.logprobs is not None]

    def ints(values: Iterator[int]) -> Int32s:
        return np.fromiter(values, np.int32, len(rows))

    return ChunkColumns(
        numbers=ints(number for number, _, _ in chunks),
        prompts=ints(prompt for _, prompt, _ in chunks),
        branches=ints(chunk.branch for chunk in rows),
        counts=ints(len(chunk.tokens) for chunk in rows),
        tokens=_flat((chunk.tokens for chunk in rows), np.int32),
        finishes=np.array([FINISHES.index(chunk.finish) for chunk in rows], np.uint8),
        stop_tokens=ints(ABSENT if chunk.stop_token is None else chunk.stop_token for chunk in rows),
        cached=ints(chunk.cached for chunk in rows),
        drafted=ints(chunk.drafted for chunk in rows),
        accepted=ints(chunk.accepted for chunk in rows),
        seconds=np.array([(chunk.queue_s, chunk.compute_s, chunk.prefill_s) for chunk in rows], np.float64),
        widths=np.array([(_width(chunk.top_ids), _width(chunk.chosen_logprobs)) for chunk in rows], np.int32),
        scored=np.array([chunk.logprobs is not None for chunk in rows], np.uint8),
        logprobs=_flat((chunk.logprobs for chunk in scored), np.float32),
        ranks=_flat((chunk.ranks for chunk in scored), np.int32),
        top_ids=_flat((chunk.top_ids for chunk in scored), np.int32),
        top_logprobs=_flat((chunk.top_logprobs for chunk in scored), np.float32),
        chosen_logprobs=_flat((chunk.chosen_logprobs for chunk in scored), np.float32),
    )


def _step_chunks(step: StepTokens) -> Iterator[tuple[int, PromptChunk]]:
    _check_step(step)
    numbers, prompts = step.streams.T.tolist()
    return zip(numbers, map(PromptChunk, prompts, step.chunks()), strict=True)


def _check_step(step: StepTokens) -> None:
    count = len(step.tokens)
    expected = ((count, 2), *[(count,)] * 3, (count, 3), (count,), (count, 2))
    found = tuple(column.shape for column in step[: len(expected)] if column is not None)
    wide = [None if (column := getattr(step, name)) is None else column.shape for name in WIDE]
    if found != expected or any(shape is not None and (len(shape) != 2 or shape[0] != count) for shape in wide):
        raise FrameError(f"The columns of a step must have {count} rows. Given: {found} and {wide}.")
    if not step.scored.any():
        return
    wanted, room = step.widths[step.scored], [ABSENT if shape is None else shape[1] for shape in wide]
    scores = [None if column is None else column.shape for column in (step.logprobs, step.ranks)]
    if scores != [(count,)] * 2 or (wanted < ABSENT).any() or (wanted > (min(room[:2]), room[2])).any():
        raise FrameError(
            f"The log-probabilities of a step must be as wide as its rows want. Given: {scores} and {wide}."
        )


def _column_chunks(columns: ChunkColumns) -> Iterator[tuple[int, PromptChunk]]:
    _check_columns(columns)
    token = score = top = chosen = 0
    lists = (
        columns.numbers, columns.prompts, columns.branches, columns.counts, columns.finishes, columns.stop_tokens,
        columns.cached, columns.drafted, columns.accepted, columns.seconds, columns.widths, columns.scored,
    )  # fmt: skip
    for number, prompt, branch, count, finish, stop, cached, drafted, accepted, seconds, widths, scored in zip(
        *(column.tolist() for column in lists), strict=True
    ):
        tokens = columns.tokens[token : token + count]
        token += count
        logprobs = ranks = top_ids = top_logprobs = chosen_logprobs = None
        if scored:
            logprobs, ranks = columns.logprobs[score : score + count], columns.ranks[score : score + count]
            score += count
            n_top, n_chosen = widths
            if n_top >= 0:
                end, shape = top + count * n_top, (count, n_top)
                top_ids, top_logprobs = columns.top_ids[top:end], columns.top_logprobs[top:end]
                top_ids, top_logprobs, top = top_ids.reshape(shape), top_logprobs.reshape(shape), end
            if n_chosen >= 0:
                end = chosen + count * n_chosen
                chosen_logprobs = columns.chosen_logprobs[chosen:end].reshape(count, n_chosen)
                chosen = end
        queue_s, compute_s, prefill_s = seconds
        chunk = GenerateChunk(
            branch, tokens, logprobs, ranks, top_ids, top_logprobs, chosen_logprobs, FINISHES[finish],
            None if stop == ABSENT else stop, cached, queue_s, compute_s, drafted, accepted, prefill_s,
        )  # fmt: skip
        yield number, PromptChunk(prompt, chunk)


def _check_columns(columns: ChunkColumns) -> None:
    count = len(columns.numbers)
    shapes = {"seconds": (count, 3), "widths": (count, 2)}
    for name in columns.__struct_fields__[:13]:
        expected = (len(columns.tokens),) if name == "tokens" else shapes.get(name, (count,))
        if getattr(columns, name).shape != expected:
            raise FrameError(f"`{name}` must be of shape {expected}. Given: {getattr(columns, name).shape}.")
    counts, widths = columns.counts.astype(np.int64), columns.widths.astype(np.int64)
    if (counts < 0).any() or (widths < ABSENT).any() or (columns.finishes >= len(FINISHES)).any():
        raise FrameError("`counts`, `widths` and `finishes` must be in range.")
    scored = np.where(columns.scored != 0, counts, 0)
    top, chosen = (scored * np.maximum(widths, 0).T).sum(axis=1).tolist()
    sizes = {
        "tokens": int(counts.sum()),
        "logprobs": int(scored.sum()),
        "ranks": int(scored.sum()),
        "top_ids": top,
        "top_logprobs": top,
        "chosen_logprobs": chosen,
    }
    for name, size in sizes.items():
        if getattr(columns, name).shape != (size,):
            raise FrameError(f"`{name}` must be of shape ({size},). Given: {getattr(columns, name).shape}.")


def _flat(parts: Iterator[npt.NDArray[Any] | None], dtype: type[np.generic]) -> npt.NDArray[Any]:
    found = [part.ravel() for part in parts if part is not None]
    return np.concatenate(found, dtype=dtype, casting="unsafe") if found else np.empty(0, dtype)


def _width(values: npt.NDArray[Any] | None) -> int:
    return ABSENT if values is None else values.shape[1]
