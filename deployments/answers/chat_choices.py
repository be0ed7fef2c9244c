"""Choices of a chat while their chunks come: those of a completion, with log-probabilities as one object a token."""

from typing import Any, ClassVar

from deployments.answers.choices import Choice
from engine.jobs import GenerateChunk


class ChatChoice(Choice):
    """Log-probabilities as `content`, and `requested_logprobs` where ids were named."""

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
