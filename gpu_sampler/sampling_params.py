"""Defines what a request may ask of the sampler, and validates it for both ends of the service."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

INVALID_TOKEN = -1
MAX_LOGPROB_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 256
MAX_BAD_WORD_TOKENS = 16
MAX_EOS_TOKEN_IDS = 32  # the model's own, which come on top of those a request may name


class ParamError(ValueError):
    """Reports a parameter out of range, by `field`, `given` (a number, or a type or length in words) and `allowed`."""

    def __init__(self, field: str, given: object, allowed: str) -> None:
        super().__init__(f"`{field}` must be {allowed}. Given: {given}.")
        self.field = field
        self.given = given
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Holds bounds that a server may lower or raise. Wire models, the replica and the docs read them here."""

    max_n: int = 128
    max_logit_bias: int = 1024
    max_allowed_token_ids: int = 1024
    max_bad_words: int = 128
    max_bad_word_tokens_total: int = 1024
    max_stop_token_ids: int = 128
    max_logprobs: int = 20
    max_logprob_token_ids: int = MAX_LOGPROB_TOKEN_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Says how the tokens of one request are drawn. Values are as in the HTTP contract; ids are token ids in [0, V).

    Greedy is `temperature == 0`. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `seed` None means that the caller
    drew one for the request. A sampler that ignores seeds never draws a row with an explicit seed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the row, the model's own end-of-text ids included unless the request ignores them."""
    seed: int | None = None
    """Any int64, taken as its 64 bits."""
    n: int = 1
    logprobs: int | None = None
    """None: no log-probabilities. N: the sampled token's, and the first N of the total order."""
    logprob_token_ids: tuple[int, ...] | None = None

    def validate(self, vocab_size: int, limits: SamplingLimits = SamplingLimits()) -> None:
        """Raises ParamError for the first field out of range. `vocab_size` is the width of the logits."""
        self._validate_numbers(limits)
        self._validate_ids(vocab_size, limits)

    def _validate_numbers(self, limits: SamplingLimits) -> None:
        _number("temperature", self.temperature, lambda x: 0 <= x <= 2, "in [0, 2]")
        _integer("top_k", self.top_k, lambda x: x >= -1, "-1, 0 or >= 1")
        _number("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]")
        _number("min_p", self.min_p, lambda x: 0 <= x <= 1, "in [0, 1]")
        _number("repetition_penalty", self.repetition_penalty, lambda x: 0 < x <= 10, "in (0, 10]")
        _number("frequency_penalty", self.frequency_penalty, lambda x: -2 <= x <= 2, "in [-2, 2]")
        _number("presence_penalty", self.presence_penalty, lambda x: -2 <= x <= 2, "in [-2, 2]")
        _integer("max_tokens", self.max_tokens, lambda x: 1 <= x < 2**31, f"in [1, {2**31 - 1}]")
        _integer("min_tokens", self.min_tokens, lambda x: 0 <= x <= self.max_tokens, f"in [0, {self.max_tokens}]")
        _integer("n", self.n, lambda x: 1 <= x <= limits.max_n, f"in [1, {limits.max_n}]")
        if self.seed is not None:
            _integer("seed", self.seed, lambda x: -(2**63) <= x < 2**64, "a 64-bit integer")
        if self.logprobs is not None:
            bound = min(limits.max_logprobs, MAX_TOP_LOGPROBS)
            _integer("logprobs", self.logprobs, lambda x: 0 <= x <= bound, f"in [0, {bound}]")

    def _validate_ids(self, vocab_size: int, limits: SamplingLimits) -> None:
        _length("logit_bias", self.logit_bias, 0, limits.max_logit_bias)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.logit_bias):
            raise ParamError("logit_bias", "an entry that is no pair", "a map of token ids to values in [-100, 100]")
        _ids("logit_bias", [token for token, _ in self.logit_bias], vocab_size)
        for _, bias in self.logit_bias:
            _number("logit_bias", bias, lambda x: -100 <= x <= 100, "a map of token ids to values in [-100, 100]")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise ParamError("logit_bias", "an id given twice", "a map of distinct token ids")
        if self.allowed_token_ids is not None:
            _length("allowed_token_ids", self.allowed_token_ids, 1, limits.max_allowed_token_ids)
            _ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _length("stop_token_ids", self.stop_token_ids, 0, limits.max_stop_token_ids + MAX_EOS_TOKEN_IDS)
        _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.logprob_token_ids is not None:
            bound = min(limits.max_logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            _length("logprob_token_ids", self.logprob_token_ids, 1, bound)
            _ids("logprob_token_ids", self.logprob_token_ids, vocab_size)
        self._validate_bad_words(vocab_size, limits)

    def _validate_bad_words(self, vocab_size: int, limits: SamplingLimits) -> None:
        # A word is given with and without its leading space, hence twice the number of words.
        _length("bad_words", self.bad_words_ids, 0, 2 * limits.max_bad_words)
        for word in self.bad_words_ids:
            _sequence("bad_words", word)
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise ParamError(
                    "bad_words", f"a word of {len(word)} tokens", f"words of 1 to {MAX_BAD_WORD_TOKENS} tokens"
                )
            _ids("bad_words", word, vocab_size)
        total = sum(len(word) for word in self.bad_words_ids)
        if total > limits.max_bad_word_tokens_total:
            raise ParamError(
                "bad_words", f"{total} tokens", f"at most {limits.max_bad_word_tokens_total} tokens in all"
            )


def _number(field: str, value: object, ok: Callable[[float], bool], allowed: str) -> None:
    if isinstance(value, bool) or (not isinstance(value, float) and not isinstance(value, int)):
        raise ParamError(field, f"a {type(value).__name__}", f"a number {allowed}")
    # NaN passes neither `<` nor `>`: test it by name. An integer is finite, and may be too large for `isfinite`.
    if (isinstance(value, float) and not math.isfinite(value)) or not ok(value):
        raise ParamError(field, _shown(value), allowed)


def _integer(field: str, value: object, ok: Callable[[int], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(field, f"a {type(value).__name__}", f"an integer {allowed}")
    if not ok(value):
        raise ParamError(field, _shown(value), allowed)


def _shown(value: float) -> object:
    """Returns a number as a message gives it: Python refuses to print very long integers."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return value


def _sequence(field: str, values: object) -> None:
    if not isinstance(values, tuple) and (isinstance(values, str) or not isinstance(values, Sequence)):
        raise ParamError(field, f"a {type(values).__name__}", "a list")


def _length(field: str, values: Sequence[object], minimum: int, maximum: int) -> None:
    _sequence(field, values)
    if not minimum <= len(values) <= maximum:
        raise ParamError(field, f"{len(values)} entries", f"a list of {minimum} to {maximum} entries")


def _ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    for token in ids:
        _integer(field, token, lambda x: 0 <= x < vocab_size, f"made of token ids in [0, {vocab_size})")
