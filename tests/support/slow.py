"""Draws the token of a row by the routes and noise of the design, one number at a time in Python.

Two samplers may differ from it where the two best perturbed values lie within 1e-4 of each other.
"""

import math
from collections.abc import Sequence

from tests.support.distribution import MIN_TEMPERATURE, kept_tokens, processed_values, total_order
from tests.support.draws import DrawRow, LawCase

GROUP = 128
LISTED = 256
SAMPLE_GROUP, SAMPLE_TOKEN = 0, 1


def slow_words(counter: Sequence[int], seed: int) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & 0xFFFFFFFF, (left >> 32) ^ c[3] ^ k[1], left & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def slow_gumbel(seed: int, position: int, branch: int, purpose: int, token: int, draw: int = 0) -> float:
    """Standard Gumbel noise of a token id or a group id, in float64. `draw` is the round of a rejection."""
    word = slow_words([token >> 2, position, purpose << 16 | draw, branch], seed)[token & 3]
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2.0**-24)))


def slow_singles(case: LawCase) -> set[int]:
    """Tokens outside of their groups: those with a bias, a ban of their own or a penalty's eye on them."""
    params = case.params
    found = {token for token, _ in params.logit_bias} | {word[0] for word in params.bad_words_ids if len(word) == 1}
    if params.repetition_penalty != 1:
        found |= set(case.prompt)
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
        found |= set(case.outputs)
    return found


def slow_token(row: DrawRow) -> int:
    """The token of a row with something finite."""
    case, params = row.case, row.case.params
    values = processed_values(case.logits_V, params, case.prompt, case.outputs)
    order, kept, singles = total_order(values), kept_tokens(values, params), slow_singles(case)
    if params.temperature == 0:
        return order[0]
    temperature = max(params.temperature, MIN_TEMPERATURE)
    above = [(x - values[order[0]]) / temperature for x in values]

    def noise(purpose: int, number: int, draw: int) -> float:
        return slow_gumbel(row.seed, len(case.outputs), row.branch, purpose, number, draw)

    def best_of(tokens: Sequence[int], draw: int) -> int:
        return max(tokens, key=lambda token: above[token] + noise(SAMPLE_TOKEN, token, draw))

    def two_level(draw: int) -> int:
        whole = [range(first, min(first + GROUP, len(values))) for first in range(0, len(values), GROUP)]
        groups = [[token for token in group if token not in singles] for group in whole]
        weights = [math.fsum(math.exp(above[token]) for token in group) for group in groups]
        scores = {i: math.log(w) + noise(SAMPLE_GROUP, i, draw) for i, w in enumerate(weights) if w > 0}
        alone = {token: above[token] + noise(SAMPLE_TOKEN, token, draw) for token in sorted(singles)}
        if max(alone.values(), default=-math.inf) > max(scores.values(), default=-math.inf):
            return max(alone, key=lambda token: alone[token])
        return best_of(groups[max(scores, key=lambda i: scores[i])], draw)

    if params.top_k <= 0 and params.top_p == 1 and params.min_p == 0:
        return two_level(0)
    if params.top_k > 0 or len(kept) <= LISTED:
        return best_of(kept, 0)
    draw = 0
    while (token := two_level(draw)) not in kept:
        draw += 1
    return token
