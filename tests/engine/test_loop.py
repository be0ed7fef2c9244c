"""The engine end to end with the toy model: every answer is compared bit for bit."""

from collections.abc import Callable

import pytest

PROMPT = list(range(40, 57))


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_request_alone_generates_to_its_length(
    make_rig: Callable, generate_job: Callable, overlap: bool
) -> None:
    rig = make_rig(overlap=overlap)
    heard = await rig.run(generate_job(PROMPT, max_tokens=13, logprobs=3))
    assert len(heard.tokens) == 13
    assert heard.finish == "length"
    assert len(heard.logprobs) == 4 * 13
    assert len(heard.top) == 3 * 4 * 13
