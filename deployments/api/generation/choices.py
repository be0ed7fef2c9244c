"""Turns the token chunks of each choice into text, ids, log-probabilities and finish reasons.

A completion and a chat differ only in how they write log-probabilities.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from deployments.api.generation.request_builder import GenerationPlan
from deployments.errors import invalid
from deployments.protocol import PromptScores
from engine.requests import FinishReason, GenerateChunk
from engine.tokenizer.detokenizer import BranchText, IncrementalDecoder
from engine.tokenizer.tokenizer import Tokenizer
from scoring.normalize import MIN_LOGPROB

RUN = 1024  # resumed tokens that are decoded together: other threads run between two runs


class Delta(NamedTuple):
    """Holds what a chunk adds to its choice."""

    text: str
    tokens: list[int]
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: str | int | None


class TokenLogprobs(NamedTuple):
    """Holds the log-probabilities of a run of tokens, finite. Each field has one entry for each token."""

    own: list[float]
    top_ids: list[list[int]]  # the first N of the order; -1 where a row holds fewer
    top: list[list[float]]
    requested: list[list[float]] | None  # in the order of `logprob_token_ids`


class ChoiceState:
    """Holds one branch of one prompt. Call `push` until it has ended; later chunks must not be pushed."""

    offsets: ClassVar[bool] = True  # whether log-probabilities name the character that each token begins at

    def __init__(self, plan: GenerationPlan, index: int, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        """Begins the choice behind the tokens that it resumes. `decoder`: follows its prompt, and is its own.

        Raises:
            ApiError: Those tokens complete a stop string.
        """
        self._plan = plan
        self._tokenizer = tokenizer
        self.index = index
        self.prompt = index // plan.call[0].params.n
        self.seed = plan.seeds[self.prompt]
        self.completion_tokens = 0
        self.ended = False
        self.started = False
        self.prompt_scores: PromptScores | None = None
        self.around_text: tuple[bytes, bytes] | None = None  # of each event that has nothing but text
        self._silent = True  # it has no delta yet
        options = plan.prompt_options
        self.only_text = not (
            plan.wants_logprobs or plan.body.stop or plan.body.return_token_ids or options.only or options.echo
        )  # its chunks add nothing but text, except the last
        self._decoder = decoder
        self._text = BranchText(
            self._decoder,
            plan.body.stop or (),
            include_stop=bool(plan.body.include_stop_str_in_output),
            min_tokens=plan.call[0].params.min_tokens,
            offsets=plan.wants_logprobs and self.offsets,
            start=len(plan.echoed[self.prompt].text) if plan.prompt_options.echo else 0,
        )
        resumed = plan.body.resume_token_ids or []
        for start in range(0, len(resumed), RUN):
            if self._text.push(resumed[start : start + RUN]).stop is not None:
                raise invalid("resume_token_ids", "tokens before a stop string", "tokens that complete one")

    def push(self, chunk: GenerateChunk) -> Delta:
        """Returns what a chunk adds. The branch has ended if it completes a stop string."""
        if self._plan.prompt_options.only:
            return self._close(self._next_entry(chunk))
        tokens: list[int] = chunk.tokens.tolist()
        visible = tokens
        if chunk.stop_token is not None and tokens and not self._plan.body.include_stop_str_in_output:
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
        elif chunk.stop_token in (self._plan.body.stop_token_ids or ()):
            reason = chunk.stop_token
        self.ended = finish is not None
        self.completion_tokens += len(tokens)
        return self._opened(Delta(text, tokens, self._logprobs(chunk, tokens, offsets), finish, reason))

    def push_text(self, chunk: GenerateChunk) -> str:
        """Returns the text that a chunk adds which is not the last of a choice with `only_text`."""
        tokens: list[int] = chunk.tokens.tolist()
        self.completion_tokens += len(tokens)
        return self._decoder.push(tokens)

    def close(self) -> Delta:
        """Returns the only delta of a choice for which only the prompt is computed."""
        return self._close(None)

    def _close(self, logprobs: dict[str, list[Any]] | None) -> Delta:
        self.ended = True
        return self._opened(Delta("", [], logprobs, FinishReason.LENGTH.value, None))

    def _next_entry(self, chunk: GenerateChunk) -> dict[str, list[Any]] | None:
        """Returns the entry of the position behind the prompt, which names the most probable token there."""
        if self._plan.prompt_options.next_top is None or chunk.top_ids is None or chunk.top_logprobs is None:
            return None
        best = chunk._replace(tokens=chunk.top_ids[:, 0], logprobs=chunk.top_logprobs[:, 0])
        return self._logprobs(best, best.tokens.tolist(), [self._text.offset()])

    def _opened(self, delta: Delta) -> Delta:
        """Puts the prompt before the choice's first delta where the request wants it repeated."""
        first, self._silent = self._silent, False
        if not first or not self._plan.prompt_options.echo:
            return delta
        echoed = self._plan.echoed[self.prompt]
        logprobs = self._prompt_entries(echoed.offsets)
        for name, values in (delta.logprobs or {}).items():
            logprobs[name] = logprobs[name] + values
        return delta._replace(text=echoed.text + delta.text, logprobs=logprobs if self._plan.wants_logprobs else None)

    def _prompt_entries(self, offsets: list[int]) -> dict[str, list[Any]]:
        """Returns the entries of the prompt's tokens. The first token has no log-probability."""
        if self.prompt_scores is None:
            return {}
        first, *ids = self._plan.prompts[self.prompt]
        entries = self._logprobs(self._as_chunk(self.prompt_scores, ids), ids, offsets[1:]) or {}
        start = {"tokens": self._names([first])[0], "text_offset": offsets[0]}
        return {name: [start.get(name), *values] for name, values in entries.items()}

    @staticmethod
    def _as_chunk(scores: PromptScores, ids: list[int]) -> GenerateChunk:
        """Returns the scores of prompt tokens as a chunk of generated tokens."""
        own, ranks, top_ids, top, chosen, queue_s, compute_s = scores
        return GenerateChunk(
            0, np.array(ids, np.int32), own, ranks, top_ids, top, chosen, None, None, 0, queue_s, compute_s
        )

    def prompt_logprobs(self) -> list[dict[str, dict[str, Any]] | None] | None:
        """Returns, for each place, the token there and the most probable ones; None if the request wants none."""
        scores, count = self.prompt_scores, self._plan.prompt_options.logprobs
        if scores is None or count is None:
            return None
        ids = self._plan.prompts[self.prompt][1:]
        own, top = finite(scores.logprobs), [finite(row) for row in scores.top_logprobs[:, :count]]
        rows = zip(ids, own, scores.ranks.tolist(), scores.top_ids[:, :count].tolist(), top, strict=True)
        return [None, *(self._place(*row) for row in rows)]

    def _place(
        self, token: int, logprob: float, rank: int, top_ids: list[int], top: list[float]
    ) -> dict[str, dict[str, Any]]:
        known = [other for other in top_ids if other >= 0]  # a row may hold fewer than N tokens
        found = {str(other): (value, at) for at, (other, value) in enumerate(zip(known, top, strict=False), 1)}
        found[str(token)] = (logprob, rank)
        names = self._tokenizer.token_texts([*map(int, found)])
        return {
            other: {"logprob": value, "rank": at, "decoded_token": name}
            for (other, (value, at)), name in zip(found.items(), names, strict=True)
        }

    def _logprobs(self, chunk: GenerateChunk, tokens: list[int], offsets: list[int]) -> dict[str, list[Any]] | None:
        """Returns the entries of `tokens`, which are the first of the chunk's."""
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
        """Returns those of the chunk's first `count` tokens; None if the request wants none."""
        if not self._plan.wants_logprobs or chunk.logprobs is None:
            return None
        params, wanted = self._plan.call[0].params, self._plan.alternatives
        top_ids: list[list[int]] = [[]] * count
        top: list[list[float]] = [[]] * count
        if wanted and chunk.top_ids is not None and chunk.top_logprobs is not None:
            top_ids = chunk.top_ids[:count, :wanted].tolist()
            top = [finite(row) for row in chunk.top_logprobs[:count, :wanted]]
        requested = None
        if params.logprob_token_ids is not None and chunk.chosen_logprobs is not None:
            requested = [finite(row) for row in chunk.chosen_logprobs[:count, : len(params.logprob_token_ids)]]
        return TokenLogprobs(finite(chunk.logprobs[:count]), top_ids, top, requested)

    def _names(self, ids: Sequence[int]) -> list[str]:
        if self._plan.body.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in ids]
        return self._tokenizer.token_texts(ids)

    def _alternatives(
        self, token: int, name: str, logprob: float, ids: list[int], logprobs: list[float]
    ) -> dict[str, float]:
        """Returns the first N tokens and the sampled one, which is always there under its own text."""
        found: dict[str, float] = {}
        for other, other_name, value in zip(ids, self._names(ids), logprobs, strict=True):
            if other == token:
                found[name] = logprob
            elif other >= 0:  # a row may hold fewer than N tokens
                taken = other_name in found or other_name == name
                found[f"token_id:{other}" if taken else other_name] = value
        found.setdefault(name, logprob)
        return found


def merged_choice(
    plan: GenerationPlan,
    choice: ChoiceState,
    deltas: Sequence[Delta],
    text: dict[str, Any],
    logprob_fields: Sequence[str],
) -> dict[str, Any]:
    """Returns a choice of a plain answer.

    Args:
        plan: The request.
        choice: The choice, which has ended.
        deltas: Everything that its chunks added.
        text: Its text, in the field of the route.
        logprob_fields: Fields that its log-probabilities have even where nothing was generated.
    """
    logprobs: dict[str, list[Any]] | None = None
    if plan.wants_logprobs:
        logprobs = {name: [] for name in logprob_fields}
        for delta in deltas:
            for name, values in (delta.logprobs or {}).items():
                logprobs.setdefault(name, []).extend(values)
    last = deltas[-1]
    found: dict[str, Any] = {
        "index": choice.index,
        **text,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "seed": choice.seed,
    }
    if plan.body.return_token_ids:
        found["token_ids"] = [token for delta in deltas for token in delta.tokens]
        found["prompt_token_ids"] = plan.prompts[choice.prompt]
    if plan.prompt_options.logprobs is not None:
        found["prompt_logprobs"] = choice.prompt_logprobs()
    return found


def finite(values: Any) -> list[float]:
    """Returns float32 values for JSON: as the float64 that equal them, none below MIN_LOGPROB."""
    found: list[float] = values.tolist()
    return [value if value >= MIN_LOGPROB else MIN_LOGPROB for value in found]


class ChatChoiceState(ChoiceState):
    """Writes log-probabilities as `content`, and as `requested_logprobs` where the request names ids."""

    offsets: ClassVar[bool] = False

    def _logprobs(self, chunk: GenerateChunk, tokens: list[int], offsets: list[int]) -> dict[str, list[Any]] | None:
        found = self._rows(chunk, len(tokens))
        if found is None:
            return None
        entries = self._entries(tokens, found.own)
        for entry, ids, values in zip(entries, found.top_ids, found.top, strict=True):
            known = [token for token in ids if token >= 0]  # a row may hold fewer than N tokens
            entry["top_logprobs"] = self._entries(known, values[: len(known)])
        logprobs: dict[str, list[Any]] = {"content": entries}
        if found.requested is not None:
            logprobs["requested_logprobs"] = found.requested
        return logprobs

    def _entries(self, ids: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
        rows = zip(self._names(ids), logprobs, self._tokenizer.token_bytes(ids), strict=True)
        return [{"token": name, "logprob": value, "bytes": list(data)} for name, value, data in rows]
