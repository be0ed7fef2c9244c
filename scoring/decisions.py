"""Answers typed questions about one input by the probabilities of codes. Nothing is sampled.

Shape legend: N rows of a batch, L labels of a batch, E edges of all rows (see scoring.option_codes), K codes of a
question.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.errors import ScoreCode, ScoringError, refusal
from scoring.labels import token_id_problem
from scoring.option_codes import Code, CodeReader, Float64s, Ids, Indices, alphabet, code_reader, prefix_free
from scoring.prompts.decision_prompts import Entry, Layout, Question
from scoring.row_builder import Int32s, PromptLimits, check_tokens, offsets
from scoring.tokenizer_protocol import TokenizerProtocol

MAX_CODES = 255
PROBES = ("Is it?", " \n\nis it", "((", "是吗")


class DecisionBatch(NamedTuple):
    """Holds the rows that one scoring request computes."""

    ids: Int32s  # tokens of all rows after the prefix
    starts: Int32s  # [N + 1]
    labels: Int32s  # [L]
    rows: Indices  # [E of the batch] where each edge is found in the answer [N, L]
    columns: Indices  # [E of the batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPlan:
    """Holds a request as rows `prefix + ids`: question by question, for each the rows of its reader."""

    prefix: Int32s
    batches: list[DecisionBatch]
    readers: list[CodeReader]
    input_tokens: int  # of all rows, prefix included

    def logprobs(
        self, found: Sequence[npt.NDArray[np.float32]], failed: Sequence[npt.NDArray[np.bool_]]
    ) -> list[Float64s]:
        """Returns the log-probability of each code, float64 [K] for each question; NaN where one of its rows failed.

        Args:
            found: Label log-probabilities of each batch, [N, L].
            failed: Rows of each batch that failed, [N].
        """
        parts = []
        for batch, values, bad in zip(self.batches, found, failed, strict=True):
            parts.append(np.where(bad[batch.rows], np.nan, values[batch.rows, batch.columns].astype(np.float64)))
        edges = np.concatenate(parts)
        ends = np.cumsum([sum(map(len, one.tokens)) for one in self.readers])
        return [one.logprobs(part) for one, part in zip(self.readers, np.split(edges, ends[:-1]), strict=True)]


class AnswerProbabilities(NamedTuple):
    """Holds the answer to one question."""

    probabilities: Float64s  # [K], sum 1
    label_mass: float  # what the model gave to all of the codes together


def answer_probabilities(logprobs: Float64s) -> AnswerProbabilities | None:
    """Normalizes log-probabilities [K] among the codes. Returns None where the model gave no usable number."""
    best = float(logprobs.max())
    if not math.isfinite(best):  # a NaN is a maximum too
        return None
    weights = np.exp(logprobs - best)
    total = float(weights.sum())
    return AnswerProbabilities(weights / total, min(1.0, math.exp(best) * total))


def confidence(probabilities: Float64s) -> float:
    """Returns `1 - H(p) / ln K`: 0 for a uniform p, 1 for certainty."""
    seen = probabilities[probabilities > 0]
    entropy = -float((seen * np.log(seen)).sum())
    return min(1.0, max(0.0, 1.0 - entropy / math.log(len(probabilities))))


def expected_level(probabilities: Float64s) -> float:
    """Returns `sum_i i p_i` with i from 0."""
    return float(np.arange(len(probabilities)) @ probabilities)


class DecisionPrompts:
    """Makes the prompts of one layout for one tokenizer. Created at start-up; thread-safe.

    The question is tokenised behind the anchor, a fixed text, and the prefix with the anchor at its end. So both have
    the tokens that they have in the joined text, although the input is tokenised only once.
    """

    def __init__(self, tokenizer: TokenizerProtocol, layout: Layout, maximum: int = MAX_CODES) -> None:
        """Chooses at most `maximum` codes. Raises ValueError if this tokenizer does not suit the layout."""
        self._tokenizer = tokenizer
        self.layout = layout
        self._head = tokenizer.mark(layout.head)
        self._closing = tokenizer.mark(layout.closing)
        self._anchor = self._encode(layout.anchor)
        codes = alphabet(self._answers, maximum)
        self.codes = codes if len(codes) > 1 else ()
        self.yes_no = self._yes_no()
        self._check()
        self._reader = lru_cache(maxsize=MAX_CODES + 1)(
            lambda count: code_reader(self.codes[:count] if count else self.yes_no)
        )

    def plan(self, given: str | Sequence[Entry], questions: Sequence[Question], limits: PromptLimits) -> DecisionPlan:
        """Makes the rows of a request. This is CPU work: call it off the event loop.

        Args:
            given: The input, as text or as entries.
            questions: At least one question.
            limits: The limits of the model and the server.

        Raises:
            ScoringError: The request is too large, or a question does not begin with a token of its own.
        """
        head = self._head + self.layout.transcript(given) + self.layout.anchor
        [prefix] = self._tokenizer.encode_batch([head], add_special_tokens=self.layout.special, plain=True)
        bodies = self._bodies(questions)
        self._check_ids(prefix, bodies, limits.vocab_size)
        readers = [self._reader(len(question.options)) for question in questions]
        self._check_size(len(prefix), bodies, readers, limits)
        rows = (
            ([*body, *stem], tokens)
            for body, one in zip(bodies, readers, strict=True)
            for stem, tokens in zip(one.stems, one.tokens, strict=True)
        )
        batches = [_pack(part) for part in _grouped(rows, limits)]
        count = sum(len(batch.starts) - 1 for batch in batches)
        own_tokens = sum(len(batch.ids) for batch in batches)
        return DecisionPlan(
            prefix=np.array(prefix, np.int32),
            batches=batches,
            readers=readers,
            input_tokens=count * len(prefix) + own_tokens,
        )

    def _bodies(self, questions: Sequence[Question]) -> list[list[int]]:
        """Returns the ids of each question after the prefix."""
        texts = [self.layout.anchor + self.layout.body(question, self.codes) + self._closing for question in questions]
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False, plain=True)
        size = len(self._anchor)
        for index, ids in enumerate(found):
            if ids[:size] != self._anchor:
                raise refusal(f"questions[{index}].instructions", "be text that begins a token of its own.")
        return [ids[size:] for ids in found]

    @staticmethod
    def _check_ids(prefix: list[int], bodies: list[list[int]], vocab_size: int) -> None:
        """Raises ScoringError for a text with ids that the model lacks."""
        for name, ids in (("input", prefix), *((f"questions[{index}]", body) for index, body in enumerate(bodies))):
            wrong = token_id_problem(name, ids, vocab_size, text=True)
            if wrong:
                raise ScoringError(ScoreCode.INVALID_TOKEN_ID, wrong, name)

    @staticmethod
    def _check_size(prefix: int, bodies: list[list[int]], readers: list[CodeReader], limits: PromptLimits) -> None:
        count = sum(len(one.stems) for one in readers)
        if count > limits.max_rows:
            rule = f"need at most {limits.max_rows} rows together. Given: {count}. Ask fewer questions."
            raise refusal("questions", rule, ScoreCode.REQUEST_TOO_LARGE)
        total = prefix
        for index, (body, one) in enumerate(zip(bodies, readers, strict=True)):
            longest = prefix + len(body) + max(map(len, one.stems))
            if longest > limits.max_model_len:
                raise ScoringError(
                    ScoreCode.CONTEXT_LENGTH_EXCEEDED,
                    f"`input` and `questions[{index}]` must be at most {limits.max_model_len} tokens together. "
                    f"Given: {longest}. Shorten the input.",
                    "input" if prefix > len(body) else f"questions[{index}]",
                )
            total += sum(len(body) + len(stem) for stem in one.stems)
        check_tokens(total, limits.max_request_tokens, "questions", "Ask fewer questions.")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text], add_special_tokens=False, plain=True)[0]

    def _answers(self, texts: Sequence[str]) -> list[Ids | None]:
        """Returns the ids of each text after the closing. See `scoring.option_codes.Encode`."""
        lead = self._closing + self.layout.lead
        before, *after = self._tokenizer.encode_batch(
            [self._closing, *(lead + text for text in texts)], add_special_tokens=False, plain=True
        )
        return [tuple(ids[len(before) :]) if ids[: len(before)] == before else None for ids in after]

    def _yes_no(self) -> tuple[Code, ...]:
        found = self._answers(("yes", "no"))
        codes = tuple(Code(text, ids) for text, ids in zip(("yes", "no"), found, strict=True) if ids)
        if len(codes) < 2 or not prefix_free(codes):
            raise ValueError(
                f"In the {self.layout.name} layout this tokenizer has no tokens of their own for yes and no."
            )
        return codes

    def _check(self) -> None:
        """Checks that the parts have the tokens that they have in the joined text."""
        for probe in PROBES:
            parts = (self._head + probe, self.layout.anchor, f" {probe}{self._closing}")
            joined = self._encode("".join(parts))
            prefix, question = self._encode(parts[0] + parts[1]), self._encode(parts[1] + parts[2])
            size = len(self._anchor)
            if question[:size] != self._anchor or joined != prefix + question[size:]:
                raise ValueError(
                    f"This tokenizer has no seam between input and question in the {self.layout.name} layout."
                )


Row = tuple[list[int], Ids]  # ids after the prefix, tokens read


def _grouped(rows: Iterator[Row], limits: PromptLimits) -> Iterator[tuple[list[Row], dict[int, int]]]:
    """Yields groups of rows in order, each as many as one request may hold, with the column of each label.

    A request has one set of labels. Their log-probabilities are over the whole vocabulary, so more labels change none
    of them: the union of what the rows read is exact, and the prefix is computed once instead of once for each set.
    """
    group: list[Row] = []
    columns: dict[int, int] = {}
    for row in rows:
        fresh = set(row[1]).difference(columns)
        labels = len(columns) + len(fresh)
        if group and (labels > limits.scoring.max_labels or (len(group) + 1) * labels > limits.max_cells):
            yield group, columns
            group, columns = [], {}
        group.append(row)
        for token in row[1]:
            columns.setdefault(token, len(columns))
    yield group, columns


def _pack(part: tuple[list[Row], dict[int, int]]) -> DecisionBatch:
    group, columns = part
    return DecisionBatch(
        ids=np.concatenate([np.array(ids, np.int32) for ids, _ in group]),
        starts=offsets([len(ids) for ids, _ in group]),
        labels=np.fromiter(columns, np.int32, len(columns)),
        rows=np.repeat(np.arange(len(group), dtype=np.intp), [len(tokens) for _, tokens in group]),
        columns=np.array([columns[token] for _, tokens in group for token in tokens], np.intp),
    )
