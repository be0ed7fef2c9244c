"""The step loop with the sampler's kernels, interpreted: what the engine says on a GPU, but for the GPU.

Runs in the process of the kernels' own tests (`make test`), because TRITON_INTERPRET=1 holds for a whole process.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import SamplerConfig
from engine.requests import GenerateRequest

MakeRig = Callable[..., Any]
MakeJob = Callable[..., GenerateRequest]
PROMPT = list(range(40, 57))
ROWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 2, "logprob_token_ids": (7, 3)},
    {"top_p": 0.95, "logprobs": 0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    {"logit_bias": ((5, 4.0), (6, -100.0)), "min_p": 0.02},
    {"allowed_token_ids": tuple(range(0, 250, 3)), "logprobs": 2},
    {"bad_words_ids": ((44,), (40, 41)), "min_tokens": 4, "stop_token_ids": (3, 9, 27)},
)
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs where Triton's interpreter is chosen"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]


def jobs_of(generate_job: MakeJob, max_tokens: int = 8) -> list[GenerateRequest]:
    return [
        generate_job([*PROMPT, 60 + number], seed=number, **{"max_tokens": max_tokens, "temperature": 0.7, **row})
        for number, row in enumerate(ROWS)
    ]


async def test_the_kernels_say_in_the_loop_what_the_reference_says(make_rig: MakeRig, generate_job: MakeJob) -> None:
    wanted = await make_rig(real_sampler=True).together(*jobs_of(generate_job))
    for overlap in (False, True):
        rig = make_rig(real_sampler=True, sampler=SamplerConfig(backend="triton"), overlap=overlap)
        found = await rig.together(*jobs_of(generate_job))
        for own, other in zip(found, wanted, strict=True):
            assert own._replace(logprobs=b"") == other._replace(logprobs=b"")
            ours, theirs = (np.frombuffer(reported.logprobs, np.float32) for reported in (own, other))
            np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.full
async def test_preemption_and_resumption_change_no_bit_of_the_kernels(make_rig: MakeRig, generate_job: MakeJob) -> None:
    options = {"real_sampler": True, "sampler": SamplerConfig(backend="triton"), "prefix_cache": False}
    alone = [await make_rig(**options).run(request) for request in jobs_of(generate_job, 30)]
    rig = make_rig(num_slots=71, admission_tokens=4, overlap=True, **options)
    assert await rig.together(*jobs_of(generate_job, 30)) == alone
    assert rig.engine.stats().preemptions > 0
