"""A stream whose replica is lost goes on elsewhere, and its client gets what it would have got."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.protocol import GenerateCall, GenerateReply, PromptChunk
from deployments.routing.stream_resume import StreamProgress
from engine.requests import GenerateChunk, Load
from gpu_sampler.sampling_params import SamplingParams

FleetOf = Callable[..., Awaitable[Any]]
Alone = Callable[[Any, GenerateCall], Awaitable[Any]]
Make = Callable[..., GenerateCall]
SHAPES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one branch": ((), {}),
    "three branches": ((), {"n": 3, "logprobs": 2}),
    "two prompts, two branches": (((5, 6, 7), range(60, 90)), {"n": 2, "logprobs": 1, "stop_token_ids": (65, 66, 67)}),
    "penalties": (
        (),
        {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": ((70, 3.0),)},
    ),
    "bans": ((), {"bad_words_ids": ((70,), (71, 72)), "min_tokens": 20, "stop_token_ids": tuple(range(60, 120))}),
    "chosen ids": ((), {"logprobs": 3, "logprob_token_ids": (1, 2, 200)}),
    "prompt scores": ((range(40, 60), (9, 8, 7)), {"n": 2, "logprobs": 2, "prompt_logprobs": 2}),
    "greedy": ((), {"temperature": 0.0, "logprobs": 1}),
}


@pytest.mark.full(keep=2)
@pytest.mark.risk("R7")
@pytest.mark.parametrize(
    ("how", "shape"),
    [*(("died", shape) for shape in SHAPES), ("stopped", "two prompts, two branches"), ("unavailable", "greedy")],
)
async def test_a_stream_goes_on_elsewhere_exactly(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any, path: str, how: str, shape: str
) -> None:
    prompts, fields = SHAPES[shape]
    task = generation(*prompts, **fields)
    fleet = await fleet_of(cut(how, 3))
    whole = await alone(fleet, task)
    found = await told_of(fleet.dispatch.stream(task))
    assert found == whole
    assert fleet.epochs == [0, 1]
    (first, _), (second, resumed) = fleet.sent
    assert first != second
    assert resumed[0].isolated is (how == "died" or (how == "unavailable" and path == "handle"))  # a link was cut
    cause = "handoff" if how == "stopped" else how
    assert fleet.count("assay_resumes_total", cause=cause) == 1
    assert fleet.count("assay_retries_total", cause=cause) == 0


@pytest.mark.parametrize("after", [0, 1, 2, 5, 11])
async def test_wherever_it_is_cut(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any, after: int
) -> None:
    task = generation(range(40, 60), (9, 8, 7), n=2, logprobs=1, prompt_logprobs=1, max_tokens=40)
    fleet = await fleet_of(cut("died", after))
    assert await told_of(fleet.dispatch.stream(task)) == await alone(fleet, task)
    assert fleet.count("assay_resumes_total", cause="died") == (after > 0)
    assert fleet.count("assay_retries_total", cause="died") == (after == 0)


def accepted(fleet: Any) -> int:
    return sum(sum(server.engine.stats().drafts_accepted) for server in fleet.servers.values())


@pytest.mark.parametrize("rule", ["strict", "standard", "block"])
async def test_drafts_are_taken_up_where_a_run_of_them_ended(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any, rule: str
) -> None:
    """Low temperature over few tokens: drafts of what stood before are often right."""
    task = generation([7, 8, 9, 7, 8, 9, 7, 8], n=2, logprobs=1, temperature=0.7, allowed_token_ids=(7, 8, 9))
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "seeded_rejection_sample_method": rule}
    fleet = await fleet_of(cut("died", 4), speculation=speculation)
    whole = await alone(fleet, task)
    before = accepted(fleet)
    found = await told_of(fleet.dispatch.stream(task))
    assert found == whole
    assert len(fleet.sent) == 2
    assert accepted(fleet) > before


async def test_it_may_be_handed_on_again_and_again(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any
) -> None:
    """A rollout moves a stream as often as it stops replicas: that is no failure, and there is no limit to it."""
    task = generation(n=2, max_tokens=100, logprobs=1)
    fleet = await fleet_of(*(cut("stopped", 2) for _ in range(6)))
    whole = await alone(fleet, task)
    stop = fleet.stop

    def stop_and_start(name: str) -> None:
        fleet.drained.clear()
        fleet.loads.publish(fleet.servers)  # as if another had been started in the place of the last one
        stop(name)

    fleet.stop = stop_and_start
    assert await told_of(fleet.dispatch.stream(task)) == whole
    assert fleet.count("assay_resumes_total", cause="handoff") == 6
    assert fleet.epochs == list(range(7))


async def test_prompts_that_have_ended_are_not_sent_again(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any
) -> None:
    task = generation((70, 71), range(60, 90), (1, 2), max_tokens=200, stop_token_ids=tuple(range(100)))
    fleet = await fleet_of(cut("died", 1))
    whole = await alone(fleet, task)
    ended = [place for place, tokens in whole.tokens.items() if len(tokens) == 1]
    found = await told_of(fleet.dispatch.stream(task))
    assert found == whole
    if ended and len(fleet.sent) == 2:
        assert len(fleet.sent[1][1]) <= 3 - len(ended)


async def test_a_long_plain_answer_goes_on_and_a_short_one_starts_again(
    fleet_of: FleetOf, generation: Make, alone: Alone, cut: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("deployments.routing.stream_resume.CHECKPOINT", 16)
    long = generation(n=2, max_tokens=60, logprobs=1)
    fleet = await fleet_of(cut("died", 2))
    whole = await alone(fleet, long)
    reply = await fleet.dispatch.generate(long)
    assert [(item.prompt, item.chunk.branch) for item in reply.chunks] == [(0, 0), (0, 1)]
    for item in reply.chunks:
        place = (item.prompt, item.chunk.branch)
        assert item.chunk.tokens.tolist() == whole.tokens[place]
        assert item.chunk.logprobs.tobytes() == whole.columns[place][0]
        assert (item.chunk.finish, item.chunk.stop_token) == whole.ends[place]
    (_, first), (_, second) = fleet.sent
    assert first[0].stream_interval == second[0].stream_interval == 16
    assert sum(len(tokens) for tokens in second[0].emitted) >= 16

    fleet = await fleet_of(cut("died", 0))
    short = generation(max_tokens=15)
    reply = await fleet.dispatch.generate(short)
    assert reply.chunks[0].chunk.tokens.tolist() == (await alone(fleet, short)).tokens[0, 0]
    assert fleet.count("assay_retries_total", cause="died") == 1


# The detector and its planted counterparts.


class Repeats(StreamProgress):
    """Forgets the last token that was received."""

    def rest(self) -> GenerateCall:
        return tuple(
            replace(request, emitted=tuple(branch[:-1] for branch in request.emitted)) for request in super().rest()
        )


class Drops(StreamProgress):
    """Thinks of one token more."""

    def rest(self) -> GenerateCall:
        return tuple(
            replace(request, emitted=tuple(np.append(branch, np.int32(70)) for branch in request.emitted))
            for request in super().rest()
        )


@pytest.mark.risk("R7", planted=True)
@pytest.mark.risk("R8", planted=True)
@pytest.mark.parametrize("planted", [Repeats, Drops])
async def test_a_resume_that_repeats_or_drops_a_token_is_seen(
    fleet_of: FleetOf, generation: Make, alone: Alone, told_of: Any, cut: Any, planted: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("deployments.routing.stream_resume.StreamProgress", planted)
    task = generation()
    fleet = await fleet_of(cut("died", 3))
    assert await told_of(fleet.dispatch.stream(task)) != await alone(fleet, task)


def chunk_of(tokens: list[int], epoch: int) -> GenerateReply:
    ids = np.array(tokens, np.int32)
    chunk = GenerateChunk(0, ids, None, None, None, None, None, None, None, 0, 0.0, 0.0)
    return GenerateReply((PromptChunk(0, chunk),), epoch, Load(0, 1.0))


class KeepsTheEpoch(StreamProgress):
    def take(self, reply: GenerateReply) -> GenerateReply | None:
        return super().take(reply._replace(epoch=self.epoch))


@pytest.mark.parametrize(("kind", "expected"), [(StreamProgress, [1, 2, 3, 4]), (KeepsTheEpoch, [1, 2, 3, 3, 4])])
def test_a_late_chunk_of_the_lost_replica_is_dropped(generation: Make, kind: Any, expected: list[int]) -> None:
    """The second kind is the planted fault: what the first replica still brings is sent twice."""
    progress = kind(generation())
    heard = [progress.take(chunk_of([1, 2], 0))]
    resumed = progress.rest()
    assert (progress.epoch, resumed[0].emitted[0].tolist()) == (1, [1, 2])
    heard += [progress.take(chunk_of([3], 1)), progress.take(chunk_of([3], 0)), progress.take(chunk_of([4], 1))]
    reported = [token for reply in heard if reply is not None for token in reply.chunks[0].chunk.tokens.tolist()]
    assert reported == expected


def test_tokens_that_the_client_resumed_with_stay_in_front(generation: Make) -> None:
    progress = StreamProgress(generation(emitted=(np.array([9, 8], np.int32),)))
    progress.take(chunk_of([7], 0))
    assert progress.rest()[0].emitted[0].tolist() == [9, 8, 7]
    assert isinstance(progress.rest()[0].params, SamplingParams)
