"""Choices of a completion while their chunks come: text, ids, the classic log-probability object, finish reasons."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from deployments.generation import Plan
from deployments.text import BranchText
from deployments.wire.errors import invalid
from engine.jobs import FinishReason, GenerateChunk
from engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity


class Delta(NamedTuple):
    """What a chunk adds to its choice."""

    text: str
    tokens: list[int]
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a run of tokens, as JSON can hold them. One entry a token in each field."""

    own: list[float]
    top_ids: list[list[int]]  # the first N of the order; -1 where a row holds fewer
    top: list[list[float]]
    requested: list[list[float]] | None  # in the order of `logprob_token_ids`


class Choice:
    """One branch of one prompt. `push` until it has ended; what comes later is surplus and must not be pushed."""

    offsets: ClassVar[bool] = True  # whether log-probabilities name the character that each token begins at

    def __init__(self, plan: Plan, index: int, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self.index = index
        self.prompt = index // plan.task.params.n
        self.seed = plan.seeds[self.prompt]
        self.completion_tokens = 0
        self.ended = False
        self.started = False
        self._text = BranchText(
            tokenizer.decoder(skip_special_tokens=plan.skip_special),
            plan.stops,
            include_stop=plan.include_stop,
            min_tokens=plan.task.params.min_tokens,
            offsets=plan.wants_logprobs and self.offsets,
        )
        if plan.resumed and self._text.push(plan.resumed).stop is not None:
            raise invalid("resume_token_ids", "tokens before a stop string", "tokens that complete one")

    def push(self, chunk: GenerateChunk) -> Delta:
        tokens: list[int] = chunk.tokens.tolist()
        visible = tokens
        if chunk.stop_token is not None and tokens and not self._plan.include_stop:
            visible = tokens[:-1]  # a stop token has an entry but no text
        piece = self._text.push(visible)
        text, stop = piece.text, piece.stop
        finish = None if chunk.finish is None else chunk.finish.value
        offsets = piece.offsets
        if stop is None:
            offsets = [*offsets, *[self._text.offset()] * (len(tokens) - len(visible))]
            if finish is not None:
                rest = self._text.finish()
                text, stop = text + rest.text, rest.stop
        else:
            tokens = tokens[: piece.used]
        reason: str | int | None = stop
        if stop is not None:
            finish = FinishReason.STOP.value
        elif chunk.stop_token in self._plan.stop_ids:
            reason = chunk.stop_token
        self.ended = finish is not None
        self.completion_tokens += len(tokens)
        return Delta(text, tokens, self._logprobs(chunk, tokens, offsets), finish, reason)

    def _logprobs(self, chunk: GenerateChunk, tokens: list[int], offsets: list[int]) -> dict[str, list[Any]] | None:
        """The entries of `tokens`, the first of the chunk's."""
        found = self._rows(chunk, len(tokens))
        if found is None:
            return None
        names = self._names(tokens)
        rows = zip(tokens, names, found.own, found.top_ids, found.top, strict=True)
        entries: dict[str, list[Any]] = {
            "tokens": names,
            "token_logprobs": found.own,
            "top_logprobs": [self._alternatives(*row) for row in rows],
            "text_offset": offsets,
        }
        if found.requested is not None:
            entries["requested_logprobs"] = found.requested
        return entries

    def _rows(self, chunk: GenerateChunk, count: int) -> TokenLogprobs | None:
        """Of the chunk's first `count` tokens. None if the request wants none."""
        if not self._plan.wants_logprobs or chunk.logprobs is None:
            return None
        params = self._plan.task.params
        top_ids: list[list[int]] = [[]] * count
        top: list[list[float]] = [[]] * count
        if params.logprobs and chunk.top_ids is not None and chunk.top_logprobs is not None:
            top_ids = chunk.top_ids[:count, : params.logprobs].tolist()
            top = [finite(row) for row in chunk.top_logprobs[:count, : params.logprobs]]
        requested = None
        if params.logprob_token_ids is not None and chunk.chosen_logprobs is not None:
            requested = [finite(row) for row in chunk.chosen_logprobs[:count, : len(params.logprob_token_ids)]]
        return TokenLogprobs(finite(chunk.logprobs[:count]), top_ids, top, requested)

    def _names(self, ids: Sequence[int]) -> list[str]:
        if self._plan.as_token_ids:
            return [f"token_id:{token}" for token in ids]
        return self._tokenizer.token_texts(ids)

    def _alternatives(
        self, token: int, name: str, logprob: float, ids: list[int], logprobs: list[float]
    ) -> dict[str, float]:
        """The first N and the sampled token, which is always there and always under its own text."""
        found: dict[str, float] = {}
        for other, other_name, value in zip(ids, self._names(ids), logprobs, strict=True):
            if other == token:
                found[name] = logprob
            elif other >= 0:  # a row may hold fewer than N tokens
                taken = other_name in found or other_name == name
                found[f"token_id:{other}" if taken else other_name] = value
        found.setdefault(name, logprob)
        return found


def finite(values: Any) -> list[float]:
    """float32 values as JSON can hold them: shortest forms of the float64 that hold them, none below LOWEST."""
    found: list[float] = values.tolist()
    return [value if value >= LOWEST else LOWEST for value in found]
