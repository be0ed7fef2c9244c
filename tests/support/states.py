"""Makes states of many slots with every feature of the sampler mixed, for tests of what the device keeps of them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import SamplingParams
from gpu_sampler.state.host_state import SamplingState

FEW = 12  # tokens that lists, prompts and outputs are made of: so that stop ids, bad words and entries share them


def mixed_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Each feature with one chance in two. A count, like a penalty, is no round number in float32."""

    def tokens(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(rng.integers(0, min(FEW, vocab_size), rng.integers(least, most + 1)).tolist())

    features: dict[str, Any] = {
        "repetition_penalty": float(rng.choice([0.3, 1.3, 7.0])),
        "frequency_penalty": float(rng.choice([-1.1, 0.7, 2.0])),
        "presence_penalty": float(rng.choice([-0.3, 1.9])),
        "logit_bias": tuple((token, float(rng.choice([-100, -1 / 3, 0, 0.1, 100]))) for token in set(tokens(9))),
        "allowed_token_ids": (*rng.integers(0, vocab_size, 3 * vocab_size // 4).tolist(), *tokens(3)),
        "bad_words_ids": tuple(tokens(4, 1) for _ in range(rng.integers(0, 30))),
        "stop_token_ids": tokens(6),
        "min_tokens": int(rng.choice([3, 20])),
        "logprobs": 3,
        "logprob_token_ids": tokens(5, 1),
    }
    chosen = {name: value for name, value in features.items() if rng.random() < 0.5}
    return SamplingParams(
        temperature=float(rng.choice([0, 0.7])), top_k=int(rng.integers(-1, 9)), min_p=0.1, max_tokens=40, **chosen
    )


def mixed_state(seed: int, slots: int, vocab_size: int) -> SamplingState:
    """`slots` of them are in use, and slot 0; some of them go on behind tokens that they have drawn."""
    rng = np.random.default_rng(seed)
    state = SamplingState(num_slots=slots + 1, vocab_size=vocab_size, overlay_entries=1500 * slots)
    few = min(FEW, vocab_size)
    for slot in range(1, slots + 1):
        prompt = rng.integers(0, min(2 * few, vocab_size), rng.integers(0, 20))
        output = rng.integers(0, few, rng.choice([0, 1, 5, 30]))
        state.admit(
            slot,
            mixed_params(rng, vocab_size),
            prompt.astype(np.int32),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            branch=slot,
            output_ids=output.astype(np.int32),
        )
    return state


def rough_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Values of every size and both zeros, and here and there one that is bad or -inf. None is subnormal, which the
    interpreter of Triton makes 0 as it widens bf16."""
    logits = rng.normal(0, 8, (rows, vocab_size)).astype(np.float32)
    values = [0.0, -0.0, 1e-37, -3e38, 3e38, -np.inf, np.inf, np.nan]
    odd = rng.random(logits.shape) < 0.05
    logits[odd] = rng.choice(values, odd.sum(), p=[0.2, 0.2, 0.1, 0.1, 0.1, 0.2, 0.05, 0.05])
    return logits
