"""Frames and their messages: what goes in comes out, and bytes that are no frame are refused and keep no memory."""

import gc
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.link import messages
from deployments.link.frames import (
    HEADER,
    MAGIC,
    MAX_FRAME_BYTES,
    VERSION,
    FrameError,
    FrameKind,
    FrameReader,
    LinkFrame,
)
from deployments.link.messages import ABSENT, CallEnd, CallFailure, GenerationCall, NumberedChunk, Results, ScoreCall
from deployments.protocol import Failure, LikelihoodReply, PromptScores
from engine.requests import (
    ErrorCode,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    LikelihoodRequest,
    Load,
    PoolingRequest,
    PoolingResult,
    PoolingTask,
    ScoreRequest,
    ScoreResult,
    StepTokens,
)
from gpu_sampler.sampling_params import SamplingParams

LIMIT = 1 << 20


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


SCORE = ScoreRequest(request_id="s", tenant="t", prefix=ints(), ids=ints(1, 2, 3), starts=ints(0, 3), labels=ints(7, 9))
LIKELIHOOD = LikelihoodRequest(
    request_id="l", prefix=ints(4), ids=ints(1, 2), starts=ints(0, 2), shared=ints(0), wanted=ints(1), chosen=ints(5)
)
POOLING = PoolingRequest(
    request_id="p",
    prefix=ints(4),
    ids=ints(1, 2),
    starts=ints(0, 2),
    task=PoolingTask.TOKEN_CLASSIFY,
    positions=ints(0, 1),
    segments=ints(1),
)
PARAMS = SamplingParams(
    max_tokens=9, logit_bias=((3, -1.5),), bad_words_ids=((1, 2), (3,)), stop_token_ids=(4,), logprobs=2, seed=-1
)
GENERATE = GenerateRequest(
    request_id="g", prompt=ints(1, 2), params=PARAMS, seed=(1 << 64) - 1, emitted=(ints(5), ints()), timeout_s=2.5
)
CHUNKS = [
    GenerateChunk(0, ints(5), None, None, None, None, None, None, None, 3, 0.25, 0.5, 4, 2, 0.125),
    GenerateChunk(
        1, ints(6, 7), np.array([-0.5, -1], np.float32), ints(1, 2), ints(6, 8, 7, 9).reshape(2, 2),
        np.array([[-0.5, -2], [-1, -3]], np.float32), None, FinishReason.STOP, 7, 0, 0.0, 1.0,
    ),
    GenerateChunk(
        0, ints(8), np.array([-0.25], np.float32), ints(1), ints().reshape(1, 0), np.empty((1, 0), np.float32),
        np.array([[-4, -5, -np.inf]], np.float32), FinishReason.LENGTH, None, 0, 0.0, 1.0,
    ),
    GenerateChunk(2, ints(), None, None, None, None, None, FinishReason.STOP, 3, 0, 0.0, 0.0),
]  # fmt: skip
NUMBERED = [NumberedChunk(10 + index, index % 2, chunk) for index, chunk in enumerate(CHUNKS)]
SCORES = PromptScores(
    np.zeros(2, np.float32), ints(1, 2), ints(1, 2).reshape(2, 1), np.zeros((2, 1), np.float32),
    np.empty((2, 0), np.float32), 0.5, 0.25,
)  # fmt: skip
RESULT = ScoreResult(
    np.array([[-1, np.nan]], np.float32), np.zeros(1, np.uint8), ints(2), 0.5, 0.25, Load(3, 0.5, 9), 0.125
)
POOLED = PoolingResult(np.array([[1.5, -2], [0.5, 3]], np.float32), np.zeros(1, np.uint8), ints(0), 0.0, 0.5)
REPLY = LikelihoodReply(
    np.zeros(2, np.float32), np.array([True, False]), np.ones(1, np.uint8), ints(0), 0.0, 0.0, Load(0, 0.0)
)
FAILURE = Failure(ErrorCode.OVERLOADED, "The queue is full.", "n", Load(1, 2.0, 3), True)


def step_tokens(widest: int = 2) -> StepTokens:
    """Four streams: without log-probabilities, with two of the most probable, with none of them, with chosen ids."""
    floats = -np.arange(1, 5, dtype=np.float32)
    return StepTokens(
        streams=ints(20, 0, 21, 1, 20, 1, 22, 0).reshape(4, 2),
        branches=ints(0, 1, 0, 2),
        tokens=ints(5, 6, 7, 8),
        cached=ints(0, 3, 0, 0),
        seconds=np.arange(12, dtype=np.float64).reshape(4, 3),
        scored=np.array([False, True, True, True]),
        widths=ints(ABSENT, ABSENT, widest, ABSENT, 0, ABSENT, ABSENT, 3).reshape(4, 2),
        logprobs=floats,
        ranks=ints(1, 2, 3, 4),
        top_ids=np.arange(4 * widest, dtype=np.int32).reshape(4, widest),
        top_logprobs=np.repeat(floats[:, None], widest, axis=1),
        chosen_logprobs=np.repeat(floats[:, None], 3, axis=1) * 2,
    )


def chunks_apart(tokens: StepTokens) -> list[NumberedChunk]:
    names = tokens.streams.tolist()
    return [NumberedChunk(number, prompt, tokens.chunk(row)) for row, (number, prompt) in enumerate(names)]


RESULTS = Results(
    Load(1, 2.0, 3),
    [messages.ScoredPrompt(1, 0, SCORES)],
    messages.parts_of([*NUMBERED[:2], step_tokens(), *NUMBERED[2:], step_tokens(0)]),
    [
        messages.LabelScoreAnswer(2, RESULT), messages.LikelihoodAnswer(3, REPLY), CallFailure(4, FAILURE, ABSENT),
        CallFailure(5, FAILURE, 2), CallEnd(1), messages.PoolingAnswer(6, POOLED),
    ],
)  # fmt: skip
FRAMES = [
    messages.SCORE.encode(ScoreCall(1, SCORE)),
    messages.LIKELIHOOD.encode(messages.LikelihoodCall(2, LIKELIHOOD)),
    messages.GENERATE.encode(GenerationCall(3, (GENERATE, replace(GENERATE, seed=1)), 4, True)),
    messages.CANCEL.encode(messages.CancelCall(3)),
    messages.RESULTS.encode(RESULTS),
    messages.POOLING.encode(messages.PoolingCall(4, POOLING)),
]
TYPES: dict[FrameKind, messages.MessageType[Any]] = {
    FrameKind.SCORE: messages.SCORE,
    FrameKind.LIKELIHOOD: messages.LIKELIHOOD,
    FrameKind.POOLING: messages.POOLING,
    FrameKind.GENERATE: messages.GENERATE,
    FrameKind.CANCEL: messages.CANCEL,
    FrameKind.RESULTS: messages.RESULTS,
    FrameKind.HELLO: messages.HELLO,
    FrameKind.PROOF: messages.PROOF,
    FrameKind.WELCOME: messages.WELCOME,
}


def read(data: bytes, reader: FrameReader | None = None) -> list[LinkFrame]:
    return list((reader or FrameReader(LIMIT)).feed(data))


def decoded(data: bytes) -> Any:
    (frame,) = read(data)
    found: Any = TYPES[frame.kind].decode(frame)
    if isinstance(found, Results):
        list(messages.chunks_of(found.chunks))
    return found


def plain(value: Any) -> Any:
    """The value with arrays as their types, shapes and bytes, which compare equal where NaN is."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    names = getattr(type(value), "__struct_fields__", None) or getattr(type(value), "__dataclass_fields__", None)
    return {name: plain(getattr(value, name)) for name in names} if names else value


def test_requests_come_out_as_they_went_in() -> None:
    assert plain(decoded(FRAMES[-1]).request) == plain(POOLING)
    assert plain(decoded(FRAMES[0]).request) == plain(SCORE)
    raw = ScoreCall(1, replace(SCORE, full=False, raw_logits=True))
    assert plain(decoded(messages.SCORE.encode(raw)).request) == plain(raw.request)
    assert plain(decoded(FRAMES[1]).request) == plain(LIKELIHOOD)
    found = decoded(FRAMES[2])
    assert (found.number, found.epoch, found.streamed) == (3, 4, True)
    assert plain(found.requests[0]) == plain(GENERATE)
    assert found.requests[0].prompt.flags.writeable


def test_ids_are_named_by_their_number_alone() -> None:
    (frame,) = read(FRAMES[0])
    assert msgspec.msgpack.decode(frame.message)[1]["ids"] == 3
    for wrong, length in ((b"\xff", "must be in"), (b"\x05", "must fit"), (b"\x02", "used up")):
        message = bytes(frame.message).replace(b"\xa3ids\x03", b"\xa3ids" + wrong)
        with pytest.raises(FrameError, match=length):
            messages.SCORE.decode(frame._replace(message=bytearray(message)))
    (frame,) = read(messages.RESULTS.encode(Results(messages.NO_LOAD, [], [], [messages.LabelScoreAnswer(1, RESULT)])))
    floats = bytes(frame.message).replace(b"\x93\x01\x01\x02", b"\x02")  # the code of float32, and both lengths
    assert floats != frame.message
    with pytest.raises(FrameError, match="float32"):
        messages.RESULTS.decode(frame._replace(message=bytearray(floats)))


def test_only_results_are_copied_out_of_their_frame() -> None:
    request = decoded(FRAMES[0]).request
    assert request.ids.flags.writeable and request.ids.base is not None
    answer = decoded(messages.RESULTS.encode(Results(messages.NO_LOAD, [], [], [messages.LabelScoreAnswer(1, RESULT)])))
    assert answer.answers[0].result.status.base is None


def test_results_come_out_as_they_went_in() -> None:
    found = decoded(FRAMES[4])
    assert plain([found.load, found.prompts, found.answers]) == plain([RESULTS.load, RESULTS.prompts, RESULTS.answers])
    apart = [*NUMBERED[:2], *chunks_apart(step_tokens()), *NUMBERED[2:], *chunks_apart(step_tokens(0))]
    assert plain(list(messages.chunks_of(found.chunks))) == numbered(apart)


@given(st.lists(st.integers(1, 300), max_size=30), st.randoms())
def test_frames_do_not_depend_on_how_bytes_are_cut(cuts: list[int], draw: random.Random) -> None:
    data = b"".join(FRAMES)
    reader, found = FrameReader(LIMIT), list[LinkFrame]()
    while data:
        size = cuts.pop() if cuts else draw.randrange(1, len(data) + 1)
        found += read(data[:size], reader)
        data = data[size:]
    assert [bytes(frame.message) for frame in found] == [frame.message for one in FRAMES for frame in read(one)]


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ((b"XL", VERSION, 4, 1, 0), "magic"),
        ((MAGIC, VERSION + 1, 4, 1, 0), "version"),
        ((MAGIC, VERSION, 0, 1, 0), "kind"),
        ((MAGIC, VERSION, 99, 1, 0), "kind"),
        ((MAGIC, VERSION, 4, LIMIT, 1), "at most"),
        ((MAGIC, VERSION, 4, 1, 2**32 - 1), "at most"),
    ],
)
def test_a_bad_header_is_refused_before_anything_follows(header: tuple[Any, ...], word: str) -> None:
    with pytest.raises(FrameError, match=word):
        read(HEADER.pack(*header))


def test_a_frame_that_no_receiver_takes_is_not_sent() -> None:
    large = replace(SCORE, ids=np.zeros(MAX_FRAME_BYTES // 4, np.int32))
    with pytest.raises(FrameError, match="at most"):
        messages.SCORE.encode(ScoreCall(1, large))
    with pytest.raises(FrameError, match="Unicode"):
        messages.SCORE.encode(ScoreCall(1, replace(SCORE, cache_salt="\ud800")))


def changed(data: bytes, draw: random.Random) -> bytes:
    """A frame with some of its bytes changed, cut, repeated or made up, behind a header that fits or does not."""
    body = bytearray(data[HEADER.size :])
    _, _, kind, message, arrays = HEADER.unpack_from(data)
    for _ in range(draw.randrange(1, 6)):
        match draw.randrange(5):
            case 0 if body:
                body[draw.randrange(len(body))] = draw.randrange(256)
            case 1:
                del body[draw.randrange(len(body) + 1) :]
            case 2:
                at = draw.randrange(len(body) + 1)
                body[at:at] = draw.randbytes(draw.randrange(1, 40))
            case 3 if len(body) > 4:
                at = draw.randrange(len(body) - 4)
                body[at : at + 5] = b"\xdd" + draw.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1\0\0"))
            case _:
                kind = draw.randrange(10)
    message = draw.choice((message, len(body), min(message, len(body)), draw.randrange(1 << 32)))
    arrays = draw.choice((arrays, max(0, len(body) - message), 0, draw.randrange(1 << 32)))
    return HEADER.pack(MAGIC, VERSION, kind, message, arrays) + bytes(body)


def outcome(data: bytes) -> str:
    """Whether a receiver of this data refuses it, waits for more, or takes it; any other exception is a fault."""
    try:
        frames = read(data)
        for frame in frames:
            found: Any = TYPES[frame.kind].decode(frame)
            if isinstance(found, Results):
                list(messages.chunks_of(found.chunks))
    except FrameError:
        return "refused"
    return "taken" if frames else "waits"


@pytest.mark.risk("S11", figure="0 of 100,000 hostile frames raised anything but a refusal; no memory kept")
@pytest.mark.full(keep=1)
@pytest.mark.parametrize("count", [3_000, 100_000])
def test_hostile_frames_are_refused_and_keep_no_memory(count: int) -> None:
    draw = random.Random(11)
    seen = {"refused": 0, "waits": 0, "taken": 0}
    for _ in range(200):
        outcome(changed(draw.choice(FRAMES), draw))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(count):
            seen[outcome(changed(draw.choice(FRAMES), draw))] += 1
        gc.collect()  # which also empties the interpreter's free lists
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen["refused"] > count / 2 and seen["taken"] < count / 4
    assert after - before < 64 << 10
    assert peak - before < 8 << 20


@pytest.mark.risk("S11", planted=True)
def test_a_reader_that_trusts_the_lengths_of_arrays_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: Any, kind: Any, value: Any) -> Any:
        self._received = memoryview(b"")
        return np.zeros(value, np.int32) if isinstance(value, int) else np.zeros(value[1:], messages.DTYPES[value[0]])

    hostile = FRAMES[0].replace(b"\xa3ids\x03", b"\xa3ids\xce\x03\xff\xff\xff")  # 256 MiB of ids
    _, _, kind, size, arrays = HEADER.unpack_from(hostile)
    hostile = HEADER.pack(MAGIC, VERSION, kind, size + 4, arrays) + hostile[HEADER.size :]
    assert outcome(hostile) == "refused"
    monkeypatch.setattr(messages.MessageType, "_take", trusting)
    planted = messages.MessageType(FrameKind.SCORE, ScoreCall)
    (frame,) = read(hostile)
    assert planted.decode(frame).request.ids.nbytes == 4 * 0x03FFFFFF


def test_each_row_of_a_step_has_what_it_wants() -> None:
    without, top, none, chosen = step_tokens().chunks()
    assert without == without._replace(logprobs=None, ranks=None, top_ids=None, top_logprobs=None, chosen_logprobs=None)
    assert (top.branch, top.tokens.tolist(), top.cached) == (1, [6], 3)
    assert (top.queue_s, top.compute_s, top.prefill_s, top.finish, top.drafted) == (3.0, 4.0, 5.0, None, 0)
    found = [None if column is None else column.tolist() for column in top[2:7]]
    assert found == [[-2.0], [2], [[2, 3]], [[-2.0, -2.0]], None]
    assert none.top_ids is not None and none.top_ids.shape == (1, 0) and none.chosen_logprobs is None
    assert chosen.top_ids is None and chosen.chosen_logprobs is not None
    assert chosen.chosen_logprobs.tolist() == [[-8.0] * 3]


def results_of(chunks: list[Any]) -> Results:
    return Results(messages.NO_LOAD, [], messages.parts_of(chunks), [])


def numbered(chunks: list[NumberedChunk]) -> Any:
    return plain([(number, (prompt, chunk)) for number, prompt, chunk in chunks])


def test_the_tokens_of_a_step_travel_as_chunks_of_one_token_would() -> None:
    """Alone, without columns that no stream wants, and between chunks, in order. Planted: rows that change places."""
    step = step_tokens()
    bare = step._replace(
        scored=np.zeros(4, np.bool_), logprobs=None, ranks=None, top_ids=None, top_logprobs=None, chosen_logprobs=None,
        widths=np.full((4, 2), ABSENT, np.int32),
    )  # fmt: skip
    for tokens in (step, bare, step.rows(1, 3), step.rows(0, 0)):
        mixed: list[Any] = [NUMBERED[0], tokens, bare, *NUMBERED[1:], tokens]
        apart = [NUMBERED[0], *chunks_apart(tokens), *chunks_apart(bare), *NUMBERED[1:], *chunks_apart(tokens)]
        found = decoded(messages.RESULTS.encode(results_of(mixed)))
        assert plain(list(messages.chunks_of(found.chunks))) == numbered(apart)
        assert len(found.chunks) == 5
    assert plain(list(messages.chunks_of(messages.parts_of([step])))) != numbered(chunks_apart(step)[::-1])


def test_columns_that_do_not_fit_each_other_are_refused() -> None:
    good = messages.parts_of(NUMBERED)
    for name, value in {
        "counts": ints(1, 2, 1, -1), "prompts": ints(1), "tokens": ints(1), "widths": ints(*range(8)).reshape(4, 2),
        "finishes": np.full(4, 9, np.uint8), "logprobs": np.zeros(7, np.float32), "seconds": np.zeros((4, 2)),
    }.items():  # fmt: skip
        planted = messages.parts_of(NUMBERED)
        setattr(planted[0], name, value)
        with pytest.raises(FrameError):
            list(messages.chunks_of(planted))
    assert len(list(messages.chunks_of(good))) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams": ints(1, 2, 3, 4)},
        {"tokens": ints(1, 2, 3)},
        {"seconds": np.zeros((4, 2))},
        {"widths": ints(*range(4))},
        {"widths": ints(ABSENT, ABSENT, 3, ABSENT, 0, ABSENT, ABSENT, 3).reshape(4, 2)},
        {"widths": ints(ABSENT, ABSENT, 2, ABSENT, 0, ABSENT, ABSENT, 4).reshape(4, 2)},
        {"widths": ints(ABSENT, ABSENT, 2, ABSENT, 0, -2, ABSENT, 3).reshape(4, 2)},
        {"logprobs": None},
        {"ranks": ints(1)},
        {"top_ids": None},
        {"top_logprobs": np.zeros((3, 2), np.float32)},
        {"top_ids": ints(1, 2, 3, 4)},
        {"chosen_logprobs": np.zeros((4, 2), np.float32)},
    ],
)
def test_columns_of_a_step_that_do_not_fit_each_other_are_refused(wrong: dict[str, Any]) -> None:
    frame = messages.RESULTS.encode(results_of([step_tokens()._replace(**wrong)]))
    with pytest.raises(FrameError):
        decoded(frame)
    assert len(list(messages.chunks_of(messages.parts_of([step_tokens()])))) == 4
