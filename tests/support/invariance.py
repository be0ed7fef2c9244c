"""Checks that a row's answer is its own: bitwise the same alone, among any neighbours, resumed, on any sampler.

Shape legend: S steps, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_sampler.output import SampleOutput
from gpu_sampler.sampler import LogprobsMode, Sampler
from gpu_sampler.sampling_params import SamplingParams

STEPS: Final = 2
MAX_ROWS: Final = 32
Float32s = npt.NDArray[np.float32]
MakeSampler = Callable[[int, int, LogprobsMode], Sampler]
"""(slots, vocabulary, mode)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCase:
    """One request somewhere in its life, and the logits that the model will give it."""

    params: SamplingParams
    prompt: tuple[int, ...]
    outputs: tuple[int, ...]  # generated so far
    seed: int
    branch: int
    logits_SV: Float32s


def random_cases(count: int, vocab_size: int, seed: int) -> list[RowCase]:
    rng = np.random.default_rng([seed, vocab_size])
    return [_random_case(rng, vocab_size) for _ in range(count)]


def _random_case(rng: np.random.Generator, vocab_size: int) -> RowCase:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, rng.integers(0, most + 1)).tolist())

    params, outputs = _random_params(rng, vocab_size), tokens(20)
    logits_SV = np.stack([_random_logits(rng, vocab_size) for _ in range(STEPS)])
    seed, branch = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 4))
    return RowCase(params=params, prompt=tokens(12), outputs=outputs, seed=seed, branch=branch, logits_SV=logits_SV)


def _random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def maybe(share: float, value: Any, off: Any) -> Any:
        return value if rng.random() < share else off

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, rng.integers(least, most + 1)).tolist())

    biased = np.unique(ids(0, 9)).tolist()
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-5, 0.3, 1.0, 1.0, 1.7, 2.0])),
        top_k=maybe(0.3, int(rng.choice([1, 2, 17, 64, 256, vocab_size, vocab_size + 1])), 0),
        top_p=maybe(0.5, float(rng.choice([1e-9, 0.5, 0.9, 0.97, 0.999, 1 - 2**-24])), 1.0),
        min_p=maybe(0.2, float(rng.choice([1e-9, 0.01, 0.2, 1.0])), 0.0),
        repetition_penalty=maybe(0.2, float(rng.uniform(0.5, 2)), 1.0),
        frequency_penalty=maybe(0.2, float(rng.uniform(-2, 2)), 0.0),
        presence_penalty=maybe(0.2, float(rng.uniform(-2, 2)), 0.0),
        logit_bias=maybe(0.2, tuple((token, float(rng.uniform(-100, 100))) for token in biased), ()),
        allowed_token_ids=maybe(0.1, ids(1, 40), None),
        bad_words_ids=maybe(0.2, tuple(ids(1, 3) for _ in range(3)), ()),
        max_tokens=64,
        min_tokens=int(rng.integers(0, 30)),
        stop_token_ids=ids(0, 2),
        seed=maybe(0.5, 1, None),
        logprobs=maybe(0.5, int(rng.integers(0, 21)), None),
        logprob_token_ids=maybe(0.2, ids(1, 9), None),
    )


def _random_logits(rng: np.random.Generator, vocab_size: int) -> Float32s:
    logits_V = rng.normal(0, rng.choice([0.05, 0.5, 2.0, 6.0]), vocab_size)
    if rng.random() < 0.5:
        logits_V = np.round(logits_V * 4) / 4  # many ties
    if rng.random() < 0.1:
        logits_V[rng.random(vocab_size) < 0.5] = -np.inf
    if rng.random() < 0.03:
        logits_V[rng.integers(0, vocab_size)] = rng.choice([np.nan, np.inf])
    if rng.random() < 0.01:
        logits_V[:] = rng.choice([-np.inf, np.nan])
    return logits_V.astype(np.float32)


def admit(sampler: Sampler, slot: int, case: RowCase, more: Sequence[int] = ()) -> None:
    """`more`: tokens generated after those of the case."""
    outputs = (*case.outputs, *more)
    sampler.admit(slot, case.params, case.prompt, seed=case.seed, branch=case.branch, output_ids=outputs)


def answer(given: SampleOutput, row: int, params: SamplingParams) -> bytes:
    """Every bit that a row was given: token, flags, and what it asked for of log-probabilities and ranks."""
    output: Any = given  # None for all of the log-probabilities or for none of them
    parts: list[Any] = [output.tokens[row], output.flags[row]]
    wants = params.logprobs is not None or params.logprob_token_ids is not None
    if wants and output.logprobs is not None:
        n, chosen = params.logprobs or 0, len(params.logprob_token_ids or ())
        parts += [output.logprobs[row], output.ranks[row], output.top_ids[row][:n], output.top_logprobs[row][:n]]
        parts.append(output.chosen_logprobs[row][:chosen])
    return b"|".join(np.asarray(part).tobytes() for part in parts)


def mismatches(cases: Sequence[RowCase], make: MakeSampler, mode: LogprobsMode, seed: int = 0) -> int:
    """How many cases get, in random batches or resumed on another sampler, anything but what they get alone."""
    vocab_size = cases[0].logits_SV.shape[1]
    alone, tokens = answers_alone(cases, make(3, vocab_size, mode))
    rng = np.random.default_rng(seed)
    batched = answers_in_batches(cases, make(2 * MAX_ROWS + 1, vocab_size, mode), rng)
    resumed = answers_resumed(cases, tokens, make(2 * MAX_ROWS + 1, vocab_size, mode), rng)
    found = zip(alone, batched, resumed, strict=True)
    return sum(one != other or one[1] != last for one, other, last in found)


def answers_alone(cases: Sequence[RowCase], sampler: Sampler) -> tuple[list[list[bytes]], list[int]]:
    """(answers by step, first token) of each case, a call of one row each."""
    found: list[list[bytes]] = []
    tokens: list[int] = []
    for case in cases:
        admit(sampler, 1, case)
        outputs = [sampler.sample(case.logits_SV[step : step + 1], [1]) for step in range(STEPS)]
        tokens.append(int(outputs[0].tokens[0]))
        found.append([answer(output, 0, case.params) for output in outputs])
        sampler.release(1)
    return found, tokens


def random_batches(count: int, rng: np.random.Generator) -> list[list[int]]:
    """All indices below `count`, shuffled, 2 to 32 at a time."""
    order, batches = rng.permutation(count).tolist(), list[list[int]]()
    while order:
        size = int(rng.integers(2, MAX_ROWS + 1))
        size = len(order) if len(order) - size < 2 <= len(order) <= MAX_ROWS else size
        batches.append(order[:size])
        order = order[size:]
    return batches


def answers_in_batches(cases: Sequence[RowCase], sampler: Sampler, rng: np.random.Generator) -> list[list[bytes]]:
    """Each case in random slots among random neighbours, in another order and with padding rows at each step."""
    found: list[list[bytes]] = [[] for _ in cases]
    for members in random_batches(len(cases), rng):
        slots = 1 + rng.permutation(2 * MAX_ROWS)[: len(members)]
        for slot, member in zip(slots, members, strict=True):
            admit(sampler, int(slot), cases[member])
        for step in range(STEPS):
            places = rng.permutation(len(members) + step)  # at the second step one row is padding
            padded = [*members, members[0]][: len(places)]
            logits = np.stack([cases[padded[place]].logits_SV[step] for place in places])
            output = sampler.sample(logits, np.append(slots, 0)[places])
            for row, place in enumerate(places):
                if place < len(members):
                    found[members[place]].append(answer(output, row, cases[members[place]].params))
        for slot in slots:
            sampler.release(int(slot))
    return found


def answers_resumed(
    cases: Sequence[RowCase], tokens: Sequence[int], sampler: Sampler, rng: np.random.Generator
) -> list[bytes]:
    """The last step of each case, admitted with the tokens before it, among other random neighbours."""
    found = [b""] * len(cases)
    for members in random_batches(len(cases), rng):
        slots = 1 + rng.permutation(2 * MAX_ROWS)[: len(members)]
        for slot, member in zip(slots, members, strict=True):
            admit(sampler, int(slot), cases[member], [tokens[member]])
        output = sampler.sample(np.stack([cases[member].logits_SV[1] for member in members]), slots)
        for row, member in enumerate(members):
            found[member] = answer(output, row, cases[member].params)
        # No release: the next batch takes slots over, as after a preemption.
    return found
