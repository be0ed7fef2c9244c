"""Dispatcher over a scripted handle: every Ray error becomes ours, and what may be tried again is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayTaskError,
    TaskCancelledError,
)
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from deployments.config.app_args import AppArgs
from deployments.errors import ApiError
from deployments.health_probe import CanaryReply
from deployments.observability.ingress_metrics import IngressMetrics
from deployments.protocol import Failure, GenerateCall, GenerateReply, LikelihoodReply, ModelCard
from deployments.routing.dispatcher import Dispatcher
from deployments.routing.handle_transport import HandleTransport
from deployments.routing.health_monitor import HealthMonitor
from engine.requests import ErrorCode, GenerateRequest, LikelihoodRequest, Load, ScoreRequest, ScoreResult
from gpu_sampler.sampling_params import SamplingParams

LOAD = Load(0, 1.0)
SCORE = ScoreResult(np.zeros((1, 1), np.float32), np.zeros(1, np.uint8), np.zeros(1, np.int32), 0.1, 0.2, LOAD)
TOLD = LikelihoodReply(
    np.zeros(1, np.float32), np.ones(1, np.bool_), np.zeros(1, np.uint8), np.zeros(1, np.int32), 0.1, 0.2, LOAD
)
GENERATED = GenerateReply((), 0, LOAD)
CARD = ModelCard("toy", "toy", None, 264, 64, None, (), "raw_logprobs", {})
ID = DeploymentID("Replica", "app")
DIED = ActorDiedError()
RAISED = RayTaskError("score", "traceback with a secret", ValueError("secret"))


class Response:
    """Holds what a handle gives: awaited or iterated, and cancelled."""

    def __init__(self, script: Any) -> None:
        self.script = script
        self.cancelled = False

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> Any:
        if self.script == "hang":
            await asyncio.Event().wait()
        if isinstance(self.script, BaseException):
            raise self.script
        return self.script

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self.script:
            raise StopAsyncIteration
        self_script, self.script = self.script[0], self.script[1:]
        if self_script == "hang":
            await asyncio.Event().wait()
        if isinstance(self_script, BaseException):
            raise self_script
        return self_script

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Answers its calls from a script, one entry an attempt."""

    def __init__(self, *script: Any) -> None:
        self._script = list(script)
        self.responses: list[Response] = []
        self.tasks: list[Any] = []

    def options(self, *, stream: bool) -> "Handle":
        return self

    @property
    def score(self) -> "Handle":
        return self

    generate = stream = card = likelihood = score

    def remote(self, *arguments: Any, route: Any = None) -> Response:
        self.tasks.extend(arguments[:1])
        self.responses.append(Response(self._script.pop(0)))
        return self.responses[-1]


Make = Callable[..., Any]


@pytest.fixture
def dispatch_over() -> Make:
    def make(*script: Any, replicas: Sequence[object] = (CanaryReply("a", None, 0.1),)) -> tuple[Dispatcher, Handle]:
        args = AppArgs.model_validate({"retry": {"max_backoff_s": 0}})
        metrics = IngressMetrics()

        async def broadcast(method: str, timeout_s: float, *args: object, on_answer: Any = None) -> Sequence[object]:
            for answer in replicas:
                on_answer(answer)
            return replicas

        board = HealthMonitor(broadcast, args.health, metrics)
        asyncio.get_running_loop()
        handle = Handle(*script)
        dispatch: Any = Dispatcher(HandleTransport(handle), args, board, metrics, scrape=None)  # type: ignore[arg-type]
        dispatch.board = board
        dispatch.counted = metrics
        return dispatch, handle

    return make


async def looked(pair: tuple[Any, Handle]) -> tuple[Any, Handle]:
    await pair[0].board.look()
    return pair


def score_task(timeout_s: float = 60) -> ScoreRequest:
    empty = np.empty(0, np.int32)
    return ScoreRequest(request_id="s", prefix=empty, ids=empty, starts=empty, labels=empty, timeout_s=timeout_s)


def generate_task() -> GenerateCall:
    empty = np.empty(0, np.int32)
    return (GenerateRequest(request_id="g", prompt=empty, params=SamplingParams(), seed=0, prompt_only=True),)


def failure(code: ErrorCode) -> Failure:
    return Failure(code, "words", "a_field")


def retries(dispatch: Any, cause: str) -> float:
    value = dispatch.counted.registry.get_sample_value("assay_retries_total", {"cause": cause})
    return float(value or 0)


async def test_a_reply_is_handed_on(dispatch_over: Make) -> None:
    dispatch, _ = await looked(dispatch_over(SCORE, GENERATED, CARD))
    assert await dispatch.score(score_task()) is SCORE
    assert await dispatch.generate(generate_task()) is GENERATED
    assert await dispatch.card() is CARD


@pytest.mark.parametrize(
    ("error", "cause", "isolated", "accepted"),
    [
        (DIED, "died", True, True),
        (ActorUnavailableError("gone", None), "unavailable", True, True),
        (ReplicaUnavailableError(ID), "unavailable", True, True),
        (BackPressureError(1, 1), "busy", False, False),
        (failure(ErrorCode.OVERLOADED), "busy", False, False),
        (failure(ErrorCode.STEP_FAILED), "step_failed", True, True),
        (failure(ErrorCode.DRAINING), "unavailable", False, False),
        (failure(ErrorCode.NOT_READY), "unavailable", False, False),
        (failure(ErrorCode.NOT_READY)._replace(admitted=True), "unavailable", False, True),
        (failure(ErrorCode.LOST), "died", True, True),
    ],
)
async def test_what_another_replica_may_do_is_tried_again(
    dispatch_over: Make, error: Any, cause: str, isolated: bool, accepted: bool
) -> None:
    dispatch, handle = await looked(dispatch_over(error, SCORE))
    assert await dispatch.score(score_task()) is SCORE
    assert [task.isolated for task in handle.tasks] == [False, isolated]
    assert [task.already_admitted for task in handle.tasks] == [False, accepted]
    assert retries(dispatch, cause) == 1


@pytest.mark.parametrize(
    ("error", "code", "attempts"),
    [
        (DIED, "quarantined_request", 2),
        (ReplicaUnavailableError(ID), "replica_lost", 3),
        (BackPressureError(1, 1), "overloaded", 3),
        (failure(ErrorCode.OVERLOADED), "overloaded", 3),
        (failure(ErrorCode.STEP_FAILED), "internal_error", 2),
        (failure(ErrorCode.NOT_READY), "not_ready", 3),
        (failure(ErrorCode.QUARANTINED), "quarantined_request", 1),
        (failure(ErrorCode.LOST), "quarantined_request", 2),
        (DeploymentUnavailableError(ID), "no_replica", 1),
        (TaskCancelledError(), "replica_lost", 3),
        (RAISED, "internal_error", 1),
        (failure(ErrorCode.INVALID_VALUE), "invalid_value", 1),
        (failure(ErrorCode.NONFINITE_LOGITS), "nonfinite_logits", 1),
        (failure(ErrorCode.DEADLINE_EXCEEDED), "deadline_exceeded", 1),
        ("another object", "internal_error", 1),
    ],
)
async def test_every_end_is_an_api_error(dispatch_over: Make, error: Any, code: str, attempts: int) -> None:
    dispatch, handle = await looked(dispatch_over(error, error, error))
    with pytest.raises(ApiError) as raised:
        await dispatch.score(score_task())
    assert raised.value.code == code
    assert "secret" not in raised.value.message
    assert len(handle.tasks) == attempts
    if raised.value.status in (429, 503):
        assert "retry-after" in raised.value.headers()


async def test_the_second_attempt_has_only_the_time_that_is_left(dispatch_over: Make) -> None:
    dispatch, handle = await looked(dispatch_over(DIED, SCORE))
    await dispatch.score(score_task(timeout_s=60))
    first, second = handle.tasks
    assert second.timeout_s < first.timeout_s == 60


async def test_a_replica_that_hangs_is_given_up_at_the_deadline(dispatch_over: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("deployments.routing.replica_call.GRACE_S", 0.0)
    dispatch, handle = await looked(dispatch_over("hang"))
    with pytest.raises(ApiError) as raised:
        await dispatch.score(score_task(timeout_s=0.05))
    assert raised.value.code == "deadline_exceeded"
    assert handle.responses[0].cancelled


@pytest.mark.parametrize(("script", "code"), [("hang", "not_ready"), (DIED, "replica_lost")])
async def test_a_card_that_does_not_come_is_a_503(
    dispatch_over: Make, monkeypatch: Any, script: Any, code: str
) -> None:
    monkeypatch.setattr("deployments.routing.dispatcher.CARD_TIMEOUT_S", 0.05)
    dispatch, _ = await looked(dispatch_over(script))
    with pytest.raises(ApiError) as raised:
        await dispatch.card()
    assert (raised.value.code, raised.value.status) == (code, 503)
    assert "retry-after" in raised.value.headers()


async def test_cancelling_the_caller_cancels_the_call(dispatch_over: Make) -> None:
    dispatch, handle = await looked(dispatch_over("hang"))
    call = asyncio.create_task(dispatch.score(score_task()))
    while not handle.responses:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert handle.responses[0].cancelled


@pytest.mark.parametrize(
    ("replicas", "code"), [(None, "not_ready"), ((CanaryReply("a", "error", 0.1),), "not_ready"), ((), "no_replica")]
)
async def test_without_a_replica_the_answer_comes_immediately(dispatch_over: Make, replicas: Any, code: str) -> None:
    """Serve would keep the call waiting for ever."""
    dispatch, handle = dispatch_over(replicas=replicas or ())
    if code == "no_replica":
        dispatch.board._take(CanaryReply("a", None, 0.1))  # it has passed, and is gone
    if replicas is not None:
        await dispatch.board.look()
    for call in (dispatch.score(score_task()), dispatch.card(), anext(dispatch.stream(generate_task()))):
        with pytest.raises(ApiError) as raised:
            await call
        assert raised.value.code == code
    assert not handle.tasks


async def test_a_stream_is_handed_on_and_not_cancelled_after_its_end(dispatch_over: Make) -> None:
    dispatch, handle = await looked(dispatch_over([GENERATED, GENERATED]))
    assert [reply async for reply in dispatch.stream(generate_task())] == [GENERATED] * 2
    assert not handle.responses[0].cancelled


async def test_closing_a_stream_cancels_the_call(dispatch_over: Make) -> None:
    dispatch, handle = await looked(dispatch_over([GENERATED, "hang"]))
    stream = dispatch.stream(generate_task())
    await anext(stream)
    await stream.aclose()
    assert handle.responses[0].cancelled


async def test_likelihoods_are_tried_again_as_scores_are(dispatch_over: Make) -> None:
    ids, one = np.array([1, 2], np.int32), np.ones(1, np.int32)
    task = LikelihoodRequest(
        request_id="l", prefix=ids[:0], ids=ids, starts=ids * 0, shared=one * 0, wanted=one, timeout_s=5
    )
    dispatch, handle = await looked(dispatch_over(DIED, TOLD))
    assert await dispatch.likelihood(task) is TOLD
    assert [task.isolated for task in handle.tasks] == [False, True]
    dispatch, handle = await looked(dispatch_over(Failure(ErrorCode.INVALID_VALUE, "Closed words.", "wanted")))
    with pytest.raises(ApiError) as error:
        await dispatch.likelihood(task)
    assert (error.value.code, error.value.param, len(handle.tasks)) == ("invalid_value", "wanted", 1)
    dispatch, _ = await looked(dispatch_over(SCORE))
    with pytest.raises(ApiError) as error:
        await dispatch.likelihood(task)
    assert error.value.code == "internal_error"
