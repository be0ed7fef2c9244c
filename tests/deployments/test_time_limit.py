"""Time limits: a block that is over ends with TimeoutError, and all else passes."""

import asyncio

import pytest

from deployments.time_limit import TimeLimit


async def test_a_block_that_takes_too_long_is_cancelled() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.001):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_a_block_in_time_keeps_its_result_and_its_errors() -> None:
    with TimeLimit(10.0):
        await asyncio.sleep(0)
    with pytest.raises(ValueError, match="own"), TimeLimit(10.0):
        raise ValueError("own")


async def test_the_limit_of_an_outer_block_passes_the_inner_one() -> None:
    with pytest.raises(TimeoutError), TimeLimit(0.001):
        try:
            with TimeLimit(10.0):
                await asyncio.Event().wait()
        except TimeoutError:
            pytest.fail("the inner limit was not over")


async def test_a_cancellation_from_outside_stays_one() -> None:
    began = asyncio.Event()

    async def work() -> None:
        with TimeLimit(10.0):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_limit_needs_a_task() -> None:
    async def outside() -> None:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[BaseException | None] = loop.create_future()

        def enter() -> None:
            try:
                TimeLimit(1.0).__enter__()
            except RuntimeError as error:
                found.set_result(error)

        loop.call_soon(enter)
        assert isinstance(await found, RuntimeError)

    asyncio.run(outside())
