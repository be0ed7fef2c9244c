"""Choices of a completion while their chunks come: text, ids, the classic log-probability object, finish reasons."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Choice:
    """One branch of one prompt. `push` until it has ended; what comes later is surplus and must not be pushed."""

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
            offsets=plan.wants_logprobs,
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
        if not self._plan.wants_logprobs or chunk.logprobs is None:
            return None
        own = finite(chunk.logprobs[: len(tokens)])
        wanted = self._plan.task.params.logprobs or 0
        top_ids: list[list[int]] = [[]] * len(tokens)
        top: list[list[float]] = [[]] * len(tokens)
        if wanted and chunk.top_ids is not None and chunk.top_logprobs is not None:
            top_ids = chunk.top_ids[: len(tokens), :wanted].tolist()
            top = [finite(row) for row in chunk.top_logprobs[: len(tokens), :wanted]]
        names = self._names(tokens)
        entries: dict[str, list[Any]] = {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": [self._alternatives(*row) for row in zip(tokens, names, own, top_ids, top, strict=True)],
            "text_offset": offsets,
        }
        asked = self._plan.task.params.logprob_token_ids
        if asked is not None and chunk.chosen_logprobs is not None:
            entries["requested_logprobs"] = [finite(row) for row in chunk.chosen_logprobs[: len(tokens), : len(asked)]]
        return entries

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
