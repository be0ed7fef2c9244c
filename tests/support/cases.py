"""Lists the cases whose draws are compared with the enumerated distribution.

A full factorial of the parameters has one draw each, and single cases have many draws.

Shape legend: R rows, V vocabulary.
"""

import itertools
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_sampler.sampling_params import SamplingParams
from tests.support.draws import BINS, DrawRow, Draws, LawCase, against_joint_distribution, rows_of
from tests.support.statistics import chi_square, probability_transform

SMALL_V = 29
PROMPT = (3, 7, 7, 11, 28)
OUTPUTS = (5, 7, 5, 19, 4)
BIAS = ((2, 1.5), (5, -2.0), (19, 3.0), (27, 0.5))
ALLOWED = tuple(token for token in range(SMALL_V) if token % 4 != 1)
BAD_WORDS = ((8,), (19, 4, 12), (4, 20), (5, 6))  # 6 is not banned: 5 is not the last token
FACTORS: dict[str, tuple[object, ...]] = {
    "temperature": (0.3, 1.0, 1.7),
    "top_k": (0, 6),
    "top_p": (1.0, 0.9, 0.5),
    "min_p": (0.0, 0.05, 0.3),
    "repetition_penalty": (1.0, 2.0, 0.5),  # exact in fp32: where a product rounds is not part of the distribution
    "frequency_penalty": (0.0, 0.5, -0.5),
    "presence_penalty": (0.0, 0.75),
    "logit_bias": ((), BIAS),
    "allowed_token_ids": (None, ALLOWED),
    "bad_words_ids": ((), BAD_WORDS),
    "min_tokens": (0, 6),
}


def coarse_logits(size: int, seed: int, spread: float = 1.5) -> npt.NDArray[np.float32]:
    """Logits in steps of 1/8: exact in bf16, and with many ties."""
    logits = np.random.default_rng([seed, size]).normal(0, spread, size)
    return (np.round(logits * 8) / 8).astype(np.float32)


@cache
def factorial_rows() -> tuple[list[DrawRow], npt.NDArray[np.float64]]:
    """One row for each of the 15,552 combinations, each with its own logits and seed, and their distributions [R,
    V]."""
    seeds = np.random.default_rng(2026).integers(0, 2**64, 20_000, np.uint64, endpoint=False)
    rows = []
    for i, values in enumerate(itertools.product(*FACTORS.values())):
        params = SamplingParams(
            **dict(zip(FACTORS, values, strict=True)),  # type: ignore[arg-type]
            stop_token_ids=(0, 14),
            max_tokens=16,
            logprobs=3,
            logprob_token_ids=tuple(range(SMALL_V)),
        )
        case = LawCase(logits_V=coarse_logits(SMALL_V, i), params=params, prompt=PROMPT, outputs=OUTPUTS)
        rows.append(DrawRow(case, int(seeds[i])))
    return rows, np.stack([row.case.distribution() for row in rows])


def factorial_p_values(tokens_R: npt.NDArray[np.int64]) -> dict[str, float]:
    """For all rows and for each level of each factor: the p-value of the hypothesis that each token came from the
    distribution of its row, by the randomised probability transform."""
    rows, probs_RV = factorial_rows()
    jitter = np.random.default_rng(11).random(len(rows))
    places_R = probability_transform(tokens_R, probs_RV, jitter)

    def p_value(chosen: npt.NDArray[np.bool_]) -> float:
        places = places_R[chosen]
        if (places < 0).any():
            return 0.0
        return chi_square(np.histogram(places, BINS, (0, 1))[0], np.full(BINS, 1 / BINS)).p_value

    found = {"all": p_value(np.ones(len(rows), bool))}
    for name, levels in FACTORS.items():
        for level in levels:
            chosen = np.array([getattr(row.case.params, name) == level for row in rows])
            found[f"{name} = {str(level)[:12]}"] = p_value(chosen)
    return found


def case(logits: npt.NDArray[np.float32], **params: Any) -> LawCase:
    """The tokens before are those of the factorial that this vocabulary has."""
    prompt, outputs = (tuple(token for token in tokens if token < len(logits)) for tokens in (PROMPT, OUTPUTS))
    params.setdefault("max_tokens", 16)
    return LawCase(logits_V=logits, params=SamplingParams(**params), prompt=prompt, outputs=outputs)


def flat(size: int) -> npt.NDArray[np.float32]:
    return np.full(size, -1.25, np.float32)


TIED_AT_K = np.array([2, 1, 1, 3, 1, 1, 0, 1, -1], np.float32)
TIED_AT_P = np.array([0.5] * 4 + [-np.inf] * 13, np.float32)


def raised(logits_V: npt.NDArray[np.float32], tokens: tuple[int, ...], by: float = 2.0) -> npt.NDArray[np.float32]:
    """The logits with some tokens likelier, so that what becomes of them shows."""
    found = logits_V.copy()
    found[list(set(tokens))] += np.float32(by)
    return found


EVERYTHING = {
    "temperature": 1.3,
    "top_k": 12,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.25,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "logit_bias": BIAS,
    "allowed_token_ids": ALLOWED,
    "bad_words_ids": BAD_WORDS,
    "min_tokens": 6,
    "stop_token_ids": (0, 14),
}
CASES: dict[str, LawCase] = {
    "plain": case(coarse_logits(40, 1, 2.5)),
    "plain, three groups": case(coarse_logits(300, 2)),
    "plain, eight groups, cold": case(coarse_logits(1000, 3), temperature=0.3),
    "plain, eight groups, hot": case(coarse_logits(1000, 4, 2.5), temperature=1.7),
    "plain, one group holds almost all": case(coarse_logits(300, 5) + 6 * (np.arange(300) // 128 == 1)),
    "plain, one id over a group": case(coarse_logits(129, 6, 0.3)),
    "one token": case(np.zeros(1, np.float32)),
    "top-k": case(coarse_logits(37, 7), top_k=5),
    "top-k of all": case(coarse_logits(37, 7), top_k=38),
    "top-k over three groups": case(coarse_logits(300, 8, 0.7), top_k=50),
    "top-k over 256": case(coarse_logits(700, 8, 0.3), top_k=300),
    "ties at k": case(TIED_AT_K, top_k=4),
    "ties at k of 256": case(flat(640), top_k=256),
    "top-p": case(coarse_logits(37, 9), top_p=0.8),
    "ties at p": case(TIED_AT_P, top_p=0.5),
    "ties at the top, almost greedy": case(np.array([1, 3, 0, 3, 3], np.float32), temperature=1e-5),
    "top-k and top-p": case(coarse_logits(300, 10, 0.7), top_k=40, top_p=0.6, temperature=1.7),
    "top-k, top-p and min-p": case(coarse_logits(37, 10), top_k=9, top_p=0.9, min_p=0.1),
    "min-p": case(coarse_logits(37, 11), min_p=0.1),
    "wide nucleus": case(coarse_logits(700, 12, 0.3), top_p=0.7),
    "wider nucleus": case(coarse_logits(1000, 13, 0.3), top_p=0.95, temperature=1.7),
    "wide nucleus, ties at p": case(flat(640), top_p=0.75),  # 480 of 640 tokens have less than 0.75 before them
    "wide min-p": case(coarse_logits(700, 14, 0.3), min_p=0.25),
    "wide nucleus and min-p": case(coarse_logits(700, 15, 0.3), top_p=0.9, min_p=0.25),
    "penalties": case(
        raised(coarse_logits(37, 16), OUTPUTS), repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25
    ),
    "penalties, wide nucleus": case(
        raised(coarse_logits(700, 17, 0.3), PROMPT), top_p=0.8, repetition_penalty=2.0, logit_bias=BIAS
    ),
    "penalties, two-level": case(coarse_logits(300, 18), repetition_penalty=1.25, frequency_penalty=-1.0),
    "bias and bans, two-level": case(coarse_logits(300, 18), logit_bias=BIAS, bad_words_ids=BAD_WORDS),
    "everything": case(raised(coarse_logits(SMALL_V, 19), (0, 14)), **EVERYTHING),
    "everything, cold": case(coarse_logits(SMALL_V, 20), **EVERYTHING | {"temperature": 0.3}),
    "everything but top-k": case(coarse_logits(SMALL_V, 21), **EVERYTHING | {"top_k": 0, "top_p": 0.85}),
}


PAIR = LawCase(logits_V=np.array([0.5, -1, 1, 0.25, 0], np.float32), params=SamplingParams())
FILTERED_PAIR = LawCase(
    logits_V=np.array([0.5, -1, 1, 0.25, 0, 0.125], np.float32), params=SamplingParams(top_k=5, top_p=0.97)
)


def group_and_place(draws: Draws) -> float:
    """The p-value of the hypothesis that a token's group of 128 and its place there are independent and have their
    distributions: four groups; places 0 to 2 have weight."""
    places_3 = np.array([0.5, 0, -0.5], np.float32)
    logits_V = np.full(512, -np.inf, np.float32)
    for group in range(4):
        logits_V[128 * group : 128 * group + 3] = places_3 + np.float32(group / 4)
    tokens = draws(rows_of(LawCase(logits_V=logits_V, params=SamplingParams()), 4000, 5), 1)[:, 0]
    groups = LawCase(logits_V=np.arange(4, dtype=np.float32) / np.float32(4), params=SamplingParams())
    places = LawCase(logits_V=places_3, params=SamplingParams())
    if (tokens % 128 > 2).any():
        return 0.0
    return against_joint_distribution(groups, places, np.stack([tokens // 128, tokens % 128], axis=1)).p_value


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.3),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=256, min_p=0.01, temperature=1.7),
    SamplingParams(temperature=1.9, top_p=0.97),
    SamplingParams(temperature=1e-5),
]
"""Every branch, and each way of drawing a nucleus."""
